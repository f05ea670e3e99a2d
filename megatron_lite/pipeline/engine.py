"""Runs a rank's timetable: forwards, backwards, the messages between them. One rank is the case without messages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from megatron_lite.pipeline.schedule import Task, Tick
from megatron_lite.pipeline.transfer import Transfer

Forward = Callable[[Task, Tensor | None], Tensor]  # (task, activation of the chunk before) -> activation, or the loss


@dataclass(frozen=True)
class Report:
    """What running a timetable was like on this rank."""

    waited_s: float  # for messages
    live: int  # most forwards at a time whose backward was still to come


def run(ticks: Sequence[Tick], forward: Forward, before_backward: Callable[[Task], None], transfer: Transfer) -> Report:
    """Do every task in its tick.

    `forward` gets what the chunk before made ([t, D]), or None where the model begins, and returns what this one makes;
    the last chunk returns the micro-batch's share of the loss, whose gradient is 1. Of a forward only the graph and its
    input are kept. `before_backward` hears of each backward when it is about to start.
    """
    kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]] = {}
    most = 0
    waited = transfer.waited
    for tick in ticks:
        result = None
        if tick.task is not None and tick.task.kind == "forward":
            result = _forward(tick.task, forward, transfer, kept)
            most = max(most, len(kept))
        elif tick.task is not None:
            before_backward(tick.task)
            result = _backward(tick.task, transfer, kept)
        transfer.exchange(tick, result)
    transfer.finish()
    return Report(transfer.waited - waited, most)


def _forward(task: Task, forward: Forward, transfer: Transfer,
             kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]]) -> Tensor:  # fmt: skip
    x = transfer.take(task).requires_grad_(torch.is_grad_enabled()) if transfer.holds(task) else None
    out = forward(task, x)
    if out.requires_grad:
        kept[task.micro_batch, task.chunk] = (x, get_gradient_edge(out))
    return out.detach()


def _backward(task: Task, transfer: Transfer,
              kept: dict[tuple[int, int], tuple[Tensor | None, GradientEdge]]) -> Tensor | None:  # fmt: skip
    x, edge = kept.pop((task.micro_batch, task.chunk))
    torch.autograd.backward([edge], [transfer.take(task) if transfer.holds(task) else None])
    return None if x is None else x.grad
