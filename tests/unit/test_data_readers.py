"""JSON lines, plain and compressed: every line with its place, damage never silent."""

from __future__ import annotations

import gzip
import json
import random

import pytest
import zstandard

from megatron_lite.data import readers
from megatron_lite.errors import DataError


def _write(path, content: bytes, level: int = 3):
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.ZstdCompressor(level=level).compress(content)
    path.write_bytes(content)
    return path


def _lines(texts) -> bytes:
    return b"".join(json.dumps({"text": text}).encode() + b"\n" for text in texts)


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "a.jsonl.zst"])
@pytest.mark.parametrize("chunk", [1, 7, 1 << 20])
def test_lines_come_with_number_and_offset(tmp_path, monkeypatch, name, chunk):
    monkeypatch.setattr(readers, "CHUNK", chunk)
    content = b'{"text": "a"}\n\n  \n{"text": "\\n"}\r\n{"text": "last, no newline"}'
    lines = list(readers.read_lines(_write(tmp_path / name, content)))
    assert [(line.number, line.offset) for line in lines] == [(1, 0), (4, 18), (5, 34)]
    assert [readers.parse(line, "text") for line in lines] == ["a", "\n", "last, no newline"]
    assert all(content[line.offset :].startswith(line.raw) for line in lines)


def test_several_frames_and_members_are_one_text(tmp_path):
    parts = [_lines([str(i)] * 50) for i in range(4)]
    (tmp_path / "a.zst").write_bytes(b"".join(zstandard.compress(part) for part in parts))
    (tmp_path / "a.gz").write_bytes(b"".join(gzip.compress(part) for part in parts))
    for name in ("a.zst", "a.gz"):
        assert b"\n".join(line.raw for line in readers.read_lines(tmp_path / name)) + b"\n" == b"".join(parts)


@pytest.mark.req("A03")
@pytest.mark.parametrize("name", ["a.gz", "a.zst"])
def test_a_truncated_or_damaged_compressed_file_is_an_error(tmp_path, name):
    noise = random.Random(0).randbytes(100_000).hex()
    path = _write(tmp_path / name, _lines([noise]))
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=rf"{name} is (damaged or )?incomplete"):
        list(readers.read_lines(path))
    path.write_bytes(b"this is not compressed")
    with pytest.raises(DataError, match=rf"{name} is damaged"):
        list(readers.read_lines(path))


@pytest.mark.req("A09")
def test_broken_utf8_is_reported_with_file_line_and_byte(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "x"}\n{"text": "ab' + b"\xe4\xb8")
    lines = list(readers.read_lines(path))
    with pytest.raises(readers.BadLine, match=r"a.jsonl, line 2, byte 26: not valid UTF-8"):
        readers.parse(lines[1], "text")


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (b"{", "not valid JSON"),
        (b'{"text": "\\ud800"}', "not valid JSON"),
        (b"[1]", "not a JSON object"),
        (b'{"body": "x"}', r"no key 'text' \(its keys are \['body'\]\)"),
        (b'{"text": 5}', "the value of 'text' is not a string"),
        (b'{"text": null}', "the value of 'text' is not a string"),
    ],
)
def test_lines_without_a_document_say_why(raw, words):
    with pytest.raises(readers.BadLine, match=f"f, line 3, byte 1[0-9]+: {words}"):
        readers.parse(readers.Line("f", 3, 100, raw), "text")


def test_a_byte_order_mark_is_no_part_of_the_text(tmp_path):
    path = _write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + _lines(["a", "b"]))
    assert [readers.parse(line, "text") for line in readers.read_lines(path)] == ["a", "b"]


def test_missing_inputs_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere.jsonl does not exist"):
        readers.check_inputs([tmp_path / "nowhere.jsonl"])
    with pytest.raises(DataError, match="no input files"):
        readers.check_inputs([])
