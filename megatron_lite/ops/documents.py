"""The one layout of activations: tokens of all rows end to end, and the borders attention must not cross."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor


@dataclass(frozen=True)
class Documents:
    """Segments of a packed [T, …] micro-batch. A batch of equal rows is the case of equal segments."""

    cu_seqlens: Tensor  # int32 [segments + 1], on the device: 0 … T
    lengths: tuple[int, ...]  # the same, as differences, on the host
    max_seqlen: int
    position_ids: Tensor  # int64 [T], restart at every segment
    row_length: int | None = None  # set when every segment has this length
    rows: int | None = None  # equal rows that segments do not cross; context parallelism cuts each by itself

    @property
    def num_rows(self) -> int:
        """Rows of the micro-batch: its segments, if those are rows, else as it was told."""
        if self.row_length is not None:
            return len(self.lengths)
        assert self.rows is not None, "these documents do not say in how many rows they lie"
        return self.rows


@dataclass(frozen=True)
class Segments:
    """Runs of queries of [Tq, …] and the runs of keys of [Tk, …] that they meet, both end to end.

    causal: the last query of a run sees all its keys, each one before sees one less; else every query sees all.
    """

    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool
    cu_q: Tensor  # int32 [segments + 1], on the device: 0 … Tq
    cu_k: Tensor
    max_q: int
    max_k: int

    @staticmethod
    def of(q_lengths: Sequence[int], k_lengths: Sequence[int], *, causal: bool, device: torch.device) -> Segments:
        """From lengths on the host."""
        assert len(q_lengths) == len(k_lengths)
        assert not causal or all(q <= k for q, k in zip(q_lengths, k_lengths, strict=True))

        def borders(lengths: Sequence[int]) -> Tensor:
            cu = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
            return cu if device.type == "cpu" else cu.pin_memory().to(device, non_blocking=True)

        return Segments(
            tuple(q_lengths), tuple(k_lengths), causal, borders(q_lengths), borders(k_lengths),
            max(q_lengths), max(k_lengths),
        )  # fmt: skip
