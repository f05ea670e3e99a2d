"""Over random corpora and stages: every epoch is a permutation, no token is lost or read twice, files are whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.config.schema import Recipe
from megatron_lite.data import corpus
from megatron_lite.data.batch import IGNORE, make_batch
from megatron_lite.data.cache import Cache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.loader import StepLoader, open_training
from megatron_lite.data.source import TrainingRows
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, data_recipe, write_corpus

SEQ = 6
LENGTHS = st.lists(
    st.sampled_from([0, 1, SEQ - 1, SEQ, SEQ + 1, SEQ + 2, 10 * SEQ]) | st.integers(0, 3 * SEQ), min_size=1, max_size=25
).filter(lambda lengths: sum(lengths) > SEQ)
WEIGHT = st.sampled_from([0.0, 0.25, 0.3, 1.0, 2.0, 3.0])
WIDE = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@st.composite
def stages(draw):
    """Lengths of the documents of one to three corpora, and what a stage makes of them."""
    names = "abc"[: draw(st.integers(1, 3))]
    lengths = {name: draw(LENGTHS) for name in names}
    weights = {name: draw(WEIGHT) for name in names}
    weights[draw(st.sampled_from(names))] = 1.0
    return (
        lengths,
        weights,
        draw(st.sampled_from(["blend", "fractions"])),
        draw(st.sampled_from(["concat", "best_fit"])),
    )


def _recipe(folder: Path, lengths: dict[str, list[int]], weights, kind: str, packing: str, **other) -> Recipe:
    """Corpora whose tokens count on from 1, those of the next one after those of the one before: none is twice."""
    start, sources = 1, {}
    for name, counts in lengths.items():
        write_corpus(folder / name, counting(counts, start))
        sources[name] = {"path": str(folder / name)}
        start += sum(counts)
    stage = {"blend": None, kind: weights, "packing": packing, "mask_documents": True}
    return data_recipe(sources, seq_len=SEQ, stage=stage, **other)


def _labels(rows: TrainingRows, numbers) -> list[int]:
    """The labels of rows, with those that are ignored left out."""
    batch = make_batch([rows.row(i) for i in numbers], list(numbers), mask_documents=True)
    return batch.labels[batch.labels != IGNORE].tolist()


@WIDE
@pytest.mark.req("B02", "C05", "C06", "C14")
@given(stages(), st.integers(0, 2**40))
def test_every_epoch_of_a_source_holds_each_row_once(tmp_path_factory, stage, seed):
    folder = tmp_path_factory.mktemp("epochs")
    rows = open_training(_recipe(folder, *stage, seed=seed), 0, folder / "cache")
    seen: dict[str, list[int]] = {name: [] for name in rows.sources}
    for i in range(60):
        name, _, at = rows.place(i)
        seen[name].append(at)
        assert len(rows.row(i).tokens) == SEQ + 1
    for name, order in seen.items():
        size = rows.sources[name].num_rows
        for start in range(0, len(order), size):
            epoch = order[start : start + size]
            assert len(set(epoch)) == len(epoch) and set(epoch) <= set(range(size))
        assert not order or max(Counter(order).values()) - (len(order) // size) in (0, 1)


@WIDE
@given(stages())
def test_a_mixture_is_within_one_row_of_its_shares_at_every_prefix(tmp_path_factory, stage):
    folder = tmp_path_factory.mktemp("prefix")
    lengths, weights, kind, packing = stage
    rows = open_training(_recipe(folder, lengths, weights, kind, packing), 0, folder / "cache")
    sizes = {name: rows.sources[name].num_rows if kind == "fractions" else 1 for name in weights}
    parts = {name: Fraction(repr(weight)) * sizes[name] for name, weight in weights.items()}
    counts = dict.fromkeys(weights, 0)
    for i in range(80):
        counts[rows.place(i)[0]] += 1
        assert all(abs(counts[name] - part / sum(parts.values()) * (i + 1)) < 1 for name, part in parts.items())


@WIDE
@given(LENGTHS, st.sampled_from([0, 2, SEQ]), st.sampled_from([None, SEQ + 1, 4 * SEQ]), st.booleans())
def test_best_fit_reads_every_token_of_a_kept_document_once_an_epoch(tmp_path_factory, lengths, low, high, mmap):
    """As a label, all but a document's first; the first begins a segment. Only a cut repeats the token before it."""
    folder = tmp_path_factory.mktemp("conserved")
    recipe = _recipe(folder, {"a": lengths}, {"a": 1.0}, "blend", "best_fit", data={"mmap": mmap})
    limits = recipe.sources["a"].model_copy(update={"min_length": low, "max_length": high})
    recipe = recipe.model_copy(update={"sources": {"a": limits}})
    kept = [d for d in counting(lengths, 1) if len(d) and low <= len(d) and (high is None or len(d) <= high)]
    if not kept:
        with pytest.raises(DataError, match="none of the"):
            open_training(recipe, 0, folder / "cache")
        return
    rows = open_training(recipe, 0, folder / "cache")
    size = rows.sources["a"].num_rows
    for epoch in range(2):
        numbers = range(epoch * size, (epoch + 1) * size)
        assert sorted(_labels(rows, numbers)) == sorted(t for d in kept for t in d[1:].tolist())
        pieces = []
        for row in map(rows.row, numbers):
            end = SEQ + 1 if row.num_labels is None else row.num_labels + 1
            assert (np.diff(row.borders) > 0).all() and not row.tokens[end:].any()
            edges = [0, *(b for b in row.borders.tolist() if b < end), end]
            assert end == SEQ + 1 or row.borders[-1] == end, "one trailing segment fills the row"
            pieces += [row.tokens[a:b].tolist() for a, b in zip(edges, edges[1:], strict=False)]
        whole = [d.tolist() for d in kept if len(d) <= SEQ + 1]
        assert all(pieces.count(document) == 1 for document in whole)
        assert sorted({t for piece in pieces for t in piece}) == sorted(t for d in kept for t in d.tolist())


