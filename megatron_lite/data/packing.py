"""Rows of equal length out of documents of any length. Pure arithmetic on int64 arrays.

`concat`: the kept documents of one source, laid end to end, are cut every `seq_len` tokens. Row j holds tokens
[j * seq_len, j * seq_len + seq_len + 1) of that stream: its last label is the next row's first input, so that every
token of the stream but the first is a label exactly once. Fewer than `seq_len` tokens at the end fill no row and are
left out, the same ones in every epoch.
"""

from __future__ import annotations

import numpy as np


def kept_documents(lengths: np.ndarray, min_length: int = 0, max_length: int | None = None) -> np.ndarray:
    """int64 numbers of the documents with min_length <= length <= max_length tokens; empty ones are never kept."""
    keep = lengths >= max(min_length, 1)
    if max_length is not None:
        keep &= lengths <= max_length
    return np.flatnonzero(keep).astype(np.int64)


def stream_starts(lengths: np.ndarray) -> np.ndarray:
    """int64 [documents + 1]: where each document starts in the stream, and where the stream ends."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:], dtype=np.int64)
    return starts


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Rows a stream of `num_tokens` fills; each reads one token beyond its last input."""
    return max(0, (num_tokens - 1) // seq_len)


def left_out(num_tokens: int, seq_len: int) -> int:
    """Tokens at the end of the stream that no row reads."""
    return num_tokens - (num_rows(num_tokens, seq_len) * seq_len + 1)


def row_documents(starts: np.ndarray, row: int, seq_len: int) -> tuple[int, int, np.ndarray]:
    """What row `row` reads, given `stream_starts`.

    Returns the first document it reads, one past the last, and its borders: int64 offsets 0 < b <= seq_len in the row
    at which another document starts. Documents of the stream are not empty, so borders strictly increase.
    """
    begin = row * seq_len
    # every operand is int64: a position beyond 2**53 would lose its last bits as a float
    first, last = np.searchsorted(starts, np.array([begin, begin + seq_len], dtype=np.int64), side="right").tolist()
    return first - 1, last, starts[first:last] - begin
