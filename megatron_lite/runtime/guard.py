"""Decisions that all ranks take together: whether something failed, and when to stop."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from megatron_lite.errors import MegatronLiteError
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import Axis, ParallelContext

T = TypeVar("T")

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
PULSE_S = 1.0  # between two signs of life of a rank that is busy


def together(ctx: ParallelContext, action: Callable[[], T]) -> T:
    """action() on every rank; an error a user can mend on any rank is raised on all, saying where it came from.

    The action itself must not be a collective. Costs one small all-reduce while all is well.
    """
    failure: MegatronLiteError | None = None
    try:
        result = action()
    except MegatronLiteError as error:
        failure = error
    (failures,) = sum_over(ctx, ctx.world, failure is not None)
    if not failures:
        return result
    answers: list[Any] = [failure and (type(failure), str(failure))] * ctx.world.size
    if ctx.world.size > 1:
        dist.all_gather_object(answers, answers[0], group=ctx.world.group)
    failed = [rank for rank, answer in enumerate(answers) if answer is not None]
    kind, message = answers[failed[0]]
    everywhere = len(failed) == ctx.world.size
    raise kind(message if everywhere else f"{message} (on rank {', '.join(map(str, failed))} of {ctx.world.size})")


def patiently(ctx: ParallelContext, action: Callable[[], T]) -> T:
    """`together` for an action that may take longer than a collective's time limit, such as building an index.

    It runs in a thread of its own, while all ranks tell each other every PULSE_S whether they are still busy: no rank
    waits in a collective for longer than that, and one that dies still ends the others within the limit.
    """
    if ctx.world.size == 1:
        return action()
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="patiently")
    result = thread.submit(action)
    thread.shutdown(wait=False)
    busy = 1.0
    while busy:
        wait([result], PULSE_S)
        (busy,) = sum_over(ctx, ctx.world, not result.done())
    return together(ctx, result.result)


class Stop:
    """Notes a stop signal, or that the time is up, until all ranks can act on it between two steps."""

    def __init__(self, stop_after_s: float | None):
        self.reason: str | None = None
        self._deadline = None if stop_after_s is None else time.monotonic() + stop_after_s
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Stop:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, _: FrameType | None) -> None:
        self.reason = f"signal {signal.Signals(number).name}"

    def wanted(self) -> bool:
        """Whether this rank was asked to stop."""
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.reason = self.reason or "runtime.stop_after_s is over"
        return self.reason is not None


def sum_over(ctx: ParallelContext, axis: Axis, *values: float) -> list[float]:
    """Numbers summed over an axis in one exchange (fp64, exact for counts below 2^53)."""
    return ctx.read(comm.all_sum(torch.tensor(values, dtype=torch.float64, device=ctx.device), axis))
