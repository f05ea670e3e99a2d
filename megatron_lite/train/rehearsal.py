"""The ranks of a job, on one machine: the real model, optimizer and step, on tensors without numbers.

Each rank is alone in a process group that answers at once; the numbers a host would decide by are all 1. A step is as
train/step.py does it, of as many micro-batches as fill a pipeline; what is counted is that of a whole step.
Attention is what a GPU would use. Messages of pp ranks are waited for at once.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_lite.config.schema import Recipe
from megatron_lite.data.batch import Batch, Row, make_batch
from megatron_lite.errors import TrainingError, require
from megatron_lite.models.transformer import build_rank, named_pieces
from megatron_lite.ops import Ops, select
from megatron_lite.ops.stand_in import flash_attention, flash_parts
from megatron_lite.optim.zero1 import BUCKET_ELEMENTS, Zero1
from megatron_lite.parallel.context import ParallelContext, build_context
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.agreement import first_mismatch
from megatron_lite.plan.rank_report import describe
from megatron_lite.plan.ranks import AXES, MESSAGES, Job, Rehearsed, job_of, model_ranks, whole_step
from megatron_lite.train.recorder import Recorder
from megatron_lite.train.step import train_step


def step_batches(job: Job, ctx: ParallelContext) -> list[Batch]:
    """Micro-batches of one rank, every row one document."""
    row = Row(np.zeros(job.seq_len + 1, dtype=np.int64), np.zeros(0, dtype=np.int64))
    rows = [row] * job.micro_batch
    return [make_batch(rows, range(job.micro_batch), job.mask_documents) for _ in range(job.ran)]


def record(job: Job, ctx: ParallelContext, ops: Ops, mode: Callable[[Recorder], Any]) -> tuple[Recorder, nn.Module]:
    """Build what a rank has and let it do one step, watched."""
    recorder = Recorder(ctx)
    dtype = torch.bfloat16 if job.precision == "bf16" else torch.float32
    model = build_rank(job.model, ctx, ops, job.parallel, dtype)
    with mode(recorder):
        optimizer = _Observed(model, ctx, ops, job, recorder)
        recorder.watch(model, optimizer)
        train_step(model, optimizer, step_batches(job, ctx), ctx, lr=1e-3, clip=job.optimizer.clip, overlap=False)
        optimizer.wait()
    return recorder, model


class _Observed(Zero1):
    """The optimizer, telling the recorder which part of the step begins."""

    def __init__(self, model: nn.Module, ctx: ParallelContext, ops: Ops, job: Job, recorder: Recorder):
        self.recorder = recorder
        super().__init__(
            model, named_pieces(model), ctx, job.optimizer, ops, bucket_elements=job.bucket_elements or BUCKET_ELEMENTS,
            overlap_gradients=job.parallel.overlap_gradients, overlap_weights=job.parallel.overlap_weights,
        )  # fmt: skip

    def expect(self, last: bool) -> None:
        self.recorder.phase = "last backward" if last else "backward"
        super().expect(last)

    def reduce(self) -> Tensor:
        self.recorder.phase = "step"
        return super().reduce()


def rehearse_rank(job: Job, rank: int, stands_for: int = 1) -> Rehearsed:
    """One rank's step on tensors without numbers."""
    with fake_ranks(job.grid, rank) as ctx:
        ops = replace(select.default_ops(), attention=flash_attention, attention_parts=flash_parts())
        recorder, model = record(job, ctx, ops, WatchedFakes)
        return summary(job, ctx, recorder, model, stands_for)


class WatchedFakes(FakeTensorMode):
    """Tensors without numbers, every operation on them shown to a recorder."""

    def __init__(self, recorder: Recorder):
        super().__init__(allow_non_fake_inputs=True)  # batches are numpy arrays
        self.recorder, self.within = recorder, False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.within:  # a shape worked out by way of other operations
            return super().dispatch(func, types, args, kwargs or {})
        self.within = True
        try:
            out = super().dispatch(func, types, args, kwargs or {})
        finally:
            self.within = False
        self.recorder.see(func, args, kwargs or {}, out)
        return out


@contextmanager
def fake_ranks(grid: Grid, rank: int) -> Iterator[ParallelContext]:
    """The context of one rank of a grid whose other ranks do not exist. Every axis has a group of its own."""
    dist.init_process_group("fake", rank=rank, world_size=grid.world, store=FakeStore())
    try:
        ctx = build_context(grid, rank=rank, device=torch.device("cpu"), timeout_s=60.0)
        axes = {name: getattr(ctx, name) for name in AXES}
        own = {n: replace(a, group=dist.new_group(list(a.ranks))) for n, a in axes.items() if a.size > 1}
        yield replace(ctx, read=lambda numbers: [1.0] * numbers.numel(), **own)
    finally:
        dist.destroy_process_group()


def summary(job: Job, ctx: ParallelContext, recorder: Recorder, model: nn.Module, stands_for: int = 1) -> Rehearsed:
    """What a recorded step comes to."""
    found: dict[str, list[tuple[str, int]]] = {}
    for call in recorder.calls:
        axis = getattr(ctx, call.axis)
        phase = "message" if call.kind in MESSAGES else call.phase
        found.setdefault(call.axis, []).append((phase, call.sent(axis.size)))
    return Rehearsed(
        rank=ctx.world.rank,
        stands_for=stands_for,
        parameters=sum(p.numel() for p in model.parameters()),
        peak=recorder.peak(),
        flops=whole_step(list(recorder.flops.items()), job.ran, job.micro_batches),
        sent={axis: whole_step(sent, job.ran, job.micro_batches) for axis, sent in found.items()},
        calls=tuple(recorder.calls),
    )


def rehearse(job: Job, *, every: bool = False) -> list[Rehearsed]:
    """One rank of each kind, or every one, over as many processes as there are cores."""
    like = model_ranks(job.grid)
    ranks = range(job.grid.world) if every else sorted(set(like.values()))
    many = 1 if every else job.grid.dp
    workers = min(len(os.sched_getaffinity(0)), len(ranks))
    if workers == 1:
        return [rehearse_rank(job, rank, many) for rank in ranks]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        futures = [pool.submit(rehearse_rank, job, rank, many) for rank in ranks]
        return [future.result() for future in futures]


def report(recipe: Recipe, stages: Sequence[int], world_size: int, *, every: bool = False) -> str:
    """Rehearse each of `stages` (indices from 0) and say what was found.

    Errors: ConfigError where a stage cannot run on so many ranks; TrainingError, with the report of the stage, where
    ranks would not meet.
    """
    texts = []
    for index in stages:
        job = job_of(recipe, index, world_size)
        ranks = rehearse(job, every=every)
        mismatch, groups = first_mismatch(job.grid, {rank.rank: rank.calls for rank in ranks})
        texts.append(f"stage {index + 1}, {recipe.stages[index].name}: {describe(job, ranks, mismatch, groups)}")
        require(mismatch is None, "\n".join(["ranks would wait for each other forever", *texts]), TrainingError)
    return "\n\n".join(texts)
