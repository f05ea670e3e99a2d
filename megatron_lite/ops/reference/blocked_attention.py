"""Causal attention for CPUs: each block of queries meets all keys up to its own end in a few large matrix products.

With s = scale q k^T under the causal mask, softmax(s) = P, and what comes from the loss written d:

  o = P v    lse = log sum exp(s)
  dP = do v^T    dv = P^T do    ds = P * dP - P sum(P * dP)    dq = scale ds k    dk = scale ds^T q

The backward makes P again from s and lse (Dao et al. 2022, FlashAttention), so that no more than one block of scores
exists at a time; blocks in the future are never computed. Exponentials and sums are in fp32, and ds is exactly 0 for a
query that sees one key.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK = 64  # queries: enough for a matrix product, few enough for the scores to stay in the cache


def causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """q [B, S, n, H]; k, v [B, S, g, H] -> [B, S, n, H]. Query heads n are g groups that share one key."""
    return _Blocked.apply(q, k, v, scale)


class _Blocked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        groups = k.shape[2]
        q_N, k_N, v_N = _by_group(q, groups), _by_group(k, groups)[:, 0], _by_group(v, groups)[:, 0]
        out_N = torch.empty_like(q_N)
        lse_N = q_N.new_empty(q_N.shape[:3], dtype=torch.float32)
        for rows, past in _blocks(q_N.shape[2]):
            scores = _scores(q_N[:, :, rows], k_N[:, past], scale)
            top = scores.amax(-1, keepdim=True)
            exps = scores.sub_(top).exp_()
            total = exps.sum(-1, keepdim=True)
            out_N[:, :, rows] = _matmul(exps.to(v_N.dtype), v_N[:, past]) / total
            lse_N[:, :, rows] = total.log_().add_(top)[..., 0]
        ctx.save_for_backward(q, k, v, lse_N)
        ctx.scale = scale
        return _by_token(out_N, groups)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, lse_N = ctx.saved_tensors
        groups = k.shape[2]
        q_N, k_N, v_N = _by_group(q, groups), _by_group(k, groups)[:, 0], _by_group(v, groups)[:, 0]
        do_N = _by_group(grad, groups)
        dq_N = torch.empty_like(q_N)
        dk_N, dv_N = (torch.zeros_like(k_N, dtype=torch.float32) for _ in range(2))
        for rows, past in _blocks(q_N.shape[2]):
            q_b, do_b = q_N[:, :, rows], do_N[:, :, rows]
            probs = _scores(q_b, k_N[:, past], ctx.scale).sub_(lse_N[:, :, rows, None]).exp_()
            dv_N[:, past] += _transposed_matmul(probs.to(v.dtype), do_b)
            weighted = _matmul(do_b, v_N[:, past].transpose(1, 2)).float().mul_(probs)
            ds = weighted.addcmul_(probs, weighted.sum(-1, keepdim=True), value=-1).mul_(ctx.scale).to(k.dtype)
            dq_N[:, :, rows] = _matmul(ds, k_N[:, past])
            dk_N[:, past] += _transposed_matmul(ds, q_b)
        dk, dv = (_by_token(total[:, None], groups).to(k.dtype) for total in (dk_N, dv_N))
        return _by_token(dq_N, groups), dk, dv, None


def _blocks(length: int) -> Iterator[tuple[slice, slice]]:
    """(a block of queries, the keys up to its end)."""
    for start in range(0, length, BLOCK):
        stop = min(start + BLOCK, length)
        yield slice(start, stop), slice(0, stop)


def _scores(q: Tensor, k: Tensor, scale: float) -> Tensor:
    """q [N, r, b, H], the last b queries; k [N, s, H] -> scale q k^T, fp32 [N, r, b, s], minus infinity ahead."""
    scores = _matmul(q, k.transpose(1, 2)).float().mul_(scale)
    b = q.shape[2]
    ahead = torch.ones(b, b, dtype=torch.bool, device=q.device).triu_(1)
    scores[..., -b:].masked_fill_(ahead, -torch.inf)
    return scores


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """[N, r, m, x] [N, x, y] -> [N, r, m, y]: the r heads of a group are rows of one product."""
    return torch.bmm(a.flatten(1, 2), b).unflatten(1, a.shape[1:3])


def _transposed_matmul(a: Tensor, b: Tensor) -> Tensor:
    """sum over r and m of [N, r, m, x]^T [N, r, m, y] -> [N, x, y]."""
    return torch.bmm(a.flatten(1, 2).transpose(1, 2), b.flatten(1, 2))


def _by_group(x: Tensor, groups: int) -> Tensor:
    """[B, S, groups r, H] -> [B groups, r, S, H], contiguous."""
    return x.unflatten(2, (groups, -1)).permute(0, 2, 3, 1, 4).flatten(0, 1).contiguous()


def _by_token(x: Tensor, groups: int) -> Tensor:
    """[B groups, r, S, H] -> [B, S, groups r, H], contiguous."""
    return x.unflatten(0, (-1, groups)).permute(0, 3, 1, 2, 4).flatten(2, 3).contiguous()
