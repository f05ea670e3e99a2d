"""Thin adapters to kernels of other packages, each checked only where it is selected."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import torch
from torch import Tensor

from megatron_lite.ops import AttentionParts
from megatron_lite.ops.documents import Documents, Segments


def flash_attention() -> tuple[Callable[..., Tensor], AttentionParts | None]:
    """flash-attn's varlen kernel and, from version 2.7 on, its parts. ImportError where it is absent."""
    from flash_attn import flash_attn_varlen_func

    def attention(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
        cu, longest = doc.cu_seqlens, doc.max_seqlen
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True)

    return attention, _flash_parts()


def _flash_parts() -> AttentionParts | None:
    """The kernel's own forward and backward; None for versions whose halves take and return other things."""
    from flash_attn import flash_attn_interface as flash

    run, undo = flash._flash_attn_varlen_forward, flash._flash_attn_varlen_backward
    if "window_size_left" not in inspect.signature(undo).parameters:
        return None

    def forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
        out, lse, *_ = run(
            q, k, v, segments.cu_q, segments.cu_k, segments.max_q, segments.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=segments.causal,
        )  # fmt: skip
        return out, lse.T  # it keeps [n, Tq]

    def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
                 scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        undo(
            grad, q, k, v, out, lse.T.contiguous(), dq, dk, dv,
            segments.cu_q, segments.cu_k, segments.max_q, segments.max_k,
            dropout_p=0.0, softmax_scale=scale, causal=segments.causal, window_size_left=-1, window_size_right=-1,
            softcap=0.0, alibi_slopes=None, deterministic=False,
        )  # fmt: skip
        return dq, dk, dv

    return AttentionParts(forward, backward)
