"""Loss on named validation sets: the same rows every time, averaged over their valid tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from megatron_lite.data.batch import Batch
from megatron_lite.data.loader import Rows, validation_batches
from megatron_lite.models.transformer import Transformer
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.guard import sum_over
from megatron_lite.train.step import to_device


@torch.no_grad()
def mean_loss(model: Transformer, batches: Iterable[Batch], ctx: ParallelContext) -> float:
    """Sum of losses / number of valid tokens over all ranks' batches; every rank brings the same number of batches."""
    total, valid = 0.0, 0
    for batch in batches:
        total += model(*to_device(batch, ctx.device)).item()
        valid += batch.valid_tokens
    total, valid_tokens = sum_over(ctx, ctx.data, total, valid)
    return total / max(valid_tokens, 1)


def evaluate(model: Transformer, sets: Mapping[str, Rows], ctx: ParallelContext, *, rows: int, micro_batch: int,
             mask_documents: bool) -> dict[str, float]:  # fmt: skip
    """Mean loss of each validation set over its first `rows` rows."""
    return {
        name: mean_loss(
            model,
            validation_batches(data, rows, micro_batch, ctx.data.rank, ctx.data.size, mask_documents),
            ctx,
        )
        for name, data in sets.items()
    }
