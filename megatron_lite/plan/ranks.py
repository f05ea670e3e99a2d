"""What a rehearsal of ranks is made of and what it finds: the job, who stands for whom, what one rank did.

A rehearsal (train/rehearsal.py) runs one rank of each kind. Data-parallel replicas differ in their rows and in which
slice of equal length they update, so one of them stands for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_lite.config.check import check
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Optimizer, Parallel, Recipe
from megatron_lite.config.stages import for_stage
from megatron_lite.errors import ConfigError
from megatron_lite.parallel.grid import Grid, coordinates, kv_replicas
from megatron_lite.plan.division import Division, divide

KINDS = ("weights", "gradients", "optimizer", "activations", "working")  # of memory
AXES = ("tp", "kv", "cp", "pp", "ends", "dp", "data", "ep", "edp", "world")
MESSAGES = ("send", "receive")


@dataclass(frozen=True)
class Job:
    """What every rank of one stage is built from; small, so that it can be sent to other processes."""

    model: ModelConfig
    parallel: Parallel
    optimizer: Optimizer
    grid: Grid
    precision: str
    seq_len: int
    micro_batch: int
    mask_documents: bool
    division: Division
    bucket_elements: int | None = None  # as in optim/zero1.py

    @property
    def micro_batches(self) -> int:
        """Of each rank in one step."""
        return self.division.micro_batches

    @property
    def ran(self) -> int:
        """Micro-batches that a rehearsal runs: enough for as many at a time on each rank as ever."""
        pp = self.grid.pp
        return min(self.micro_batches, pp + 1 if self.parallel.virtual_stages == 1 else 2 * pp)


def job_of(recipe: Recipe, index: int, world_size: int) -> Job:
    """Stage `index` (from 0) on so many ranks. Errors: ConfigError with every reason why it cannot run on them."""
    if problems := check(recipe, world_size, stage=index):
        raise ConfigError("\n  - ".join([f"stage {index + 1} cannot run on {world_size} ranks:", *problems]))
    merged = for_stage(recipe, index)
    parallel, stage = merged.parallel, merged.stages[index]
    replicas = kv_replicas(merged.model.num_key_value_heads, parallel.tp)
    grid = Grid(world_size, parallel.tp, parallel.pp, parallel.cp, parallel.ep, replicas)
    return Job(
        model=merged.model,
        parallel=parallel,
        optimizer=merged.optimizer,
        grid=grid,
        precision=merged.precision,
        seq_len=stage.seq_len,
        micro_batch=stage.micro_batch,
        mask_documents=stage.mask_documents,
        division=divide(stage, parallel, grid, 2 if merged.precision == "bf16" else 4),
    )


class Call(NamedTuple):
    """One collective or message, as one rank issues it."""

    kind: str  # all_reduce, all_gather, reduce_scatter, all_to_all, …, send, receive
    axis: str
    dtype: str
    given: tuple[int, ...]  # shape of what this rank puts in
    made: tuple[int, ...]  # shape of what it gets
    size: int  # bytes of the larger of the two
    peer: int | None = None  # of a message: the other's place on the axis
    phase: str = "step"  # forward, backward, last backward, step

    def sent(self, ranks: int) -> int:
        """Bytes that leave this rank, with ring collectives over `ranks` ranks."""
        if self.kind in MESSAGES:
            return self.size if self.kind == "send" else 0
        return (2 if self.kind == "all_reduce" else 1) * self.size * (ranks - 1) // ranks

    def __str__(self) -> str:
        return f"{self.kind} of {self.dtype} {list(self.given)} to {list(self.made)}"


@dataclass(frozen=True)
class Rehearsed:
    """What one rank did in the step that was rehearsed. Bytes and FLOPs are those of a whole step."""

    rank: int
    stands_for: int  # ranks
    parameters: int
    peak: Mapping[str, int]  # KINDS -> bytes at the moment when most memory is in use
    flops: int
    sent: Mapping[str, int]  # axis -> bytes
    calls: tuple[Call, ...]  # of the micro-batches that were run

    @property
    def memory(self) -> int:
        """Bytes at the peak."""
        return sum(self.peak.values())


def model_ranks(grid: Grid) -> dict[int, int]:
    """Rank -> the rank of its kind, the same pp, cp and tp position, that is rehearsed: the data-parallel first."""
    sizes = (grid.pp, grid.dp, grid.cp, grid.tp)
    first = {}
    for rank in range(grid.world):
        pp, _, cp, tp = coordinates(rank, sizes)
        first[rank] = ((pp * grid.dp) * grid.cp + cp) * grid.tp + tp
    return first


def whole_step(found: Sequence[tuple[str, int]], ran: int, micro_batches: int) -> int:
    """The sum of (phase, number) over a step of `micro_batches`, from one of `ran` micro-batches.

    Forwards and the backwards before the last are all alike; "message" stands for what every micro-batch does once.
    """
    by_phase: Counter[str] = Counter()
    for phase, number in found:
        by_phase[phase] += number
    total = by_phase.pop("forward", 0) * micro_batches + by_phase.pop("message", 0) * micro_batches
    total //= ran
    if earlier := by_phase.pop("backward", 0):
        total += earlier * (micro_batches - 1) // (ran - 1)
    return total + sum(by_phase.values())
