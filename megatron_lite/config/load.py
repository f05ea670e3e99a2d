"""From a TOML file and `--set` options to a checked Recipe, and back.

Every problem of a file is reported at once (see problems.py). Paths inside a recipe are relative to the folder the run
is started in.
"""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron_lite.config import toml
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.problems import validate
from megatron_lite.config.schema import Recipe
from megatron_lite.config.stages import for_stage, stage_index
from megatron_lite.config.suggest import did_you_mean
from megatron_lite.errors import ConfigError

__all__ = ["for_stage", "load_recipe", "read_recipe", "stage_index", "to_toml"]


def load_recipe(path: Path, overrides: Sequence[str] = (), *, launched: bool = False) -> Recipe:
    """Read a recipe file, apply `--set` options, expand the preset, check everything.

    launched: the number of ranks is a fact, whatever the recipe is meant for; leave what depends on it to `check`.
    Raises ConfigError that lists every problem of the file and of the options.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot read the recipe {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"the recipe {path} is not UTF-8 text (byte {error.start})") from error
    return read_recipe(text, overrides, where=str(path), launched=launched)


def read_recipe(text: str, overrides: Sequence[str] = (), where: str = "recipe", *, launched: bool = False) -> Recipe:
    """As load_recipe, from the text of a recipe; `where` names it in messages."""
    try:
        raw = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{where} is not valid TOML: {error}") from error
    problems = [problem for option in overrides if (problem := _set(raw, option))]
    problems += _expand_preset(raw)
    recipe, more = validate(raw, launched)
    problems += more
    if problems or recipe is None:
        count = "1 problem" if len(problems) == 1 else f"{len(problems)} problems"
        raise ConfigError("\n  - ".join([f"{where} has {count}:", *problems]))
    return recipe


def to_toml(recipe: Recipe) -> str:
    """The resolved recipe: every value that is in force, defaults and preset included. Reads back as an equal one."""
    return toml.write(recipe.model_dump())


def _set(raw: dict[str, Any], option: str) -> str | None:
    """Apply one `a.b=value`; nothing after `=` removes the key. Returns what is wrong with it, if anything."""
    path, equals, text = option.partition("=")
    keys = path.strip().split(".")
    if not equals or not all(keys):
        return f"--set {option}: write it as section.key=value, list entries by number from 0 (stages.0.seq_len=4096)"
    at: Any = raw
    for depth, key in enumerate(keys[:-1]):
        problem = _not_a_key(at, key, ".".join(keys[:depth]), option)
        if problem:
            return problem
        at = at[int(key)] if isinstance(at, list) else at.setdefault(key, {})
    problem = _not_a_key(at, keys[-1], ".".join(keys[:-1]), option)
    if problem:
        return problem
    last = int(keys[-1]) if isinstance(at, list) else keys[-1]
    if text.strip():
        at[last] = _parse_value(text.strip())
    elif isinstance(at, dict):
        at.pop(last, None)
    else:
        return f"--set {option}: entry {last} of {'.'.join(keys[:-1])} cannot be removed"
    return None


def _not_a_key(table: Any, key: str, path: str, option: str) -> str | None:
    """Why `key` cannot be looked up in `table`, which lies at `path`."""
    if isinstance(table, list):
        if key.isascii() and key.isdigit() and int(key) < len(table):
            return None
        return f"--set {option}: {path} has entries 0 to {len(table) - 1}, not '{key}'"
    if isinstance(table, dict):
        return None
    return f"--set {option}: {path} is {table!r}, which has no keys"


def _parse_value(text: str) -> Any:
    try:
        parsed = tomllib.loads(f"value = {text}")
    except tomllib.TOMLDecodeError:
        return text
    plain = list(parsed) == ["value"] and isinstance(parsed["value"], (bool, int, float, str, list, dict))
    return parsed["value"] if plain else text


def _expand_preset(raw: dict[str, Any]) -> list[str]:
    """Put the fields of `model.preset` under those that [model] says itself."""
    model = raw.get("model")
    if not isinstance(model, dict) or not isinstance(model.get("preset"), str):
        return []
    name = model["preset"]
    raw["model"] = PRESETS.get(name, PRESETS["tiny-qwen3"]) | model
    if name in PRESETS:
        return []
    return [f"unknown preset '{name}'{did_you_mean(name, PRESETS)}; there are {', '.join(PRESETS)}"]
