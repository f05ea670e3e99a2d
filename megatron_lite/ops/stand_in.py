"""What a GPU's kernel takes and makes, for a rehearsal on tensors without numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.ops.documents import Documents


def flash_attention(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
    """Memory and FLOPs (full attention convention) of flash-attn's varlen kernel.

    Keeps q, k, v, the output and one fp32 number per token and head. The backward works with an fp32 gradient of q
    and, when query heads share kv heads, gradients of k and v for each query head.
    """
    return _Flash.apply(q, k, v, doc, scale)


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
        cu, longest = doc.cu_seqlens, doc.max_seqlen
        out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
            q, k, v, cu, cu, longest, longest, 0.0, True, False, scale=scale
        )
        ctx.save_for_backward(q, k, v, out, lse, cu)
        ctx.longest, ctx.scale = longest, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, cu = ctx.saved_tensors
        accumulated = torch.empty_like(q, dtype=torch.float32)
        of_each_head = [torch.empty_like(q) for _ in range(2)] if q.shape[1] != k.shape[1] else []
        seed = torch.empty(2, dtype=torch.uint64)
        grads = torch.ops.aten._flash_attention_backward(
            grad, q, k, v, out, lse, cu, cu, ctx.longest, ctx.longest, 0.0, True, seed, seed, scale=ctx.scale
        )
        del accumulated, of_each_head
        return *grads, None, None
