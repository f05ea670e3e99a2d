"""Where a run stands, and whether a recipe may go on from there."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from megatron_lite.errors import CheckpointError, require

VERSION = 1

# What a stage may not change once it has begun: it would be another model, or another order of samples.
_FIXED_TOP = ("seed", "model")
_FIXED_STAGE = (
    *("name", "seq_len", "batch_tokens", "batch_ramp", "rope_theta", "rope_scaling"),
    *("packing", "mask_documents", "blend", "fractions"),
)
# Says where a preset came from, or how rows are padded in memory: no part of what the model computes.
_FREE_MODEL = ("model.preset", "model.vocab_multiple")


@dataclass(frozen=True)
class TrainState:
    """All counters of a run after a step, and what it was running. Weights and moments lie beside it."""

    stage: int  # index in the recipe, from 0
    stage_name: str
    step: int  # optimizer steps of this stage that are done, skipped ones included
    num_steps: int  # of the whole stage
    consumed_samples: int  # rows of this stage
    consumed_tokens: int  # tokens of this stage
    total_tokens: int  # over all stages
    optimizer_steps: int  # updates the moments have seen (bias correction)
    skipped: int  # steps without an update, of this stage
    consecutive_skips: int
    complete: bool  # the stage is done; the next one may start from here
    data: str  # fingerprint of the corpora and the options that decide the order of rows
    recipe: str  # the resolved recipe, TOML

    def to_meta(self) -> dict[str, Any]:
        """As `save` takes it."""
        return {"version": VERSION, "state": {field.name: getattr(self, field.name) for field in fields(self)}}

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> TrainState:
        """From what `read_meta` returns. CheckpointError: not the state of a run, or one of another version."""
        state, names = meta.get("state"), {field.name for field in fields(cls)}
        require(
            meta.get("version") == VERSION and isinstance(state, dict) and set(state) == names,
            f"the checkpoint holds no training state of version {VERSION}: it has {sorted(state or meta)}",
            CheckpointError,
        )
        assert isinstance(state, dict)
        return cls(**state)


def compare_recipes(saved: dict[str, Any], now: dict[str, Any], stage: int) -> list[str]:
    """Whether stage `stage` may go on under recipe `now`; both are `Recipe.model_dump()`s.

    Returns one line for every accepted change (rates, kernels, layout, logging, …). CheckpointError: the model, the
    seed, a source in use or a field of the stage that decides the order of samples changed; lists all of them.
    """
    before, after = _flatten(saved), _flatten(now)
    mixed = saved["stages"][stage] if stage < len(saved["stages"]) else {}
    used = set(mixed.get("blend") or mixed.get("fractions") or {})
    accepted: list[str] = []
    refused: list[str] = []
    for key in dict.fromkeys([*before, *after]):
        old, new = before.get(key), after.get(key)
        if old != new:
            line = f"{key}: {_show(old)} in the checkpoint, {_show(new)} now"
            (refused if _is_fixed(key, stage, used) else accepted).append(line)
    require(
        not refused,
        "the checkpoint belongs to another run; change it back, or start anew in another folder: " + "; ".join(refused),
        CheckpointError,
    )
    return accepted


def check_data(saved: str, now: str) -> None:
    """CheckpointError unless the fingerprint of the data is the one a run began with."""
    require(
        saved == now,
        f"the data are not those the checkpoint was trained on (fingerprint {saved} then, {now} now): a corpus or "
        "what selects its documents changed",
        CheckpointError,
    )


def _is_fixed(key: str, stage: int, used: set[str]) -> bool:
    parts = key.split(".")
    if parts[0] == "stages":
        return parts[1] == str(stage) and parts[2] in _FIXED_STAGE
    if parts[0] == "sources":  # a corpus may move: the fingerprint of its content decides
        return parts[1] in used and parts[-1] != "path"
    return parts[0] in _FIXED_TOP and key not in _FREE_MODEL


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, list | tuple) and any(isinstance(item, dict) for item in value):
        items = enumerate(value)
    else:
        return {prefix: list(value) if isinstance(value, tuple) else value}
    flat = {}
    for key, item in items:
        flat.update(_flatten(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def _show(value: Any) -> str:
    return "nothing" if value is None else repr(value)
