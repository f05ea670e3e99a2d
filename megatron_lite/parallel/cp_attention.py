"""Attention of tokens that are divided among context-parallel ranks; the whole keys and values never exist twice.

  gather : keys and values of whole rows on every rank    all-gather         <-> reduce-scatter
  ring   : they pass by, one rank's block at a time       send and receive   <-> blocks and their gradients go round
  heads  : whole rows of some heads on each rank          all-to-all         <-> all-to-all

Each rank holds the tokens of cp_split.positions. Whatever the method, a query meets the keys of its own document only,
without a mask. Gradients of keys and values are summed in fp32, and travel so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.errors import require
from megatron_lite.ops import AttentionParts, Ops
from megatron_lite.ops.documents import Documents, Segments
from megatron_lite.ops.select import WITH_PARTS
from megatron_lite.parallel.comm import gather_rows, scatter_rows
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.cp_heads import by_rank, in_sequence, to_heads, to_tokens
from megatron_lite.parallel.cp_split import Piece, choose_method, gather_pieces, ring_pieces

Attend = Callable[[Tensor, Tensor, Tensor, Documents, float], Tensor]


def attention_over(cp: Axis, ops: Ops, method: Literal["auto", "gather", "ring", "heads"]) -> Attend:
    """`ops.attention` for q [t, n, H], k and v [t, g, H] of this rank's tokens, t = T / cp.

    `doc` has the borders of the whole micro-batch and the positions of this rank's tokens. "auto" is
    cp_split.choose_method. Errors: ConfigError if the method needs a log-sum-exp that the kernel does not tell.
    """
    if cp.size == 1:
        return ops.attention
    if method == "heads":
        return _Heads(cp, ops.attention)
    require(
        ops.attention_parts is not None,
        f"cp={cp.size} with cp_attention='{method}' needs an attention kernel that tells its log-sum-exp, and the one "
        f"chosen does not; set kernels.attention to one of {', '.join(WITH_PARTS)} (flash_attn from version 2.7 on), "
        "or cp_attention = 'heads'",
    )
    assert ops.attention_parts is not None
    return _Shared(cp, ops.attention_parts, method)


@dataclass(frozen=True)
class _Heads:
    """Whole rows of n / cp heads on each rank; kv heads that are fewer than the ranks are copied first."""

    cp: Axis
    attention: Attend

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
        cp, kv_heads = self.cp.size, k.shape[1]
        if kv_heads < cp:
            assert cp % kv_heads == 0, f"{kv_heads} kv heads do not divide cp={cp}"
            k, v = (x.repeat_interleave(cp // kv_heads, 1) for x in (k, v))
        parts = [x.unflatten(1, (cp, -1)) for x in (q, k, v)]  # [t, cp, heads of one rank, H]
        mine = to_heads(torch.cat([x.flatten(2) for x in parts], -1), self.cp, doc.num_rows).squeeze(1)
        widths = [x[0, 0].numel() for x in parts]
        q, k, v = (x.unflatten(1, part.shape[2:]) for x, part in zip(mine.split(widths, 1), parts, strict=True))
        return to_tokens(self.attention(q, k, v, doc, scale), self.cp, doc.num_rows)


@dataclass(frozen=True)
class _Call:
    """One call of the kernel."""

    queries: slice
    keys: slice
    segments: Segments


class _Shared:
    """Gather or ring. All layers ask for the same documents, so the calls for the last ones are kept."""

    def __init__(self, cp: Axis, parts: AttentionParts, method: Literal["auto", "gather", "ring"]):
        self.cp, self.parts, self.method = cp, parts, method
        self._last: tuple[Documents, str, list[list[_Call]]] | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, doc: Documents, scale: float) -> Tensor:
        method: str = self.method
        if method == "auto":
            method = choose_method(self.cp.size * (k.numel() + v.numel()) * k.element_size())
        if self._last is None or self._last[0] is not doc or self._last[1] != method:
            self._last = (doc, method, self._plan(doc, method, q.device))
        calls = self._last[2]
        kernel = _Kernel(self.parts, k.shape[1:], v.shape[1:], scale)
        if method == "gather":
            return _Gather.apply(q, k, v, calls[0], doc.num_rows, self.cp, kernel)
        return _Ring.apply(q, k, v, calls, self.cp, kernel)

    def _plan(self, doc: Documents, method: str, device: torch.device) -> list[list[_Call]]:
        """The calls of the ring's steps, or those of gathering as the only step."""

        def calls(pieces: Iterable[Piece]) -> list[_Call]:
            return [
                _Call(p.queries, p.keys, Segments.of(p.q_lengths, p.k_lengths, causal=p.causal, device=device))
                for p in pieces
            ]

        cp, rank = self.cp.size, self.cp.rank
        if method == "gather":
            return [calls(gather_pieces(doc.lengths, doc.num_rows, cp, rank))]
        return [calls(ring_pieces(doc.lengths, doc.num_rows, cp, rank, (rank - step) % cp)) for step in range(cp)]


