"""Rows of a stage: the same for everybody, every epoch complete, errors before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.data import corpus
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.loader import open_training, open_validation
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, data_recipe, write_corpus


@pytest.fixture
def two(tmp_path):
    """Two corpora of 10 and 20 rows of 16 tokens, the second one's ids from 1000 on."""
    write_corpus(tmp_path / "a", counting([61, 1, 99]))
    write_corpus(tmp_path / "b", counting([200, 121], start=1000))
    return {"a": {"path": str(tmp_path / "a")}, "b": {"path": str(tmp_path / "b")}}


def _first(rows, index) -> int:
    return int(rows.row(index).tokens[0])


@pytest.mark.req("B02", "C14")
def test_rows_are_whole_and_hold_the_corpus(two, tmp_path):
    rows = open_training(data_recipe(two), 0, tmp_path / "cache")
    seen = set()
    for i in range(20):
        row = rows.row(i)
        assert row.tokens.dtype == np.int64 and row.borders.dtype == np.int64 and len(row.tokens) == 17
        assert np.array_equal(row.tokens, np.arange(row.tokens[0], row.tokens[0] + 17))
        seen.add(int(row.tokens[0]))
    assert {s for s in seen if s < 1000} == set(range(0, 160, 16)) and len(seen) == 20


@pytest.mark.req("C03")
def test_what_a_stage_takes_of_each_source_is_told(two, tmp_path):
    even = open_training(data_recipe(two), 0, tmp_path / "cache").describe(30)
    assert "15 rows = 240 tokens (50.00%), 1.50 epochs of 10 rows of 161 tokens in 3 documents" in even[0]
    assert "15 rows = 240 tokens (50.00%), 0.75 epochs of 20 rows" in even[1]
    assert "0 rows" in open_training(data_recipe(two), 0, tmp_path / "cache").describe(0)[0]
    uneven = open_training(data_recipe(two, {"a": 10, "b": 20}), 0, tmp_path / "cache").describe(30)
    assert [line.split(": ")[1].split()[0] for line in uneven] == ["10", "20"]


@pytest.mark.req("C05", "C06", "D02")
def test_each_epoch_holds_every_row_once_in_an_order_of_its_own(two, tmp_path):
    rows = open_training(data_recipe({"b": two["b"]}), 0, tmp_path / "cache")
    starts = [_first(rows, i) for i in range(50)]
    assert len(set(starts[:20])) == len(set(starts[20:40])) == 20
    assert starts[:20] != starts[20:40] != sorted(starts[20:40])
    assert set(Counter(starts).values()) == {2, 3}


@pytest.mark.req("D03", "D12", "D14")
def test_a_row_depends_on_its_number_only(two, tmp_path):
    """Read on, read backwards, read by a process that starts in the middle of an epoch: the same rows and borders."""
    recipe = data_recipe(two, {"a": 3, "b": 1})
    rows = open_training(recipe, 0, tmp_path / "cache")
    onward = [rows.row(i) for i in range(70)]
    again = open_training(recipe, 0, tmp_path / "cache")
    for i in reversed(range(70)):
        row = again.row(i)
        assert np.array_equal(row.tokens, onward[i].tokens) and np.array_equal(row.borders, onward[i].borders)
    assert again.fingerprint == rows.fingerprint


def test_seed_stage_and_corpus_change_order_and_fingerprint_but_batch_and_length_of_the_run_do_not(two, tmp_path):
    def order(recipe):
        rows = open_training(recipe, 0, tmp_path / "cache")
        return [_first(rows, i) for i in range(40)], rows.fingerprint

    known = order(data_recipe(two))
    assert order(data_recipe(two, rows=8)) == order(data_recipe(two, steps=1)) == known
    other = order(data_recipe(two, seed=5))
    assert other[0] != known[0] and other[1] != known[1]
    write_corpus(tmp_path / "a", counting([61, 2, 98]))
    assert order(data_recipe(two))[1] != known[1]


def test_two_stages_shuffle_differently(two, tmp_path):
    recipe = data_recipe(two)
    recipe = recipe.model_copy(update={"stages": recipe.stages * 2})
    one, other = (open_training(recipe, stage, tmp_path / "cache") for stage in (0, 1))
    assert [_first(one, i) for i in range(20)] != [_first(other, i) for i in range(20)]
    assert one.fingerprint != other.fingerprint


