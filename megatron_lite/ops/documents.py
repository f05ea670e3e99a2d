"""The one layout of activations: tokens of all rows end to end, and the borders attention must not cross."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Segments of a packed [T, …] micro-batch. A batch of equal rows is the case of equal segments."""

    cu_seqlens: Tensor  # int32 [segments + 1], on the device: 0 … T
    lengths: tuple[int, ...]  # the same, as differences, on the host
    max_seqlen: int
    position_ids: Tensor  # int64 [T], restart at every segment
    row_length: int | None = None  # set when every segment has this length
