"""Which tokens each context-parallel rank holds, and which of them meet: pure arithmetic, without torch.

A micro-batch is `rows` rows end to end. Each row is cut into 2 cp equal chunks, and rank r holds chunks r and
2 cp - 1 - r of every row, so that under a causal mask every rank has the same number of pairs to compute:

  cp = 2    chunk  0 1 2 3
            rank   0 1 1 0

A document is a run of tokens that see each other backwards; it never crosses a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

GATHER_BYTES = 256 * 2**20  # of the keys and values of one layer and micro-batch, whole rows

Method = Literal["gather", "ring", "heads"]


@dataclass(frozen=True)
class Piece:
    """Queries that meet keys in one call of a kernel: segment i is q_lengths[i] queries and k_lengths[i] keys.

    causal: the last query of a segment sees all its keys, each one before sees one less; else every query sees all.
    """

    queries: slice  # of this rank's tokens
    keys: slice  # of the other rank's tokens (ring) or of the whole micro-batch (gather)
    q_lengths: tuple[int, ...]
    k_lengths: tuple[int, ...]
    causal: bool


def choose_method(gathered_bytes: int) -> Method:
    """What "auto" means: gather while whole rows of keys and values are small, for one collective is soon over."""
    return "gather" if gathered_bytes <= GATHER_BYTES else "ring"


def chunks_of(cp: int, rank: int) -> slice:
    """A rank's two chunks among the 2 cp of a row."""
    return slice(rank, 2 * cp - rank, 2 * cp - 1 - 2 * rank)


def positions(rows: int, seq_len: int, cp: int, rank: int) -> np.ndarray:
    """Places in the micro-batch of the tokens of a rank, in the order in which it holds them: int64 [rows S / cp]."""
    places = np.arange(rows * seq_len, dtype=np.int64)
    if cp == 1:
        return places  # of an odd length too
    assert seq_len % (2 * cp) == 0, f"{seq_len} tokens do not divide into 2 x {cp} chunks"
    return places.reshape(rows, 2 * cp, -1)[:, chunks_of(cp, rank)].reshape(-1)


def ring_pieces(lengths: Sequence[int], rows: int, cp: int, rank: int, other: int) -> list[Piece]:
    """What the queries of `rank` see of the keys of `other`; over all `other`, every pair of a document once.

    Of its own: the tokens of one document in one row lie together and in order, so they are a causal segment. Of
    another rank: what lies in earlier chunks, which is one document in each row at most, without a mask.
    """
    mine, theirs = (_documents(lengths, rows, cp, of) for of in (rank, other))
    if rank == other:
        runs = _runs(mine.reshape(-1))
        whole = slice(0, mine.size)
        return [Piece(whole, whole, runs, runs, causal=True)]
    tokens = mine.shape[1]
    # Both of my chunks come after the other's first one, or my second chunk after both of the other's.
    first, last = (0, tokens // 2) if other < rank else (tokens // 2, tokens)
    pieces = []
    for row in range(rows):
        document = mine[row, first]
        q = int(np.count_nonzero(mine[row, first:] == document))
        k = int(np.count_nonzero(theirs[row, :last] == document))
        if k:
            begin, end = row * tokens + first, row * tokens + last
            pieces.append(Piece(slice(begin, begin + q), slice(end - k, end), (q,), (k,), causal=False))
    return pieces


def gather_pieces(lengths: Sequence[int], rows: int, cp: int, rank: int) -> list[Piece]:
    """What the queries of `rank` see of the whole micro-batch: for each chunk its documents, each from its start on."""
    borders = np.cumsum([0, *lengths])
    row_length = int(borders[-1]) // rows
    chunk = row_length // (2 * cp)
    pieces = []
    for number, (row, place) in enumerate((row, p) for row in range(rows) for p in (rank, 2 * cp - 1 - rank)):
        begin = row * row_length + place * chunk
        end = begin + chunk
        first, last = np.searchsorted(borders, begin, "right") - 1, np.searchsorted(borders, end, "left")
        starts = borders[first:last]
        stops = np.minimum(borders[first + 1 : last + 1], end)
        pieces.append(
            Piece(
                slice(number * chunk, (number + 1) * chunk),
                slice(int(starts[0]), end),
                tuple((stops - np.maximum(starts, begin)).tolist()),
                tuple((stops - starts).tolist()),
                causal=True,
            )
        )
    return pieces


def _documents(lengths: Sequence[int], rows: int, cp: int, rank: int) -> np.ndarray:
    """Number of the document of each token of a rank, [rows, S / cp]."""
    numbers = np.repeat(np.arange(len(lengths)), lengths)
    return numbers[positions(rows, numbers.size // rows, cp, rank)].reshape(rows, -1)


def _runs(numbers: np.ndarray) -> tuple[int, ...]:
    """Lengths of the runs of equal numbers."""
    borders = np.flatnonzero(np.diff(numbers)) + 1
    return tuple(np.diff([0, *borders, numbers.size]).tolist())