@pytest.mark.req("B11")
def test_copies_of_the_files_with_a_cache_of_their_own_give_the_same_rows_and_fingerprint(two, tmp_path):
    """As on a node that shares no disk."""
    here = open_training(data_recipe(two), 0, tmp_path / "cache")
    for name in ("a", "b"):
        for suffix in ("bin", "idx"):
            content = (tmp_path / f"{name}.{suffix}").read_bytes()
            (tmp_path / f"moved-{name}.{suffix}").write_bytes(content)
    moved = {name: {"path": str(tmp_path / f"moved-{name}")} for name in two}
    there = open_training(data_recipe(moved), 0, tmp_path / "other cache")
    assert there.fingerprint == here.fingerprint
    assert all(np.array_equal(there.row(i).tokens, here.row(i).tokens) for i in range(40))


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.integers(0, 40), min_size=4, max_size=40),
    st.integers(0, 9),
    st.integers(9, 40),
    st.booleans(),
    st.integers(1, 9),
)
def test_filtered_streams_equal_a_slow_truth(tmp_path_factory, lengths, low, high, mmap, chunk):
    folder = tmp_path_factory.mktemp("filtered")
    documents = counting([*lengths, 9])
    write_corpus(folder / "c", documents)
    kept = [d for d in documents if len(d) and low <= len(d) <= high]
    stream = np.concatenate(kept)
    seq_len = 5
    sources = {"c": {"path": str(folder / "c"), "min_length": low, "max_length": high}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "DOCUMENTS", chunk)
        rows = open_training(data_recipe(sources, seq_len=seq_len, data={"mmap": mmap}), 0, folder / "cache")
    source = rows.sources["c"]
    assert source.num_rows == (len(stream) - 1) // seq_len and source.num_documents == len(kept)
    starts = {int(d[0]) for d in kept}
    for j in range(source.num_rows):
        row = source.row(j)
        assert np.array_equal(row.tokens, stream[j * seq_len : j * seq_len + seq_len + 1])
        assert row.borders.tolist() == [i for i in range(1, seq_len + 1) if int(row.tokens[i]) in starts]


@pytest.mark.req("B10")
def test_reading_without_maps_gives_the_same_rows(two, tmp_path):
    mapped, plain = (
        open_training(data_recipe(two, data={"mmap": mmap}), 0, tmp_path / "cache") for mmap in (True, False)
    )
    for i in range(40):
        assert np.array_equal(mapped.row(i).tokens, plain.row(i).tokens)
        assert np.array_equal(mapped.row(i).borders, plain.row(i).borders)
    assert mapped.fingerprint == plain.fingerprint


def test_documents_of_several_sequences_are_whole(tmp_path):
    """Other writers may cut a document into sequences; only documents have borders."""
    write_corpus(tmp_path / "c", counting([4, 5, 6, 3]))
    head, entries = (tmp_path / "c.idx").read_bytes(), np.array([0, 2, 2, 4], "<i8").tobytes()
    header = head[:26] + np.array([4], "<u8").tobytes()
    (tmp_path / "c.idx").write_bytes(header + head[34 : 34 + 4 * 12] + entries)
    dataset = IndexedDataset(tmp_path / "c")
    assert [len(dataset.document(i)) for i in range(3)] == [9, 0, 9]
    rows = open_training(data_recipe({"c": {"path": str(tmp_path / "c")}}, seq_len=17), 0, tmp_path / "cache")
    assert rows.row(0).borders.tolist() == [9]


@pytest.mark.req("C08")
def test_a_corpus_shorter_than_a_row_is_refused_with_both_numbers(tmp_path):
    write_corpus(tmp_path / "c", [range(10)])
    recipe = data_recipe(
        {"c": {"path": str(tmp_path / "c")}}, seq_len=64, validation={"v": {"path": str(tmp_path / "c")}}
    )
    for opens, section in ((open_training, "sources.c"), (open_validation, "validation.v")):
        with pytest.raises(DataError, match=rf"\[{section}\].* has 10 tokens .*seq_len=64 needs at least 65"):
            opens(recipe, 0, tmp_path / "cache")


@pytest.mark.req("C15")
def test_a_source_that_ends_too_early_is_refused_with_both_numbers(tmp_path):
    write_corpus(tmp_path / "c", [range(50)])
    sources = {"c": {"path": str(tmp_path / "c"), "max_epochs": 1.0}}
    with pytest.raises(DataError, match=r"takes 4 rows of .*/c, which has 3: 1.33 epochs, but max_epochs=1.0"):
        open_training(data_recipe(sources, rows=4, steps=1), 0, tmp_path / "cache")
    open_training(data_recipe(sources, rows=3, steps=1), 0, tmp_path / "cache")


@pytest.mark.parametrize("manifest", [False, True])
def test_ids_the_model_does_not_have_are_refused(tmp_path, manifest):
    write_corpus(tmp_path / "c", [[*range(40), 300]])
    if manifest:
        (tmp_path / "c.json").write_text('{"documents": 1, "tokens": 41, "dtype": "uint16", "max_id": 300}')
    sources = {"c": {"path": str(tmp_path / "c")}}
    for _ in range(2):  # found by reading, then known from the cache
        with pytest.raises(DataError, match=r"\[sources.c\].*holds the id 300, but model.vocab_size=300 ends at 299"):
            open_training(data_recipe(sources, vocab_size=300), 0, tmp_path / "cache")
    open_training(data_recipe(sources, vocab_size=301), 0, tmp_path / "cache")


