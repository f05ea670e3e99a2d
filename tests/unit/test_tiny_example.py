"""The tiny example: its corpus is held apart from its validation, its tokenizer loses nothing, its check can fail."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import sentencepiece

from examples.tiny import build_corpus, train_tokenizer
from examples.tiny.build_corpus import Document
from tests.house.rules import ROOT


def _library(folder):
    """A standard library of two packages, eight modules, and things that must be left out."""
    body = 'X = "\\t"\n\n\ndef f():\n    """A function of the module{}, described at some length."""\n    return 1\n'
    for number in range(8):
        (folder / f"module{number}.py").write_text(body.format(number))
    for package in ("alpha", "beta"):
        (folder / package).mkdir()
        for number in range(5):
            (folder / package / f"part{number}.py").write_text(body.format(f" {package}{number}") * 100)
    for name in ("test", "site-packages", "encodings"):
        (folder / name).mkdir()
        (folder / name / "x.py").write_text("left_out = 1\n")
    (folder / "broken.py").write_bytes(b"x = '\xff'\n")
    return folder


def test_three_sources_come_from_a_library(tmp_path):
    documents = list(build_corpus.documents(_library(tmp_path)))
    names = {d.name for d in documents}
    assert {"code/module3.py", "code/alpha/part0.py", "prose/module3.py", "long/alpha", "long/beta"} <= names
    assert any(name.startswith("prose/topics/") for name in names)
    assert not any(word in name for name in names for word in ("test", "site-packages", "encodings", "broken"))
    code = next(d for d in documents if d.name == "code/module3.py")
    assert code.text == (tmp_path / "module3.py").read_text()
    long = next(d for d in documents if d.name == "long/alpha")
    assert long.text.count("# alpha/part") == 5 and len(long.text) >= build_corpus.MIN_LONG
    repeated = next(d for d in documents if d.name == "prose/alpha/part0.py")
    assert repeated.text.count("described at some length") == 1


def test_validation_shares_no_unit_with_training():
    sizes = [3, 90, 41, 7, 55, 23, 64, 18, 77, 36, 12, 49] * 3
    documents = [Document("code", f"unit{i}", f"code/{i}", "x" * size) for i, size in enumerate(sizes)]
    documents += [Document("prose", f"unit{i}", f"prose/{i}", "y" * 5) for i in range(len(sizes))]
    documents += [Document("long", f"unit{i}", f"long/{i}", "z" * 400) for i in range(20)]
    documents += [Document("prose", f"topic {i}", f"topic/{i}", "t" * 11) for i in range(31)]
    held_out = build_corpus.held_out_units(documents)
    assert held_out == build_corpus.held_out_units(documents[::-1])
    for source in ("code", "prose", "long"):
        units = {d.unit for d in documents if d.source == source}
        assert held_out & units and units - held_out, source
    characters = sum(len(d.text) for d in documents if d.unit in held_out) / sum(len(d.text) for d in documents)
    assert 0.03 < characters < 0.15


def test_docstrings_come_in_order_without_indentation():
    source = 'class A:\n    """First.\n\n    Second."""\n    async def f(self):\n        "Third."\nx = 1\n'
    assert build_corpus.docstrings(f'"""Zero."""\n{source}') == ["Zero.", "First.\n\nSecond.", "Third."]
    assert build_corpus.docstrings("def (:\n") == []


def test_the_tokenizer_gives_every_text_back(tmp_path):
    files = sorted((ROOT / "megatron_lite").rglob("*.py"))
    corpus = tmp_path / "text.jsonl"
    corpus.write_text("".join(json.dumps({"text": f.read_text()}) + "\n" for f in files))
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=train_tokenizer.train([corpus], 700))
    assert tokenizer.get_piece_size() == 700
    assert tokenizer.id_to_piece(tokenizer.eos_id()) == train_tokenizer.END_OF_DOCUMENT
    for text in (*train_tokenizer.AWKWARD, *(f.read_text() for f in files)):
        assert tokenizer.decode(tokenizer.encode(text)) == text
        assert tokenizer.eos_id() not in tokenizer.encode(text)
    # The one character that sentencepiece cannot give back: the corpus leaves such documents out, the check sees them.
    change = train_tokenizer.first_change(tokenizer, f"ab{build_corpus.RESERVED}c")
    assert change is not None and change.startswith("character 2:")


@pytest.mark.parametrize(
    ("prose", "code", "long", "error"),
    [
        (5.5, 5.4, 3.9, ""),
        (5.7, 5.4, 3.9, "did not fall enough: prose over stage 1"),
        (5.5, 5.4, 4.0, "did not fall enough: long over stage 3"),
        (float("nan"), 5.4, 3.9, "prose over stage 1"),
        (5.5, None, 3.9, "not 'code'"),
    ],
)
def test_the_check_of_a_run(tmp_path, prose, code, long, error):
    ends = {
        1: [{"prose": 7.6, "code": 7.6}, {"prose": prose, "code": code}],
        3: [{"long": 4.0}, {"long": long}],
    }
    for stage, losses in ends.items():
        folder = tmp_path / f"stage-{stage}"
        folder.mkdir()
        lines = [
            {"step": 10 * i, "losses": {k: v for k, v in at.items() if v is not None}} for i, at in enumerate(losses)
        ]
        (folder / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "examples/tiny/check_run.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0) == bool(error), done.stderr
    assert error in done.stderr


def test_the_check_names_a_stage_that_was_not_run(tmp_path):
    command = [sys.executable, "examples/tiny/check_run.py", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "was stage 1 run?" in done.stderr
