"""Who holds which tokens, and which queries meet which keys: every small size, against the definition."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations

import numpy as np
import pytest

from megatron_lite.parallel.cp_split import (
    GATHER_BYTES,
    Piece,
    choose_method,
    chunks_of,
    gather_pieces,
    positions,
    ring_pieces,
)

SIZES = [(rows, 2 * cp * chunk, cp) for rows in (1, 2, 3) for cp in (1, 2, 3, 4) for chunk in (1, 2, 3)]


def cuts(row: int) -> Iterator[tuple[int, ...]]:
    """Every way to cut a row into documents."""
    for number in range(row):
        for borders in combinations(range(1, row), number):
            yield tuple(np.diff([0, *borders, row]).tolist())


def pairs(piece: Piece, queries: np.ndarray, keys: np.ndarray) -> Iterator[tuple[int, int]]:
    """(query, key) places in the micro-batch that a piece computes."""
    q, k = queries[piece.queries], keys[piece.keys]
    assert (len(q), len(k)) == (sum(piece.q_lengths), sum(piece.k_lengths))
    q_at = k_at = 0
    for q_length, k_length in zip(piece.q_lengths, piece.k_lengths, strict=True):
        assert q_length > 0 and k_length > 0 and (q_length <= k_length or not piece.causal)
        for j in range(q_length):
            for i in range(k_length - q_length + j + 1 if piece.causal else k_length):
                yield int(q[q_at + j]), int(k[k_at + i])
        q_at, k_at = q_at + q_length, k_at + k_length


def wanted(lengths: tuple[int, ...], queries: np.ndarray) -> Counter[tuple[int, int]]:
    """A query sees its document up to itself."""
    starts = np.repeat(np.cumsum([0, *lengths[:-1]]), lengths)
    return Counter((int(q), k) for q in queries for k in range(starts[q], q + 1))


@pytest.mark.parametrize("rows, seq_len, cp", SIZES)
def test_ranks_together_hold_every_token_once_and_equally_many(rows, seq_len, cp):
    held = [positions(rows, seq_len, cp, rank) for rank in range(cp)]
    assert {(p.dtype, p.shape) for p in held} == {(np.dtype(np.int64), (rows * seq_len // cp,))}
    assert sorted(np.concatenate(held).tolist()) == list(range(rows * seq_len))
    for tokens in held:
        assert (np.diff(tokens) > 0).all()
        assert np.bincount(tokens // seq_len, minlength=rows).tolist() == [seq_len // cp] * rows


def test_rank_r_holds_chunks_r_and_its_mirror_image():
    assert positions(2, 8, 2, 0).tolist() == [0, 1, 6, 7, 8, 9, 14, 15]
    assert positions(2, 8, 2, 1).tolist() == [2, 3, 4, 5, 10, 11, 12, 13]
    assert positions(3, 5, 1, 0).tolist() == list(range(15))  # alone: everything, odd rows too
    assert [list(range(8))[chunks_of(4, rank)] for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]


@pytest.mark.parametrize("cp, chunk", [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (2, 3)])
def test_every_pair_of_a_document_is_computed_once(cp, chunk):
    row = 2 * cp * chunk
    everything = np.arange(row)
    held = [positions(1, row, cp, rank) for rank in range(cp)]
    for lengths in cuts(row):
        for rank in range(cp):
            expected = wanted(lengths, held[rank])
            gathered = [
                p for piece in gather_pieces(lengths, 1, cp, rank) for p in pairs(piece, held[rank], everything)
            ]
            assert Counter(gathered) == expected
            around: list[tuple[int, int]] = []
            for other in range(cp):
                pieces = ring_pieces(lengths, 1, cp, rank, other)
                assert len(pieces) <= 1  # of another rank: one document at most, and no mask
                assert all(piece.causal == (rank == other) for piece in pieces)
                around += [p for piece in pieces for p in pairs(piece, held[rank], held[other])]
            assert Counter(around) == expected


@pytest.mark.parametrize("rows, cp, chunk", [(2, 2, 2), (3, 2, 1), (2, 3, 3), (2, 4, 2)])
def test_rows_do_not_meet(rows, cp, chunk):
    row, draw = 2 * cp * chunk, np.random.default_rng(0)
    everything = np.arange(rows * row)
    held = [positions(rows, row, cp, rank) for rank in range(cp)]
    for _ in range(30):
        borders = [np.sort(draw.choice(np.arange(1, row), draw.integers(0, 4), replace=False)) for _ in range(rows)]
        lengths = tuple(n for b in borders for n in np.diff([0, *b, row]).tolist())
        for rank in range(cp):
            pieces = gather_pieces(lengths, rows, cp, rank)
            assert Counter(p for x in pieces for p in pairs(x, held[rank], everything)) == wanted(lengths, held[rank])
            around = [
                p
                for other in range(cp)
                for piece in ring_pieces(lengths, rows, cp, rank, other)
                for p in pairs(piece, held[rank], held[other])
            ]
            assert Counter(around) == wanted(lengths, held[rank])


@pytest.mark.parametrize("cp", [2, 3, 4, 8])
def test_ranks_compute_equally_many_pairs_of_a_row_without_borders(cp):
    row = 2 * cp * 3
    for step in range(cp):
        work = []
        for rank in range(cp):
            pieces = ring_pieces((row,), 1, cp, rank, (rank - step) % cp)
            work.append(sum(1 for p in pieces for _ in pairs(p, np.arange(row), np.arange(row))))
        assert len(set(work)) == 1  # in each step, so that nobody waits


def test_auto_gathers_what_is_small():
    assert choose_method(GATHER_BYTES) == "gather"
    assert choose_method(GATHER_BYTES + 1) == "ring"
