"""Corpora exchanged with megatron-core: what either writes the other reads, and the files are equal byte for byte.

Skipped where that package is absent; `pip install --no-deps megatron-core einops` beside torch is enough for it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import IndexedDataset
from tests.helpers.corpora import write_corpus

pytest.importorskip("megatron.core", reason="megatron-core is not installed")
theirs = pytest.importorskip("megatron.core.datasets.indexed_dataset", reason="megatron-core lacks its data package")
torch = pytest.importorskip("torch")

DTYPES = {
    "uint8": np.uint8,
    "int8": np.int8,
    "int16": np.int16,
    "int32": np.int32,
    "int64": np.int64,
    "uint16": np.uint16,
}


def _documents(dtype: type) -> list[np.ndarray]:
    """Lengths that are odd, one and zero; the largest value of the type included."""
    random = np.random.default_rng(0)
    most = int(min(np.iinfo(dtype).max, 2**31 - 1))
    documents = [random.integers(0, most, size=length, dtype=np.int64) for length in (3, 1, 0, 257, 64)]
    documents[0][1] = most
    return documents


def _write_theirs(prefix: Path, documents: list[np.ndarray], dtype: type) -> None:
    builder = theirs.IndexedDatasetBuilder(f"{prefix}.bin", dtype=dtype)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(f"{prefix}.idx")


@pytest.mark.parametrize("name", DTYPES)
def test_files_are_equal_byte_for_byte(tmp_path, name):
    dtype = DTYPES[name]
    documents = _documents(dtype)
    _write_theirs(tmp_path / "theirs", documents, dtype)
    write_corpus(tmp_path / "ours", documents, np.dtype(dtype).str)
    for suffix in ("bin", "idx"):
        assert (tmp_path / f"ours.{suffix}").read_bytes() == (tmp_path / f"theirs.{suffix}").read_bytes()


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", DTYPES)
def test_a_corpus_of_theirs_reads_here(tmp_path, name, mmap):
    documents = _documents(DTYPES[name])
    _write_theirs(tmp_path / "c", documents, DTYPES[name])
    dataset = IndexedDataset(tmp_path / "c", mmap)
    dataset.check()
    assert [dataset.document(i).tolist() for i in range(len(documents))] == [d.tolist() for d in documents]


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("name", DTYPES)
def test_a_corpus_of_ours_reads_there(tmp_path, name, mmap):
    documents = _documents(DTYPES[name])
    write_corpus(tmp_path / "c", documents, np.dtype(DTYPES[name]).str)
    dataset = theirs.IndexedDataset(str(tmp_path / "c"), mmap=mmap)
    assert [dataset[i].tolist() for i in range(len(documents))] == [d.tolist() for d in documents]
    assert dataset.document_indices.tolist() == list(range(len(documents) + 1))


def test_documents_of_several_sequences_read_as_one(tmp_path):
    builder = theirs.IndexedDatasetBuilder(str(tmp_path / "c.bin"), dtype=np.uint16)
    builder.add_document(torch.arange(9), [4, 5])
    builder.add_document(torch.arange(3), [3])
    builder.finalize(str(tmp_path / "c.idx"))
    dataset = IndexedDataset(tmp_path / "c")
    dataset.check()
    assert dataset.num_documents == 2 and dataset.document_starts().tolist() == [0, 9, 12]
    assert dataset.document(0).tolist() == list(range(9))
