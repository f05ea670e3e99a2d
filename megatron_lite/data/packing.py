"""Rows of equal length out of documents of any length. Pure arithmetic on int64 arrays.

A row reads seq_len + 1 tokens of a stream: its inputs and the token after them. Row j begins `stride` * j tokens into
its stream, which is a table of where each piece starts.

`concat` (stride seq_len): the kept documents of one source, laid end to end, are cut every seq_len tokens. A row's last
label is the next row's first input, so that every token of the stream but the first is a label exactly once. Fewer
than seq_len tokens at the end fill no row and are left out, the same ones in every epoch.

`best_fit` (stride seq_len + 1): a document of at most seq_len + 1 tokens stays whole. A longer one is cut every seq_len
tokens, and again a piece ends with the token the next one begins with, so that every token but a document's first is a
label exactly once. Pieces are placed longest first, each into the fullest row that still holds it. What is left of a
row is one last piece of padding. Rows are numbered by the first piece they hold, pieces lie in the corpus's order.
"""

from __future__ import annotations

import numpy as np

PADDING = -1  # place of a piece that only fills its row


def kept_documents(lengths: np.ndarray, min_length: int = 0, max_length: int | None = None) -> np.ndarray:
    """int64 numbers of the documents with min_length <= length <= max_length tokens; empty ones are never kept."""
    keep = lengths >= max(min_length, 1)
    if max_length is not None:
        keep &= lengths <= max_length
    return np.flatnonzero(keep).astype(np.int64)


def stream_starts(lengths: np.ndarray, origin: int = 0) -> np.ndarray:
    """int64 [pieces + 1]: where each piece starts in a stream that starts at `origin`, and where the stream ends."""
    starts = np.empty(len(lengths) + 1, dtype=np.int64)
    starts[0] = origin
    np.cumsum(lengths, out=starts[1:], dtype=np.int64)
    starts[1:] += origin
    return starts


def num_rows(num_tokens: int, seq_len: int) -> int:
    """Rows a stream of `num_tokens` fills under concat; each reads one token beyond its last input."""
    return max(0, (num_tokens - 1) // seq_len)


def left_out(num_tokens: int, seq_len: int) -> int:
    """Tokens at the end of the stream that no row of concat reads."""
    return num_tokens - (num_rows(num_tokens, seq_len) * seq_len + 1)


def row_pieces(starts: np.ndarray, begin: int, seq_len: int) -> tuple[int, int, np.ndarray]:
    """What the row that begins at `begin` in the stream reads, given `stream_starts`.

    Returns the first piece it reads, one past the last, and its borders: int64 offsets 0 < b <= seq_len in the row
    at which another piece starts. Pieces of the stream are not empty, so borders strictly increase.
    """
    # every operand is int64: a position beyond 2**53 would lose its last bits as a float
    first, last = np.searchsorted(starts, np.array([begin, begin + seq_len], dtype=np.int64), side="right").tolist()
    return first - 1, last, starts[first:last] - begin


def pack(lengths: np.ndarray, places: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """The stream of best_fit for documents of `lengths` tokens, none of them empty, that start at `places` in a file.

    Returns int64 [pieces + 1], where each piece starts in the stream, and its end (a multiple of seq_len + 1); and
    int64 [pieces], where each starts in the file, or PADDING.
    """
    size = seq_len + 1
    lengths, places = _pieces(lengths, places, seq_len)
    row, count = _best_fit(lengths, size)
    first = np.empty(count, dtype=np.int64)
    first[row[::-1]] = np.arange(len(row) - 1, -1, -1)  # of equal indices the last assignment stays: the first piece
    number = np.empty(count, dtype=np.int64)
    number[np.argsort(first)] = np.arange(count)
    row = number[row]
    order = np.argsort(row, kind="stable")
    lengths, places, row = lengths[order], places[order], row[order]
    ends = np.searchsorted(row, np.arange(count), side="right")  # one past the last piece of each row
    used = np.diff(np.cumsum(lengths)[ends - 1], prepend=0)
    short = np.flatnonzero(used < size)
    lengths = np.insert(lengths, ends[short], size - used[short])
    return stream_starts(lengths), np.insert(places, ends[short], PADDING)


def _pieces(lengths: np.ndarray, places: np.ndarray, seq_len: int) -> tuple[np.ndarray, np.ndarray]:
    """Lengths and places of the pieces of documents, none longer than seq_len + 1."""
    labels = lengths - 1
    parts = np.maximum(1, -(-labels // seq_len))
    if (parts == 1).all():
        return lengths, places
    document = np.repeat(np.arange(len(lengths)), parts)
    part = np.arange(len(document)) - np.repeat(np.cumsum(parts) - parts, parts)
    rest = labels[document] - part * seq_len
    return np.minimum(rest, seq_len) + 1, places[document] + part * seq_len


def _best_fit(lengths: np.ndarray, size: int) -> tuple[np.ndarray, int]:
    """The row of each piece, and how many rows of `size` tokens there are.

    Equal pieces are placed together and rows with equally many free tokens are kept as ranges of numbers, so that the
    work grows with the different lengths there are and not with the pieces. Placing one after another gives the same:
    a row that has just taken a piece of this length has fewer free tokens than before, so it takes the next one too.
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    row = np.empty(len(lengths), dtype=np.int64)
    ranges: list[list[tuple[int, int]]] = [[] for _ in range(size + 1)]  # free tokens -> rows first … last - 1
    some = bytearray(size + 1)  # 1 where `ranges` is not empty: find() is the search for the best fit
    done = opened = 0
    for length, left in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while left:
            free = some.find(1, length)
            if free < 0:
                first, last, free = opened, opened + -(-left // (size // length)), size
                opened = last
            else:
                first, last = ranges[free].pop()
                some[free] = bool(ranges[free])
            each = min(free // length, left)
            taken = min(last - first, left // each)
            pieces = taken * each
            row[order[done : done + pieces]] = np.repeat(np.arange(first, first + taken), each)
            done, left = done + pieces, left - pieces
            for rest, start, stop in ((free - each * length, first, first + taken), (free, first + taken, last)):
                if start < stop:
                    ranges[rest].append((start, stop))
                    some[rest] = 1
    return row, opened
