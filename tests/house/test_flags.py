"""The flags people type: what they are called is a promise, so a change of them has to change this file too."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.house.rules import ROOT

FLAGS = {
    "pretrain.py": {"--recipe", "--stage", "--set", "--resume", "--dry-run", "--world-size"},
    "tools/convert_hf.py": {"--hf", "--checkpoint", "--family", "--dtype", "--tokenizer", "--shard-size"},
    "tools/preprocess_data.py": {
        *("--input", "--output-prefix", "--tokenizer", "--key", "--ids-key", "--where", "--append-eod", "--workers"),
        *("--on-bad-line", "--shard", "--resume", "--backend"),
    },
}


def _flags(help_text: str) -> set[str]:
    """Long options that a help text lists; an option starts its line, after at most a short one."""
    found = re.findall(r"^ +(?:-\w(?: \w+)?, )?(--[a-z][a-z0-9-]*)", help_text, re.MULTILINE)
    return set(found) - {"--help"}


@pytest.mark.parametrize("program", sorted(FLAGS))
def test_flags_are_frozen(program):
    done = subprocess.run([sys.executable, program, "--help"], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert _flags(done.stdout) == FLAGS[program]


def test_the_flag_reader_reads():
    text = "usage: x [-h] [--ignored]\n\noptions:\n  -h, --help  show\n  --one-two X  text --not\n  -k, --key KEY\n"
    assert _flags(text) == {"--one-two", "--key"}