@WIDE
@given(LENGTHS)
def test_concat_reads_every_token_of_the_stream_as_a_label_once_an_epoch(tmp_path_factory, lengths):
    folder = tmp_path_factory.mktemp("stream")
    recipe = _recipe(folder, {"a": lengths}, {"a": 1.0}, "blend", "concat")
    rows = open_training(recipe, 0, folder / "cache")
    size = rows.sources["a"].num_rows
    labels = [t for i in range(size, 2 * size) for t in rows.row(i).tokens[1:].tolist()]
    assert sorted(labels) == list(range(2, size * SEQ + 2))


@WIDE
@pytest.mark.req("C12", "C13")
@given(stages(), st.sampled_from([1, 2, 3, 4]), st.sampled_from([1, 2]), st.integers(1, 2), st.integers(0, 2))
def test_any_number_of_ranks_reads_the_same_rows_each_exactly_once(
    tmp_path_factory, stage, size, micro_batch, accumulation, first_step
):
    """Also when the run begins in the middle of an epoch, with another number of ranks."""
    folder = tmp_path_factory.mktemp("ranks")
    rows = open_training(_recipe(folder, *stage), 0, folder / "cache")
    per_step = size * micro_batch * accumulation
    taken: list[list[tuple[int, bytes]]] = [[] for _ in range(first_step, 3)]
    for rank in range(size):
        loader = StepLoader(
            open_training(_recipe(folder, *stage), 0, folder / "cache"), steps=[per_step] * (3 - first_step),
            micro_batch=micro_batch, rank=rank, size=size, start_row=first_step * per_step, mask_documents=True,
        )  # fmt: skip
        for step, batches in enumerate(loader):
            for batch in batches:
                inputs = batch.input_ids.reshape(micro_batch, SEQ)
                taken[step] += [(sample, ids.tobytes()) for sample, ids in zip(batch.samples, inputs, strict=True)]
    for step, seen in enumerate(taken, start=first_step):
        numbers = range(step * per_step, (step + 1) * per_step)
        assert sorted(seen) == [(i, rows.row(i).tokens[:-1].tobytes()) for i in numbers]


# ---- files are whole or absent


def _selection(prefix: Path, cache: Path):
    dataset = IndexedDataset(prefix)
    return dataset, (0, dataset.num_documents), 0, None, SEQ, Cache(cache)


@WIDE
@given(LENGTHS, st.data())
def test_an_index_whose_writing_fails_anywhere_is_absent_and_is_built_by_the_next_start(
    tmp_path_factory, lengths, data
):
    folder = tmp_path_factory.mktemp("torn")
    write_corpus(folder / "a", counting(lengths, 1))
    truth = corpus.packed(*_selection(folder / "a", folder / "elsewhere"))
    size = os.path.getsize(next((folder / "elsewhere").glob("rows-*")))
    room = data.draw(st.integers(0, size - 1), label="bytes the disk still holds")
    cache = folder / "cache"
    corpus.documents(*_selection(folder / "a", cache)[:4], Cache(cache))

    def save(file, table):
        file.write(bytes(room))
        raise OSError(28, "No space left on device")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus.np, "save", save)
        with pytest.raises(DataError, match=r"cannot write .*rows-.*No space left on device"):
            corpus.packed(*_selection(folder / "a", cache))
    assert not list(cache.glob("rows-*"))
    again = corpus.packed(*_selection(folder / "a", cache))
    assert np.array_equal(again.starts, truth.starts) and np.array_equal(again.places, truth.places)


BUILDER = """
import json, sys
from pathlib import Path
from megatron_lite.data import corpus
from megatron_lite.data.cache import Cache
from megatron_lite.data.indexed import IndexedDataset
dataset = IndexedDataset(sys.argv[1])
print("ready", flush=True)
for number in range(10**6):  # a cache of its own for every build
    corpus.packed(dataset, (0, dataset.num_documents), 0, None, 64, Cache(Path(sys.argv[2]) / str(number)))
"""


@pytest.mark.req("B13")
def test_a_process_killed_while_it_builds_indices_leaves_none_that_is_not_whole(tmp_path):
    lengths = np.random.default_rng(0).integers(0, 300, 5000)
    write_corpus(tmp_path / "c", [np.zeros(n, dtype=np.int64) for n in lengths])
    dataset = IndexedDataset(tmp_path / "c")
    selection = (dataset, (0, dataset.num_documents), 0, None)
    truth = corpus.packed(*selection, 64, Cache(tmp_path / "truth"))
    kept = corpus.documents(*selection, Cache(tmp_path / "truth"))
    rng, found = random.Random(1), 0
    for attempt in range(10):
        folder = tmp_path / f"{attempt}"
        command = [sys.executable, "-c", BUILDER, str(tmp_path / "c"), str(folder)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.02, 0.2))
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
        for path in folder.glob("*/*.npy"):
            table = np.load(path)
            expected = truth if path.name.startswith("rows-") else kept
            starts = table if table.ndim == 1 else table[0]
            assert np.array_equal(starts, expected.starts)
            found += 1
    assert found > 10
