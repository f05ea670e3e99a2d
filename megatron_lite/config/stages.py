"""Which stage of a recipe, and what is in force while it runs."""

from __future__ import annotations

from typing import Any

from megatron_lite.config.schema import Kernels, Optimizer, Parallel, Recipe
from megatron_lite.config.section import Section
from megatron_lite.config.suggest import did_you_mean
from megatron_lite.errors import require

# Sections a stage may override, key by key.
OVERRIDABLE: dict[str, type[Section]] = {"parallel": Parallel, "kernels": Kernels, "optimizer": Optimizer}


def stage_index(recipe: Recipe, key: str) -> int:
    """Index from 0 of the stage that `key` names: its number counted from 1, or its name."""
    names = [stage.name for stage in recipe.stages]
    known = ", ".join(f"{number} ({name})" for number, name in enumerate(names, start=1))
    if key.isascii() and key.isdigit():
        require(1 <= int(key) <= len(names), f"there is no stage {key}; the recipe has {known}")
        return int(key) - 1
    require(key in names, f"there is no stage '{key}'{did_you_mean(key, names)}; the recipe has {known}")
    return names.index(key)


def for_stage(recipe: Recipe, index: int) -> Recipe:
    """The recipe as stage `index` (from 0) sees it: its overrides merged, its RoPE base and scaling in the model.

    A RoPE scaling or base that the stage does not set is the model's, not that of the stage before. All stages stay
    in the recipe, so that `index` stays valid; applying this twice changes nothing.
    """
    stage = recipe.stages[index]
    update: dict[str, Any] = {"model": recipe.model.model_copy(update=_rope(recipe, index))}
    for section, kind in OVERRIDABLE.items():
        merged = getattr(recipe, section).model_dump() | getattr(stage, section)
        update[section] = kind.model_validate(merged)
    return recipe.model_copy(update=update)


def _rope(recipe: Recipe, index: int) -> dict[str, Any]:
    stage = recipe.stages[index]
    chosen = {"rope_theta": stage.rope_theta, "rope_scaling": stage.rope_scaling}
    return {key: value for key, value in chosen.items() if value is not None}
