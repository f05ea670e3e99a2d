"""From the environment torchrun sets to a running grid of ranks. The only place that reads the environment."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_lite.errors import require
from megatron_lite.parallel.context import ParallelContext, build_context, release
from megatron_lite.parallel.grid import Grid


@dataclass(frozen=True)
class Launch:
    """Which of how many processes this is; one process without torchrun is rank 0 of 1."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0


def read_launch() -> Launch:
    """What torchrun (or srun with the same variables) says."""
    if "RANK" not in os.environ:
        return Launch()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Launch(rank, world_size, int(os.environ.get("LOCAL_RANK", "0")))


def pick_device(launch: Launch) -> torch.device:
    """This process's own GPU, or the CPU where there is none."""
    if not torch.cuda.is_available():
        return torch.device("cpu")
    count = torch.cuda.device_count()
    require(launch.local_rank < count, f"local rank {launch.local_rank} has no GPU of its own: {count} are visible")
    device = torch.device("cuda", launch.local_rank)
    torch.cuda.set_device(device)
    return device


@contextmanager
def process_groups(launch: Launch, grid: Grid, timeout_s: float) -> Iterator[ParallelContext]:
    """The context of this rank; its process groups end with the block, also when it fails."""
    device = pick_device(launch)
    if launch.world_size > 1:
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
    ctx = build_context(grid, rank=launch.rank, device=device, timeout_s=timeout_s)
    try:
        yield ctx
    finally:
        release(ctx)
