"""Whether ranks that were rehearsed would meet: every member of a group in the same calls, every message received."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.ranks import AXES, MESSAGES, Call, model_ranks


class Mismatch(NamedTuple):
    """The first place where members of a group would not meet."""

    group: str
    ranks: tuple[int, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.group} of ranks {named(self.ranks)}: {self.text}"


def groups_of(grid: Grid) -> dict[tuple[int, ...], tuple[str, ...]]:
    """The ranks of every group -> the axes it serves: those with the same ranks share one."""
    groups: dict[tuple[int, ...], tuple[str, ...]] = {}
    for axis in AXES:
        for ranks in grid.rows(axis):
            if len(ranks) > 1:
                groups[ranks] = (*groups.get(ranks, ()), axis)
    return groups


def first_mismatch(grid: Grid, calls: Mapping[int, Sequence[Call]]) -> tuple[Mismatch | None, int]:
    """Whether all members of every group issue the same calls on it in the same order, messages find each other, and
    the orders of different groups fit together.

    `calls` of the ranks that were rehearsed; the rest are as `model_ranks` says. Also the number of groups compared.
    """
    like = model_ranks(grid) if len(calls) < grid.world else {rank: rank for rank in calls}
    groups = groups_of(grid)
    compared: set[tuple[tuple[int, ...], tuple[str, ...]]] = set()
    for ranks, axes in groups.items():
        models = tuple(like[rank] for rank in ranks)
        if (models, axes) in compared:
            continue
        compared.add((models, axes))
        on_group = {model: [call for call in calls[model] if call.axis in axes] for model in set(models)}
        found = _collectives(ranks, models, on_group) or _messages(ranks, models, on_group)
        if found is not None:
            return Mismatch(f"group {' = '.join(axes)}", ranks, found), len(groups)
    return first_stuck(grid, {rank: calls[model] for rank, model in like.items()}, groups), len(groups)


def first_stuck(grid: Grid, calls: Mapping[int, Sequence[Call]],
                groups: Mapping[tuple[int, ...], tuple[str, ...]]) -> Mismatch | None:  # fmt: skip
    """Let all ranks run, each waiting in every collective for all members and in every receive for the message; None
    when all come to their end. That is stricter than a GPU, where most calls are only begun."""
    rows = {axis: {rank: ranks for ranks in grid.rows(axis) for rank in ranks} for axis in AXES}
    at = dict.fromkeys(range(grid.world), 0)
    arrived: dict[tuple[int, ...], list[int]] = {ranks: [] for ranks in groups}
    mail: Counter[tuple[int, int]] = Counter()  # (sender, receiver) -> messages that nobody has taken
    awaited: set[tuple[int, int]] = set()
    running = deque(range(grid.world))
    while running:
        rank = running.popleft()
        while at[rank] < len(calls[rank]):
            call = calls[rank][at[rank]]
            ranks = rows[call.axis][rank]
            if call.kind == "send":
                way = (rank, ranks[call.peer or 0])
                mail[way] += 1
                if way in awaited:
                    awaited.remove(way)
                    running.append(way[1])
            elif call.kind == "receive":
                way = (ranks[call.peer or 0], rank)
                if not mail[way]:
                    awaited.add(way)
                    break
                mail[way] -= 1
            else:
                arrived[ranks].append(rank)
                if len(arrived[ranks]) < len(ranks):
                    break
                for other in arrived[ranks]:
                    if other != rank:
                        at[other] += 1
                        running.append(other)
                arrived[ranks] = []
            at[rank] += 1
    for rank, number in at.items():
        if number < len(calls[rank]):
            ranks = rows[calls[rank][number].axis][rank]
            waits = [f"rank {r}: call {at[r] + 1}, {calls[r][at[r]]} over {calls[r][at[r]].axis}" for r in ranks]
            return Mismatch(f"group {' = '.join(groups[ranks])}", ranks, "nobody can go on: " + "; ".join(waits))
    return None


def _collectives(ranks: tuple[int, ...], models: tuple[int, ...], calls: Mapping[int, list[Call]]) -> str | None:
    plain = {model: [_meets(call) for call in each if call.kind not in MESSAGES] for model, each in calls.items()}
    first = plain[models[0]]
    for rank, model in zip(ranks, models, strict=True):
        if plain[model] != first:
            return _difference("call", first, plain[model], f"rank {ranks[0]}", f"rank {rank}")
    return None


def _messages(ranks: tuple[int, ...], models: tuple[int, ...], calls: Mapping[int, list[Call]]) -> str | None:
    for a, model in enumerate(models):
        for b, other in enumerate(models):
            sent = [(c.dtype, c.given) for c in calls[model] if c.kind == "send" and c.peer == b]
            received = [(c.dtype, c.made) for c in calls[other] if c.kind == "receive" and c.peer == a]
            if sent != received:
                return _difference("message", sent, received, f"rank {ranks[a]} sends", f"rank {ranks[b]} receives")
    return None


def _meets(call: Call) -> Call:
    """What all members must have in common."""
    return call._replace(axis="", phase="")


def _difference(what: str, mine: Sequence[object], other: Sequence[object], who: str, whom: str) -> str:
    """Where two sequences part, and what each has there."""
    at = next((i for i, (x, y) in enumerate(zip(mine, other, strict=False)) if x != y), min(len(mine), len(other)))
    here, there = (str(each[at]) if at < len(each) else "nothing more" for each in (mine, other))
    return f"{what} {at + 1} of {max(len(mine), len(other))}: {who}: {here}; {whom}: {there}"


def named(ranks: Sequence[int]) -> str:
    """0, 8, …, 56 for evenly spaced ranks, else all of them."""
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 0
    if len(ranks) > 4 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, step or 1)):
        return f"{ranks[0]}, {ranks[1]}, …, {ranks[-1]}"
    return ", ".join(map(str, ranks))
