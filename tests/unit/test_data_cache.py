"""The index cache: one builds and the others wait, whoever is killed; what lies there is whole."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megatron_lite.data import cache
from megatron_lite.data.cache import Cache
from megatron_lite.data.loader import open_training
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, data_recipe, write_corpus


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.req("B13")
def test_one_builds_and_the_others_wait(tmp_path):
    calls, gate = [], threading.Barrier(8)

    def build() -> bytes:
        calls.append(1)
        time.sleep(0.2)
        return b"content"

    def start(_: int) -> Cache:
        entries = Cache(tmp_path / "cache")
        gate.wait()
        for key in ("a", "b", "a"):
            assert entries.entry("kind", key, ".json", build).read_bytes() == b"content"
        return entries

    with ThreadPoolExecutor(8) as threads:
        opened = list(threads.map(start, range(8)))
    assert len(calls) == sum(sum(entries.opened.values()) for entries in opened) == 2
    assert all(len(entries.opened) == 2 for entries in opened)
    assert len(_names(tmp_path / "cache")) == 2


def test_after_a_build_that_fails_the_next_one_builds(tmp_path):
    entries = Cache(tmp_path)

    def fail() -> bytes:
        raise DataError("broken corpus")

    with pytest.raises(DataError, match="broken corpus"):
        entries.entry("kind", "a", ".json", fail)
    assert _names(tmp_path) == []
    assert entries.entry("kind", "a", ".json", lambda: b"whole").read_bytes() == b"whole"


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_file_system_without_locks_will_do(tmp_path, monkeypatch, code):
    def refuse(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", refuse)
    entries = Cache(tmp_path)
    entry = entries.entry("kind", "a", ".npy", lambda: np.arange(5))
    assert np.load(entry).tolist() == [0, 1, 2, 3, 4] and _names(tmp_path) == [entry.name]


def test_a_whole_cache_can_be_read_where_nobody_may_write(tmp_path, monkeypatch):
    prefix = write_corpus(tmp_path / "c", counting([50, 60]))
    recipe = data_recipe({"c": {"path": str(prefix)}})
    open_training(recipe, 0, tmp_path / "cache")
    for writer in ("_alone", "atomic_file", "naming"):
        monkeypatch.setattr(cache, writer, None)  # calling it would fail
    open_training(recipe, 0, tmp_path / "cache")


@pytest.mark.parametrize("kind", ["survey", "documents", "rows"])
@pytest.mark.parametrize("mmap", [True, False])
def test_a_damaged_entry_is_named(tmp_path, kind, mmap):
    prefix = write_corpus(tmp_path / "c", counting([50, 60]))
    recipe = data_recipe({"c": {"path": str(prefix)}}, stage={"packing": "best_fit"}, data={"mmap": mmap})
    open_training(recipe, 0, tmp_path / "cache")
    (entry,) = (tmp_path / "cache").glob(f"{kind}-*")
    entry.write_bytes(entry.read_bytes()[:-3])
    with pytest.raises(DataError, match=rf"\[sources.c\] .*{entry.name} is damaged .*remove it"):
        open_training(recipe, 0, tmp_path / "cache")
    entry.unlink()
    open_training(recipe, 0, tmp_path / "cache")


STARTS = """
import json, sys, time
from pathlib import Path
from megatron_lite.data.loader import open_training
from tests.helpers.corpora import data_recipe
recipe = data_recipe(json.loads(sys.argv[1]), stage={"packing": "best_fit"})
print("ready", flush=True)
rows = open_training(recipe, 0, Path(sys.argv[2]))
print(rows.fingerprint, len(rows.row(3).borders))
"""


@pytest.mark.req("B13")
def test_starts_killed_at_any_moment_leave_a_cache_that_the_next_one_completes(tmp_path):
    rng = random.Random(3)
    sources = {}
    for i in range(8):  # 3 entries each
        lengths = np.random.default_rng(i).integers(0, 60, 3000)
        sources[f"s{i}"] = {"path": str(write_corpus(tmp_path / f"{i}", [np.full(n, i) for n in lengths]))}
    truth = open_training(data_recipe(sources, stage={"packing": "best_fit"}), 0, tmp_path / "truth")
    command = [sys.executable, "-c", STARTS, json.dumps(sources), str(tmp_path / "cache")]

    def start() -> subprocess.Popen[str]:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        return process

    for _ in range(10):
        process = start()
        time.sleep(rng.uniform(0.0, 0.1))
        process.send_signal(signal.SIGKILL)
        process.communicate()
        whole = {path.name for path in (tmp_path / "truth").iterdir()}
        for path in (tmp_path / "cache").glob("*.npy") if (tmp_path / "cache").is_dir() else ():
            assert path.name in whole and path.read_bytes() == (tmp_path / "truth" / path.name).read_bytes()
    last = [start() for _ in range(2)]
    answers = [process.communicate(timeout=60)[0].split() for process in last]
    assert answers == [[truth.fingerprint, str(len(truth.row(3).borders))]] * 2
    left = [name for name in _names(tmp_path / "cache") if not name.endswith(".lock")]  # empty, and in nobody's way
    assert left == _names(tmp_path / "truth")
