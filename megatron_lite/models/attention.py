"""Grouped-query attention with partial rotary positions and optional q/k norms.

q, k, v = x W_q, x W_k, x W_v        heads divided over tp; kv heads held by several ranks when tp exceeds them
q, k    = rope(norm(q)), rope(norm(k))
y       = softmax(q k^T / sqrt(H) + causal inside each document) v W_o
"""

from __future__ import annotations

from torch import Tensor, nn

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.norm import Norm
from megatron_lite.ops import Ops
from megatron_lite.ops.documents import Documents
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.linear import ColumnParallelLinear, Part, RowParallelLinear
from megatron_lite.parallel.recompute import Wrap


class Attention(nn.Module):
    """x [t, D] -> y [t, D] (t = T/tp under sequence parallelism)."""

    def __init__(self, config: ModelConfig, tp: Axis, ops: Ops, *, sequence_parallel: bool, recompute_core: Wrap):
        super().__init__()
        heads, kv_heads, head_dim = config.num_attention_heads, config.num_key_value_heads, config.head_dim
        sp = sequence_parallel
        parts = (
            Part("q_proj", heads * head_dim, heads),
            Part("k_proj", kv_heads * head_dim, kv_heads),
            Part("v_proj", kv_heads * head_dim, kv_heads),
        )
        qkv_bias, o_bias = config.attention_bias or config.use_qkv_bias, config.attention_bias
        self.qkv_proj = ColumnParallelLinear(config.hidden_size, parts, tp, bias=qkv_bias, sequence_parallel=sp)
        self.o_proj = RowParallelLinear(heads * head_dim, config.hidden_size, tp, bias=o_bias, sequence_parallel=sp)
        if config.qk_norm:
            self.q_norm: nn.Module = Norm(head_dim, config.norm_eps, tp, ops, partial_grad=True)
            self.k_norm: nn.Module = Norm(head_dim, config.norm_eps, tp, ops, partial_grad=True)
        else:
            self.q_norm = self.k_norm = nn.Identity()
        self.head_dim, self.scale = head_dim, head_dim**-0.5
        self.rope, self.attention, self.recompute_core = ops.rope, ops.attention, recompute_core

    def forward(self, x_tD: Tensor, rotary: tuple[Tensor, Tensor], doc: Documents) -> Tensor:
        return self.o_proj(self.recompute_core(self.core, self.qkv_proj(x_tD), rotary, doc))

    def core(self, qkv: Tensor, rotary: tuple[Tensor, Tensor], doc: Documents) -> Tensor:
        """[T, (n + 2g) H] -> [T, n H]."""
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)) for part in qkv.split(self.qkv_proj.widths, -1))
        q, k = self.rope(self.q_norm(q), *rotary), self.rope(self.k_norm(k), *rotary)
        return self.attention(q, k, v, doc, self.scale).flatten(1)
