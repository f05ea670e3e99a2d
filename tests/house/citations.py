"""Which requirements of tests/requirements.txt no test cites: `make req` prints them.

A test cites with `@pytest.mark.req("D01", "D12")`. The marks are read from the sources, nothing is imported.
"""

from __future__ import annotations

import ast
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]


def requirements(text: str) -> dict[str, str]:
    """Id -> rule, from lines `A01  the rule`; lines that start with # are headings."""
    lines = [line.split(None, 1) for line in text.splitlines() if line.strip() and not line.startswith("#")]
    assert all(len(line) == 2 for line in lines)
    assert len({line[0] for line in lines}) == len(lines), "an id stands twice"
    return {name: rule.strip() for name, rule in lines}


def cited(source: str) -> set[str]:
    """The ids in all pytest.mark.req(...) of a test file."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "req":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant)}
    return found


def all_cited() -> set[str]:
    """The ids that any test under tests/ cites."""
    return set().union(*(cited(path.read_text()) for path in TESTS.rglob("test_*.py")))


def main() -> None:
    known = requirements((TESTS / "requirements.txt").read_text())
    open_ones = {name: rule for name, rule in known.items() if name not in all_cited()}
    for name, rule in open_ones.items():
        print(f"{name}  {rule}")
    print(f"{len(known) - len(open_ones)} of {len(known)} requirements are cited by a test")


if __name__ == "__main__":
    main()
