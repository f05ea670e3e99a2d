"""pretrain.py as people start it: with torchrun and without, killed, stopped, and given what cannot run."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest

from megatron_lite.checkpoint import store
from megatron_lite.config.load import to_toml
from megatron_lite.config.schema import Recipe
from tests.helpers.corpora import write_corpus
from tests.helpers.runs import curve, tiny_recipe

ROOT = Path(__file__).parents[2]
LONG = {"steps": 40, "lr": {"peak": 5e-3, "warmup_steps": 3}}


def command(recipe: Recipe, *flags: str, ranks: int = 1) -> list[str]:
    """How the recipe is started on that many processes."""
    path = Path(recipe.run).parent / "recipe.toml"
    path.write_text(to_toml(recipe))
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"] if ranks > 1 else []
    return [sys.executable, *launcher, str(ROOT / "pretrain.py"), "--recipe", str(path), *flags]


def start(*args: str) -> subprocess.Popen[str]:
    """The command in a process group of its own."""
    return subprocess.Popen(
        args, env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    """Exit code, output, errors."""
    out, err = process.communicate(timeout=120)
    return process.returncode, out, err


def wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    """Until the path exists."""
    deadline = time.monotonic() + 60
    while not path.exists():
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.005)


def kill(process: subprocess.Popen[str]) -> None:
    """End the launcher and its workers, which torchrun puts in sessions of their own, without any warning."""
    family = [*psutil.Process(process.pid).children(recursive=True), process]
    for member in family:
        member.kill()
    process.communicate()


@pytest.mark.req("M01", "M06")
def test_killed_at_any_moment_the_same_command_goes_on_from_the_last_checkpoint(tmp_path: Path) -> None:
    settings = {"stage": LONG, "checkpoint": {"every": 3, "keep": 2}}
    straight = tiny_recipe(tmp_path, run=str(tmp_path / "straight"), **settings)
    assert finish(start(*command(straight, "--stage", "first", ranks=2)))[0] == 0
    recipe = tiny_recipe(tmp_path, run=str(tmp_path / "killed"), **settings)
    checkpoints = Path(recipe.run) / "stage-1" / "checkpoints"
    for step, delay in ((3, 0.0), (9, 0.03), (21, 0.07)):
        process = start(*command(recipe, "--stage", "1", ranks=2))
        wait_for(checkpoints / store.folder_name(step), process)
        time.sleep(delay)
        kill(process)
    (checkpoints / "step-00000099.partial").mkdir()
    code, out, _ = finish(start(*command(recipe, "--stage", "1", ranks=2)))
    assert code == 0 and "resumed from" in out
    assert curve(recipe) == curve(straight)
    assert [path.name for path in sorted(checkpoints.iterdir())] == ["step-00000039", "step-00000040"]


@pytest.mark.req("P01")
def test_a_stop_signal_to_the_workers_saves_and_ends_cleanly(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, stage=LONG | {"steps": 2000}, checkpoint={"every": 0})
    process = start(*command(recipe, "--stage", "1", ranks=2))
    wait_for(Path(recipe.run) / "stage-1" / "metrics.jsonl", process)
    time.sleep(0.5)
    process.send_signal(signal.SIGTERM)  # torchrun passes it on
    _, out, err = finish(process)
    step = curve(recipe)[-1][0]
    assert f"stopped after step {step:.0f} (signal SIGTERM)" in out, (out, err)
    saved = store.latest(Path(recipe.run) / "stage-1" / "checkpoints")
    assert saved is not None and saved.name == store.folder_name(int(step))


@pytest.mark.req("E07", "M05")
@pytest.mark.parametrize(
    "ranks, flags, words",
    [
        (1, ["--set", "stages.0.seqlen=8"], ["unknown key stages.0.seqlen", "did you mean 'seq_len'"]),
        (2, ["--set", "stages.0.batch_tokens=80", "--set", "stages.0.micro_batch=1"], ["5 rows", "dp 2"]),
        (2, ["--set", "parallel.tp=2", "--set", "model.intermediate_size=127"], ["127", "tp"]),
        (3, ["--set", "parallel.tp=2"], ["3", "2"]),
        (1, ["--set", "sources.a.path=/nope"], ["/nope"]),
        (1, ["--set", "init_from=/nope"], ["/nope"]),
        (1, ["--resume", "/nope"], ["/nope"]),
        (1, ["--set", "kernels.attention=flash_attn"], ["flash_attn", "blocked: available"]),
        (1, ["--set", "model.vocab_size=50"], ["50"]),
        (1, ["--set", "model.num_experts=4"], ["num_experts"]),
        (1, ["--set", "logging.every=0", "--set", "seed=1.5"], ["logging.every", "seed"]),
    ],
)
def test_what_cannot_run_is_refused_with_the_numbers_before_training(
    tmp_path: Path, ranks: int, flags: list[str], words: list[str]
) -> None:
    recipe = tiny_recipe(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    code, out, err = finish(start(*command(recipe, "--stage", "1", *flags, ranks=ranks)))
    assert code != 0 and all(word in err for word in words), err
    assert "Traceback (most recent call last)" not in err.split("torch/distributed")[0]
    assert "step 1/" not in out
    left = [path for path in sorted(tmp_path.rglob("*")) if path not in before and "cache" not in str(path)]
    assert [path.name for path in left] in ([], ["recipe.toml"], ["recipe.toml", "run"])


def truncate(folder: Path) -> None:
    path = folder / "a.bin"
    path.write_bytes(path.read_bytes()[:-10])


def empty(folder: Path) -> None:
    """An index of the format that announces no sequence and no document."""
    (folder / "a.idx").write_bytes((folder / "a.idx").read_bytes()[:18] + struct.pack("<QQq", 0, 1, 0))


def shorten(folder: Path) -> None:
    write_corpus(folder / "a", [np.arange(9)])


@pytest.mark.parametrize(
    "damage, words",
    [
        (truncate, ["a.bin", "bytes"]),
        (empty, ["sources.a", "holds no documents: 0 sequences"]),
        (shorten, ["sources.a", "9 tokens"]),
        (lambda folder: (folder / "tokenizer.json").unlink(), ["tokenizer.json"]),
    ],
    ids=["truncated .bin", ".idx without documents", "shorter than a sample", "no tokenizer"],
)
def test_data_that_cannot_be_trained_on_is_refused_in_seconds(
    tmp_path: Path, damage: Callable[[Path], None], words: list[str]
) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    recipe = tiny_recipe(tmp_path, tokenizer={"path": str(tmp_path / "tokenizer.json")})
    damage(tmp_path)
    begin = time.monotonic()
    code, out, err = finish(start(*command(recipe, "--stage", "1", ranks=2)))
    assert code != 0 and "step 1/" not in out and all(word in err for word in words), err
    assert time.monotonic() - begin < 30  # a few seconds on an idle machine, most of them to import torch
    assert "Traceback (most recent call last)" not in err.split("torch/distributed")[0]
