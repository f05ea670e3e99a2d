"""What a rule looks at, and what it says."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel, Recipe, Stage
from megatron_lite.config.stages import OVERRIDABLE


@dataclass(frozen=True)
class Violation:
    """A message, and the dotted keys of the recipe that it speaks about."""

    keys: tuple[str, ...]
    message: str

    def touches(self, paths: Iterable[str]) -> bool:
        """Does it depend on a value at, above or below one of `paths`?"""
        return any(f"{a}.".startswith(f"{b}.") or f"{b}.".startswith(f"{a}.") for a in self.keys for b in paths)


@dataclass(frozen=True)
class StageView:
    """One stage with what is in force while it runs."""

    index: int
    recipe: Recipe  # as loaded, without the stage's overrides
    model: ModelConfig
    parallel: Parallel
    ranks: int | None  # launched, or what the recipe is meant for; None = unknown

    @property
    def stage(self) -> Stage:
        """The stage itself."""
        return self.recipe.stages[self.index]

    @property
    def where(self) -> str:
        """What messages about the stage begin with."""
        return f"stages.{self.index} ({self.stage.name})"

    @property
    def layout_where(self) -> str:
        """What messages about its layout begin with: the stage only if it has a layout of its own."""
        return self.where if self.stage.parallel else "[parallel]"

    @property
    def dp(self) -> int | None:
        """Data-parallel ranks, if the number of ranks is known and divisible."""
        group = ranks_of_one_replica(self.parallel)
        return self.ranks // group if self.ranks and self.ranks % group == 0 else None

    def says(self, message: str, *keys: str) -> Violation:
        """A violation that depends on keys of the stage, or of sections outside it that it may override or name."""
        mine = tuple(f"stages.{self.index}.{key}" for key in keys)
        others = tuple(key for key in keys if key.split(".")[0] in (*OVERRIDABLE, "model", "sources"))
        return Violation(mine + others, message)


Found = Iterator[Violation]


def ranks_of_one_replica(parallel: Parallel) -> int:
    """Ranks that together hold the model once and see one micro-batch: the multiple that a launch must be of."""
    return parallel.pp * parallel.cp * parallel.tp
