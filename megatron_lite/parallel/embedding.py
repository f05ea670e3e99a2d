"""The vocabulary, its rows divided over tensor-parallel ranks: embedding of ids, and the head that reads out of it.

Rows are padded to a multiple of vocab_multiple * tp. Rows at and beyond vocab_size exist only in memory.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.parallel import comm
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.shard import Piece


class VocabRows(nn.Module):
    """This rank's rows of a [vocab_size, D] matrix padded to `padded` rows; an untied head is just that."""

    def __init__(self, vocab_size: int, padded: int, d_model: int, tp: Axis):
        super().__init__()
        assert padded % tp.size == 0 and padded >= vocab_size
        self.tp, self.vocab_size, self.d_model = tp, vocab_size, d_model
        self.rows = padded // tp.size
        self.start = tp.rank * self.rows
        self.real = min(max(vocab_size - self.start, 0), self.rows)  # rows of this rank that exist on disk
        self.weight = nn.Parameter(torch.empty(self.rows, d_model))
        self.sink: Tensor | None = None  # fp32 [rows, D] that the optimizer adds gradients up in

    def pieces(self, name: str) -> dict[str, tuple[Piece, ...]]:
        """The rows that exist on disk: an empty rectangle on a rank that holds only padding."""
        whole, start = (self.vocab_size, self.d_model), min(self.start, self.vocab_size)
        return {"weight": (Piece(f"{name}.weight", whole, (start, 0), (self.real, self.d_model)),)}


class VocabParallelEmbedding(VocabRows):
    """ids [T] -> x [T/tp, D] if sequence_parallel else [T, D]: each rank looks up its own rows, the rest add 0."""

    def __init__(self, vocab_size: int, padded: int, d_model: int, tp: Axis, *, sequence_parallel: bool = False):
        super().__init__(vocab_size, padded, d_model, tp)
        self.leave = comm.scatter_rows if sequence_parallel else comm.leave_region
        self.look_up = self._whole if tp.size == 1 else self._own_rows

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.leave(self.look_up(ids_T), self.tp)

    def _whole(self, ids_T: Tensor) -> Tensor:
        return F.embedding(ids_T, self.weight)

    def _own_rows(self, ids_T: Tensor) -> Tensor:
        local = ids_T - self.start
        elsewhere = (local < 0) | (local >= self.rows)
        return F.embedding(local.masked_fill(elsewhere, 0), self.weight).masked_fill(elsewhere[:, None], 0.0)
