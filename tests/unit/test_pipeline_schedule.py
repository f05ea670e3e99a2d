"""1F1B and interleaved 1F1B: every task once, in time, without deadlock, at the bubble and the memory they promise."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_lite.pipeline.schedule import Task, Tick, bubble, forward_order, live, order, timetable

SCHEDULES = [
    (pp, chunks, micro_batches)
    for pp, chunks, micro_batches in product(range(1, 9), range(1, 5), range(1, 25))
    if chunks == 1 or (pp > 1 and micro_batches % pp == 0)
]


def every_task(chunks: int, micro_batches: int) -> set[Task]:
    return {
        Task(kind, m, chunk)  # type: ignore[arg-type]
        for kind, m, chunk in product(("forward", "backward"), range(micro_batches), range(chunks))
    }


def test_every_rank_does_every_forward_and_backward_once_and_in_that_order():
    for pp, chunks, micro_batches in SCHEDULES:
        for rank in range(pp):
            tasks = order(pp, rank, chunks, micro_batches)
            assert len(tasks) == len(set(tasks)) and set(tasks) == every_task(chunks, micro_batches)
            for m, chunk in product(range(micro_batches), range(chunks)):
                assert tasks.index(Task("forward", m, chunk)) < tasks.index(Task("backward", m, chunk))


def test_no_rank_holds_more_live_forwards_than_promised():
    for pp, chunks, micro_batches in SCHEDULES:
        for rank in range(pp):
            alive = most = 0
            for task in order(pp, rank, chunks, micro_batches):
                alive += 1 if task.kind == "forward" else -1
                most = max(most, alive)
            assert most == live(pp, rank, chunks, micro_batches), (pp, chunks, micro_batches, rank)


def length(tables: list[list[Tick]]) -> int:
    """Ticks until all are done, replayed under rendezvous: an exchange ends when all its partners are in theirs."""
    clock = [0] * len(tables)  # when a rank is done with its ticks so far
    at = [0] * len(tables)
    while any(place < len(table) for place, table in zip(at, tables, strict=True)):
        moved = False
        for rank, table in enumerate(tables):
            if at[rank] == len(table):
                continue
            tick = table[at[rank]]
            partners = {message.peer for message in (tick.send, *tick.receive) if message is not None}
            together = {rank} | partners
            # everybody an exchange reaches, and whom those exchange with in the same breath
            while True:
                more = {
                    message.peer
                    for r in together
                    if at[r] < len(tables[r])
                    for message in (tables[r][at[r]].send, *tables[r][at[r]].receive)
                    if message is not None
                }
                if more <= together:
                    break
                together |= more
            if not all(_fits(tables, at, r) for r in together):
                continue
            start = max(clock[r] + (tables[r][at[r]].task is not None) for r in together)
            for r in together:
                clock[r], at[r] = start, at[r] + 1
            moved = True
            break
        assert moved, "deadlock"
    return max(clock)


def _fits(tables: list[list[Tick]], at: list[int], rank: int) -> bool:
    """Whether every message of this rank's current exchange is in the current exchange of its partner."""
    if at[rank] == len(tables[rank]):
        return False
    tick = tables[rank][at[rank]]
    sent = tick.send is None or any(
        message.peer == rank and message.task == tick.send.task
        for message in (tables[tick.send.peer][at[tick.send.peer]].receive if _open(tables, at, tick.send.peer) else ())
    )
    return sent and all(
        _open(tables, at, m.peer)
        and (other := tables[m.peer][at[m.peer]].send) is not None
        and other.peer == rank
        and other.task == m.task
        for m in tick.receive
    )


def _open(tables: list[list[Tick]], at: list[int], rank: int) -> bool:
    return at[rank] < len(tables[rank])


@pytest.mark.parametrize("training", [True, False])
def test_blocking_exchanges_never_deadlock(training):
    for pp, chunks, micro_batches in SCHEDULES:
        if pp * chunks * micro_batches <= 128:
            length(timetable(pp, chunks, micro_batches, training=training))


def test_a_task_runs_after_its_input_has_arrived_and_not_before():
    for pp, chunks, micro_batches in SCHEDULES:
        for rank, ticks in enumerate(timetable(pp, chunks, micro_batches)):
            arrived: set[Task] = set()
            for tick in ticks:
                first = rank == 0 and tick.task is not None and tick.task[::2] == ("forward", 0)
                last = rank == pp - 1 and tick.task is not None and tick.task[::2] == ("backward", chunks - 1)
                assert tick.task is None or first or last or tick.task in arrived
                arrived |= {message.task for message in tick.receive}
            assert [tick.task for tick in ticks if tick.task] == order(pp, rank, chunks, micro_batches)


def test_the_bubble_is_the_one_of_the_formula():
    for pp, chunks, micro_batches in SCHEDULES:
        if micro_batches % pp:
            continue  # with fewer micro-batches than ranks a rank waits for its last one
        ticks = length(timetable(pp, chunks, micro_batches)) if pp * micro_batches * chunks <= 128 else None
        if ticks is not None:
            busy = 2 * micro_batches * chunks
            assert ticks >= busy
            if chunks == 1:
                assert 1 - busy / ticks == pytest.approx(bubble(pp, chunks, micro_batches)), (pp, chunks, micro_batches)


def test_forwards_alone_take_any_number_of_micro_batches():
    for pp, chunks, micro_batches in product(range(1, 5), range(1, 4), range(1, 8)):
        tasks = forward_order(pp, chunks, micro_batches)
        assert len(tasks) == len(set(tasks)) == chunks * micro_batches


def test_one_rank_alternates():
    assert [(t.kind, t.micro_batch) for t in order(1, 0, 1, 2)] == [
        ("forward", 0), ("backward", 0), ("forward", 1), ("backward", 1),
    ]  # fmt: skip
    assert all(tick.send is None and not tick.receive for tick in timetable(1, 1, 3)[0])