def test_what_is_missing_or_filtered_away_is_named(two, tmp_path):
    sources = {"a": {"path": str(tmp_path / "nowhere")}}
    with pytest.raises(DataError, match=r"\[sources.a\] .*nowhere.idx does not exist"):
        open_training(data_recipe(sources), 0, tmp_path / "cache")
    with pytest.raises(DataError, match=r"blend names \['c'\], but the sources are \['a', 'b'\]"):
        open_training(data_recipe(two, {"a": 1, "c": 1}), 0, tmp_path / "cache")
    sources = {"a": two["a"] | {"min_length": 70, "max_length": 80}}
    with pytest.raises(DataError, match=r"none of the 3 documents .* min_length=70 and max_length=80.* longest has 99"):
        open_training(data_recipe(sources), 0, tmp_path / "cache")


@pytest.mark.req("B04")
def test_many_epochs_of_very_short_documents(tmp_path):
    write_corpus(tmp_path / "c", counting([2] * 10))
    start = time.monotonic()
    rows = open_training(data_recipe({"c": {"path": str(tmp_path / "c")}}, steps=25_000), 0, tmp_path / "cache")
    assert all(len(rows.row(i).tokens) == 17 for i in range(0, 100_000, 7))
    assert time.monotonic() - start < 10


@pytest.mark.req("C04")
def test_240_corpora_open_in_seconds(tmp_path):
    sources = {}
    for i in range(240):
        sources[f"s{i}"] = {"path": str(write_corpus(tmp_path / f"{i}", counting([20, 30], start=100 * i)))}
    start = time.monotonic()
    blend = {name: 1 + i / 7 for i, name in enumerate(sources)}
    rows = open_training(data_recipe(sources, blend, steps=1000), 0, tmp_path / "cache")
    assert len({_first(rows, i) // 100 for i in range(6000)}) == 240
    assert time.monotonic() - start < 30


@pytest.mark.req("D10")
def test_validation_is_the_first_rows_in_corpus_order(two, tmp_path):
    recipe = data_recipe(two, validation={"a": two["a"], "b": two["b"]}, evaluation={"rows": 12})
    sets = open_validation(recipe, 0, tmp_path / "cache")
    assert {name: rows.num_rows for name, rows in sets.items()} == {"a": 10, "b": 12}
    assert [_first(sets["b"], i) for i in range(12)] == list(range(1000, 1192, 16))
    again = open_validation(data_recipe(two, seed=9, validation={"b": two["b"]}), 0, tmp_path / "cache")["b"]
    assert np.array_equal(again.row(3).tokens, sets["b"].row(3).tokens)


def test_the_cache_is_used_and_follows_content(two, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    open_training(data_recipe(two), 0, cache)
    entries = sorted(os.listdir(cache))
    assert len(entries) == 4 and not [name for name in entries if "partial" in name]
    with monkeypatch.context() as patch:
        patch.setattr(corpus, "token_range", None)  # calling it would fail
        open_training(data_recipe(two), 0, cache)
    assert sorted(os.listdir(cache)) == entries
    write_corpus(tmp_path / "a", counting([61, 1, 99], start=500))  # same lengths, other tokens
    assert _first(open_training(data_recipe({"a": two["a"]}), 0, cache), 0) >= 500
    assert len(os.listdir(cache)) == 6


def test_a_cache_that_cannot_be_made_is_named(two, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match=r"cannot write .*file/cache"):
        open_training(data_recipe(two), 0, tmp_path / "file" / "cache")


@pytest.mark.req("B13")
def test_ten_simultaneous_starts_on_one_empty_cache_succeed(two, tmp_path):
    program = (
        "import sys, json; from pathlib import Path; from tests.helpers.corpora import data_recipe\n"
        "from megatron_lite.data.loader import count_indexes, open_training\n"
        "rows = open_training(data_recipe(json.loads(sys.argv[1])), 0, Path(sys.argv[2]))\n"
        "print(rows.fingerprint, *count_indexes(rows, {}))"
    )

    command = [sys.executable, "-c", program, json.dumps(two), str(tmp_path / "cache")]
    starts = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(10)]
    prints, opened, built = zip(*(start.communicate(timeout=120)[0].split() for start in starts), strict=True)
    assert [start.returncode for start in starts] == [0] * 10 and len(set(prints)) == 1
    assert set(opened) == {"4"} and sum(map(int, built)) == 4
    assert len(os.listdir(tmp_path / "cache")) == 4
