"""'Did you mean' for a name that does not exist."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def closest(name: str, known: Iterable[str]) -> str | None:
    """The known name most like `name`, if any is like it."""
    simple = {_simple(candidate): candidate for candidate in known}
    matches = get_close_matches(_simple(name), simple, n=1, cutoff=0.6)
    return simple[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """'; did you mean 'X'?', or nothing when no known name is like it."""
    match = closest(name, known)
    return f"; did you mean '{match}'?" if match else ""


def _simple(name: str) -> str:
    return name.lower().replace("-", "_")
