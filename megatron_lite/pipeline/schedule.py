"""1F1B and interleaved 1F1B (Narayanan et al. 2021) as pure schedules.

A rank holds `chunks` parts of the model; part c of pp rank r is number c * pp + r of all. `order` says what a rank
computes one after the other: a few forwards to fill the pipeline, then one forward and one backward in turn, then the
backwards that are left. `timetable` lets all ranks work on one clock, one task a tick each; a result travels in the
tick that made it and can be used in the next. The clock proves that the order comes to an end, and gives any two ranks
the same order of messages, at most one a tick in each direction: a batched exchange at the end of each tick cannot
deadlock.

With forwards and backwards of equal length a rank waits for the share (pp - 1) / (pp - 1 + micro-batches * chunks).
"""

from __future__ import annotations

from typing import Literal, NamedTuple


class Task(NamedTuple):
    """One forward or backward of one micro-batch through one of this rank's chunks."""

    kind: Literal["forward", "backward"]
    micro_batch: int
    chunk: int


class Message(NamedTuple):
    """What `task` needs from, or made for, the rank `peer` of the pp axis: an activation or its gradient."""

    peer: int
    task: Task  # the task of the receiving rank that uses it


class Tick(NamedTuple):
    """What a rank does in one tick of the clock: perhaps a task, then its messages all at once."""

    task: Task | None
    send: Message | None
    receive: tuple[Message, ...]


def order(pp: int, rank: int, chunks: int, micro_batches: int) -> list[Task]:
    """The tasks of a rank. More than one chunk needs a multiple of pp micro-batches."""
    assert chunks == 1 or micro_batches % pp == 0, f"{micro_batches} micro-batches on pp={pp} in {chunks} chunks"
    total = micro_batches * chunks
    forwards = forward_order(pp, chunks, micro_batches)
    backwards = [Task("backward", t.micro_batch, chunks - 1 - t.chunk) for t in forwards]
    ahead = min(warm_up(pp, rank, chunks), total)
    tasks = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        tasks += [forward, backward]
    return tasks + backwards[total - ahead :]


def forward_order(pp: int, chunks: int, micro_batches: int) -> list[Task]:
    """Forwards alone: pp micro-batches go through a chunk, then the same ones through the next."""
    groups = [range(start, min(start + pp, micro_batches)) for start in range(0, micro_batches, pp)]
    return [Task("forward", m, chunk) for group in groups for chunk in range(chunks) for m in group]


def warm_up(pp: int, rank: int, chunks: int) -> int:
    """Forwards of a rank before its first pair of a forward and a backward."""
    return pp - rank - 1 if chunks == 1 else 2 * (pp - rank - 1) + (chunks - 1) * pp


def live(pp: int, rank: int, chunks: int, micro_batches: int) -> int:
    """Forwards of a rank whose backward is still to come, at most: what its activations take, in chunks."""
    return min(warm_up(pp, rank, chunks) + 1, micro_batches * chunks)


def bubble(pp: int, chunks: int, micro_batches: int) -> float:
    """Share of a step in which a rank waits, if tasks take equally long and messages no time."""
    return (pp - 1) / (pp - 1 + micro_batches * chunks)


def timetable(pp: int, chunks: int, micro_batches: int, *, training: bool = True) -> list[list[Tick]]:
    """For every rank its ticks, those in which it has nothing to do left out; not `training`: forwards alone."""
    if training:
        orders = [order(pp, rank, chunks, micro_batches) for rank in range(pp)]
    else:
        orders = [forward_order(pp, chunks, micro_batches) for _ in range(pp)]
    arrived: list[set[Task]] = [set() for _ in range(pp)]
    done = [0] * pp
    ticks: list[list[Tick]] = [[] for _ in range(pp)]
    while any(done[rank] < len(orders[rank]) for rank in range(pp)):
        tasks: list[Task | None] = []
        for rank, tasks_of_rank in enumerate(orders):
            task = tasks_of_rank[done[rank]] if done[rank] < len(tasks_of_rank) else None
            ready = task is not None and (task in arrived[rank] or _starts(task, pp, rank, chunks))
            tasks.append(task if ready else None)
        assert any(tasks), f"pp={pp}, {chunks} chunks, {micro_batches} micro-batches: nobody can go on"
        sends: list[Message | None] = [
            None if task is None else _successor(task, pp, rank, chunks) for rank, task in enumerate(tasks)
        ]
        receives: list[list[Message]] = [[] for _ in range(pp)]
        for rank, message in enumerate(sends):
            done[rank] += tasks[rank] is not None
            if message is not None:
                arrived[message.peer].add(message.task)
                receives[message.peer].append(Message(rank, message.task))
        for rank in range(pp):
            tick = Tick(tasks[rank], sends[rank], tuple(receives[rank]))
            if any(tick):
                ticks[rank].append(tick)
    return ticks


def _starts(task: Task, pp: int, rank: int, chunks: int) -> bool:
    """Whether it waits for no other rank: it begins with ids, or with the loss whose forward came before."""
    if task.kind == "forward":
        return rank == 0 and task.chunk == 0
    return rank == pp - 1 and task.chunk == chunks - 1


def _successor(task: Task, pp: int, rank: int, chunks: int) -> Message | None:
    """Whose task the result is for; None after the last forward and the last backward."""
    step = 1 if task.kind == "forward" else -1
    number = task.chunk * pp + rank + step
    if not 0 <= number < pp * chunks:
        return None
    return Message(number % pp, Task(task.kind, task.micro_batch, number // pp))
