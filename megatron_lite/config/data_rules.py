"""Rules about corpora and about what a stage reads of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from megatron_lite.config.schema import Recipe, Source
from megatron_lite.config.suggest import did_you_mean
from megatron_lite.config.violation import Found, StageView, Violation

# --- sections of corpora ---


def source_lengths_leave_something(recipe: Recipe) -> Found:
    """min_length <= max_length."""
    for where, source in _all_sources(recipe):
        if source.max_length is not None and source.min_length > source.max_length:
            yield Violation(
                (f"{where}.min_length", f"{where}.max_length"),
                f"{where}: min_length={source.min_length} is above max_length={source.max_length}, "
                "which leaves no document",
            )


def validation_has_no_epochs(recipe: Recipe) -> Found:
    """Validation sets are read once, from their start."""
    for name, source in recipe.validation.items():
        if source.max_epochs is not None:
            where = f"validation.{name}.max_epochs"
            yield Violation((where,), f"{where} has no meaning: a validation set is read once; remove it")


def exhaustion_needs_a_limit(recipe: Recipe) -> Found:
    """A source without max_epochs is never exhausted."""
    for where, source in _all_sources(recipe):
        if source.when_exhausted == "stop" and source.max_epochs is None:
            yield Violation(
                (f"{where}.when_exhausted", f"{where}.max_epochs"),
                f"{where}: when_exhausted = 'stop' has no meaning without max_epochs, for the source is read again as "
                "often as a stage needs; set max_epochs, or remove it",
            )


def splits_have_their_part(recipe: Recipe) -> Found:
    """split and part come together, and the part is one of the split with a weight above 0."""
    for where, source in _all_sources(recipe):
        split, part, keys = source.split, source.part, (f"{where}.split", f"{where}.part")
        if (split is None) != (part is None):
            given, missing = ("part", "split") if split is None else ("split", "part")
            yield Violation(keys, f"{where}: {given} is set but {missing} is not; set both, or none to read it whole")
        elif split is not None and part is not None:
            if part >= len(split):
                yield Violation(
                    keys, f"{where}: part={part}, but split {_shown(split)} has parts 0 to {len(split) - 1}; choose one"
                )
            elif split[part] == 0:
                yield Violation(
                    keys,
                    f"{where}: part={part} of split {_shown(split)} has weight 0 and so no documents; give it some",
                )


def splits_of_a_corpus_agree(recipe: Recipe) -> Found:
    """Parts of one corpus are disjoint only if they are parts of the same split."""
    first: dict[str, tuple[str, Source]] = {}
    for where, source in _all_sources(recipe):
        if source.split is None:
            continue
        other, known = first.setdefault(source.path, (where, source))
        if known.split != source.split:
            assert known.split is not None
            yield Violation(
                (f"{where}.split", f"{other}.split", f"{where}.path", f"{other}.path"),
                f"{other} and {where} divide {source.path} by different splits, {_shown(known.split)} and "
                f"{_shown(source.split)}, so that their parts may overlap; use one split",
            )


def _all_sources(recipe: Recipe) -> Iterator[tuple[str, Source]]:
    yield from ((f"sources.{name}", source) for name, source in recipe.sources.items())
    yield from ((f"validation.{name}", source) for name, source in recipe.validation.items())


# --- the data of a stage ---


def stage_has_one_mixture(view: StageView) -> Found:
    """blend or fractions, not both."""
    blend, fractions = view.stage.blend, view.stage.fractions
    if (blend is None) == (fractions is None):
        given = "neither is set" if blend is None else f"blend={blend} and fractions={fractions} are both set"
        yield view.says(
            f"{view.where}: exactly one of blend (shares of the tokens) and fractions (of each source) mixes its "
            f"sources, but {given}",
            *("blend", "fractions"),
        )


def mixture_names_exist(view: StageView) -> Found:
    """Every name of a blend, or of fractions, is one of [sources]."""
    sources = view.recipe.sources
    for key, mixture in _mixtures(view):
        for name in mixture:
            if name not in sources:
                yield view.says(
                    f"{view.where}: {key} names '{name}', which is not in [sources] ({', '.join(sources) or 'empty'})"
                    f"{did_you_mean(name, sources)}",
                    *(key, "sources"),
                )


def mixture_weights_are_proportions(view: StageView) -> Found:
    """Weights are 0 or more, and some weight is above 0."""
    for key, mixture in _mixtures(view):
        for name, weight in mixture.items():
            if weight < 0:
                yield view.says(f"{view.where}: {key} {name}={weight:g} is negative; use 0 or more", key)
        if not any(weight > 0 for weight in mixture.values()):
            yield view.says(f"{view.where}: {key} = {mixture} has nothing above 0; give one source a weight", key)


def best_fit_masks_documents(view: StageView) -> Found:
    """Documents packed by length have nothing to do with each other, and padding is a segment of its own."""
    if view.stage.packing == "best_fit" and not view.stage.mask_documents:
        yield view.says(
            f"{view.where}: packing = 'best_fit' puts documents into a row by their length, so attention has to stay "
            "inside each; set mask_documents = true, or use packing = 'concat'",
            *("packing", "mask_documents"),
        )


def _mixtures(view: StageView) -> Iterator[tuple[str, dict[str, float]]]:
    for key, mixture in (("blend", view.stage.blend), ("fractions", view.stage.fractions)):
        if mixture is not None:
            yield key, mixture


def _shown(split: tuple[float, ...]) -> str:
    return f"[{', '.join(f'{weight:g}' for weight in split)}]"


DATA_RECIPE_RULES: tuple[Callable[[Recipe], Found], ...] = (
    source_lengths_leave_something,
    validation_has_no_epochs,
    exhaustion_needs_a_limit,
    splits_have_their_part,
    splits_of_a_corpus_agree,
)
DATA_STAGE_RULES: tuple[Callable[[StageView], Found], ...] = (
    stage_has_one_mixture,
    mixture_names_exist,
    mixture_weights_are_proportions,
    best_fit_masks_documents,
)
