"""Lengths of documents: exact, in memory that does not grow with their number, and drawn."""

from __future__ import annotations

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.data import corpus, lengths
from megatron_lite.data.corpus import document_at, first_with
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.writer import IndexedWriter
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, write_corpus

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def _regroup(prefix: Path, first: list[int]) -> None:
    """Make documents that begin at these sequences, out of one document per sequence."""
    raw = (prefix.parent / f"{prefix.name}.idx").read_bytes()
    sequences = int(np.frombuffer(raw, "<u8", 1, 18)[0])
    head = raw[:26] + np.array([len(first) + 1], "<u8").tobytes() + raw[34 : 34 + 12 * sequences]
    (prefix.parent / f"{prefix.name}.idx").write_bytes(head + np.array([*first, sequences], "<i8").tobytes())


@SLOW
@given(st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(any), st.integers(1, 9), st.data())
def test_the_table_equals_a_slow_truth_for_documents_of_any_number_of_sequences(tmp_path_factory, sizes, chunk, data):
    prefix = tmp_path_factory.mktemp("lengths") / "c"
    write_corpus(prefix, counting(sizes))
    first = sorted([0, *data.draw(st.lists(st.integers(0, len(sizes)), max_size=10), label="document starts")])
    _regroup(prefix, first)
    dataset = IndexedDataset(prefix)
    truth = [sum(sizes[a:b]) for a, b in zip(first, [*first[1:], len(sizes)], strict=True)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "DOCUMENTS", chunk)
        table = lengths.count_lengths(dataset)
    assert np.repeat(table.values, table.counts).tolist() == sorted(truth)
    assert (table.documents, table.tokens, table.longest) == (len(truth), sum(truth), max(truth))
    octaves = list(table.octaves())
    assert sum(inside.documents for *_, inside in octaves) == len(truth) and octaves[-1][1] > max(truth)
    for low, high, inside in octaves:
        assert inside.tokens == sum(n for n in truth if low <= n < high)
    half = table.quantile(0.5)
    assert sum(n <= half for n in truth) * 2 >= len(truth) > sum(n < half for n in truth) * 2
    where = [(i, n) for i, n in enumerate(truth) if n]  # tokens count on from 0: a token is its own place
    for token in range(sum(truth)):
        number, begin, end = document_at(dataset, token)
        assert begin <= token < end and end - begin == truth[number]
        assert dataset.document(number)[token - begin] == token
    assert first_with(dataset, 0) == where[0][0] and first_with(dataset, sum(truth)) is None
    assert first_with(dataset, sum(truth) - 1) == where[-1][0]


def test_memory_does_not_grow_with_the_documents(tmp_path):
    peaks = []
    for number in (150_000, 1_500_000):
        prefix = tmp_path / f"{number}"
        with IndexedWriter(prefix, np.dtype("u1")) as writer:
            sizes = np.arange(number) % 7
            writer.add_documents(np.zeros(sizes.sum(), np.uint8), sizes)
        dataset = IndexedDataset(prefix)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "DOCUMENTS", 1 << 16)
            tracemalloc.start()
            table = lengths.count_lengths(dataset)
            peaks.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
        assert table.documents == number
    assert peaks[1] < 1.1 * peaks[0]


def _table(*sizes: int) -> lengths.Lengths:
    return lengths.Lengths(*(part.astype(np.int64) for part in np.unique(sizes, return_counts=True)))


def test_what_is_told_adds_up():
    web, books = _table(1, 10, 10, 5000), _table(70_000, 100_000)
    told = list(lengths.describe("web", web))
    assert told[0] == "web: 4 documents, 5,021 tokens"
    assert told[1] == "  tokens per document: mean 1,255.2, median 10, 99 % up to 5,000, longest 5,000"
    assert [line.split() for line in told[3:-1]] == [
        ["1", "to", "1", "1", "25.00%", "1", "0.02%"],
        ["8", "to", "15", "2", "50.00%", "20", "0.40%"],
        ["4,096", "to", "8,191", "1", "25.00%", "5,000", "99.58%"],
    ]
    assert told[-1].endswith("at least: 4K 99.6%, 8K 0.0%, 16K 0.0%, 32K 0.0%, 64K 0.0%")
    sources = [line.split() for line in lengths.describe_sources({"web": web, "books": books})]
    assert sources[1:] == [
        ["web", "4", "66.67%", "5,021", "2.87%"],
        ["books", "2", "33.33%", "170,000", "97.13%"],
        ["all", "6", "100.00%", "175,021", "100.00%"],
    ]


@pytest.mark.parametrize("sources", [{"a": (3, 4, 5)}, {"a": (0, 1), "b": (2**20, 5)}, {"a": (4096,), "b": (65536,)}])
def test_a_picture_is_drawn_of_any_lengths(tmp_path, sources):
    pytest.importorskip("matplotlib", reason="pictures are an optional extra")
    lengths.draw({name: _table(*sizes) for name, sizes in sources.items()}, tmp_path / "new folder" / "lengths.png")
    assert (tmp_path / "new folder" / "lengths.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(DataError, match=r"cannot write the picture .*lengths.nonsense"):
        lengths.draw({"a": _table(5)}, tmp_path / "lengths.nonsense")


def test_a_picture_without_matplotlib_is_refused_with_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setattr(lengths, "find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"needs matplotlib, .*pip install 'megatron-lite\[plot\]'"):
        lengths.draw({"a": _table(5)}, tmp_path / "lengths.png")
