"""Rows to ranks: each on exactly one, in one order for every layout, and reading ahead changes nothing."""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.batch import Row
from megatron_lite.data.loader import StepLoader, validation_batches
from megatron_lite.errors import DataError


class Numbered:
    """Row i holds the token i and nothing else; row `broken` raises."""

    fingerprint = "numbered"

    def __init__(self, num_rows: int | None = None, broken: int = -1):
        self.num_rows, self.broken, self.read = num_rows, broken, 0

    def row(self, index: int) -> Row:
        self.read += 1
        if index == self.broken:
            raise DataError(f"row {index} is broken")
        return Row(np.full(4, index, dtype=np.int64), np.array([2], dtype=np.int64))

    def describe(self, num_rows: int) -> list[str]:
        return []


def _loader(rows, *, rows_per_step=12, micro_batch=2, rank=0, size=1, start=0, stop=36, mask=False) -> StepLoader:
    return StepLoader(
        rows, steps=[rows_per_step] * ((stop - start) // rows_per_step), start_row=start, micro_batch=micro_batch,
        rank=rank, size=size, mask_documents=mask,
    )  # fmt: skip


def _samples(loader: StepLoader) -> list[list[tuple[int, ...]]]:
    return [[batch.samples for batch in step] for step in loader]


@pytest.mark.req("C12")
def test_rows_of_a_step_are_dealt_micro_batch_by_micro_batch():
    ranks = [_samples(_loader(Numbered(), rank=rank, size=3, stop=24)) for rank in range(3)]
    assert ranks[1] == [[(2, 3), (8, 9)], [(14, 15), (20, 21)]]
    for step in range(2):
        rows = [row for rank in ranks for batch in rank[step] for row in batch]
        assert sorted(rows) == list(range(12 * step, 12 * step + 12))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 2, 3]), st.integers(1, 3), st.integers(0, 3))
def test_any_layout_reads_the_same_rows_each_step(size, micro_batch, accumulation, first_step):
    per_step = size * micro_batch * accumulation
    steps = [[] for _ in range(4 - first_step)]
    for rank in range(size):
        loader = _loader(
            Numbered(), rows_per_step=per_step, micro_batch=micro_batch, rank=rank, size=size,
            start=first_step * per_step, stop=4 * per_step,
        )  # fmt: skip
        for step, batches in enumerate(loader):
            assert len(batches) == accumulation
            for batch in batches:
                assert batch.input_ids.reshape(micro_batch, 3)[:, 0].tolist() == list(batch.samples)
                steps[step] += batch.samples
    for step, rows in enumerate(steps, start=first_step):
        assert sorted(rows) == list(range(step * per_step, (step + 1) * per_step))


@pytest.mark.req("C13")
def test_reading_ahead_gives_what_reading_row_by_row_gives():
    rows = Numbered()
    ahead = list(_loader(rows, stop=36))
    assert rows.read == 36
    again = list(_loader(rows, start=12, stop=36))
    for one, other in zip(ahead[1:], again, strict=True):
        for a, b in zip(one, other, strict=True):
            assert a.samples == b.samples and np.array_equal(a.labels, b.labels)


@pytest.mark.req("C15")
def test_rows_that_cannot_be_divided_are_refused_with_the_numbers():
    with pytest.raises(DataError, match="a step of 3 rows .* 3 is not a multiple of 4"):
        _loader(Numbered(), rows_per_step=3, micro_batch=2, size=2)


def test_steps_may_differ_in_size():
    loader = StepLoader(Numbered(), steps=[2, 4, 2], start_row=3, micro_batch=2, rank=0, size=1, mask_documents=False)
    assert _samples(loader) == [[(3, 4)], [(5, 6), (7, 8)], [(9, 10)]]


def test_an_error_while_reading_ahead_is_raised_at_its_step():
    loader = _loader(Numbered(broken=14))
    assert [batch.samples for batch in next(loader)][0] == (0, 1)
    with pytest.raises(DataError, match="row 14 is broken"):
        next(loader)
    loader.close()


def test_closing_early_ends_the_thread():
    before = threading.active_count()
    loader = _loader(Numbered(), stop=1200)
    next(loader)
    loader.close()
    loader.close()
    assert threading.active_count() == before and list(loader) == []


def test_a_finished_loader_stays_finished():
    before = threading.active_count()
    loader = _loader(Numbered())
    assert len(list(loader)) == 3 and list(loader) == []
    assert threading.active_count() == before


def test_documents_are_masked_when_asked():
    plain, masked = (next(_loader(Numbered(), mask=mask))[0] for mask in (False, True))
    assert plain.row_length == 3 and plain.cu_seqlens.tolist() == [0, 3, 6]
    assert masked.row_length is None and masked.cu_seqlens.tolist() == [0, 2, 3, 5, 6]


@pytest.mark.req("D10")
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("asked", [1, 7, 12, 50])
def test_every_validation_row_counts_once_and_every_rank_has_as_many_batches(size, asked):
    rows = Numbered(num_rows=20)
    batches = [list(validation_batches(rows, asked, 2, rank, size, True)) for rank in range(size)]
    assert len({len(b) for b in batches}) == 1
    every = [batch for rank in batches for batch in rank]
    assert sorted(s for batch in every for s in batch.samples) == list(range(min(asked, 20)))
    assert {batch.input_ids.size for batch in every} == {6}
    assert sum(batch.valid_tokens for batch in every) == 2 * min(asked, 20)
    again = [list(validation_batches(rows, asked, 2, rank, size, True)) for rank in range(size)]
    assert [[b.samples for b in rank] for rank in again] == [[b.samples for b in rank] for rank in batches]
