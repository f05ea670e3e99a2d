"""One pre-norm transformer block."""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.attention import Attention
from megatron_lite.models.mlp import MLP
from megatron_lite.models.norm import hidden_norm
from megatron_lite.ops import Ops
from megatron_lite.ops.documents import Documents
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.recompute import Wrap


class Block(nn.Module):
    """x = x + attention(norm(x));  x = x + mlp(norm(x))."""

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, sequence_parallel: bool, recompute_core: Wrap):
        super().__init__()
        sp, core = sequence_parallel, recompute_core
        self.input_layernorm = hidden_norm(config, tp, ops, sequence_parallel=sp)
        self.self_attn = Attention(config, tp, ops, sequence_parallel=sp, recompute_core=core)
        self.post_attention_layernorm = hidden_norm(config, tp, ops, sequence_parallel=sp)
        self.mlp = MLP(config, tp, ops, sequence_parallel=sp, recompute_core=core)

    def forward(self, x_tD: Tensor, rotary: tuple[Tensor, Tensor], doc: Documents) -> Tensor:
        x_tD = x_tD + self.self_attn(self.input_layernorm(x_tD), rotary, doc)
        return x_tD + self.mlp(self.post_attention_layernorm(x_tD))
