"""inspect_data: whole corpora pass, broken ones are named, numbers add up."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.config.load import to_toml
from megatron_lite.data import cache, lengths
from megatron_lite.data.indexed import DTYPES
from megatron_lite.data.prepare import Options, prepare
from megatron_lite.parallel.context import single_process
from tests.helpers.corpora import counting, data_recipe, write_corpus
from tests.helpers.runs import run_stages, tiny_recipe
from tests.house.rules import ROOT
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


def test_every_broken_corpus_is_named_and_every_whole_one_too(tmp_path, capsys):
    for name in "abc":
        write_corpus(tmp_path / name, [[1, 2, 3], [4]])
    (tmp_path / "a.bin").write_bytes(b"\0" * 6)
    code, out, err = _run(capsys, "check", *(tmp_path / name for name in "abcd"))
    assert code == 1 and [line.split(": ")[0] for line in out.splitlines()] == [str(tmp_path / n) for n in "bc"]
    assert "a.bin has 6 bytes" in err and "d.idx does not exist" in err and len(err.splitlines()) == 2


def test_the_vocabulary_can_be_a_tokenizers(tmp_path, capsys):
    prefix = _prepared(tmp_path)
    assert _run(capsys, "check", prefix, "--tokenizer", "byte")[0] == 0
    write_corpus(tmp_path / "d", [[1, 2], [256], [257, 3]])
    code, _, err = _run(capsys, "check", tmp_path / "d", "--tokenizer", "byte")
    assert code == 1 and "document 2 holds an id that is not below 257; the largest is 257" in err
    manifest = json.loads((tmp_path / "c.json").read_text())
    manifest["tokenizer"] |= {"fingerprint": "0", "name": "another"}
    (tmp_path / "c.json").write_text(json.dumps(manifest))
    code, _, err = _run(capsys, "check", prefix, "--tokenizer", "byte")
    assert code == 1 and "was written with the tokenizer another, not with byte" in err


def test_several_corpora_are_told_apart_and_together_and_drawn(tmp_path, capsys, monkeypatch):
    for name, sizes in {"a": [1, 2, 3], "b": [4096, 10]}.items():
        write_corpus(tmp_path / name, counting(sizes))
    prefixes = [tmp_path / "a", tmp_path / "b"]
    monkeypatch.setattr(lengths, "draw", lambda tables, output: output.write_text(" ".join(tables)))
    monkeypatch.setattr(lengths, "check_matplotlib", lambda: None)
    code, out, _ = _run(capsys, "stats", *prefixes, "--png", tmp_path / "x.png")
    assert code == 0 and "all 2 corpora: 5 documents, 4,112 tokens" in out
    assert f"{tmp_path / 'b'} " in out and "4,106  99.85%" in out
    assert (tmp_path / "x.png").read_text() == f"{tmp_path / 'a'} {tmp_path / 'b'}"


@pytest.mark.parametrize("command", ["check", "stats"])
def test_nothing_but_the_answer_is_printed_where_nobody_looks_at_a_terminal(tmp_path, capsys, command):
    write_corpus(tmp_path / "c", [[1, 2, 3]])
    assert _run(capsys, command, tmp_path / "c")[2] == ""


BEST_FIT = {"packing": "best_fit", "mask_documents": True}


def _recipe(folder: Path, min_length: int = 0, **more) -> Path:
    """Letters of a source with borders everywhere, as a recipe's file."""
    texts = ["ab", "cdefgh", "i", "jklmnopqrstuvwxyz"]
    write_corpus(folder / "c", [list(text.encode()) for text in texts])
    sources = {"letters": {"path": str(folder / "c"), "min_length": min_length}}
    recipe = data_recipe(sources, seq_len=8, rows=1, steps=3, vocab_size=300, run=str(folder / "run"), **more)
    model = recipe.model.model_copy(update={"qk_norm": True})
    (folder / "recipe.toml").write_text(to_toml(recipe.model_copy(update={"model": model})))
    return folder / "recipe.toml"


