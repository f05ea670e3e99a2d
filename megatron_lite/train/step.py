"""One optimizer step, every phase in order.

The loss of a step is the sum over its valid tokens divided by their number in the global batch, on every rank and for
any slicing of the batch: the number is known before the first forward, and all later reductions are sums.
Two things happen elsewhere, both in hooks of the optimizer (optim/zero1.py): as each gradient appears during a backward
it is added to its flat bucket, and in the last backward finished buckets start their reduction; and a module that is
called waits until its fresh weights have arrived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megatron_lite.data.batch import Batch
from megatron_lite.models.transformer import Transformer
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.comm import all_sum
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.pipeline.engine import run
from megatron_lite.pipeline.schedule import Task, timetable
from megatron_lite.pipeline.transfer import Transfer
from megatron_lite.runtime.guard import sum_over
from megatron_lite.train.inputs import Inputs, split


@dataclass(frozen=True)
class StepResult:
    """What a step did; the same on every rank but for `live`."""

    loss: float  # mean over the valid tokens of the global batch
    grad_norm: float  # before clipping
    valid_tokens: int
    skipped: bool  # loss or gradient not finite, or no valid token: no update
    sources: tuple[tuple[float, int], ...] = ()  # (sum of losses, valid tokens) of each source's rows
    waited_s: float = field(default=0.0, compare=False)  # for messages of the pipeline, mean over the ranks
    live: int = field(default=1, compare=False)  # most forwards at a time on this rank whose backward was to come


def train_step(model: Transformer, optimizer: Zero1, batches: Sequence[Batch], ctx: ParallelContext, *, lr: float,
               clip: float, overlap: bool = True, sources: Sequence[Sequence[int]] = (),
               num_sources: int = 0) -> StepResult:  # fmt: skip
    """One update from this rank's micro-batches. `clip` 0 means never; `overlap`: messages between pipeline ranks.

    `sources`: for each micro-batch the number of the source of each of its rows, to tell their losses apart.
    """
    # 1. this rank's tokens, and what the loss is divided by
    batches = [split(batch, ctx.cp) for batch in batches]
    by_source = SourceLosses(sources, num_sources, ctx.device)
    counts = by_source.count(batches)
    valid_tokens, *source_tokens = sum_over(ctx, ctx.data, sum(batch.valid_tokens for batch in batches), *counts)

    # 2. forward and backward of every micro-batch, in the order of the pipeline; gradients add up in flat buckets
    loss = torch.zeros((), device=ctx.device)
    inputs = Inputs(batches, ctx)

    def forward(task: Task, x: Tensor | None) -> Tensor:
        ids, labels, documents = inputs[task.micro_batch]
        token_losses = torch.zeros(len(labels), device=ctx.device)
        out = model(ids, labels, documents, token_losses, chunk=task.chunk, x=x)
        if not model.chunks[task.chunk].last:
            return out
        micro_loss = out / max(valid_tokens, 1)
        loss.add_(micro_loss.detach())
        by_source.add(task.micro_batch, token_losses)
        return micro_loss

    ticks = timetable(ctx.pp.size, len(model.chunks), len(batches))[ctx.pp.rank]
    report = run(
        ticks, forward, lambda task: optimizer.expect(last=task.micro_batch == len(batches) - 1),
        transfer(model, batches[0], ctx, overlap=overlap),
    )  # fmt: skip

    # 3. the global gradient norm and loss: each rank adds the elements and tokens it answers for
    share = optimizer.reduce()
    losses = torch.cat([loss.double().view(1), by_source.sums])
    losses = losses if ctx.tp.rank == 0 else torch.zeros_like(losses)  # tp ranks have the same
    waited = torch.tensor([report.waited_s / ctx.world.size], dtype=torch.float64, device=ctx.device)
    square, waited_s, total, *source_losses = ctx.read(all_sum(torch.cat([share.view(1), waited, losses]), ctx.world))
    grad_norm = math.sqrt(square)

    # 4. everybody saw the same numbers, so everybody skips or nobody
    skipped = valid_tokens == 0 or not math.isfinite(grad_norm) or not math.isfinite(total)
    if not skipped:
        optimizer.update(lr, clip_scale(grad_norm, clip))
    optimizer.zero_grad()
    pairs = tuple((x, int(n)) for x, n in zip(source_losses, source_tokens, strict=True))
    return StepResult(total, grad_norm, int(valid_tokens), skipped, pairs, waited_s, report.live)


def transfer(model: Transformer, batch: Batch, ctx: ParallelContext, *, overlap: bool) -> Transfer:
    """What carries activations of micro-batches of the shape of `batch` between this rank and its neighbours."""
    weight = next(model.parameters())
    tokens = len(batch.input_ids) // (ctx.tp.size if model.sequence_parallel else 1)
    return Transfer(ctx.pp, (tokens, model.model.config.hidden_size), weight.dtype, ctx.device, overlap=overlap)


class SourceLosses:
    """Sums of the losses and numbers of the valid tokens of this rank's rows, by source."""

    def __init__(self, sources: Sequence[Sequence[int]], num_sources: int, device: torch.device):
        self.sources = [torch.tensor(rows, device=device) for rows in sources]  # of each micro-batch
        self.sums = torch.zeros(num_sources, dtype=torch.float64, device=device)

    def count(self, batches: Sequence[Batch]) -> list[float]:
        """Valid tokens of each source."""
        counts = torch.zeros_like(self.sums)
        for batch, sources in zip(batches, self.sources, strict=False):
            valid = torch.from_numpy(batch.labels >= 0).view(len(sources), -1).sum(1)
            counts.index_add_(0, sources, valid.double().to(counts.device))
        return [float(x) for x in counts.tolist()]

    def add(self, number: int, losses_T: Tensor) -> None:
        """The losses of the tokens of micro-batch `number`."""
        if self.sources:
            sources = self.sources[number]
            self.sums.index_add_(0, sources, losses_T.view(len(sources), -1).sum(1, dtype=torch.float64))


def clip_scale(grad_norm: float, clip: float) -> float:
    """What gradients are multiplied by so that their global norm is at most `clip` (0: no limit)."""
    return min(1.0, clip / (grad_norm + 1e-6)) if clip else 1.0
