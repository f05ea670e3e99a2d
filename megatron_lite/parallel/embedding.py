"""The vocabulary, its rows divided over tensor-parallel ranks: embedding of ids, and the head that reads out of it.

Rows are padded to a multiple of vocab_multiple * tp. Rows at and beyond vocab_size exist only in memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron_lite.parallel import comm
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.shard import Piece

EMBEDDING = "model.embed_tokens"


class VocabRows(nn.Module):
    """This rank's rows of a [vocab_size, D] matrix padded to `padded` rows; a head is just that.

    `ends`: the axis of the two pipeline ranks that hold a tied matrix, one as the embedding, one as the head.
    """

    def __init__(self, vocab_size: int, padded: int, d_model: int, tp: Axis, ends: Axis | None = None):
        super().__init__()
        assert padded % tp.size == 0 and padded >= vocab_size
        self.tp, self.ends, self.vocab_size, self.d_model = tp, ends, vocab_size, d_model
        self.rows = padded // tp.size
        self.start = tp.rank * self.rows
        self.real = min(max(vocab_size - self.start, 0), self.rows)  # rows of this rank that exist on disk
        self.weight = nn.Parameter(torch.empty(self.rows, d_model))
        self.sink: Tensor | None = None  # fp32 [rows, D] that the optimizer adds gradients up in

    def pieces(self, name: str) -> dict[str, tuple[Piece, ...]]:
        """The rows that exist on disk: an empty rectangle on a rank that holds only padding."""
        whole, start = (self.vocab_size, self.d_model), min(self.start, self.vocab_size)
        piece = Piece(f"{name}.weight", whole, (start, 0), (self.real, self.d_model))
        if self.ends is not None and self.ends.size > 1:
            piece = replace(piece, name=f"{EMBEDDING}.weight", axis="ends", copies=2, copy=self.ends.rank,
                            partial_grad=True)  # fmt: skip
        return {"weight": (piece,)}


class VocabParallelEmbedding(VocabRows):
    """ids [T] -> x [T/tp, D] if sequence_parallel else [T, D]: each rank looks up its own rows, the rest add 0."""

    def __init__(self, vocab_size: int, padded: int, d_model: int, tp: Axis, ends: Axis | None = None, *,
                 sequence_parallel: bool = False):  # fmt: skip
        super().__init__(vocab_size, padded, d_model, tp, ends)
        self.leave = comm.scatter_rows if sequence_parallel else comm.leave_region

    def forward(self, ids_T: Tensor) -> Tensor:
        return self.leave(_LookUp.apply(ids_T, self.weight, self), self.tp)


class _LookUp(torch.autograd.Function):
    """weight[ids - start], zero for rows of other ranks.

    The gradient adds rows up in fp32, in the sink if there is one, rather than make [rows, D] of mostly zeros.
    """

    @staticmethod
    def forward(ctx: Any, ids: Tensor, weight: Tensor, rows: VocabRows) -> Tensor:
        local, elsewhere = ids, None
        if rows.tp.size > 1:
            local = ids - rows.start
            elsewhere = ((local < 0) | (local >= rows.rows))[:, None]
            local = local.masked_fill(elsewhere[:, 0], 0)
        ctx.save_for_backward(local, elsewhere)
        ctx.sink, ctx.weight_like = rows.sink, (weight.shape, weight.dtype)
        x = F.embedding(local, weight)
        return x if elsewhere is None else x.masked_fill_(elsewhere, 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor | None, None]:
        local, elsewhere = ctx.saved_tensors
        shape, dtype = ctx.weight_like
        grad32 = grad.float() if elsewhere is None else grad.float().masked_fill(elsewhere, 0.0)
        total = grad.new_zeros(shape, dtype=torch.float32) if ctx.sink is None else ctx.sink
        total.index_put_((local,), grad32, accumulate=True)  # on CUDA too in one fixed order, unlike index_add_
        return None, total.to(dtype) if ctx.sink is None else None, None
