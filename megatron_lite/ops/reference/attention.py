"""Causal attention inside each document: by the formula, by torch's own function, and by blocks of queries."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.ops.documents import Documents
from megatron_lite.ops.reference.blocked_attention import causal


def naive(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
    """softmax(q k^T scale + causal mask) v, one document at a time, in fp32: the truth the others are held to."""
    group = q.shape[1] // k.shape[1]
    outs = []
    for q_i, k_i, v_i in zip(q.split(doc.lengths), k.split(doc.lengths), v.split(doc.lengths), strict=True):
        k_i, v_i = k_i.repeat_interleave(group, 1).float(), v_i.repeat_interleave(group, 1).float()
        scores = torch.einsum("qnh,knh->nqk", q_i.float(), k_i) * scale
        future = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        outs.append(torch.einsum("nqk,knh->qnh", scores.masked_fill(future, -torch.inf).softmax(-1), v_i).to(q.dtype))
    return torch.cat(outs)


def sdpa(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
    """torch's scaled_dot_product_attention on each document."""
    return _each_document(_torch_causal, q, k, v, doc, scale)


def blocked(q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
    """Matrix products over blocks of queries, on each document."""
    return _each_document(causal, q, k, v, doc, scale)


Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]


def _each_document(attend: Attend, q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
    """One call for equal rows, else one call per document: no mask between documents is ever built."""
    if doc.row_length is not None:
        q, k, v = (x.unflatten(0, (-1, doc.row_length)) for x in (q, k, v))
        return attend(q, k, v, scale).flatten(0, 1)
    segments = zip(q.split(doc.lengths), k.split(doc.lengths), v.split(doc.lengths), strict=True)
    return torch.cat([attend(q_i[None], k_i[None], v_i[None], scale)[0] for q_i, k_i, v_i in segments])


def _torch_causal(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """[B, S, n, H], [B, S, g, H] -> [B, S, n, H]."""
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, scale=scale,
        enable_gqa=q.shape[2] != k.shape[2],
    )  # fmt: skip
    return out.transpose(1, 2)
