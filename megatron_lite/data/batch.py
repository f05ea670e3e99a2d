"""What one forward pass reads: rows laid end to end, with the borders attention must not cross."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

IGNORE = -100  # label of a position that carries no loss


@dataclass(frozen=True)
class Batch:
    """One micro-batch of `rows` rows, T = rows * seq_len tokens. Arrays are numpy; the training step moves them."""

    input_ids: np.ndarray  # int64 [T]
    labels: np.ndarray  # int64 [T], the next token or IGNORE
    position_ids: np.ndarray  # int64 [T], restart at every border in cu_seqlens
    cu_seqlens: np.ndarray  # int32 [segments + 1], strictly increasing, 0 … T; a segment never crosses a row
    max_seqlen: int  # longest segment
    row_length: int | None  # seq_len when every segment is one whole row (documents not masked), else None
    valid_tokens: int  # labels that are not IGNORE
    samples: tuple[int, ...]  # row numbers of the stage these rows are