@dataclass(frozen=True)
class _Kernel:
    """The kernel on keys and values that lie together in one tensor [Tk, W], as they travel."""

    parts: AttentionParts
    k_shape: torch.Size  # of one token
    v_shape: torch.Size
    scale: float

    def join(self, k: Tensor, v: Tensor) -> Tensor:
        """[Tk, W]."""
        return torch.cat([k.flatten(1), v.flatten(1)], 1)

    def split(self, kv: Tensor) -> tuple[Tensor, Tensor]:
        """Views [Tk, g, H] of keys and of values."""
        k, v = kv.split([self.k_shape.numel(), self.v_shape.numel()], 1)
        return k.unflatten(1, self.k_shape), v.unflatten(1, self.v_shape)

    def forward(self, calls: Sequence[_Call], q: Tensor, kv: Tensor) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """(which queries, their output, their log-sum-exp) of each call."""
        k, v = self.split(kv)
        for call in calls:
            at, seen = call.queries, call.keys
            yield at, *self.parts.forward(q[at], k[seen], v[seen], call.segments, self.scale)

    def backward(self, calls: Sequence[_Call], grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor,
                 dq: Tensor) -> Tensor:  # fmt: skip
        """Add to dq; the fp32 gradients of kv."""
        dkv = torch.zeros_like(kv, dtype=torch.float32)
        (k, v), (dk, dv) = self.split(kv), self.split(dkv)
        for call in calls:
            at, seen = call.queries, call.keys
            found = self.parts.backward(
                grad[at], q[at], k[seen], v[seen], out[at], lse[at], call.segments, self.scale
            )  # fmt: skip
            for total, part in zip((dq[at], dk[seen], dv[seen]), found, strict=True):
                total += part
        return dkv


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, calls: Sequence[_Call], rows: int, cp: Axis,
                kernel: _Kernel) -> Tensor:  # fmt: skip
        kv_T = in_sequence(gather_rows(kernel.join(k, v), cp), cp.size, rows)
        out = q.new_empty((*q.shape[:2], kernel.v_shape[1]))
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        for at, part, part_lse in kernel.forward(calls, q, kv_T):
            out[at], lse[at] = part, part_lse
        ctx.save_for_backward(q, kv_T, out, lse)
        ctx.calls, ctx.rows, ctx.cp, ctx.kernel = calls, rows, cp, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, kv_T, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q)  # each query is in one call
        dkv_T = ctx.kernel.backward(ctx.calls, grad, q, kv_T, out, lse, dq)
        dkv = scatter_rows(by_rank(dkv_T, ctx.cp.size, ctx.rows), ctx.cp)
        return dq, *ctx.kernel.split(dkv.to(kv_T.dtype)), None, None, None, None


class _Ring(torch.autograd.Function):
    """Step s: the block of the rank s places before is here, and moves on while it is used."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, steps: Sequence[Sequence[_Call]], cp: Axis,
                kernel: _Kernel) -> Tensor:  # fmt: skip
        out = q.new_zeros((*q.shape[:2], kernel.v_shape[1]), dtype=torch.float32)
        lse = q.new_full(q.shape[:2], -torch.inf, dtype=torch.float32)
        block = kernel.join(k, v)
        for step, calls in enumerate(steps):
            onward = _Hop(block, cp) if step + 1 < cp.size else None
            for at, part, part_lse in kernel.forward(calls, q, block):
                _merge(out[at], lse[at], part, part_lse)
            if onward is not None:
                block = onward.arrived()
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.steps, ctx.cp, ctx.kernel = steps, cp, kernel
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of a block follow it, one step behind, and end where it began."""
        q, k, v, out, lse = ctx.saved_tensors
        dq = torch.zeros_like(q, dtype=torch.float32)
        block = ctx.kernel.join(k, v)
        mine: Tensor | None = None
        homeward: _Hop | None = None
        for step, calls in enumerate(ctx.steps):
            onward = _Hop(block, ctx.cp) if step + 1 < ctx.cp.size else None
            dkv = ctx.kernel.backward(calls, grad, q, block, out, lse, dq)
            if mine is None:
                mine = dkv  # is where it belongs
            else:
                homeward = _Hop(dkv if homeward is None else dkv.add_(homeward.arrived()), ctx.cp)
            if onward is not None:
                block = onward.arrived()
        assert mine is not None and homeward is not None
        dk, dv = ctx.kernel.split(mine.add_(homeward.arrived()).to(k.dtype))
        return dq.to(q.dtype), dk, dv, None, None, None


class _Hop:
    """A tensor that leaves for the next rank while another arrives from the rank before."""

    def __init__(self, leaving: Tensor, cp: Axis):
        self._leaving: Tensor | None = leaving
        self._arriving = torch.empty_like(leaving)
        after, before = (cp.ranks[(cp.rank + by) % cp.size] for by in (1, -1))
        self._works = dist.batch_isend_irecv([
            dist.P2POp(dist.isend, leaving, after, cp.group),
            dist.P2POp(dist.irecv, self._arriving, before, cp.group),
        ])  # fmt: skip

    def arrived(self) -> Tensor:
        """Wait for both; what came."""
        for work in self._works:
            work.wait()
        self._leaving = None
        self._works.clear()  # they hold both tensors
        return self._arriving


def _merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Add to out [s, n, H] and lse [s, n] what the same queries found among other keys; fp32, in place."""
    share = torch.sigmoid(part_lse - lse)  # e^part_lse / (e^part_lse + e^lse)
    out.lerp_(part.float(), share[..., None])
    lse.copy_(torch.logaddexp(lse, part_lse))
