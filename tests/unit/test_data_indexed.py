"""The pair of files: bytes as the format says, damage refused by name, nothing published that is not whole."""

from __future__ import annotations

import os
import resource
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.indexed import DTYPES, HEADER, MAGIC, IndexedDataset, token_dtype
from megatron_lite.data.writer import IndexedWriter
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, write_corpus

DOCUMENTS = [[5, 6, 7], [], [8], list(range(20, 33))]


def _index(prefix: Path, lengths, pointers, documents, *, code=8, version=1, magic=MAGIC) -> None:
    """An index as its parts say, whatever they say, beside a .bin of uint16 that fits the lengths."""
    head = HEADER.pack(magic, version, code, len(lengths), len(documents))
    parts = (np.array(lengths, "<i4"), np.array(pointers, "<i8"), np.array(documents, "<i8"))
    Path(f"{prefix}.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    Path(f"{prefix}.bin").write_bytes(b"\0\0" * max(0, sum(lengths)))


def test_bytes_are_those_of_the_format(tmp_path):
    write_corpus(tmp_path / "c", [[1, 2, 3], [4]])
    expected = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3) + struct.pack("<2i2q3q", 3, 1, 0, 6, 0, 1, 2)
    assert (tmp_path / "c.idx").read_bytes() == expected
    assert (tmp_path / "c.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx"]


@pytest.mark.req("A12", "B10")
@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_every_dtype_comes_back(tmp_path, dtype, mmap):
    write_corpus(tmp_path / "c", DOCUMENTS, dtype.str)
    dataset = IndexedDataset(tmp_path / "c", mmap)
    dataset.check()
    assert dataset.dtype == dtype and dataset.num_documents == 4 and dataset.num_tokens == 17
    assert [dataset.document(i).tolist() for i in range(4)] == DOCUMENTS
    assert dataset.document_starts().tolist() == [0, 3, 3, 4, 17]
    assert dataset.read(2, 4).tolist() == [7, 8, 20, 21]


@pytest.mark.req("A11")
@pytest.mark.parametrize("dtype", ["<u2", "<i4"])
def test_ids_0_and_65535_come_back_under_either_dtype(tmp_path, dtype):
    write_corpus(tmp_path / "c", [[0, 65535]], dtype)
    assert IndexedDataset(tmp_path / "c").document(0).tolist() == [0, 65535]
    assert (token_dtype(65536), token_dtype(65537)) == (np.dtype("<u2"), np.dtype("<i4"))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 65535), max_size=9), min_size=1, max_size=9).filter(any))
def test_any_documents_come_back(tmp_path_factory, documents):
    prefix = write_corpus(tmp_path_factory.mktemp("any") / "c", documents)
    dataset = IndexedDataset(prefix, mmap=False)
    dataset.check()
    assert [dataset.document(i).tolist() for i in range(len(documents))] == documents


def test_a_returned_array_outlives_its_dataset(tmp_path):
    write_corpus(tmp_path / "c", DOCUMENTS)
    dataset = IndexedDataset(tmp_path / "c")
    document, lengths = dataset.document(3), dataset.lengths
    del dataset
    assert document.tolist() == DOCUMENTS[3] and lengths.tolist() == [3, 0, 1, 13]


