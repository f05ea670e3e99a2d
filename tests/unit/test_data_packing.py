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
