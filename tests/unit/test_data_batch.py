"""Labels, positions and borders of one micro-batch: exact rules, by hand and against a slow truth."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.batch import IGNORE, Row, make_batch


def _row(tokens: list[int], borders: list[int], num_labels: int | None = None) -> Row:
    return Row(np.array(tokens, dtype=np.int64), np.array(borders, dtype=np.int64), num_labels)


@pytest.mark.req("J05")
def test_positions_restart_and_the_label_across_a_border_is_ignored():
    row = _row([1, 3, 3, 3, 1, 3, 3, 9], [4])  # 1 begins a document
    apart = make_batch([row], [0], mask_documents=True)
    assert apart.position_ids.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert apart.labels.tolist() == [3, 3, 3, IGNORE, 3, 3, 9]
    assert apart.cu_seqlens.tolist() == [0, 4, 7] and apart.max_seqlen == 4 and apart.row_length is None
    together = make_batch([row], [0], mask_documents=False)
    assert together.position_ids.tolist() == list(range(7))
    assert together.labels.tolist() == [3, 3, 3, 1, 3, 3, 9]
    assert together.cu_seqlens.tolist() == [0, 7] and together.row_length == 7
    assert apart.valid_tokens == together.valid_tokens - 1 == 6


@pytest.mark.req("J06")
def test_packed_documents_have_positions_of_their_own():
    batch = make_batch([_row([5, 6, 7, 8, 9, 4], [3])], [0], mask_documents=True)
    assert batch.position_ids.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.req("J07")
def test_padding_is_one_trailing_segment_without_labels():
    batch = make_batch([_row([1, 2, 3, 4, 5, 0, 0, 0, 0], [3, 5], num_labels=5)], [0], mask_documents=True)
    assert batch.cu_seqlens.tolist() == [0, 3, 5, 8]
    assert batch.labels.tolist() == [2, 3, IGNORE, 5, IGNORE, IGNORE, IGNORE, IGNORE]


def test_a_border_after_the_last_input_ignores_its_label_only():
    batch = make_batch([_row([1, 2, 3, 4], [3]), _row([5, 6, 7, 8], [])], [4, 5], mask_documents=True)
    assert batch.labels.tolist() == [2, 3, IGNORE, 6, 7, 8]
    assert batch.cu_seqlens.tolist() == [0, 3, 6] and batch.samples == (4, 5)


def test_a_filler_has_no_labels():
    rows = [_row([1, 2, 3], []), _row([1, 2, 3], [1], num_labels=0)]
    for masked in (True, False):
        batch = make_batch(rows, [7], masked)
        assert batch.labels.tolist() == [2, 3, IGNORE, IGNORE] and batch.valid_tokens == 2 and batch.samples == (7,)


@settings(deadline=None)
@given(st.integers(1, 9), st.data())
def test_batches_equal_a_slow_truth(seq_len, data):
    count = data.draw(st.integers(1, 4))
    rows = []
    for _ in range(count):
        borders = sorted(data.draw(st.sets(st.integers(1, seq_len))))
        rows.append(_row(data.draw(st.lists(st.integers(0, 99), min_size=seq_len + 1, max_size=seq_len + 1)), borders))
    batch = make_batch(rows, range(count), mask_documents=True)
    inputs, labels, positions, starts = [], [], [], []
    for r, row in enumerate(rows):
        for i in range(seq_len):
            new = i == 0 or i in row.borders
            inputs.append(row.tokens[i])
            labels.append(IGNORE if i + 1 in row.borders else row.tokens[i + 1])
            positions.append(0 if new else positions[-1] + 1)
            starts += [r * seq_len + i] if new else []
    assert (batch.input_ids.tolist(), batch.labels.tolist()) == (inputs, labels)
    assert batch.position_ids.tolist() == positions and batch.cu_seqlens.tolist() == [*starts, count * seq_len]
    assert batch.max_seqlen == max(positions) + 1
    assert {batch.input_ids.dtype, batch.labels.dtype, batch.position_ids.dtype} == {np.dtype(np.int64)}
    assert batch.cu_seqlens.dtype == np.int32
