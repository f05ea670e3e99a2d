"""From text to a corpus: the same bytes for any number of workers, everything counted, nothing half done."""

from __future__ import annotations

import gzip
import json
import os
import re
import subprocess
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megatron_lite.data import merge as merging
from megatron_lite.data import prepare as preparation
from megatron_lite.data import readers
from megatron_lite.data.encode import Encoder, Options
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.prepare import prepare
from megatron_lite.data.readers import Block, Columns
from megatron_lite.data.tokenizer import FastBackend, load_tokenizer
from megatron_lite.errors import DataError
from tests.helpers.corpora import write_corpus
from tools import inspect_data, preprocess_data

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
    monkeypatch.setattr(readers, "BLOCK", 500)
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
    monkeypatch.setattr(readers, "BLOCK", 500)
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
    prepare([source], str(tmp_path / "c"), Options("byte", Columns("body"), append_eod=True))
    manifest = json.loads((tmp_path / "c.json").read_text())
    assert manifest["tokenizer"]["vocab_size"] == 257 and manifest["tokenizer"]["eod_id"] == 256
    facts = ("documents", "tokens", "empty", "max_id", "dtype", "bin_bytes", "append_eod", "key")
    assert [manifest[fact] for fact in facts] == [1, 3, 1, 256, "uint16", 6, True, "body"]
    assert manifest["inputs"] == [{"path": str(source), "bytes": source.stat().st_size, "begin": 0, "end": None}]
    assert manifest["backend"] == "byte" and "tokenizers" in manifest["versions"]


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
        "from megatron_lite.data.encode import Options\n"
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


# ---- ready ids, columns, special text


def _prepared(folder: Path, sources, options: Options, **more) -> list[list[int]]:
    prepare(sources, str(folder / "out"), options, **more)
    dataset = IndexedDataset(folder / "out")
    return [dataset.document(i).tolist() for i in range(dataset.num_documents)]


@pytest.mark.req("A07")
@pytest.mark.parametrize("workers", [1, 2])
def test_parquet_gives_the_bytes_of_its_json_lines_and_ready_ids_are_untouched(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(readers, "BLOCK", 100)
    texts, ids = ["ab", "", "c" * 90, "dé"], [[5, 6], [], [7, 256], [8]]
    pq.write_table(
        pa.table({"text": texts, "input_ids": pa.array(ids, pa.list_(pa.int32()))}), tmp_path / "a.parquet",
        compression="zstd",
    )  # fmt: skip
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps({"text": t, "input_ids": i}) + "\n" for t, i in zip(texts, ids, strict=True)))
    for columns in (Columns("text"), Columns(None, "input_ids")):
        options = Options("byte", columns, append_eod=True)
        prepare([tmp_path / "a.parquet"], str(tmp_path / "p"), options, workers)
        prepare([lines], str(tmp_path / "j"), options, workers)
        assert _files(tmp_path / "p") == _files(tmp_path / "j")
    ready = IndexedDataset(tmp_path / "p")
    assert [ready.document(i).tolist() for i in range(3)] == [[5, 6, 256], [7, 256], [8, 256]]


