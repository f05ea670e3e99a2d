"""The text of the project: every module says what it is, none is long, none names the machine it was written on."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import warnings

from tests.house import rules
from tests.house.rules import ROOT

LONG, TOO_LONG = 400, 700  # lines
TEXT = {".py", ".md", ".toml", ".txt", ".sh", ".cfg", ".ini", ".yml", ".yaml", ".json", ""}
OUTPUTS = {".git", ".venv", "quickstart", "runs", "build", "dist", ".hypothesis"}  # at the root
# Home and work folders of a machine, split so that this file does not match itself.
MACHINE_PATH = re.compile(r"(?<![\w.$}~/-])/" + r"(?:work|root|home|Users|mnt|scratch)/" + r"[\w.-]+")
# What each import name is called on the package index.
INDEX_NAME = {"yaml": "pyyaml", "flash_attn": "flash-attn", "PIL": "pillow"}


def _text_files():
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT).parts
        made = inside[0] in OUTPUTS or any(part.endswith(("_cache", "__pycache__", ".egg-info")) for part in inside)
        if path.is_file() and path.suffix in TEXT and not made:
            yield path


def _without_docstring(source: str) -> bool:
    return not (ast.get_docstring(ast.parse(source)) or "").strip()


def test_every_module_has_a_docstring():
    tests = [p for p in (ROOT / "tests").rglob("*.py") if p.name != "__init__.py"]
    assert [
        str(p.relative_to(ROOT)) for p in [*rules.program_files(), *tests] if _without_docstring(p.read_text())
    ] == []
    assert _without_docstring("import os\n'''too late'''\n")
    assert _without_docstring("''' '''\n")


def test_no_file_is_too_long():
    lengths = {p: len(p.read_text().splitlines()) for p in _text_files() if p.suffix == ".py"}
    for path, lines in lengths.items():
        if LONG < lines <= TOO_LONG:
            warnings.warn(f"{path.relative_to(ROOT)} has {lines} lines: over {LONG} it is time to split", stacklevel=1)
    assert {str(p.relative_to(ROOT)): n for p, n in lengths.items() if n > TOO_LONG} == {}


def test_no_file_names_a_folder_of_one_machine():
    found = {str(p.relative_to(ROOT)): MACHINE_PATH.findall(p.read_text(errors="replace")) for p in _text_files()}
    assert {name: paths for name, paths in found.items() if paths} == {}
    assert MACHINE_PATH.findall("cd /" + "home/someone/x") and MACHINE_PATH.findall("'/" + "root/.cache'")
    assert not MACHINE_PATH.findall("examples/work/x and https://host/" + "home/x")


def test_nothing_is_left_for_later():
    mark = re.compile(r"#.*\b(TO" + r"DO|FIX" + r"ME|X" + r"XX)\b")
    wrong = [f"{p.relative_to(ROOT)}: {m[0]}" for p in rules.program_files() for m in mark.finditer(p.read_text())]
    assert wrong == []
    assert mark.search("x = 1  # TO" + "DO later")


def test_every_import_is_a_declared_dependency():
    tree = ast.parse((ROOT / "setup.py").read_text())
    strings = [n.value for n in ast.walk(tree) if isinstance(n, ast.Constant) and isinstance(n.value, str)]
    declared = {re.split(r"[<>=!~\[ ;]", s)[0].lower().replace("_", "-") for s in strings}
    ours = {"megatron_lite", "tools", "tests", "examples", "__future__"}
    missing = {}
    for path in rules.program_files():
        names = rules.top_level_imports(path.read_text()) - sys.stdlib_module_names - ours
        unknown = {n for n in names if INDEX_NAME.get(n, n).lower().replace("_", "-") not in declared}
        if unknown:
            missing[str(path.relative_to(ROOT))] = sorted(unknown)
    assert missing == {}
    assert rules.top_level_imports("def f():\n    import apex.optimizers\n") == {"apex"}


def test_requirements_pin_one_version_of_everything_declared():
    pins = {}
    for path in sorted((ROOT / "requirements").glob("*.txt")):
        for line in path.read_text().splitlines():
            if line and not line.startswith(("#", "-r")):
                name, _, version = line.partition("==")
                assert version and name.lower() not in pins, f"{path.name}: {line}"
                pins[name.lower().replace("_", "-")] = version
    tree = ast.parse((ROOT / "setup.py").read_text())
    core = next(
        k.value for n in ast.walk(tree) if isinstance(n, ast.Call) for k in n.keywords if k.arg == "install_requires"
    )
    assert {re.split("[<>=]", name)[0] for name in ast.literal_eval(core)} <= set(pins)
    assert pins["torch"] == "2.13.0"


def test_the_shell_scripts_parse():
    scripts = [ROOT / ".ci" / "run", *ROOT.glob("examples/**/*.sh"), *ROOT.glob("examples/**/*.sbatch")]
    for script in scripts:
        done = subprocess.run(["bash", "-n", script], capture_output=True, text=True, timeout=20)
        assert done.returncode == 0, done.stderr
