"""What the documents promise: links lead somewhere, sections are as short as they say, the library example runs."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.house.rules import ROOT

DOCUMENTS = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "docs/data.md", "docs/design.md", "docs/huggingface.md")


def _broken_links(text, folder):
    targets = re.findall(r"\]\(([^)#]+)\)", text)
    return [t for t in targets if not t.startswith(("http://", "https://")) and not (folder / t).exists()]


def test_links_lead_to_files():
    broken = {name: _broken_links((ROOT / name).read_text(), (ROOT / name).parent) for name in DOCUMENTS}
    assert {name: links for name, links in broken.items() if links} == {}
    assert _broken_links("[a](nowhere.md) [b](README.md)", ROOT) == ["nowhere.md"]


def test_files_named_in_the_documents_exist():
    for name in DOCUMENTS:
        named = re.findall(r"`((?:tools|tests|examples|docs|megatron_lite)/[\w./]+)`", (ROOT / name).read_text())
        assert [n for n in named if not (ROOT / n).exists()] == [], name


def test_each_way_to_add_something_has_at_most_eight_steps():
    sections = (ROOT / "CONTRIBUTING.md").read_text().split("\n## ")[1:]
    steps = {s.splitlines()[0]: len(re.findall(r"^\d+\. ", s, re.MULTILINE)) for s in sections}
    for word in ("model", "op", "source", "stage"):
        assert any(word in title for title in steps), word
    assert all(1 <= count <= 8 for count in steps.values()), steps


def test_the_printed_plan_is_what_the_dry_run_prints():
    command = r"\$ python (pretrain\.py .*--dry-run)\n(.*?)```"
    ((arguments, stated),) = re.findall(command, (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, *arguments.split()], cwd=ROOT, capture_output=True, text=True, timeout=120)
    now, then = done.stdout.split(), stated.split()
    number = re.compile(r"\d+\.\d+")
    assert [number.sub("#", word) for word in now] == [number.sub("#", word) for word in then]
    for word, old in zip(now, then, strict=True):  # sizes may be refined; the text is printed anew when they move
        for a, b in zip(number.findall(word), number.findall(old), strict=True):
            assert float(a) == pytest.approx(float(b), rel=0.1), f"README.md says {old}, the dry run {word}"


@pytest.mark.req("I06")
def test_how_the_loss_is_averaged_is_written_down():
    text = " ".join((ROOT / "docs/design.md").read_text().split())
    assert "sum over valid tokens divided by their number in the global batch" in text


def test_the_library_example_runs_and_learns():
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 10 and losses[-1] < losses[0] - 1
    working = [line for line in code.splitlines() if line and not line.startswith(("import", "from", "    "))]
    assert len(working) <= 10
