"""A few combinations of settings in which every pair of values of two axes occurs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

Case = dict[str, Any]


def every(axes: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool]) -> list[Case]:
    """All combinations that are possible."""
    cases = (dict(zip(axes, values, strict=True)) for values in product(*axes.values()))
    return [case for case in cases if possible(case)]


def pairwise(axes: Mapping[str, Sequence[Any]], possible: Callable[[Case], bool]) -> list[Case]:
    """Possible combinations that together contain every pair that some possible one contains; greedy, deterministic."""
    left = every(axes, possible)
    wanted = {pair for case in left for pair in _pairs(case)}
    chosen = []
    while wanted:
        best = max(left, key=lambda case: len(_pairs(case) & wanted))
        chosen.append(best)
        wanted -= _pairs(best)
    return chosen


def _pairs(case: Case) -> set[tuple[tuple[str, Any], tuple[str, Any]]]:
    return set(combinations(case.items(), 2))


def name(case: Case) -> str:
    """As a test's id."""
    return "-".join(f"{axis}{value}" if not isinstance(value, str) else value for axis, value in case.items())
