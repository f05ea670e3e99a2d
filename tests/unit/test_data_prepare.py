"""From text to a corpus: the same bytes for any number of workers, everything counted, nothing half done."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zstandard

from megatron_lite.data import prepare as preparation
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.prepare import Options, prepare
from megatron_lite.errors import DataError
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[2]


def _jsonl(path: Path, texts, key: str = "text") -> Path:
    content = "".join(json.dumps({key: text}) + "\n" for text in texts).encode()
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        content = zstandard.compress(content)
    path.write_bytes(content)
    return path


def _files(prefix: Path) -> tuple[bytes, bytes]:
    return Path(f"{prefix}.bin").read_bytes(), Path(f"{prefix}.idx").read_bytes()


@pytest.mark.req("A01")
def test_empty_documents_are_left_out_and_counted(tmp_path, capsys):
    source = _jsonl(tmp_path / "a.jsonl", ["", "ab"])
    arguments = ["--input", source, "--output-prefix", tmp_path / "c", "--tokenizer", "byte", "--append-eod"]
    assert preprocess_data.main([str(a) for a in arguments]) == 0
    assert "documents=1 tokens=3 empty=1 bad=0" in capsys.readouterr().out
    dataset = IndexedDataset(tmp_path / "c")
    assert dataset.num_documents == 1 and dataset.document(0).tolist() == [97, 98, 256]


@pytest.mark.req("A06")
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_many_inputs_equal_their_concatenation_for_any_number_of_workers(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(preparation, "BATCH_BYTES", 500)
    texts = [f"{i} " * (i * 7 % 40) for i in range(300)]
    prepare([_jsonl(tmp_path / "all.jsonl", texts)], str(tmp_path / "one"), Options("byte"), workers=1)
    parts = [
        _jsonl(tmp_path / f"{k}.jsonl{end}", texts[k * 100 : k * 100 + 100])
        for k, end in enumerate(["", ".gz", ".zst"])
    ]
    summary = prepare(parts, str(tmp_path / "many"), Options("byte"), workers)
    assert _files(tmp_path / "many") == _files(tmp_path / "one")
    expected = [text for text in texts if text]
    assert (summary.documents, summary.empty) == (len(expected), 300 - len(expected))
    dataset = IndexedDataset(tmp_path / "many")
    assert [bytes(dataset.document(i).astype(np.uint8)).decode() for i in range(len(expected))] == expected


@pytest.mark.req("A03")
@pytest.mark.parametrize("workers", [1, 2])
def test_a_bad_line_stops_the_work_is_named_and_leaves_nothing(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(preparation, "BATCH_BYTES", 500)
    source = _jsonl(tmp_path / "a.jsonl", ["x"] * 2000)
    lines = source.read_bytes().splitlines(keepends=True)
    lines[999] = b"{broken}\n"
    source.write_bytes(b"".join(lines))
    with pytest.raises(DataError, match=r"a.jsonl, line 1000, byte 1398\d: not valid JSON"):
        prepare([source], str(tmp_path / "c"), Options("byte"), workers)
    assert os.listdir(tmp_path) == ["a.jsonl"]


@pytest.mark.req("A09")
def test_bad_lines_are_counted_by_reason_when_skipped(tmp_path, capsys):
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "ab"}\n{"body": "x"}\n{"body": "x"}\n\n{"text": "\xe4\xb8')
    arguments = ["--input", source, "--output-prefix", tmp_path / "c", "--tokenizer", "byte"]
    assert preprocess_data.main([str(a) for a in arguments]) == 1
    assert "line 2, byte 15: no key 'text'" in capsys.readouterr().err
    assert preprocess_data.main([str(a) for a in [*arguments, "--on-bad-line", "skip"]]) == 0
    assert "documents=1 tokens=2 empty=0 bad=3" in capsys.readouterr().out
    manifest = json.loads((tmp_path / "c.json").read_text())
    assert manifest["bad"] == {"no key 'text'": 2, "not valid UTF-8": 1}


def test_the_manifest_says_what_the_corpus_is(tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", ["é", ""], key="body")
    prepare([source], str(tmp_path / "c"), Options("byte", key="body", append_eod=True))
    manifest = json.loads((tmp_path / "c.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 257 and manifest["tokenizer"]["eod_id"] == 256
    facts = ("documents", "tokens", "empty", "max_id", "dtype", "bin_bytes", "append_eod", "key")
    assert [manifest[fact] for fact in facts] == [1, 3, 1, 256, "uint16", 6, True, "body"]
    assert manifest["inputs"] == [{"path": str(source), "bytes": source.stat().st_size}]


@pytest.mark.req("A14")
def test_a_missing_tokenizer_or_input_is_one_line_and_creates_nothing(tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", ["x"])
    for flags, words in (
        (["--input", source, "--tokenizer", tmp_path / "nope"], "nope does not exist"),
        (["--input", tmp_path / "nope.jsonl", "--tokenizer", "byte"], "nope.jsonl does not exist"),
        (["--input", source, "--tokenizer", "byte", "--workers", "0"], "workers=0"),
    ):
        command = [sys.executable, "tools/preprocess_data.py", "--output-prefix", tmp_path / "new" / "c", *flags]
        done = subprocess.run(
            [str(part) for part in command], cwd=ROOT, capture_output=True, text=True, timeout=60,
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 1 and words in done.stderr and len(done.stderr.splitlines()) == 1
        assert os.listdir(tmp_path) == ["a.jsonl"]


def test_nothing_to_write_is_an_error(tmp_path):
    with pytest.raises(DataError, match="nothing to write"):
        prepare([_jsonl(tmp_path / "a.jsonl", ["", ""])], str(tmp_path / "c"), Options("byte"))
    assert os.listdir(tmp_path) == ["a.jsonl"]


def test_a_worker_that_dies_is_an_error_not_a_hang(tmp_path, monkeypatch):
    source = _jsonl(tmp_path / "a.jsonl", ["x"] * 100)
    (tmp_path / "t.model").write_bytes(b"")
    loads = iter([preparation.load_tokenizer("byte")])
    monkeypatch.setattr(preparation, "load_tokenizer", lambda path: next(loads))  # workers load the broken file
    with pytest.raises(DataError, match="a worker ended before its work"):
        prepare([source], str(tmp_path / "c"), Options(str(tmp_path / "t.model")), workers=2)
    assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "t.model"]


@pytest.mark.req("A04")
@pytest.mark.parametrize("workers", [1, 2])
def test_memory_does_not_grow_with_the_corpus(tmp_path, workers):
    program = (
        "import sys, resource; from pathlib import Path; from megatron_lite.data.prepare import *\n"
        "if __name__ == '__main__':\n"
        f"    prepare([Path(sys.argv[1])], sys.argv[1] + '.out', Options('byte'), {workers})\n"
        # VmHWM, not ru_maxrss: the latter starts with what the process had that started this one
        "    own = int(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])\n"
        "    print(max(own, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss))"
    )
    (tmp_path / "run.py").write_text(program)
    peaks = []
    for count in (20_000, 200_000):
        source = tmp_path / f"{count}.jsonl"
        source.write_bytes((json.dumps({"text": "some words " * 15}) + "\n").encode() * count)
        done = subprocess.run(
            [sys.executable, str(tmp_path / "run.py"), str(source)], capture_output=True, text=True, timeout=120,
            env={"PYTHONPATH": str(ROOT)},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        peaks.append(int(done.stdout))
    assert peaks[1] < 1.3 * peaks[0]
