"""Collectives with their gradients. Each forward names its conjugate backward.

  gather_rows   : all-gather dim 0      <-> reduce-scatter dim 0
  scatter_rows  : reduce-scatter dim 0  <-> all-gather dim 0
  enter_region  : identity              <-> all-reduce
  leave_region  : all-reduce            <-> identity
  exchange_rows : all-to-all dim 0      <-> all-to-all dim 0

Below them the plain ones, for numbers and buffers that carry no gradient. On an axis of size 1 each returns its input.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_lite.parallel.context import Axis


def _all_reduce(x: Tensor, axis: Axis) -> Tensor:
    out = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(out, group=axis.group)
    return out


def _all_gather_rows(x: Tensor, axis: Axis) -> Tensor:
    out = x.new_empty((x.shape[0] * axis.size, *x.shape[1:]))
    dist.all_gather_single(out, x.contiguous(), group=axis.group)
    return out


def _reduce_scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows do not divide over {axis.name}={axis.size}"
    out = x.new_empty((x.shape[0] // axis.size, *x.shape[1:]))
    dist.reduce_scatter_single(out, x.contiguous(), group=axis.group)
    return out


def _all_to_all_rows(x: Tensor, axis: Axis) -> Tensor:
    assert x.shape[0] % axis.size == 0, f"{x.shape[0]} rows do not divide over {axis.name}={axis.size}"
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    dist.all_to_all_single(out, x.contiguous(), group=axis.group)
    return out


def _conjugate(name: str, forward: Callable[[Tensor, Axis], Tensor], backward: Callable[[Tensor, Axis], Tensor]) -> Any:
    """An autograd function that does `forward`, and `backward` to the gradient."""

    class Collective(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, axis: Axis) -> Tensor:
            ctx.axis = axis
            return forward(x, axis)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return backward(grad, ctx.axis), None

    Collective.__name__ = Collective.__qualname__ = name
    return Collective


def _identity(x: Tensor, axis: Axis) -> Tensor:
    return x.view_as(x)


_GatherRows = _conjugate("GatherRows", _all_gather_rows, _reduce_scatter_rows)
_ScatterRows = _conjugate("ScatterRows", _reduce_scatter_rows, _all_gather_rows)
_EnterRegion = _conjugate("EnterRegion", _identity, _all_reduce)
_LeaveRegion = _conjugate("LeaveRegion", _all_reduce, _identity)
_ExchangeRows = _conjugate("ExchangeRows", _all_to_all_rows, _all_to_all_rows)


def gather_rows(x: Tensor, axis: Axis) -> Tensor:
    """[t, …] of every rank -> [t * size, …], in axis order."""
    return x if axis.size == 1 else _GatherRows.apply(x, axis)


def scatter_rows(x: Tensor, axis: Axis) -> Tensor:
    """[T, …] summed over the ranks -> this rank's [T / size, …]."""
    return x if axis.size == 1 else _ScatterRows.apply(x, axis)


def enter_region(x: Tensor, axis: Axis) -> Tensor:
    """x, equal on every rank, into a region where each rank uses it differently: gradients are summed."""
    return x if axis.size == 1 else _EnterRegion.apply(x, axis)


def leave_region(x: Tensor, axis: Axis) -> Tensor:
    """The sum over ranks of their partial x."""
    return x if axis.size == 1 else _LeaveRegion.apply(x, axis)


def exchange_rows(x: Tensor, axis: Axis) -> Tensor:
    """Part i of [T, …] to rank i -> the parts that the ranks had for this one, in axis order."""
    return x if axis.size == 1 else _ExchangeRows.apply(x, axis)


def all_sum(x: Tensor, axis: Axis) -> Tensor:
    """x summed over the axis, in place; returned."""
    if axis.size > 1:
        dist.all_reduce(x, group=axis.group)
    return x


def all_stack(x: Tensor, axis: Axis) -> Tensor:
    """[…] of every rank -> [size, …]."""
    return x[None] if axis.size == 1 else _all_gather_rows(x[None], axis)


def reduce_scatter_start(out: Tensor, whole: Tensor, axis: Axis) -> dist.Work:
    """Begin out = this rank's share of the sum of `whole` over the axis; wait() on what is returned.

    `out` is this rank's place in `whole`, whose other places are lost. gloo sums everything everywhere, which gives the
    same bits in less time than its own reduce-scatter.
    """
    if dist.get_backend(axis.group) == "gloo":
        return all_reduce_start(whole, axis)
    return dist.reduce_scatter_single(out, whole, group=axis.group, async_op=True)


def all_reduce_start(x: Tensor, axis: Axis) -> dist.Work:
    """Begin summing x over the axis in place; wait() on what is returned."""
    return dist.all_reduce(x, group=axis.group, async_op=True)


def all_gather_start(whole: Tensor, share: Tensor, axis: Axis) -> dist.Work:
    """Begin whole = the shares of all ranks; `share` may be this rank's place in `whole`."""
    return dist.all_gather_single(whole, share, group=axis.group, async_op=True)
