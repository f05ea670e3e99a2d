"""The picture of a run: what is read, what is refused, how losses are smoothed."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest

from megatron_lite.errors import DataError
from tests.house.rules import ROOT
from tools.plot_run import read_run, smooth


def _write(path, *objects, tail=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(o) + "\n" for o in objects) + tail)


def _run(folder):
    losses = [7.5, None, 6.25]
    steps = [{"step": i + 1, "loss": x, "total_tokens": 90 * (i + 1)} for i, x in enumerate(losses)]
    _write(folder / "stage-1" / "metrics.jsonl", *steps, tail='{"step": 4, "lo')
    ends = [{"step": s, "total_tokens": 90 * s, "losses": {"prose": 7.0 - s, "code": 6.0 - s}} for s in (0, 3)]
    _write(folder / "stage-1" / "evaluations.jsonl", *reversed(ends))
    (folder / "stage-1" / "recipe.toml").write_text('[[stages]]\nname = "general"\n')
    _write(folder / "stage-10" / "metrics.jsonl", {"step": 1, "loss": 5.0, "total_tokens": 363})
    (folder / "stage-2").mkdir()
    return folder


def test_stages_are_read_in_order_with_gaps_where_steps_were_skipped(tmp_path):
    first, second = read_run(_run(tmp_path))
    assert (first.number, first.name, second.number, second.name) == (1, "1 general", 10, "stage 10")
    np.testing.assert_array_equal(first.loss, [7.5, np.nan, 6.25])
    np.testing.assert_array_equal(first.tokens, [90, 180, 270])
    assert first.validation == {"prose": [(0.0, 7.0), (270.0, 4.0)], "code": [(0.0, 6.0), (270.0, 3.0)]}


def test_an_empty_run_is_refused_by_name(tmp_path):
    _write(tmp_path / "stage-1" / "metrics.jsonl")
    with pytest.raises(DataError, match=f"{tmp_path.name} holds no losses yet"):
        read_run(tmp_path)
    with pytest.raises(DataError, match="nowhere is not a folder"):
        read_run(tmp_path / "nowhere")


def test_a_broken_line_is_named(tmp_path):
    path = tmp_path / "stage-1" / "metrics.jsonl"
    _write(path, {"step": 1, "loss": 1.0, "total_tokens": 3}, tail="{nonsense\n")
    with pytest.raises(DataError, match=r"metrics\.jsonl, line 2 is not JSON"):
        read_run(tmp_path)


@pytest.mark.parametrize("width", [0, 1, 5, 40])
def test_smoothing_keeps_constants_and_bridges_gaps(width):
    values = np.full(17, 3.5)
    values[[0, 7, 16]] = np.nan
    np.testing.assert_allclose(smooth(values, width), 3.5, rtol=1e-12)
    assert np.isnan(smooth(np.full(3, np.nan), width)).all()


def test_the_picture_is_written(tmp_path):
    output = tmp_path / "new" / "loss.png"
    command = [sys.executable, "tools/plot_run.py", str(_run(tmp_path / "run")), "--output", str(output)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 stages, 4 steps" in done.stdout
    assert output.read_bytes().startswith(b"\x89PNG")
    empty = subprocess.run([*command[:2], str(tmp_path / "new")], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert empty.returncode == 1 and "holds no losses yet" in empty.stderr
