"""Preparation killed at any moment: nothing that looks finished is left, and --resume ends with the same bytes."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_lite.data.indexed import IndexedDataset, bin_path, idx_path
from megatron_lite.errors import DataError
from tools import preprocess_data

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.req("A03")
def test_ten_kills_leave_no_pair_that_is_not_whole(tmp_path: Path) -> None:
    rng = random.Random(7)
    for k in range(12):
        texts = (json.dumps({"text": "some words " * rng.randrange(200)}) for _ in range(2000))
        (tmp_path / f"{k:02d}.jsonl").write_text("\n".join(texts))
    flags = ["--input", str(tmp_path / "*.jsonl"), "--tokenizer", "byte", "--append-eod", "--resume"]
    assert preprocess_data.main([*flags, "--output-prefix", str(tmp_path / "one")]) == 0
    command = [sys.executable, "tools/preprocess_data.py", *flags, "--workers", "2"]
    out = tmp_path / "many"
    begin = time.monotonic()
    assert subprocess.run([*command, "--output-prefix", str(tmp_path / "time")], cwd=ROOT).returncode == 0
    usual = time.monotonic() - begin
    for _ in range(10):
        process = subprocess.Popen([*command, "--output-prefix", str(out)], cwd=ROOT, stdout=subprocess.DEVNULL)
        time.sleep(rng.uniform(0.2, 1.1) * usual)
        process.kill()
        process.wait()
        if idx_path(out).exists():  # it was quick enough to finish
            IndexedDataset(out).check()
            assert bin_path(out).read_bytes() == bin_path(tmp_path / "one").read_bytes()
            idx_path(out).unlink()
        with pytest.raises(DataError):
            IndexedDataset(out)
    _finish([*command, "--output-prefix", str(out)])
    for path in (bin_path, idx_path):
        assert path(out).read_bytes() == path(tmp_path / "one").read_bytes()
    assert not list(tmp_path.glob("*.partial*"))


def _finish(command: list[str]) -> None:
    """Run it; workers of a killed run may hold the lock for a moment."""
    deadline = time.monotonic() + 30
    while subprocess.run(command, cwd=ROOT, stderr=subprocess.DEVNULL).returncode != 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
