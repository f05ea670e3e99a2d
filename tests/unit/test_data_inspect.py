"""inspect_data: whole corpora pass, broken ones are named, numbers add up."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data.indexed import DTYPES
from megatron_lite.data.prepare import Options, prepare
from tests.helpers.corpora import counting, write_corpus
from tools import inspect_data


def _run(capsys, *arguments) -> tuple[int, str, str]:
    code = inspect_data.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.req("A12")
@pytest.mark.parametrize("dtype", list(DTYPES.values()), ids=str)
def test_every_dtype_can_be_inspected(tmp_path, capsys, dtype):
    write_corpus(tmp_path / "c", [[1, 2, 3], [], [7]], dtype.str)
    code, out, _ = _run(capsys, "check", tmp_path / "c", "--vocab-size", 8)
    assert code == 0 and f"3 documents, 4 tokens of {dtype.name}, ids 1 to 7, no manifest" in out
    assert _run(capsys, "stats", tmp_path / "c")[0] == 0
    assert "--- document 2, 1 tokens\n7\n" in _run(capsys, "show", tmp_path / "c")[1]


@pytest.mark.req("B07")
def test_a_corrupt_pointer_is_reported_with_its_document(tmp_path, capsys):
    write_corpus(tmp_path / "c", counting([4, 5, 6]))
    raw = bytearray((tmp_path / "c.idx").read_bytes())
    raw[34 + 12 + 8 : 34 + 12 + 16] = np.array([6], "<i8").tobytes()
    (tmp_path / "c.idx").write_bytes(raw)
    code, _, err = _run(capsys, "check", tmp_path / "c")
    assert code == 1 and "document 1 (sequence 1) points to byte 6" in err and len(err.splitlines()) == 1


def test_ids_beyond_a_vocabulary_are_reported_with_their_document(tmp_path, capsys):
    write_corpus(tmp_path / "c", [[1, 2], [3, 300], [400]])
    code, _, err = _run(capsys, "check", tmp_path / "c", "--vocab-size", 300)
    assert code == 1 and "document 1 holds an id that is not below 300; the largest is 400" in err


def test_negative_ids_are_reported(tmp_path, capsys):
    write_corpus(tmp_path / "c", [[1, 2]], "<i4")
    (tmp_path / "c.bin").write_bytes(np.array([1, -2], "<i4").tobytes())
    code, _, err = _run(capsys, "check", tmp_path / "c")
    assert code == 1 and "holds the id -2; ids are not negative" in err


def _prepared(folder: Path) -> Path:
    texts = ["short", "a longer one", "x" * 100]
    (folder / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    prepare([folder / "a.jsonl"], str(folder / "c"), Options("byte", append_eod=True))
    return folder / "c"


def test_a_manifest_that_disagrees_is_reported(tmp_path, capsys):
    prefix = _prepared(tmp_path)
    assert "manifest agrees" in _run(capsys, "check", prefix)[1]
    manifest = json.loads((tmp_path / "c.json").read_text()) | {"tokens": 5}
    (tmp_path / "c.json").write_text(json.dumps(manifest))
    code, _, err = _run(capsys, "check", prefix)
    assert code == 1 and "c.json says tokens=5, but the corpus has 120" in err


def test_documents_are_shown_as_text(tmp_path, capsys):
    prefix = _prepared(tmp_path)
    code, out, _ = _run(capsys, "show", prefix, "--tokenizer", "byte", "--first", 1, "--count", 5, "--width", 30)
    assert code == 0
    assert out == (
        "--- document 1, 13 tokens\na longer one<|endoftext|>\n--- document 2, 101 tokens\n" + "x" * 30 + " …\n"
    )
    code, _, err = _run(capsys, "show", prefix, "--first", 3)
    assert code == 1 and "there is no document 3; " in err


def test_lengths_add_up(tmp_path, capsys):
    write_corpus(tmp_path / "c", counting([1, 2, 3, 1000, 5000]))
    code, out, _ = _run(capsys, "stats", tmp_path / "c")
    assert code == 0 and "5 documents, 6,006 tokens" in out and "median 3" in out and "longest 5,000" in out
    rows = [line.split() for line in out.splitlines() if " to " in line and "%" in line and "share" not in line]
    counts = [int(row[3].replace(",", "")) for row in rows if row[1] == "to"]
    tokens = [int(row[5].replace(",", "")) for row in rows if row[1] == "to"]
    assert sum(counts) == 5 and sum(tokens) == 6006
    assert "4K 83.3%, 8K 0.0%" in out
