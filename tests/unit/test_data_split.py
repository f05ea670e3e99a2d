"""Parts of a corpus: disjoint, contiguous, complete, and none is empty by accident."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.loader import open_training, open_validation
from megatron_lite.data.split import parts
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, data_recipe, write_corpus


@pytest.mark.req("C10")
def test_parts_end_at_their_share_of_the_documents():
    assert parts(79_000, [949, 50, 1]) == [(0, 74_971), (74_971, 78_921), (78_921, 79_000)]
    assert parts(10, [0.7, 0.2, 0.1]) == [(0, 7), (7, 9), (9, 10)]
    assert parts(2**60, [1, 0, 2]) == [(0, (2**60 + 1) // 3), ((2**60 + 1) // 3,) * 2, ((2**60 + 1) // 3, 2**60)]


@pytest.mark.req("C10")
def test_a_part_without_documents_is_refused_with_the_numbers():
    with pytest.raises(DataError, match=r"split \[98, 1, 1\] leaves part 1 none of the 3 documents.* weight is 1"):
        parts(3, [98, 1, 1])
    assert parts(3, [1, 0]) == [(0, 3), (3, 3)]


@pytest.mark.req("C10")
@given(st.integers(1, 1000), st.lists(st.integers(0, 50) | st.floats(0, 1, width=16), min_size=1, max_size=6))
def test_parts_are_contiguous_disjoint_complete_and_within_half_a_document(num_documents, weights):
    total = sum(weights)
    if not total:
        return
    try:
        spans = parts(num_documents, weights)
    except DataError:
        assert min(w for w in weights if w) / total * num_documents < 1
        return
    assert spans[0][0] == 0 and spans[-1][1] == num_documents
    assert all(a[1] == b[0] for a, b in zip(spans, spans[1:], strict=False))
    for i, (_, end) in enumerate(spans):
        assert abs(end - sum(weights[: i + 1]) / total * num_documents) <= 0.5 + 1e-6


@pytest.mark.req("C10")
def test_a_corpus_trains_and_validates_on_parts_of_its_own(tmp_path):
    """79,000 documents of two tokens, the first of them the document's number."""
    numbers = np.arange(79_000)
    write_corpus(tmp_path / "c", np.stack([numbers, numbers], axis=1), dtype="<i4")
    part = {"path": str(tmp_path / "c"), "split": [949, 50, 1]}
    recipe = data_recipe(
        {"c": part | {"part": 0}}, validation={"middle": part | {"part": 1}, "last": part | {"part": 2}},
        evaluation={"rows": 10**6}, vocab_size=79_000,
    )  # fmt: skip
    training = open_training(recipe, 0, tmp_path / "cache")
    sets = {"train": training.sources["c"]}
    sets |= {name: rows.source for name, rows in open_validation(recipe, 0, tmp_path / "cache").items()}
    seen = {}
    for name, source in sets.items():
        tokens = np.concatenate([source.row(i).tokens for i in range(source.num_rows)])
        seen[name] = (int(tokens.min()), int(tokens.max()), source.num_documents)
    first = {"train": 0, "middle": 74_971, "last": 78_921}
    documents = {"train": 74_971, "middle": 3_950, "last": 79}
    read = {name: source.num_rows * 16 // 2 for name, source in sets.items()}  # document of the last token read
    assert seen == {name: (first[name], first[name] + read[name], documents[name]) for name in sets}
    whole = open_training(data_recipe({"c": {"path": str(tmp_path / "c")}}, vocab_size=79_000), 0, tmp_path / "cache")
    assert whole.fingerprint != training.fingerprint


@pytest.mark.req("C10")
@pytest.mark.parametrize("packing", ["concat", "best_fit"])
@pytest.mark.parametrize("filters", [{}, {"min_length": 3, "max_length": 20}])
def test_parts_hold_their_documents_whatever_the_filters_and_the_packing(tmp_path, packing, filters):
    documents = counting([9, 0, 4, 30, 1, 17, 2, 6, 8, 25], start=100)
    write_corpus(tmp_path / "c", documents)
    stage = {"packing": packing, "mask_documents": True}
    for part, (first, last) in enumerate(parts(10, [5, 3, 2])):
        source = {"path": str(tmp_path / "c"), "split": [5, 3, 2], "part": part} | filters
        rows = open_training(data_recipe({"c": source}, seq_len=4, stage=stage), 0, tmp_path / "cache")
        low, high = (filters.get("min_length", 1), filters.get("max_length", 99))
        kept = [d for d in documents[first:last] if low <= len(d) <= high]
        real = [row.tokens for row in map(rows.sources["c"].row, range(rows.sources["c"].num_rows))]
        tokens = set(np.concatenate(real).tolist()) - {0}
        every = set(np.concatenate(kept).tolist())
        assert tokens <= every and (packing == "concat" or tokens == every)


@pytest.mark.req("C10")
def test_an_empty_part_is_reported_with_its_section(tmp_path):
    write_corpus(tmp_path / "c", counting([20, 20, 20]))
    source = {"path": str(tmp_path / "c"), "split": [98, 1, 1], "part": 0}
    with pytest.raises(DataError, match=r"\[sources.c\] split \[98, 1, 1\] leaves part 1 none of the 3 documents"):
        open_training(data_recipe({"c": source}), 0, tmp_path / "cache")
