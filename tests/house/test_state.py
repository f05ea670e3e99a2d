"""Nothing is global: no `global`, nothing changed after import, nothing run at import, no hidden environment."""

from __future__ import annotations

import pytest

from tests.house import rules
from tests.house.rules import ROOT


def _violations(rule, files, skip=()):
    wrong = {str(p.relative_to(ROOT)): rule(p.read_text()) for p in files if str(p.relative_to(ROOT)) not in skip}
    return {name: found for name, found in wrong.items() if found}


def test_functions_change_nothing_that_outlives_them():
    # launch.py sets the threads, numerics and devices of the process: that is its purpose. A tool owns its process,
    # and may tell a library so by an environment variable.
    found = _violations(rules.shared_state, rules.program_files(), ("megatron_lite/runtime/launch.py",))
    left = {n: [w for w in f if not (n.startswith("tools/") and "changes os.environ[" in w)] for n, f in found.items()}
    assert {name: wrong for name, wrong in left.items() if wrong} == {}


def test_nothing_runs_at_import():
    assert _violations(rules.runs_at_import, rules.program_files()) == {}


def test_the_environment_is_read_in_one_place():
    assert _violations(rules.environment_reads, rules.program_files(), rules.ENVIRONMENT_READERS) == {}


def test_no_handler_swallows_everything():
    assert _violations(rules.broad_excepts, rules.program_files()) == {}


@pytest.mark.parametrize(
    ("bad", "line"),
    [
        ("count = 0\ndef f():\n    global count\n    count += 1\n", 3),
        ("table = {}\ndef f(x):\n    table[x] = 1\n", 3),
        ("table = {}\ndef f(x):\n    def g():\n        table.setdefault(x, 1)\n    g()\n", 4),
        ("seen = []\nclass A:\n    def f(self):\n        seen.append(self)\n", 4),
        ("class A:\n    known = 0\ndef f():\n    A.known += 1\n", 4),
        ("import torch\ndef f():\n    torch.backends.x.y = True\n", 3),
        ("rows = [1]\ndef f():\n    del rows[0]\n", 3),
        ("a, b = {}, {}\ndef f():\n    x, b['k'] = 1, 2\n", 3),
    ],
)
def test_the_state_check_sees(bad, line):
    assert any(found.startswith(f"line {line}:") for found in rules.shared_state(bad))


@pytest.mark.parametrize(
    "good",
    [
        "table = {'a': 1}\ndef f(x):\n    return table[x]\n",
        "table = {}\ndef f():\n    table = {}\n    table['a'] = 1\n    return table\n",
        "rows = ()\ndef f(rows):\n    rows.append(1)\n",
        "class A:\n    def f(self):\n        self.x = 1\n        self.y.append(2)\n",
        "import os\ndef f(p):\n    os.remove(p)\n",
    ],
)
def test_the_state_check_leaves_alone(good):
    assert rules.shared_state(good) == []


@pytest.mark.parametrize(
    ("bad", "good"),
    [
        (
            "import torch\ntorch.manual_seed(0)\n",
            "'''Text.'''\nimport torch\nif __name__ == '__main__':\n    print()\n",
        ),
        ("TABLE = {}\nTABLE['a'] = 1\n", "TABLE = {'a': 1}\nA, B = 1, 2\nX: int = 3\n"),
        ("for i in range(3):\n    pass\n", "try:\n    import a\nexcept ImportError:\n    a = None\n"),
    ],
)
def test_the_import_time_check(bad, good):
    assert rules.runs_at_import(bad) != []
    assert rules.runs_at_import(good) == []


@pytest.mark.parametrize(
    "bad", ["import os\nx = os.environ['A']\n", "from os import getenv\n", "import os as o\no.getenv('A')\n"]
)
def test_the_environment_check(bad):
    assert rules.environment_reads(bad) != []


def test_the_handler_check():
    assert rules.broad_excepts("try:\n    f()\nexcept (ValueError, Exception):\n    pass\n") != []
    assert rules.broad_excepts("try:\n    f()\nexcept:\n    pass\n") != []
    assert rules.broad_excepts("try:\n    f()\nexcept BaseException:\n    g()\n    raise\n") == []
    assert rules.broad_excepts("try:\n    f()\nexcept OSError:\n    pass\n") == []
