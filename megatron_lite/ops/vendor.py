"""Thin adapters to kernels of other packages, each checked only where it is selected."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_lite.ops.documents import Documents


def flash_attention() -> Callable[..., Tensor]:
    """flash-attn's varlen kernel. Raises ImportError where the package is absent."""
    from flash_attn import flash_attn_varlen_func

    def attention(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
        cu, longest = doc.cu_seqlens, doc.max_seqlen
        return flash_attn_varlen_func(q, k, v, cu, cu, longest, longest, softmax_scale=scale, causal=True)

    return attention
