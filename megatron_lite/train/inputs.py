"""From a micro-batch of the loader to the tensors a rank's forward reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from megatron_lite.data.batch import IGNORE, Batch
from megatron_lite.ops.documents import Documents
from megatron_lite.parallel.context import Axis, ParallelContext
from megatron_lite.parallel.cp_split import positions


def split(batch: Batch, cp: Axis) -> Batch:
    """A rank's tokens of the rows that context-parallel ranks share; the borders stay those of the whole rows."""
    if cp.size == 1:
        return batch
    mine = positions(batch.rows, len(batch.input_ids) // batch.rows, cp.size, cp.rank)
    labels = batch.labels[mine]
    return replace(
        batch, input_ids=batch.input_ids[mine], labels=labels, position_ids=batch.position_ids[mine],
        valid_tokens=int(np.count_nonzero(labels != IGNORE)),
    )  # fmt: skip


class Inputs:
    """Micro-batches as tensors, each moved when it is first asked for."""

    def __init__(self, batches: Sequence[Batch], ctx: ParallelContext):
        self.batches, self.ctx = batches, ctx
        self.moved: dict[int, tuple[Tensor, Tensor, Documents]] = {}

    def __getitem__(self, number: int) -> tuple[Tensor, Tensor, Documents]:
        if number not in self.moved:
            self.moved[number] = to_device(self.batches[number], self.ctx)
        return self.moved[number]


def to_device(batch: Batch, ctx: ParallelContext) -> tuple[Tensor, Tensor, Documents]:
    """ids [T], labels [T] and the borders of a micro-batch as tensors."""

    def move(array: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(array)
        return tensor if ctx.device.type == "cpu" else tensor.pin_memory().to(ctx.device, non_blocking=True)

    documents = Documents(
        cu_seqlens=move(batch.cu_seqlens),
        lengths=tuple(np.diff(batch.cu_seqlens).tolist()),
        max_seqlen=batch.max_seqlen,
        position_ids=move(batch.position_ids),
        row_length=batch.row_length,
        rows=batch.rows,
    )
    return move(batch.input_ids), move(batch.labels), documents
