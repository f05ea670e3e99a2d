"""What a rehearsal of ranks found, in lines to print, beside what the plan had foretold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.parallel.grid import coordinates
from megatron_lite.plan.agreement import Mismatch, named
from megatron_lite.plan.division import pipeline_ranks
from megatron_lite.plan.memory import rank_memory
from megatron_lite.plan.ranks import AXES, KINDS, Job, Rehearsed
from megatron_lite.plan.traffic import flows

GB = 1e9
DEVICE_BYTES = (40e9, 80e9, 141e9)  # of the GPUs in plan/devices.py
# What the plan counts on one axis -> the axes it goes over.
COUNTED = {"tp": ("tp", "kv"), "cp": ("cp",), "pp": ("pp",), "ends": ("ends",), "dp": ("dp", "data", "world")}


class Difference(NamedTuple):
    """One number of one rank, as the plan has it and as it was found."""

    rank: int
    what: str
    planned: int
    found: int

    @property
    def share(self) -> float:
        """How much more the plan has, as a share of what was found."""
        return (self.planned - self.found) / self.found if self.found else float(self.planned > 0)


def place_of(job: Job, rank: int) -> tuple[int, int, int]:
    """(pp, cp, tp) position."""
    grid = job.grid
    pp, _, cp, tp = coordinates(rank, (grid.pp, grid.dp, grid.cp, grid.tp))
    return pp, cp, tp


def differences(job: Job, ranks: Sequence[Rehearsed]) -> list[Difference]:
    """Memory, and bytes sent over every axis, of each rank."""
    found = []
    held, zero = pipeline_ranks(job.model, job.parallel), job.optimizer.zero
    for rank in ranks:
        at = held[place_of(job, rank.rank)[0]]
        planned = rank_memory(job.model, job.parallel, job.division, at, zero=zero).total
        found.append(Difference(rank.rank, "memory", planned, rank.memory))
        sent = dict.fromkeys(COUNTED, 0)
        for flow in flows(job.model, job.parallel, job.division, at, zero=zero):
            sent[flow.axis] += flow.sent
        for axis, over in COUNTED.items():
            if sent[axis]:
                found.append(Difference(rank.rank, axis, sent[axis], sum(rank.sent.get(name, 0) for name in over)))
    return found


def describe(job: Job, ranks: Sequence[Rehearsed], mismatch: Mismatch | None, groups: int) -> str:
    """The table of ranks, whether they meet, what memory they need, where the plan differs."""
    axes = [axis for axis in AXES if any(rank.sent.get(axis) for rank in ranks)]
    header = ["ranks", "pp", "cp", "stand for", "parameters", *KINDS, "peak GB", "TFLOP", *axes]
    rows: dict[tuple[str, ...], list[Rehearsed]] = {}  # what two ranks have in common -> they
    for rank in ranks:
        pp, cp, _ = place_of(job, rank.rank)
        numbers = [f"{rank.parameters:,}", *(_gb(rank.peak[kind]) for kind in KINDS), _gb(rank.memory)]
        numbers += [f"{rank.flops / 1e12:,.4g}", *(_gb(rank.sent.get(axis, 0)) for axis in axes)]
        rows.setdefault((str(pp), str(cp), *numbers), []).append(rank)
    table = [
        [named([rank.rank for rank in same]), pp, cp, str(sum(rank.stands_for for rank in same)), *numbers]
        for (pp, cp, *numbers), same in rows.items()
    ]
    fullest = max(ranks, key=lambda rank: rank.memory)
    fits = ", ".join(_fits(fullest.memory, size) for size in DEVICE_BYTES)
    lines = [
        f"{job.grid.world:,} ranks, {len(ranks)} rehearsed, {job.ran} of {job.micro_batches} micro-batches of a step",
        *_columns([header, *table]),
        "GB at the peak by kind, FLOPs as computed (recomputation included), GB sent in a step over each axis",
        f"no mismatch among {groups:,} group{'s' * (groups > 1)}" if mismatch is None else f"MISMATCH: {mismatch}",
        f"most memory: {_gb(fullest.memory)} GB on rank {fullest.rank}; {fits}",
        "the plan beside it",
        *_columns([["rank", "what", "plan GB", "here GB", "plan has more"], *_worst(differences(job, ranks))]),
    ]
    return "\n".join(lines)


def _worst(found: Sequence[Difference]) -> list[list[str]]:
    """Of each number that of the rank where the plan is farthest off."""
    worst: dict[str, Difference] = {}
    for each in found:
        if each.what not in worst or abs(each.share) > abs(worst[each.what].share):
            worst[each.what] = each
    return [[str(d.rank), d.what, _gb(d.planned), _gb(d.found), f"{d.share:+.1%}"] for d in worst.values()]


def _fits(need: int, size: float) -> str:
    spare = (size - need) / GB
    return f"{size / GB:.0f} GB: {'too little' if spare < 0 else f'{spare:,.1f} to spare'}"


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _gb(size: int) -> str:
    return f"{size / GB:,.3f}" if size >= 1e7 or not size else f"{size / GB:.1e}"
