"""Attention of some queries to some keys, with its log-sum-exp, one segment at a time: by the formula, and by blocks.

Parts over keys A and B merge into the whole:

  lse = log(e^lse_A + e^lse_B)    o = e^(lse_A - lse) o_A + e^(lse_B - lse) o_B

With the final lse and o each part has its share of the gradients, as blocked_attention.py writes them.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lite.ops import AttentionParts
from megatron_lite.ops.documents import Segments
from megatron_lite.ops.reference import blocked_attention


def naive() -> AttentionParts:
    """By the formula in fp32: the truth the others are held to."""
    return AttentionParts(_naive_forward, _naive_backward)


def blocked() -> AttentionParts:
    """By blocks of queries."""
    return AttentionParts(_blocked_forward, _blocked_backward)


def _naive_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for at, seen in _each(segments):
        scores, v_i = _naive_scores(q[at], k[seen], scale, segments.causal), _each_head(v[seen], q)
        lse[at] = scores.logsumexp(-1).T
        out[at] = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v_i).to(q.dtype)
    return out, lse


def _naive_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.float32) for x in (q, k, v))
    inner = (grad.float() * out.float()).sum(-1)
    for at, seen in _each(segments):
        probs = (_naive_scores(q[at], k[seen], scale, segments.causal) - lse[at].T[:, :, None]).exp()
        d_probs = torch.einsum("qnh,knh->nqk", grad[at].float(), _each_head(v[seen], q))
        d_scores = probs * (d_probs - inner[at].T[:, :, None]) * scale
        dq[at] = torch.einsum("nqk,knh->qnh", d_scores, _each_head(k[seen], q))
        heads = k.shape[1]
        dk[seen] = torch.einsum("nqk,qnh->knh", d_scores, q[at].float()).unflatten(1, (heads, -1)).sum(2)
        dv[seen] = torch.einsum("nqk,qnh->knh", probs, grad[at].float()).unflatten(1, (heads, -1)).sum(2)
    return dq, dk, dv


def _naive_scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """[n, Sq, Sk] of one segment."""
    scores = torch.einsum("qnh,knh->nqk", q.float(), _each_head(k, q)) * scale
    if causal:
        future = torch.ones(scores.shape[1:], dtype=torch.bool, device=q.device).triu(1 + len(k) - len(q))
        scores = scores.masked_fill(future, -torch.inf)
    return scores


def _each_head(x: Tensor, q: Tensor) -> Tensor:
    """[S, g, H] -> fp32 [S, n, H]."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1).float()


def _blocked_forward(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> tuple[Tensor, Tensor]:
    out, lse = torch.empty_like(q), q.new_empty(q.shape[:2], dtype=torch.float32)
    for at, seen in _each(segments):
        out_i, lse_N = blocked_attention.forward(
            q[None, at], k[None, seen], v[None, seen], scale, causal=segments.causal
        )
        out[at], lse[at] = out_i[0], lse_N.flatten(0, 1).T
    return out, lse


def _blocked_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, segments: Segments,
                      scale: float) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    dq, (dk, dv) = torch.empty_like(q), (torch.empty_like(x, dtype=torch.float32) for x in (k, v))
    inner = (grad.float() * out.float()).sum(-1)
    groups = k.shape[1]
    for at, seen in _each(segments):
        lse_N, inner_N = (x[at].T.unflatten(0, (groups, -1)) for x in (lse, inner))
        parts = blocked_attention.backward(
            grad[None, at], q[None, at], k[None, seen], v[None, seen], lse_N, inner_N, scale, causal=segments.causal
        )
        dq[at], dk[seen], dv[seen] = (part[0] for part in parts)
    return dq, dk, dv


def _each(segments: Segments) -> Iterator[tuple[slice, slice]]:
    """(queries, keys) of every segment."""
    q = k = 0
    for q_length, k_length in zip(segments.q_lengths, segments.k_lengths, strict=True):
        yield slice(q, q + q_length), slice(k, k + k_length)
        q, k = q + q_length, k + k_length
