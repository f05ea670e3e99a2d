"""Loss on named validation sets: the same rows every time, averaged over their valid tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice

import torch
from torch import Tensor

from megatron_lite.data.batch import Batch
from megatron_lite.data.loader import Rows, validation_batches
from megatron_lite.models.transformer import Transformer
from megatron_lite.parallel.comm import all_sum
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.pipeline.engine import run
from megatron_lite.pipeline.schedule import Task, timetable
from megatron_lite.runtime.guard import sum_over
from megatron_lite.train.inputs import Inputs, split
from megatron_lite.train.step import transfer


@torch.no_grad()
def mean_loss(model: Transformer, batches: Iterable[Batch], ctx: ParallelContext) -> float:
    """Sum of losses / number of valid tokens over all ranks' batches; every rank brings the same number of batches."""
    total, valid = torch.zeros(1, dtype=torch.float64, device=ctx.device), 0
    waiting = iter(batches)
    while group := [split(batch, ctx.cp) for batch in islice(waiting, ctx.pp.size)]:  # keeps every pp rank busy
        inputs = Inputs(group, ctx)

        def forward(task: Task, x: Tensor | None, inputs: Inputs = inputs) -> Tensor:
            out = model(*inputs[task.micro_batch], chunk=task.chunk, x=x)
            if model.chunks[task.chunk].last:
                total.add_(out)
            return out

        ticks = timetable(ctx.pp.size, len(model.chunks), len(group), training=False)[ctx.pp.rank]
        run(ticks, forward, lambda task: None, transfer(model, group[0], ctx, overlap=True))
        valid += sum(batch.valid_tokens for batch in group)
    (valid_tokens,) = sum_over(ctx, ctx.data, valid)
    (loss,) = ctx.read(all_sum(total if ctx.tp.rank == 0 else torch.zeros_like(total), ctx.world))
    return loss / max(valid_tokens, 1)


def evaluate(model: Transformer, sets: Mapping[str, Rows], ctx: ParallelContext, *, rows: int, micro_batch: int,
             mask_documents: bool) -> dict[str, float]:  # fmt: skip
    """Mean loss of each validation set over its first `rows` rows."""
    return {
        name: mean_loss(
            model,
            validation_batches(data, rows, micro_batch, ctx.dp.rank, ctx.dp.size, mask_documents),
            ctx,
        )
        for name, data in sets.items()
    }
