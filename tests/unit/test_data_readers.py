"""Inputs as blocks: every document with its place, damage never silent, shards that hold everything once."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from megatron_lite.data import readers
from megatron_lite.data.readers import Columns, Input, blocks, find_inputs, shares
from megatron_lite.errors import DataError

TEXT = Columns("text")


def _write(path, content: bytes, level: int = 3):
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor(level=level).compress(content)
    path.write_bytes(content)
    return path


def _lines(texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


def _read(path) -> list[readers.Block]:
    return [block.loaded() for block in blocks([Input(path)], TEXT)]


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_blocks_are_whole_lines_with_number_and_offset(tmp_path, monkeypatch, name, size):
    monkeypatch.setattr(readers, "BLOCK", max(size, 4))
    content = b'{"text": "a"}\n\n  \n{"text": "\\n"}\r\n{"text": "last, no newline"}'
    path = _write(tmp_path / name, content)
    newline = b"\n"
    found = [block for block in _read(path) if block.lines]
    assert b"".join(block.lines for block in found) == content
    assert sum(block.consumed for block in blocks([Input(path)], TEXT)) == path.stat().st_size
    for block in found:
        before = content[: block.offset]
        assert content[block.offset :].startswith(block.lines)
        assert block.where(0).endswith(f", line {before.count(newline) + 1}, byte {block.offset}")
        assert not before or before.endswith(newline)
    assert len(found) <= 2 if size == 1 << 20 or name.endswith(".zst") else len(found) > 2


def test_several_frames_and_members_are_one_text(tmp_path):
    parts = [_lines([str(i)] * 50) for i in range(4)]
    (tmp_path / "a.zst").write_bytes(b"".join(zstandard.compress(part) for part in parts))
    (tmp_path / "a.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    for name in ("a.zst", "a.gz"):
        assert b"".join(block.lines for block in _read(tmp_path / name)) == b"".join(parts)


@pytest.mark.req("A03")
@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_a_truncated_or_damaged_compressed_file_is_an_error(tmp_path, name):
    noise = random.Random(0).randbytes(100_000).hex()
    path = _write(tmp_path / name, _lines([noise]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name} is (damaged or )?incomplete"):
        _read(path)
    path.write_bytes(b"this is not compressed")
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        _read(path)


def test_files_folders_and_patterns_are_inputs(tmp_path):
    (tmp_path / "more" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "more/a.jsonl.gz", "more/deep/c.parquet", "more/notes.md"):
        (tmp_path / name).write_bytes(b"")
    names = [str(path.relative_to(tmp_path)) for path in find_inputs([tmp_path / "more", tmp_path / "b.*"])]
    assert names == ["more/a.jsonl.gz", "more/deep/c.parquet", "b.jsonl"]
    (tmp_path / "empty").mkdir()
    for pattern, words in (("nowhere.jsonl", "does not exist"), ("*.txt", "does not exist"), ("empty", "no input")):
        with pytest.raises(DataError, match=words):
            find_inputs([tmp_path / pattern])
    with pytest.raises(DataError, match="no input files"):
        find_inputs([])


@pytest.mark.parametrize("count", [1, 2, 3, 7, 40])
def test_shards_in_order_hold_every_line_once(tmp_path, monkeypatch, count):
    monkeypatch.setattr(readers, "BLOCK", 50)
    rng = random.Random(count)
    texts = [["x" * rng.randrange(40) for _ in range(rng.randrange(30))] for _ in range(5)]
    paths = [
        _write(tmp_path / f"{i}{end}", _lines(part))
        for i, (part, end) in enumerate(zip(texts, [".jsonl", ".jsonl", ".jsonl.gz", ".jsonl", ".zst"], strict=True))
    ]
    whole = b"".join(block.loaded().lines for block in blocks(shares(paths), TEXT))
    parts = [b"".join(b.loaded().lines for b in blocks(shares(paths, (k, count)), TEXT)) for k in range(count)]
    assert b"".join(parts) == whole == b"".join(_lines(part) for part in texts)
    for k in range(count):
        for block in (block.loaded() for block in blocks(shares(paths, (k, count)), TEXT)):
            if block.file.endswith(".jsonl") and block.lines:
                raw = Path(block.file).read_bytes()
                assert raw[block.offset :].startswith(block.lines)
                line = raw[: block.offset].count(b"\n") + 3
                assert block.where(2, 5) == f"{block.file}, line {line}, byte {block.offset + 5}"


def test_a_shard_that_is_not_there_is_refused(tmp_path):
    with pytest.raises(DataError, match="shards of 3 are 0/3 to 2/3"):
        shares([_write(tmp_path / "a.jsonl", b"")], (3, 3))


@pytest.mark.req("A07")
@pytest.mark.parametrize("compression", ["zstd", "snappy", "none"])
def test_parquet_comes_as_texts_or_ids_of_some_rows_at_a_time(tmp_path, monkeypatch, compression):
    monkeypatch.setattr(readers, "BLOCK", 300)
    ids = [[1, 2], [], [3], None, [4, 5, 6]] * 20
    table = pa.table({
        "text": pa.array([f"text {i}" for i in range(100)]),
        "input_ids": pa.array(ids, pa.list_(pa.int32())),
        "domain": pa.array(["book" if i % 3 else "code" for i in range(100)]),
    })  # fmt: skip
    pq.write_table(table, tmp_path / "a.parquet", compression=compression, row_group_size=33)
    found = _read(tmp_path / "a.parquet")
    assert len(found) > 4 and [text for block in found for text in block.texts] == table["text"].to_pylist()
    assert [block.number for block in found][:2] == [1, 1 + len(found[0].texts)]
    assert sum(block.consumed for block in found) == (tmp_path / "a.parquet").stat().st_size
    ready = list(blocks([Input(tmp_path / "a.parquet")], Columns(None, "input_ids")))
    assert np.concatenate([block.ids for block in ready]).tolist() == [i for part in ids for i in part or []]
    assert np.concatenate([block.lengths for block in ready]).tolist() == [-1 if p is None else len(p) for p in ids]
    only = blocks([Input(tmp_path / "a.parquet")], Columns("text", where=("domain", "code")))
    assert [t for block in only for t in block.texts] == [f"text {i}" for i in range(0, 100, 3)]


def test_parquet_without_the_column_or_with_another_type_is_refused(tmp_path):
    pq.write_table(pa.table({"body": ["x"], "n": [1]}), tmp_path / "a.parquet")
    for columns, words in (
        (TEXT, r"no column 'text'; its columns are \['body', 'n'\]"),
        (Columns("n"), "the column 'n' holds int64, but strings are needed"),
        (Columns(None, "body"), "the column 'body' holds string, but lists of integers are needed"),
        (Columns("body", where=("domain", "x")), "no column 'domain'"),
    ):
        with pytest.raises(DataError, match=words):
            list(blocks([Input(tmp_path / "a.parquet")], columns))
    (tmp_path / "b.parquet").write_bytes(b"PAR1 nothing PAR1")
    with pytest.raises(DataError, match=r"b.parquet cannot be read as parquet"):
        _read(tmp_path / "b.parquet")