def test_rows_are_shown_with_borders_between_documents(tmp_path, capsys):
    path = _recipe(tmp_path)
    shown = {}
    for row in range(3):
        code, out, _ = _run(capsys, "show", "--recipe", path, "--stage", "only", "--row", row)
        head, _, body = out.partition("\n")
        assert code == 0 and head.startswith(f"=== row {row}: row ") and ", epoch 0; 8 inputs" in head
        assert f" of sources.letters ({tmp_path / 'c'})" in head
        shown[head.split(": row ")[1].split()[0]] = body
    assert shown == {
        "0": "┌─ document 0, tokens 0 to 1 of 2\n│ ab\n├─ document 1, tokens 0 to 5 of 6\n│ cdefgh\n"
        "├─ document 2, tokens 0 to 0 of 1\n│ i\n└─\n",
        "1": "┌─ document 2, tokens 0 to 0 of 1\n│ i\n├─ document 3, tokens 0 to 7 of 17\n│ jklmnopq\n└─\n",
        "2": "┌─ document 3, tokens 7 to 15 of 17\n│ qrstuvwxy\n└─\n",
    }
    all_rows = _run(capsys, "show", "--recipe", path, "--row", 0, "--count", 9, "--width", 3)[1]
    assert all_rows.count("=== row ") == 3 and "│ cde …\n" in all_rows


def test_padding_is_shown(tmp_path, capsys):
    path = _recipe(tmp_path, min_length=2, stage=BEST_FIT)
    out = _run(capsys, "show", "--recipe", path, "--row", 0, "--count", 3)[1]
    assert "│ ab\n├─ document 1, tokens 0 to 5 of 6\n│ cdefgh\n├─ 1 tokens of padding\n└─\n" in out
    letters = "".join(line[2:] for line in out.splitlines() if line.startswith("│ "))
    assert sorted(letters) == sorted("abcdefgh" + "jklmnopqr" + "rstuvwxyz")  # r: a label, then an input


@pytest.mark.parametrize(
    "flags, words",
    [
        ([], "either a PREFIX or a --recipe"),
        (["c", "--recipe", "r.toml", "--row", "0"], "either a PREFIX or a --recipe"),
        (["--recipe", "r.toml"], "--recipe and --row go together"),
        (["c", "--set", "a=1"], "--stage and --set go with --recipe"),
        (["--recipe", "r.toml", "--row", "0", "--first", "2"], "--first goes with a PREFIX"),
        (["--recipe", "RECIPE", "--row", "3"], "there is no row 3; stage 1 (only) has rows 0 to 2"),
        (["--recipe", "RECIPE", "--row", "0", "--stage", "2"], "there is no stage 2"),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, capsys, flags, words):
    path = _recipe(tmp_path)
    code, _, err = _run(capsys, "show", *(path if flag == "RECIPE" else flag for flag in flags))
    assert code == 1 and words in err and len(err.splitlines()) == 1


@pytest.mark.req("C03")
def test_a_plan_tells_what_every_stage_reads(tmp_path, capsys):
    path = _recipe(tmp_path, 2, stage=BEST_FIT, validation={"v": {"path": str(tmp_path / "c")}})
    code, out, _ = _run(capsys, "plan", "--recipe", path)
    lines = out.splitlines()
    assert code == 0 and lines[0] == "stage 1 (only): 3 steps, 3 rows of 8 = 24 tokens, packing best_fit"
    assert "sources.letters: 3 rows = 24 tokens (100.00%), 1.00 epochs of 3 rows of 25 tokens" in lines[1]
    assert "1 empty or filtered out, packed by best fit with 0.00% padding" in lines[1]
    assert "validation.v: 3 rows" in lines[2]
    assert lines[3] == f"  indexes: 5 in {tmp_path / 'run' / 'cache'}, 5 built now"
    again = _run(capsys, "plan", "--recipe", path, "--stage", "1", "--set", "stages.0.steps=4")[1]
    assert "1.33 epochs" in again and "5 in" in again and "none built now" in again


@pytest.mark.req("B16")
def test_a_plan_needs_no_torch(tmp_path):
    path = _recipe(tmp_path)
    program = (
        "import sys; sys.modules['torch'] = None\nfrom tools.inspect_data import main; sys.exit(main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "plan", "--recipe", str(path)], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0 and "2 built now" in done.stdout, done.stderr


@pytest.mark.req("B16")
def test_after_a_plan_training_finds_every_index_and_builds_none(tmp_path, capsys, monkeypatch):
    recipe = tiny_recipe(tmp_path, stage={"steps": 1, "lr": {"peak": 1e-3}, **BEST_FIT})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    code, out, _ = _run(capsys, "plan", "--recipe", tmp_path / "recipe.toml")
    assert code == 0 and "6 in" in out and "6 built now" in out and "2 built now" in out
    monkeypatch.setattr(cache, "atomic_file", None)  # calling it would fail
    run_stages(single_process(), recipe, 0, 1)
    log = capsys.readouterr().out
    assert log.count(f"indexes: 6 in {tmp_path / 'run' / 'cache'}, none built now") == 2
