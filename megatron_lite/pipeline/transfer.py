"""Messages between pipeline ranks: everything a tick sends and receives goes out as one batch."""

from __future__ import annotations

from collections import deque
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.parallel.context import Axis
from megatron_lite.pipeline.schedule import Task, Tick


class Transfer:
    """Sends and receives [t, D] tensors of one shape and type along the pp axis.

    With `overlap` a message is waited for when it is used, and what was sent when the step is over; without it both
    are waited for at once. `waited` are the seconds the host spent so.
    """

    def __init__(self, pp: Axis, shape: tuple[int, int], dtype: torch.dtype, device: torch.device, *, overlap: bool):
        self.pp, self.overlap, self.waited = pp, overlap, 0.0
        self._shape, self._dtype, self._device = shape, dtype, device
        self._arriving: dict[Task, tuple[Tensor, dist.Work | None]] = {}  # None: it is here
        self._leaving: deque[tuple[Tensor, dist.Work]] = deque()

    def exchange(self, tick: Tick, result: Tensor | None) -> None:
        """Begin the messages of a tick; `result` is what there is to send."""
        operations = []
        if tick.send is not None:
            assert result is not None and tuple(result.shape) == self._shape, "a message of another shape"
            result = result.contiguous()
            operations.append(dist.P2POp(dist.isend, result, self.pp.ranks[tick.send.peer], self.pp.group))
        boxes = [torch.empty(self._shape, dtype=self._dtype, device=self._device) for _ in tick.receive]
        for message, box in zip(tick.receive, boxes, strict=True):
            operations.append(dist.P2POp(dist.irecv, box, self.pp.ranks[message.peer], self.pp.group))
        if not operations:
            return
        works = dist.batch_isend_irecv(operations)
        works = works if len(works) == len(operations) else works * len(operations)  # NCCL answers for all at once
        if tick.send is not None and result is not None:
            self._leaving.append((result, works[0]))
        for message, box, work in zip(tick.receive, boxes, works[-len(boxes) :], strict=False):
            self._arriving[message.task] = (box, work)
            if not self.overlap:
                self._arriving[message.task] = (self.take(message.task), None)
        while self._leaving and self._leaving[0][1].is_completed():
            self._leaving.popleft()
        if not self.overlap:
            self.finish()

    def take(self, task: Task) -> Tensor:
        """What was sent for this task."""
        box, work = self._arriving.pop(task)
        if work is not None:
            self._wait(work)
        return box

    def holds(self, task: Task) -> bool:
        """Whether anything was sent for this task."""
        return task in self._arriving

    def finish(self) -> None:
        """Wait until everything sent has left."""
        while self._leaving:
            self._wait(self._leaving.popleft()[1])

    def _wait(self, work: dist.Work) -> None:
        begin = perf_counter()
        work.wait()
        self.waited += perf_counter() - begin
