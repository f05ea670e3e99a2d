"""What one forward pass reads: rows laid end to end, with the borders attention must not cross.

The label of a position is the next token of its row. With `mask_documents`, documents stay apart: positions restart
and attention ends at every border, and a document's last token, whose next token belongs to another document, has no
label. Without it a row is one segment, whatever documents it holds, and every position has a label.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

IGNORE = -100  # label of a position that carries no loss


@dataclass(frozen=True)
class Row:
    """One sample: seq_len inputs and the token after them."""

    tokens: np.ndarray  # int64 [seq_len + 1]
    borders: np.ndarray  # int64, offsets 0 < b <= seq_len where another document starts, strictly increasing
    num_labels: int | None = None  # labels from here on are IGNORE: what follows only fills the row; None = all count


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
    samples: tuple[int, ...]  # row numbers of the stage these rows are, fillers left out
    rows: int


def make_batch(rows: Sequence[Row], samples: Sequence[int], mask_documents: bool) -> Batch:
    """Lay `rows` of equal length end to end. `samples` are the numbers of the rows that are not fillers."""
    tokens = np.stack([row.tokens for row in rows])
    num_rows, seq_len = len(rows), tokens.shape[1] - 1
    labels = tokens[:, 1:].copy()
    for i, row in enumerate(rows):
        if row.num_labels is not None:
            labels[i, row.num_labels :] = IGNORE
    labels = labels.reshape(-1)
    starts = np.arange(num_rows + 1, dtype=np.int64) * seq_len
    if mask_documents:
        borders = np.concatenate([row.borders + i * seq_len for i, row in enumerate(rows)])
        labels[borders - 1] = IGNORE
        starts = np.union1d(starts, borders)
    lengths = np.diff(starts)
    assert num_rows * seq_len < 2**31  # cu_seqlens is int32: what attention kernels take
    return Batch(
        input_ids=tokens[:, :-1].reshape(-1),
        labels=labels,
        position_ids=np.arange(num_rows * seq_len, dtype=np.int64) - np.repeat(starts[:-1], lengths),
        cu_seqlens=starts.astype(np.int32),
        max_seqlen=int(lengths.max()),
        row_length=None if mask_documents else seq_len,
        valid_tokens=int(np.count_nonzero(labels != IGNORE)),
        samples=tuple(samples),
        rows=num_rows,
    )
