"""The SwiGLU feed-forward layer: y = (silu(x W_gate) * (x W_up)) W_down."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.ops import Ops
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.linear import ColumnParallelLinear, Part, RowParallelLinear
from megatron_lite.parallel.recompute import Wrap


class MLP(nn.Module):
    """x [t, D] -> y [t, D]; gate and up are one matrix product, each divided over tp by itself."""

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, sequence_parallel: bool, recompute_core: Wrap):
        super().__init__()
        layout = {"bias": config.mlp_bias, "sequence_parallel": sequence_parallel}
        parts = (Part("gate_proj", config.intermediate_size), Part("up_proj", config.intermediate_size))
        self.gate_up_proj = ColumnParallelLinear(config.hidden_size, parts, tp, **layout)
        self.down_proj = RowParallelLinear(config.intermediate_size, config.hidden_size, tp, **layout)
        self.swiglu, self.recompute_core = ops.swiglu, recompute_core

    def forward(self, x_tD: Tensor) -> Tensor:
        return self.recompute_core(self.core, self.gate_up_proj(x_tD))

    def core(self, gate_up_T2f: Tensor) -> Tensor:
        """[T, 2f] -> [t, D]."""
        return self.down_proj(self.swiglu(gate_up_T2f))
