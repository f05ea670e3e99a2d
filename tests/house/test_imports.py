"""Who imports whom: one direction, no circles, and no torch where a recipe is only read or counted."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from tests.house import rules
from tests.house.rules import PACKAGE, ROOT

# Integer arithmetic that a login node without torch must be able to do; every package's __init__ is added below.
PURE = (
    *("config/section.py", "config/model.py", "config/schema.py", "config/presets.py", "config/load.py"),
    *("config/check.py", "models/shapes.py", "optim/schedule.py", "parallel/grid.py", "data/blend.py"),
    *("data/packing.py", "checkpoint/boxes.py", "plan/run.py", "parallel/cp_split.py"),
)


def _sources() -> dict[tuple[str, ...], tuple[str, bool]]:
    return {rules.parts(p): (p.read_text(), p.name == "__init__.py") for p in rules.package_files()}


def test_packages_import_only_from_packages_before_them():
    wrong = [w for module, (text, init) in _sources().items() for w in rules.out_of_order(text, module, init)]
    assert wrong == []


def test_no_circle_of_imports():
    assert rules.circle(rules.import_graph(_sources())) == []


def test_the_design_document_states_the_same_order():
    text = (ROOT / "docs/design.md").read_text()
    stated = re.search(r"^`(errors(?: < [a-z]+)+) < pretrain\.py, tools`", text, re.MULTILINE)
    assert stated, "docs/design.md states no import order"
    assert tuple(stated[1].split(" < ")) == rules.ORDER


def test_the_order_check_sees_what_is_wrong():
    bad = "def f():\n    from ..train import loop\nimport megatron_lite.newcomer\nimport tools.x\nimport torch\n"
    wrong = rules.out_of_order(bad, (PACKAGE, "data", "loader"))
    assert len(wrong) == 3
    assert "loader:2 imports megatron_lite.train.loop, which comes later" in wrong[0]
    assert rules.out_of_order("from megatron_lite.config import load", (PACKAGE, "data", "loader")) == []
    assert rules.out_of_order("", (PACKAGE, "newcomer", "x")) != []
    assert rules.out_of_order("from . import train", (PACKAGE,), is_package=True) != []


def test_the_circle_check_sees_a_circle_closed_inside_a_function():
    graph = rules.import_graph({
        (PACKAGE, "data", "a"): ("from megatron_lite.data import b", False),
        (PACKAGE, "data", "b"): ("from megatron_lite.data.c import x", False),
        (PACKAGE, "data", "c"): ("def f():\n    import megatron_lite.data.a", False),
    })  # fmt: skip
    assert rules.circle(graph) == [f"{PACKAGE}.data.{m}" for m in "abca"]
    graph[f"{PACKAGE}.data.c"].clear()
    assert rules.circle(graph) == []


def _run_without_torch(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    block = "import sys; sys.modules['torch'] = None\n"
    return subprocess.run(
        [sys.executable, "-c", block + code, *args], cwd=ROOT, capture_output=True, text=True, timeout=120
    )


def test_pure_modules_import_without_torch():
    files = [ROOT / PACKAGE / name for name in PURE]
    assert [str(f) for f in files if not f.is_file()] == []
    files += [p for p in rules.package_files() if p.name == "__init__.py" or p.parent.name in ("config", "plan")]
    names = sorted({".".join(rules.parts(p)) for p in files})
    code = (
        "import importlib, sys\nfor name in sys.argv[1:]:\n    try:\n        importlib.import_module(name)\n"
        "    except ImportError as error:\n        print(name, error)\n"
    )
    done = _run_without_torch(code, *names)
    assert (done.returncode, done.stdout) == (0, ""), done.stdout + done.stderr
    assert "blocked_sample" in _run_without_torch(code, "blocked_sample").stdout  # a module that cannot be imported


@pytest.mark.parametrize("recipe", sorted(str(p.relative_to(ROOT)) for p in ROOT.glob("examples/*/recipe.toml")))
def test_dry_run_needs_no_torch(recipe):
    code = "import runpy\nsys.argv = ['pretrain.py', *sys.argv[1:]]\nrunpy.run_path('pretrain.py', run_name='__main__')"
    done = _run_without_torch(code, "--recipe", recipe, "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "parameters" in done.stdout
