"""Rows out of documents: nothing lost, nothing twice, borders where documents begin."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data import packing

SEQ = 7
LENGTHS = st.lists(st.sampled_from([0, 1, 2, SEQ - 1, SEQ, SEQ + 1, 10 * SEQ]), min_size=1, max_size=20)


def _rows(lengths: np.ndarray, seq_len: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """(tokens, borders) of every row of a stream whose tokens are 0, 1, 2, …, read document by document."""
    starts = packing.stream_starts(lengths)
    rows = []
    for row in range(packing.num_rows(int(starts[-1]), seq_len)):
        first, last, borders = packing.row_pieces(starts, row * seq_len, seq_len)
        begin, end = row * seq_len, row * seq_len + seq_len + 1
        parts = [np.arange(max(begin, starts[d]), min(end, starts[d + 1])) for d in range(first, last)]
        assert all(part.size for part in parts)
        rows.append((np.concatenate(parts), borders))
    return rows


@pytest.mark.req("B02", "C14")
@given(LENGTHS)
def test_the_token_stream_is_conserved(lengths):
    kept = np.array(lengths)[packing.kept_documents(np.array(lengths))]
    total = int(kept.sum())
    rows = _rows(kept, SEQ)
    assert all(len(tokens) == SEQ + 1 for tokens, _ in rows)
    labels = [t for tokens, _ in rows for t in tokens[1:].tolist()]
    assert labels == list(range(1, len(rows) * SEQ + 1))
    assert packing.left_out(total, SEQ) == total - 1 - len(rows) * SEQ if total else not rows
    assert not total or packing.left_out(total, SEQ) < SEQ


@given(LENGTHS)
def test_borders_are_where_documents_start(lengths):
    kept = np.array([n for n in lengths if n], dtype=np.int64)
    edges = set(itertools.accumulate(kept.tolist()))
    for row, (_, borders) in enumerate(_rows(kept, SEQ)):
        inside = [p - row * SEQ for p in sorted(edges) if row * SEQ < p <= row * SEQ + SEQ]
        assert borders.tolist() == inside and borders.dtype == np.int64


@given(st.lists(st.integers(0, 12), min_size=1, max_size=30), st.integers(0, 6), st.none() | st.integers(1, 9))
def test_filters_keep_what_they_say(lengths, low, high):
    kept = packing.kept_documents(np.array(lengths), low, high).tolist()
    assert kept == [i for i, n in enumerate(lengths) if n and low <= n and (high is None or n <= high)]


@pytest.mark.req("B02")
def test_positions_beyond_2_53_are_exact():
    """Three documents of 2^60 tokens: float arithmetic would miss a border by hundreds of tokens."""
    starts = packing.stream_starts(np.array([2**60 + 1, 2**60, 2**60], dtype=np.int64))
    assert starts.dtype == np.int64
    row = (2**60 + 1) // 4096
    first, last, borders = packing.row_pieces(starts, row * 4096, 4096)
    assert (first, last, borders.tolist()) == (0, 2, [1])
    assert packing.num_rows(int(starts[-1]), 4096) == 3 * 2**60 // 4096


# ---- best fit


def _packed(lengths, seq_len: int) -> tuple[np.ndarray, list[list[tuple[int, int]]]]:
    """The stream's starts, and for each row its pieces (first token in the corpus, or PADDING; length)."""
    lengths = np.array([n for n in lengths if n], dtype=np.int64)
    starts, places = packing.pack(lengths, packing.stream_starts(lengths)[:-1], seq_len)
    assert starts.dtype == places.dtype == np.int64 and starts[0] == 0
    rows: list[list[tuple[int, int]]] = [[] for _ in range(int(starts[-1]) // (seq_len + 1))]
    for start, end, place in zip(starts[:-1].tolist(), starts[1:].tolist(), places.tolist(), strict=True):
        assert start // (seq_len + 1) == (end - 1) // (seq_len + 1), "a piece crosses the end of a row"
        rows[start // (seq_len + 1)].append((place, end - start))
    return starts, rows


@pytest.mark.req("J07")
def test_what_is_left_of_a_row_is_one_trailing_piece():
    starts, rows = _packed([3, 2], 8)
    assert rows == [[(0, 3), (3, 2), (packing.PADDING, 4)]]
    assert packing.row_pieces(starts, 0, 8)[2].tolist() == [3, 5]


@pytest.mark.req("C14")
@given(LENGTHS, st.sampled_from([1, 2, SEQ, SEQ + 3]))
def test_best_fit_keeps_documents_whole_and_every_label_once(lengths, seq_len):
    starts, rows = _packed(lengths, seq_len)
    assert (np.diff(starts) > 0).all()
    spans = []
    for pieces in rows:
        assert sum(length for _, length in pieces) == seq_len + 1
        assert all(place != packing.PADDING for place, _ in pieces[:-1]) and pieces[0][0] != packing.PADDING
        places = [place for place, _ in pieces if place != packing.PADDING]
        assert places == sorted(places), "pieces of a row lie in the order of the corpus"
        spans += [(place, length) for place, length in pieces if place != packing.PADDING]
    assert [row[0][0] for row in rows] == sorted(row[0][0] for row in rows)
    expected, at = [], 0
    for n in lengths:
        if n:
            cuts = range(0, max(n - 1, 1), seq_len)  # a piece ends with the token the next one begins with
            expected += [(at + cut, min(seq_len + 1, n - cut)) for cut in cuts]
        at += n
    assert sorted(spans) == expected
    first = set(packing.stream_starts(np.array([n for n in lengths if n], dtype=np.int64))[:-1].tolist())
    labels = sorted(place + i for place, length in spans for i in range(1, length))
    assert labels == [t for t in range(sum(lengths)) if t not in first]


def _one_by_one(lengths: list[int], size: int) -> list[int]:
    """Free tokens of each row, sorted, after placing pieces longest first into the fullest row that holds them."""
    free: list[int] = []
    for n in sorted(lengths, reverse=True):
        best = min((room, i) for i, room in enumerate([*free, size]) if room >= n)[1]
        free += [size] if best == len(free) else []
        free[best] -= n
    return sorted(free)


@given(st.lists(st.integers(1, 24), min_size=1, max_size=80))
def test_rows_are_as_full_as_placing_one_document_after_another_makes_them(lengths):
    _, rows = _packed(lengths, 23)
    padding = [sum(length for place, length in row if place == packing.PADDING) for row in rows]
    assert sorted(padding) == _one_by_one(lengths, 24)


def test_best_fit_wastes_little_on_documents_of_mixed_lengths():
    lengths = np.random.default_rng(0).lognormal(5.5, 1.2, 20_000).astype(np.int64) + 1
    starts, places = packing.pack(lengths, packing.stream_starts(lengths)[:-1], 2048)
    padding = np.diff(starts)[places == packing.PADDING].sum()
    assert padding / starts[-1] < 0.001
    again = packing.pack(lengths, packing.stream_starts(lengths)[:-1], 2048)
    assert np.array_equal(again[0], starts) and np.array_equal(again[1], places)


def test_places_beyond_2_53_are_exact():
    places = np.array([2**60 + 1, 2**60 + 10_001], dtype=np.int64)
    _, found = packing.pack(np.array([10_000, 3]), places, 4095)
    assert sorted(found[found != packing.PADDING].tolist()) == [2**60 + 1 + 4095 * i for i in range(3)] + [
        2**60 + 10_001
    ]
