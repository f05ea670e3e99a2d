"""Where this process stands in the grid of ranks. Built once, passed to whoever needs an axis, never global."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.grid import Grid


@dataclass(frozen=True)
class Axis:
    """One way of dividing ranks, seen from this rank. An axis of size 1 has no group."""

    name: str
    rank: int = 0
    size: int = 1
    ranks: tuple[int, ...] = (0,)
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelContext:
    """All axes of this rank, and its device."""

    grid: Grid
    device: torch.device
    world: Axis
    pp: Axis
    dp: Axis
    cp: Axis
    tp: Axis
    data: Axis  # dp x cp: ranks that see different tokens; gradients are summed and ZeRO-1 shards over it
    kv: Axis  # tp ranks that hold the same kv heads
    ep: Axis
    edp: Axis
    ends: Axis  # first and last pp rank: both hold the matrix of a tied embedding
    read: Callable[[Tensor], list[float]] = Tensor.tolist  # numbers the host decides by; a dry run has its own answers


def single_process(device: torch.device | str = "cpu") -> ParallelContext:
    """The context of one process without any process group."""
    return build_context(Grid(1), rank=0, device=torch.device(device), timeout_s=0.0)


def build_context(grid: Grid, *, rank: int, device: torch.device, timeout_s: float) -> ParallelContext:
    """Create the groups of every axis; a collective call in worlds larger than 1 (torch.distributed is initialised).

    Every group gets `timeout_s`: torch does not pass the timeout of the first group on to later ones.
    """
    known: dict[tuple[bool, tuple[int, ...]], dist.ProcessGroup] = {}

    def axis(name: str) -> Axis:
        mine: Axis | None = None
        for ranks in grid.rows(name):
            group = None
            if len(ranks) > 1:  # axes with the same ranks share a group; a ring does not queue behind gradients
                key = (name == "cp", ranks)
                if key not in known:
                    known[key] = dist.new_group(list(ranks), timeout=timedelta(seconds=timeout_s))
                group = known[key]
            if rank in ranks:
                mine = Axis(name, ranks.index(rank), len(ranks), ranks, group)
        assert mine is not None
        return mine

    names = ("world", "pp", "dp", "cp", "tp", "data", "kv", "ep", "edp", "ends")
    axes: dict[str, Any] = {name: axis(name) for name in names}
    return ParallelContext(grid=grid, device=device, **axes)


def release(ctx: ParallelContext) -> None:
    """Destroy all process groups, and with them their threads.

    A thread of gloo that lets go of a finished tensor while the interpreter shuts down aborts the process, and as long
    as an axis refers to a group its threads live on.
    """
    if not dist.is_initialized():
        return
    dist.destroy_process_group()
    for axis in vars(ctx).values():
        if isinstance(axis, Axis):
            object.__setattr__(axis, "group", None)
