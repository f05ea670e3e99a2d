"""Everything that is wrong with a recipe, at once: keys, types, ranges, and the rules across fields.

Rules can only be asked of values that have the right types. So a misspelt key is read as the one that was meant, a
value that cannot be used is replaced by a stand-in, and what a rule then says about a replaced value is left out.
"""

from __future__ import annotations

import copy
import typing
from collections.abc import Iterator
from types import UnionType
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from megatron_lite.config.check import violations
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Recipe, Stage
from megatron_lite.config.stages import OVERRIDABLE
from megatron_lite.config.suggest import closest, did_you_mean

# What a required value is taken to be while the rest of a recipe is checked; never part of a loaded recipe.
STAND_INS: dict[str, Any] = {
    **dict.fromkeys(("run", "path", "name"), "stand-in"),
    **dict.fromkeys(("seq_len", "batch_tokens", "micro_batch", "original_max_position_embeddings"), 1),
    **{"factor": 1.0, "peak": 1.0, "lr": {"peak": 1.0}, "sources": {}, "model": PRESETS["tiny-qwen3"]},
    **PRESETS["tiny-qwen3"],
}


class SchemaError(NamedTuple):
    """One value that does not fit the schema."""

    loc: tuple[str | int, ...]
    kind: str  # pydantic's name of the fault
    value: Any
    text: str

    @property
    def path(self) -> str:
        """Dotted, as in --set."""
        return ".".join(str(key) for key in self.loc)

    @property
    def unknown(self) -> bool:
        """Is it a key that does not exist?"""
        return self.kind == "extra_forbidden"

    def message(self) -> str:
        """One line for the reader of the recipe."""
        if self.unknown:
            known = _fields(self.loc[:-1])
            hint = did_you_mean(str(self.loc[-1]), known) or f"; there are {', '.join(known)}"
            return f"unknown key {self.path}{hint}"
        if self.kind == "missing":
            return f"missing key {self.path}"
        shown = repr(self.value)
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        return f"{self.path} = {shown}: {self.text[:1].lower()}{self.text[1:]}"


def validate(raw: dict[str, Any], launched: bool = False) -> tuple[Recipe | None, list[str]]:
    """The recipe, or None where it does not fit the schema, and every problem with it.

    launched: what depends on the number of ranks is left to whoever knows it.
    """
    raw = copy.deepcopy(raw)
    unknown = [error for error in _schema_errors(raw) if error.unknown]
    for error in unknown:
        _rename(raw, error)
    wrong = list(_schema_errors(raw))
    replaced = [_replace(raw, error) for error in wrong]
    problems = [error.message() for error in unknown + wrong]
    if any(_schema_errors(raw)):
        return None, problems  # too far from a recipe to ask the rules
    recipe = Recipe.model_validate(raw)
    problems += [
        violation.message for violation in violations(recipe, sized=not launched) if not violation.touches(replaced)
    ]
    return (None if unknown or wrong else recipe), problems


def _schema_errors(raw: dict[str, Any]) -> Iterator[SchemaError]:
    """Every value that does not fit the schema, the overrides of stages included."""
    yield from _errors_of(Recipe, raw, ())
    stages = raw.get("stages")
    for i, stage in enumerate(stages if isinstance(stages, list) else []):
        for name, section in OVERRIDABLE.items():
            override = stage.get(name) if isinstance(stage, dict) else None
            if isinstance(override, dict):
                yield from _errors_of(section, override, ("stages", i, name))


def _errors_of(section: type[BaseModel], raw: dict[str, Any], at: tuple[str | int, ...]) -> Iterator[SchemaError]:
    try:
        section.model_validate(raw)
    except ValidationError as error:
        for detail in error.errors(include_url=False):
            loc = tuple(key for key in detail["loc"] if key != "[key]")
            if detail["type"] == "too_short" and detail["input"]:
                continue  # only because its items are wrong, which is said elsewhere
            yield SchemaError(at + loc, detail["type"], detail["input"], detail["msg"])


def _rename(raw: dict[str, Any], error: SchemaError) -> None:
    """Read an unknown key as the one that was meant, unless that is there too."""
    table = _table_of(raw, error.loc)
    value = table.pop(error.loc[-1])
    meant = closest(str(error.loc[-1]), _fields(error.loc[:-1]))
    if meant is not None:
        table.setdefault(meant, value)


def _replace(raw: dict[str, Any], error: SchemaError) -> str:
    """Put a stand-in for a value, or let its default stand; returns the dotted key that was replaced."""
    loc = error.loc
    table = _table_of(raw, loc)
    while not isinstance(table, dict):  # an entry of a list of numbers: the whole list goes
        loc = loc[:-1]
        table = _table_of(raw, loc)
    table.pop(loc[-1], None)
    section = _section_at(loc[:-1])
    if section is not None and loc[-1] in STAND_INS and section.model_fields[str(loc[-1])].is_required():
        table[loc[-1]] = copy.deepcopy(STAND_INS[str(loc[-1])])
    return ".".join(str(key) for key in loc)


def _table_of(raw: Any, loc: tuple[str | int, ...]) -> Any:
    """What holds the value at `loc`."""
    for key in loc[:-1]:
        raw = raw.get(key, {}) if isinstance(raw, dict) else raw[key]
    return raw


def _section_at(loc: tuple[str | int, ...]) -> type[BaseModel] | None:
    """The section that a table at `loc` is read as, if it is one."""
    kind: Any = Recipe
    for key in loc:
        if not _is_section(kind):
            kind = [item for item in typing.get_args(kind) if item is not Ellipsis][
                -1
            ]  # of dict[str, X], tuple[X, ...]
        elif kind is Stage and key in OVERRIDABLE:
            kind = OVERRIDABLE[str(key)]
        else:
            kind = kind.model_fields[str(key)].annotation
        if isinstance(kind, UnionType):
            kind = next(item for item in typing.get_args(kind) if item is not type(None))
    return kind if _is_section(kind) else None


def _is_section(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _fields(loc: tuple[str | int, ...]) -> list[str]:
    section = _section_at(loc)
    return list(section.model_fields) if section else []
