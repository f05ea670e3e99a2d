"""All tokens of some heads instead of all heads of some tokens, for what needs whole sequences. Conjugates:

  to_heads  : [t, n, H] -> [T, n / cp, H]    <->    to_tokens : [T, n / cp, H] -> [t, n, H]

Each is one all-to-all. Tokens t = T / cp are held as cp_split.positions has them; the T are in the order of the
micro-batch, `rows` rows end to end.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.parallel.comm import exchange_rows
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.cp_split import chunks_of


def to_heads(x_tnH: Tensor, cp: Axis, rows: int) -> Tensor:
    """This rank's tokens of all heads -> all tokens of heads r n / cp … (r + 1) n / cp - 1."""
    return x_tnH if cp.size == 1 else _ToHeads.apply(x_tnH, cp, rows)


def to_tokens(x_TnH: Tensor, cp: Axis, rows: int) -> Tensor:
    """All tokens of this rank's heads -> this rank's tokens of all heads."""
    return x_TnH if cp.size == 1 else _ToTokens.apply(x_TnH, cp, rows)


def in_sequence(x: Tensor, cp: int, rows: int) -> Tensor:
    """[T, …] with the tokens of rank 0 first, then those of rank 1, … -> [T, …] in the order of the micro-batch."""
    ranks = x.view(cp, rows, 2, -1, *x.shape[1:])
    out = x.new_empty((rows, 2 * cp, *ranks.shape[3:]))
    for rank in range(cp):
        out[:, chunks_of(cp, rank)] = ranks[rank]
    return out.view(x.shape)


def by_rank(x: Tensor, cp: int, rows: int) -> Tensor:
    """The inverse of in_sequence."""
    chunks = x.unflatten(0, (rows, 2 * cp, -1))
    return torch.stack([chunks[:, chunks_of(cp, rank)] for rank in range(cp)]).view(x.shape)


def _to_heads(x: Tensor, cp: Axis, rows: int) -> Tensor:
    assert x.shape[1] % cp.size == 0, f"{x.shape[1]} heads do not divide over cp={cp.size}"
    parts = x.unflatten(1, (cp.size, -1)).transpose(0, 1).flatten(0, 1)
    return in_sequence(exchange_rows(parts, cp), cp.size, rows)


def _to_tokens(x: Tensor, cp: Axis, rows: int) -> Tensor:
    parts = exchange_rows(by_rank(x, cp.size, rows), cp)
    return parts.unflatten(0, (cp.size, -1)).transpose(0, 1).flatten(1, 2)


class _ToHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, rows: int) -> Tensor:
        ctx.cp, ctx.rows = cp, rows
        return _to_heads(x, cp, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_tokens(grad, ctx.cp, ctx.rows), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cp: Axis, rows: int) -> Tensor:
        ctx.cp, ctx.rows = cp, rows
        return _to_tokens(x, cp, rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return _to_heads(grad, ctx.cp, ctx.rows), None, None