@pytest.mark.req("B03")
def test_a_header_that_announces_more_than_2_31_documents_is_refused_in_words(tmp_path):
    (tmp_path / "c.idx").write_bytes(HEADER.pack(MAGIC, 1, 8, 2**31, 2**31 + 1))
    (tmp_path / "c.bin").write_bytes(b"\0\0")
    with pytest.raises(DataError, match=r"has 34 bytes.*announces 2147483648 sequences.*which take 42949673002"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.req("B03")
@pytest.mark.parametrize("mmap", [True, False])
def test_positions_beyond_2_31_are_exact(tmp_path, mmap):
    """A sparse .bin of 6 GB takes no room on disk."""
    lengths = [2**31 - 1, 2**30 + 5, 3]
    ends = np.cumsum(np.array(lengths, dtype=np.int64)) * 2
    _index(tmp_path / "c", [], [], [])
    head = HEADER.pack(MAGIC, 1, 8, 3, 4)
    parts = (np.array(lengths, "<i4"), np.array([0, *ends[:-1]], "<i8"), np.arange(4, dtype="<i8"))
    (tmp_path / "c.idx").write_bytes(head + b"".join(part.tobytes() for part in parts))
    with open(tmp_path / "c.bin", "wb") as file:
        file.seek(int(ends[1]))
        file.write(np.array([7, 8, 9], "<u2").tobytes())
    dataset = IndexedDataset(tmp_path / "c", mmap)
    dataset.check()
    assert dataset.document_starts().tolist() == [0, 2**31 - 1, 2**31 + 2**30 + 4, 2**31 + 2**30 + 7]
    assert dataset.document(2).tolist() == [7, 8, 9]


@pytest.mark.req("B06")
def test_a_wrong_document_index_is_named_with_both_numbers(tmp_path):
    _index(tmp_path / "c", [2, 3], [0, 4], [0, 1, 1])
    with pytest.raises(DataError, match=r"document index ends with 1, but there are 2 sequences"):
        IndexedDataset(tmp_path / "c")
    _index(tmp_path / "c", [2, 3], [0, 4], [1, 1, 2])
    with pytest.raises(DataError, match=r"document index starts with 1 instead of 0"):
        IndexedDataset(tmp_path / "c")
    _index(tmp_path / "c", [2, 3, 1], [0, 4, 10], [0, 2, 1, 3])
    with pytest.raises(DataError, match=r"falls from 2 to 1 after document 1"):
        IndexedDataset(tmp_path / "c").check()


@pytest.mark.req("B07")
def test_a_corrupt_pointer_is_reported_with_its_document(tmp_path):
    _index(tmp_path / "c", [2, 3, 1], [0, 6, 10], [0, 2, 3])
    with pytest.raises(DataError, match=r"document 0 \(sequence 1\) points to byte 6.*ends at byte 4"):
        IndexedDataset(tmp_path / "c").check()


@pytest.mark.req("B09")
def test_a_pair_that_does_not_match_is_refused_when_opened(tmp_path):
    write_corpus(tmp_path / "small", [[1, 2]])
    write_corpus(tmp_path / "large", [[1, 2], [3] * 50])
    os.replace(tmp_path / "large.idx", tmp_path / "small.idx")
    with pytest.raises(DataError, match=r"small.bin has 4 bytes, but its index ends at byte 104"):
        IndexedDataset(tmp_path / "small")


@pytest.mark.parametrize("mmap", [True, False])
def test_a_truncated_bin_is_refused(tmp_path, mmap):
    write_corpus(tmp_path / "c", DOCUMENTS)
    os.truncate(tmp_path / "c.bin", 33)
    with pytest.raises(DataError, match=r"has 33 bytes, but its index ends at byte 34.*truncated"):
        IndexedDataset(tmp_path / "c", mmap)


def test_a_file_that_shrinks_later_is_an_error_not_garbage(tmp_path):
    write_corpus(tmp_path / "c", DOCUMENTS)
    dataset = IndexedDataset(tmp_path / "c", mmap=False)
    os.truncate(tmp_path / "c.bin", 20)
    with pytest.raises(DataError, match=r"1 of 13 tokens from token 9 could be read|\d+ of \d+ tokens"):
        dataset.document(3)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"magic": b"TNTIDX\0\0\0"}, "older magic TNTIDX"),
        ({"magic": b"PK345678\0"}, "does not begin with MMIDIDX"),
        ({"version": 2}, "version 2; only version 1"),
        ({"code": 6}, "dtype code 6, a floating-point type"),
        ({"code": 7}, "dtype code 7, a floating-point type"),
        ({"code": 9}, "dtype code 9; known are"),
    ],
)
def test_headers_that_cannot_be_read_are_refused_by_name(tmp_path, change, words):
    _index(tmp_path / "c", [2], [0], [0, 1], **change)
    with pytest.raises(DataError, match=words):
        IndexedDataset(tmp_path / "c")


