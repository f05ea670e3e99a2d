"""Floating-point operations of training, forward and backward, in two conventions that must never be mixed.

  full    6 M + 12 L N H s   attention counted as if every token saw the whole row of s tokens
  causal  6 M +  6 L N H s   only the half of it that causal attention needs

M = elements of the matrices a token is multiplied with (models.shapes.matmul_parameters), L layers, N query heads of H
dims. Recomputation is not counted: the model's work, not the machine's.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.shapes import matmul_parameters


class Flops(NamedTuple):
    """FLOPs per trained token."""

    full: int
    causal: int


def flops_per_token(model: ModelConfig, seq_len: int) -> Flops:
    """FLOPs of one token's forward and backward in rows of `seq_len` tokens."""
    matrices = 6 * matmul_parameters(model)
    half = 6 * model.num_hidden_layers * model.num_attention_heads * model.head_dim * seq_len
    return Flops(full=matrices + 2 * half, causal=matrices + half)
