"""Linear layers cut over tensor-parallel ranks.

  ColumnParallelLinear : the rows of W are divided (outputs), x enters whole
  RowParallelLinear    : the columns of W are divided (inputs), the partial products are summed

Both take the axis and decide in the constructor which collective enters or leaves; forwards know no rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.errors import require
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.shard import Piece


@dataclass(frozen=True)
class Part:
    """One matrix of a merged column-parallel layer, e.g. k of q|k|v."""

    name: str  # last part of its Hugging Face key
    features: int  # rows of the whole matrix
    heads: int | None = None  # cut only between heads; fewer heads than ranks are held by several ranks


@dataclass(frozen=True)
class _Slice:
    """Where this rank's rows of a part begin in the whole matrix, how many, and who else holds them."""

    name: str
    whole: int
    start: int
    rows: int
    copies: int
    copy: int


def _slice(part: Part, tp: Axis) -> _Slice:
    groups = part.heads or part.features
    if part.heads and groups < tp.size:
        require(tp.size % groups == 0, f"tp={tp.size} is not a multiple of the {groups} heads of {part.name}")
        copies, rows = tp.size // groups, part.features // groups
        return _Slice(part.name, part.features, tp.rank // copies * rows, rows, copies, tp.rank % copies)
    what = "heads" if part.heads else "features"
    require(groups % tp.size == 0, f"{groups} {what} of {part.name} are not divisible by tp={tp.size}")
    rows = part.features // tp.size
    return _Slice(part.name, part.features, tp.rank * rows, rows, 1, 0)


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b, the rows of W (and b) divided over tp; several matrices with one input may be merged.

    In:  x [T/tp, D] if sequence_parallel else [T, D]
    Out: y [T, sum of this rank's rows of each part], parts in order

    `parts` is the number of output features, or the merged parts. Errors: ConfigError if a part cannot be divided.
    """

    def __init__(self, d_in: int, parts: int | tuple[Part, ...], tp: Axis, *, bias: bool = False,
                 sequence_parallel: bool = False):  # fmt: skip
        super().__init__()
        self.tp, self.d_in = tp, d_in
        self.enter = comm.gather_rows if sequence_parallel else comm.enter_region
        merged = (Part("", parts),) if isinstance(parts, int) else parts
        self.slices = tuple(_slice(part, tp) for part in merged)
        self.widths = tuple(s.rows for s in self.slices)
        self.weight = nn.Parameter(torch.empty(sum(self.widths), d_in))
        self.bias = nn.Parameter(torch.empty(sum(self.widths))) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(self.enter(x, self.tp), self.weight, self.bias)

    def pieces(self, name: str) -> dict[str, tuple[Piece, ...]]:
        """Named rectangles of each parameter; `name` is this module's, whose last part gives way to the parts' own."""
        parent = name.rpartition(".")[0]
        weights, biases, row = [], [], 0
        for s in self.slices:
            key = f"{parent}.{s.name}".lstrip(".") if s.name else name
            weight = Piece(
                f"{key}.weight", (s.whole, self.d_in), (s.start, 0), (s.rows, self.d_in), row * self.d_in,
                copies=s.copies, copy=s.copy, partial_grad=s.copies > 1, axis="kv",
            )  # fmt: skip
            weights.append(weight)
            biases.append(
                replace(weight, name=f"{key}.bias", whole=(s.whole,), start=(s.start,), shape=(s.rows,), offset=row)
            )
            row += s.rows
        return {"weight": tuple(weights)} | ({} if self.bias is None else {"bias": tuple(biases)})


class RowParallelLinear(nn.Module):
    """y = x W^T + b, the columns of W divided over tp; the partial products are summed, then b is added once.

    In:  x_Tf [T, F/tp]
    Out: y    [T/tp, D] if sequence_parallel else [T, D]
    """

    def __init__(self, d_in: int, d_out: int, tp: Axis, *, bias: bool = False, sequence_parallel: bool = False):
        super().__init__()
        require(d_in % tp.size == 0, f"{d_in} input features are not divisible by tp={tp.size}")
        self.tp, self.d_in, self.d_out, self.sequence_parallel = tp, d_in, d_out, sequence_parallel
        self.leave = comm.scatter_rows if sequence_parallel else comm.leave_region
        self.weight = nn.Parameter(torch.empty(d_out, d_in // tp.size))
        self.bias = nn.Parameter(torch.empty(d_out)) if bias else None

    def forward(self, x_Tf: Tensor) -> Tensor:
        y = self.leave(F.linear(x_Tf, self.weight), self.tp)
        return y if self.bias is None else y + self.bias

    def pieces(self, name: str) -> dict[str, tuple[Piece, ...]]:
        """Named rectangles of each parameter. With sequence parallelism a rank's bias sees only its own tokens."""
        f = self.d_in // self.tp.size
        weight = Piece(f"{name}.weight", (self.d_out, self.d_in), (0, self.tp.rank * f), (self.d_out, f))
        table: dict[str, tuple[Piece, ...]] = {"weight": (weight,)}
        if self.bias is not None:
            table["bias"] = (replicated(f"{name}.bias", (self.d_out,), self.tp, partial_grad=self.sequence_parallel),)
        return table


def replicated(name: str, shape: tuple[int, ...], tp: Axis, *, partial_grad: bool) -> Piece:
    """The piece of a parameter that every tp rank holds whole."""
    partial = partial_grad and tp.size > 1
    return Piece(name, shape, (0,) * len(shape), shape, copies=tp.size, copy=tp.rank, partial_grad=partial)
