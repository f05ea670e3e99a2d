"""Attention for CPUs: each block of queries meets all keys up to its own end in a few large matrix products.

With s = scale q k^T under the causal mask, softmax(s) = P, and what comes from the loss written d:

  o = P v    lse = log sum exp(s)
  dP = do v^T    dv = P^T do    ds = P * dP - P sum(P * dP)    dq = scale ds k    dk = scale ds^T q

The backward makes P again from s and lse (Dao et al. 2022, FlashAttention), so that no more than one block of scores
exists at a time; blocks in the future are never computed. Exponentials and sums are in fp32, and ds is exactly 0 for a
query that sees one key. Where the keys at hand are only some of those that P is divided over, sum(P * dP) is o . do.
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
        out, lse_N = forward(q, k, v, scale, causal=True)
        ctx.save_for_backward(q, k, v, lse_N)
        ctx.scale = scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, lse_N = ctx.saved_tensors
        dq, dk, dv = backward(grad, q, k, v, lse_N, None, ctx.scale, causal=True)
        return dq, dk.to(k.dtype), dv.to(v.dtype), None


def forward(q: Tensor, k: Tensor, v: Tensor, scale: float, *, causal: bool) -> tuple[Tensor, Tensor]:
    """q [B, Sq, n, H]; k, v [B, Sk, g, H] -> out [B, Sq, n, H], lse [B g, n / g, Sq] fp32.

    causal: the last query sees all keys, each one before sees one less.
    """
    groups = k.shape[2]
    q_N, k_N, v_N = _by_group(q, groups), _by_group(k, groups)[:, 0], _by_group(v, groups)[:, 0]
    out_N = torch.empty_like(q_N)
    lse_N = q_N.new_empty(q_N.shape[:3], dtype=torch.float32)
    for rows, past in _blocks(q_N.shape[2], k_N.shape[1], causal):
        scores = _scores(q_N[:, :, rows], k_N[:, past], scale, causal)
        top = scores.amax(-1, keepdim=True)
        exps = scores.sub_(top).exp_()
        total = exps.sum(-1, keepdim=True)
        out_N[:, :, rows] = _matmul(exps.to(v_N.dtype), v_N[:, past]) / total
        lse_N[:, :, rows] = total.log_().add_(top)[..., 0]
    return _by_token(out_N, groups), lse_N


def backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, lse_N: Tensor, inner_N: Tensor | None, scale: float, *,
             causal: bool) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq in q's type, dk and dv in fp32. inner [B g, n / g, Sq]: o . do, or None if k are all the keys there are."""
    groups = k.shape[2]
    q_N, k_N, v_N = _by_group(q, groups), _by_group(k, groups)[:, 0], _by_group(v, groups)[:, 0]
    do_N = _by_group(grad, groups)
    dq_N = torch.empty_like(q_N)
    dk_N, dv_N = (torch.zeros_like(k_N, dtype=torch.float32) for _ in range(2))
    for rows, past in _blocks(q_N.shape[2], k_N.shape[1], causal):
        q_b, do_b = q_N[:, :, rows], do_N[:, :, rows]
        probs = _scores(q_b, k_N[:, past], scale, causal).sub_(lse_N[:, :, rows, None]).exp_()
        dv_N[:, past] += _transposed_matmul(probs.to(v.dtype), do_b)
        if inner_N is None:
            weighted = _matmul(do_b, v_N[:, past].transpose(1, 2)).float().mul_(probs)
            inner = weighted.sum(-1, keepdim=True)
        else:  # dP is not rounded before o . do, which is not, is taken from it
            weighted = _matmul(do_b.float(), v_N[:, past].transpose(1, 2).float()).mul_(probs)
            inner = inner_N[:, :, rows, None]
        ds = weighted.addcmul_(probs, inner, value=-1).mul_(scale).to(k.dtype)
        dq_N[:, :, rows] = _matmul(ds, k_N[:, past])
        dk_N[:, past] += _transposed_matmul(ds, q_b)
    return _by_token(dq_N, groups), _by_token(dk_N[:, None], groups), _by_token(dv_N[:, None], groups)


def _blocks(queries: int, keys: int, causal: bool) -> Iterator[tuple[slice, slice]]:
    """(a block of queries, the keys they may see)."""
    for start in range(0, queries, BLOCK):
        stop = min(start + BLOCK, queries)
        yield slice(start, stop), slice(0, keys - queries + stop if causal else keys)


def _scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """q [N, r, b, H]; k [N, s, H] -> scale q k^T, fp32 [N, r, b, s]; causal: minus infinity ahead of the last key."""
    scores = _matmul(q, k.transpose(1, 2)).float().mul_(scale)
    if causal:
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