def test_one_input_is_split_into_sources_by_a_column(tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text(
        "".join(json.dumps({"text": t, "domain": d}) + "\n" for t, d in (("a", "x"), ("b", "y"), ("c", "x")))
    )
    assert _prepared(tmp_path, [source], Options("byte", Columns("text", where=("domain", "x")))) == [[97], [99]]
    assert json.loads((tmp_path / "out.json").read_text())["filtered"] == 1


def test_ids_beyond_the_tokenizer_are_bad_records_with_their_place(tmp_path):
    table = pa.table({"input_ids": pa.array([[1], [2, 999, -1], None, [3]], pa.list_(pa.int64()))})
    pq.write_table(table, tmp_path / "a.parquet")
    columns = Columns(None, "input_ids")
    with pytest.raises(DataError, match=r"a.parquet, row 2: ids beyond the tokenizer \(ids -1 to 999, but .* 0 to 256"):
        prepare([tmp_path / "a.parquet"], str(tmp_path / "out"), Options("byte", columns))
    options = Options("byte", columns, on_bad_line="skip")
    assert _prepared(tmp_path, [tmp_path / "a.parquet"], options) == [[1], [3]]
    assert json.loads((tmp_path / "out.json").read_text())["bad"] == {"ids beyond the tokenizer": 1, "no ids": 1}


# ---- shards, merging, going on


@pytest.mark.req("A15", "A12")
@pytest.mark.parametrize("count", [2, 5])
def test_shards_merged_equal_one_run_and_so_do_merged_conversions(tmp_path, monkeypatch, count):
    monkeypatch.setattr(readers, "BLOCK", 200)
    sources = [
        _jsonl(tmp_path / f"{k}.jsonl{end}", [f"{k} {i} " * i for i in range(30)])
        for k, end in enumerate(["", ".gz", ""])
    ]
    options = Options("byte", append_eod=True)
    prepare(sources, str(tmp_path / "one"), options)
    for k in range(count):
        prepare(sources, str(tmp_path / f"part-{k}"), options, shard=(k, count))
    monkeypatch.setattr(merging, "TOKENS", 100)
    parts = [str(tmp_path / f"part-{k}") for k in range(count)]
    assert inspect_data.main(["merge", *parts, "--output", str(tmp_path / "joined")]) == 0
    assert _files(tmp_path / "joined") == _files(tmp_path / "one")
    one, joined = (json.loads((tmp_path / f"{name}.json").read_text()) for name in ("one", "joined"))
    assert all(one[key] == joined[key] for key in one if key not in ("shard", "inputs"))


def test_parts_that_do_not_go_together_are_refused(tmp_path):
    source = _jsonl(tmp_path / "a.jsonl", ["x"])
    prepare([source], str(tmp_path / "a"), Options("byte"))
    prepare([source], str(tmp_path / "b"), Options("byte", append_eod=True))
    with pytest.raises(DataError, match="b was prepared with append_eod = True, .*a with False"):
        merging.merge([str(tmp_path / "a"), str(tmp_path / "b")], str(tmp_path / "c"))
    write_corpus(tmp_path / "wide", [[1]], "<i4")
    with pytest.raises(DataError, match="wide holds int32, .*a holds uint16"):
        merging.merge([str(tmp_path / "a"), str(tmp_path / "wide")], str(tmp_path / "c"))
    assert not (tmp_path / "c.idx").exists()


@pytest.mark.req("A03")
@pytest.mark.parametrize("workers", [1, 2])
def test_an_interrupted_preparation_goes_on_after_the_last_input_done(tmp_path, monkeypatch, workers):
    monkeypatch.setattr(preparation, "RECORD_EVERY", 0.0)
    monkeypatch.setattr(readers, "BLOCK", 200)
    sources = [_jsonl(tmp_path / f"{k}.jsonl", [f"{k} {i}" for i in range(50)]) for k in range(4)]
    prepare(sources, str(tmp_path / "one"), Options("byte"))
    whole = sources[2].read_bytes()
    sources[2].write_bytes(whole.replace(b'{"text": "2 30"}', b'{"text": 2 30  }'))
    with pytest.raises(DataError, match=r"2.jsonl, line 31, byte"):
        prepare(sources, str(tmp_path / "c"), Options("byte"), workers)
    assert not (tmp_path / "c.idx").exists() and (tmp_path / "c.partial.json").exists()
    sources[2].write_bytes(whole)
    with pytest.raises(DataError, match="go on from it with --resume"):
        prepare(sources, str(tmp_path / "c"), Options("byte"), workers)
    with pytest.raises(DataError, match="other inputs or with other options"):
        prepare(sources, str(tmp_path / "c"), Options("byte", append_eod=True), workers, resume=True)
    seen = []
    summary = prepare(sources, str(tmp_path / "c"), Options("byte"), workers, resume=True, progress=seen.append)
    assert {block.input for block in seen} == {2, 3} and summary.documents == 200
    assert _files(tmp_path / "c") == _files(tmp_path / "one")
    assert (tmp_path / "c.json").read_bytes() == (tmp_path / "one.json").read_bytes()
    assert not list(tmp_path.glob("c.partial*"))


# ---- the fast backend


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A byte-level BPE tokenizer.json with a special token, NFC, and ids of its own before each text."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.normalizer = tokenizers.normalizers.NFC()
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=600, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator([Path(__file__).read_text()] * 3, trainer)
    path = tmp_path_factory.mktemp("trained") / "tokenizer.json"
    model.save(str(path))
    return path


TEXTS = st.lists(
    st.text(max_size=80) | st.sampled_from(["<|endoftext|>", "a <|endoftext|>b", "e\u0301", "x" * 3000, ""])
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(texts=TEXTS)
def test_the_fast_backend_gives_the_ids_of_the_reference(trained, texts):
    tokenizer = load_tokenizer(str(trained))
    texts = [text.encode("utf-8", "ignore").decode() for text in texts]
    for ours, theirs in zip(FastBackend(tokenizer).encode(texts), tokenizer.encode(texts), strict=True):
        assert np.array_equal(ours, theirs)
    assert tokenizer.eod_id not in tokenizer.encode(texts)[0]


def test_marks_that_are_new_to_one_table_of_unicode_are_ordered_as_the_reference_does(trained):
    marks = [c for c in range(0x20000) if unicodedata.category(chr(c)) in ("Mn", "Mc", "Me", "Cn")]
    texts = [text for c in marks for text in (f"a\u0301{chr(c)}\u0323b", f"a\u0323{chr(c)}\u0301b")]
    tokenizer = load_tokenizer(str(trained))
    for ours, theirs in zip(FastBackend(tokenizer).encode(texts), tokenizer.encode(texts), strict=True):
        assert np.array_equal(ours, theirs)
    differing = FastBackend(tokenizer)._encode(["a\u07f3\u07fdb".encode()])[0]  # what makes it necessary
    assert not np.array_equal(differing, tokenizer.encode(["a\u07f3\u07fdb"])[0])


@pytest.mark.parametrize("workers", [1, 2])
def test_both_backends_write_the_same_corpus_and_the_manifest_says_which(trained, tmp_path, workers):
    source = _jsonl(tmp_path / "a.jsonl", Path(__file__).read_text().splitlines())
    for backend in ("auto", "reference"):
        prepare([source], str(tmp_path / backend), Options(str(trained), append_eod=True, backend=backend), workers)
    assert _files(tmp_path / "auto") == _files(tmp_path / "reference")
    manifest = json.loads((tmp_path / "auto.json").read_text())
    assert manifest["backend"].startswith("gigatoken") and manifest["checked"] > 100
    assert json.loads((tmp_path / "reference.json").read_text())["backend"] == "tokenizers:tokenizer.json"


def test_what_is_checked_does_not_depend_on_the_number_of_workers(trained, tmp_path, monkeypatch):
    monkeypatch.setattr(readers, "BLOCK", 1000)
    source = _jsonl(tmp_path / "a.jsonl", Path(__file__).read_text().splitlines())
    for workers in (1, 2):
        prepare([source], str(tmp_path / str(workers)), Options(str(trained)), workers)
    assert (tmp_path / "1.json").read_bytes() == (tmp_path / "2.json").read_bytes()


def test_a_fast_backend_that_differs_ends_the_work_and_is_named(trained, tmp_path):
    encoder = Encoder(load_tokenizer(str(trained)), Options(str(trained)))
    right = encoder.fast.encode

    def wrong(texts):
        tokens, lengths = right(texts)
        tokens = tokens.copy()
        tokens[int(lengths[:3].sum()) + 1] += 1
        return tokens, lengths

    encoder.fast.encode = wrong
    lines = b"".join(json.dumps({"text": f"some words {i}"}).encode() + b"\n" for i in range(9))
    result = encoder(Block("f.jsonl", 0, 0, 1, first=True, lines=lines))
    assert re.search(r"f.jsonl, line 1, byte 0, document 3 after it: gigatoken .* --backend reference", result.error)