def test_a_corpus_without_documents_or_tokens_is_refused_in_words(tmp_path):
    _index(tmp_path / "c", [], [], [0])
    with pytest.raises(DataError, match="holds no documents"):
        IndexedDataset(tmp_path / "c")
    _index(tmp_path / "c", [0, 0], [0, 0], [0, 1, 2])
    with pytest.raises(DataError, match="holds no tokens: all 2 documents are empty"):
        IndexedDataset(tmp_path / "c")
    (tmp_path / "c.idx").write_bytes(b"MMIDIDX\0\0\0")
    with pytest.raises(DataError, match="ends within its header"):
        IndexedDataset(tmp_path / "c")
    (tmp_path / "c.bin").unlink()
    with pytest.raises(DataError, match=r"c.bin does not exist"):
        IndexedDataset(tmp_path / "c")


@pytest.mark.req("B10")
def test_300_corpora_open_under_128_files_without_maps(tmp_path):
    for i in range(300):
        write_corpus(tmp_path / f"{i}", [[i, i + 1]])
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (128, hard))
    try:
        datasets = [IndexedDataset(tmp_path / f"{i}", mmap=False) for i in range(300)]
        tokens = [dataset.document(0).tolist() for dataset in datasets]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert tokens == [[i, i + 1] for i in range(300)]
    assert tokens == [IndexedDataset(tmp_path / f"{i}").document(0).tolist() for i in range(300)]


@pytest.mark.parametrize("tokens", [[1, 65536], [-1, 5]])
def test_an_id_that_does_not_fit_is_refused_and_leaves_nothing(tmp_path, tokens):
    with pytest.raises(DataError, match=r"do not fit uint16, which holds 0 to 65535"):
        write_corpus(tmp_path / "c", [[1], tokens])
    assert os.listdir(tmp_path) == []


@pytest.mark.req("A03")
def test_an_error_while_writing_leaves_the_older_pair_as_it_was(tmp_path):
    write_corpus(tmp_path / "c", [[1, 2]])
    with pytest.raises(RuntimeError), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document([3])
        raise RuntimeError
    assert IndexedDataset(tmp_path / "c").document(0).tolist() == [1, 2]
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx"]


@pytest.mark.req("A03", "B07")
def test_a_writer_that_lost_bytes_publishes_nothing(tmp_path):
    with pytest.raises(DataError, match="truncated"), IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document([3, 4])
        writer._tokens.flush()
        os.truncate(tmp_path / "c.partial.bin", 2)
    assert os.listdir(tmp_path) == []


def test_a_second_writer_of_the_same_pair_is_refused_and_the_first_one_succeeds(tmp_path):
    with IndexedWriter(tmp_path / "c", np.uint16) as writer:
        writer.add_document([3, 4])
        with pytest.raises(DataError, match="another process is writing"), IndexedWriter(tmp_path / "c", np.uint16):
            pass
    assert IndexedDataset(tmp_path / "c").document(0).tolist() == [3, 4]


def test_what_a_killed_writer_left_is_written_over(tmp_path):
    (tmp_path / "c.partial.bin").write_bytes(b"12345")
    (tmp_path / "c.partial.lengths").write_bytes(b"12345")
    write_corpus(tmp_path / "c", counting([3, 2]))
    assert IndexedDataset(tmp_path / "c").read(0, 5).tolist() == [0, 1, 2, 3, 4]
    assert sorted(os.listdir(tmp_path)) == ["c.bin", "c.idx"]


def test_a_full_disk_is_an_error_with_the_path(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # Python ignores SIGXFSZ: writes fail as on a full disk
    try:
        with pytest.raises(DataError, match=r"cannot write .*c.partial.*errno 27"):
            write_corpus(tmp_path / "c", [np.zeros(100_000)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == []


@pytest.mark.req("A04")
def test_a_writer_holds_no_more_for_more_documents(tmp_path):
    peaks = []
    for batches in (20, 200):
        tracemalloc.start()
        with IndexedWriter(tmp_path / "c", np.uint16) as writer:
            for _ in range(batches):
                writer.add_documents(np.zeros(10_000, np.uint16), np.ones(10_000, np.int64))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0]


def test_a_stale_manifest_does_not_survive_a_rewrite(tmp_path):
    (tmp_path / "c.json").write_text("{}")
    write_corpus(tmp_path / "c", [[1]])
    assert not (tmp_path / "c.json").exists()
