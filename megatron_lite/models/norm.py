"""RMSNorm and LayerNorm over the last dim, their weights held whole by every tensor-parallel rank."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.ops import Ops
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.linear import replicated
from megatron_lite.parallel.shard import Piece


class Norm(nn.Module):
    """One weight (and for LayerNorm one bias) of `size` elements.

    `partial_grad`: each tp rank normalises different values (its own tokens under sequence parallelism, its own heads),
    so that its gradient is a share.
    """

    def __init__(self, size: int, eps: float, tp: Axis, ops: Ops, *, layer_norm: bool = False, partial_grad: bool):
        super().__init__()
        self.size, self.eps, self.tp, self.partial_grad = size, eps, tp, partial_grad
        self.rms_norm, self.layer_norm = ops.rms_norm, ops.layer_norm
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if layer_norm else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return self.rms_norm(x, self.weight, self.eps)
        return self.layer_norm(x, self.weight, self.bias, self.eps)

    def pieces(self, name: str) -> dict[str, tuple[Piece, ...]]:
        """Whole on every rank."""
        names = ["weight"] if self.bias is None else ["weight", "bias"]
        return {
            parameter: (replicated(f"{name}.{parameter}", (self.size,), self.tp, partial_grad=self.partial_grad),)
            for parameter in names
        }


def hidden_norm(config: ModelConfig, tp: Axis, ops: Ops, *, sequence_parallel: bool) -> Norm:
    """The norm before a mixer, before an MLP, and at the end of the model."""
    return Norm(
        config.hidden_size, config.norm_eps, tp, ops,
        layer_norm=config.norm == "layernorm", partial_grad=sequence_parallel,
    )  # fmt: skip
