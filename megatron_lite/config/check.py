"""Is a recipe one that can run? Asks every rule and reports all violations together.

What is not built yet is one table, `NOT_BUILT`. Recipes that need it can be loaded and planned, not trained.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_lite.config.data_rules import DATA_RECIPE_RULES, DATA_STAGE_RULES
from megatron_lite.config.layout_rules import LAYOUT_RULES
from megatron_lite.config.rules import MODEL_RULES, RECIPE_RULES, STAGE_RULES
from megatron_lite.config.schema import Recipe
from megatron_lite.config.stages import for_stage
from megatron_lite.config.violation import StageView, Violation

NOT_BUILT: tuple[tuple[Callable[[StageView], bool], tuple[str, ...], str], ...] = (
    (lambda view: view.parallel.ep > 1, ("parallel.ep",), "expert parallelism (ep > 1)"),
    (lambda view: view.model.num_experts > 0, ("model.num_experts",), "a mixture of experts (num_experts > 0)"),
)


def check(
    recipe: Recipe, world_size: int | None = None, *, stage: int | None = None, planned: bool = False
) -> list[str]:
    """Every violation of a rule across fields, as messages; empty if the recipe can run.

    world_size: ranks launched (default: what [parallel] says the recipe is meant for); stage: look at this stage alone
    (index from 0), as a launch does; planned: leave out what is not built yet, which can be planned but not trained.
    """
    found = [violation.message for violation in violations(recipe, world_size, stage)]
    if not planned:
        found += [violation.message for violation in not_built(recipe, stage)]
    return list(dict.fromkeys(found))


def violations(
    recipe: Recipe, world_size: int | None = None, stage: int | None = None, *, sized: bool = True
) -> list[Violation]:
    """Every violation of a rule; see check. Not `sized`: the number of ranks is unknown, its rules are not asked."""
    found = [violation for rule in (*RECIPE_RULES, *DATA_RECIPE_RULES) for violation in rule(recipe)]
    found += [violation for rule in MODEL_RULES for violation in rule(recipe.model)]
    for view in _views(recipe, world_size, stage, sized):
        found += [violation for rule in (*STAGE_RULES, *DATA_STAGE_RULES, *LAYOUT_RULES) for violation in rule(view)]
    return list({violation.message: violation for violation in found}.values())


def not_built(recipe: Recipe, stage: int | None = None) -> list[Violation]:
    """What the recipe asks for that cannot be trained yet."""
    found = []
    for view in _views(recipe, None, stage):
        for applies, keys, what in NOT_BUILT:
            if applies(view):
                message = f"{view.layout_where}: {what}; it can be planned with --dry-run, not trained yet"
                found.append(view.says(message, *keys))
    return list({violation.message: violation for violation in found}.values())


def _views(recipe: Recipe, world_size: int | None, only: int | None, sized: bool = True) -> Iterator[StageView]:
    for i in range(len(recipe.stages)):
        if only is None or i == only:
            merged = for_stage(recipe, i)
            ranks = world_size or (merged.parallel.world_size if sized else None)
            yield StageView(i, recipe, merged.model, merged.parallel, ranks)
