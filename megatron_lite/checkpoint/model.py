"""Which model a checkpoint holds: of a run, or imported weights without any training state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import ValidationError

from megatron_lite.checkpoint.files import WIDTH, write_blocks
from megatron_lite.checkpoint.layout import table
from megatron_lite.checkpoint.manifest import Manifest, read_manifest, write_manifest
from megatron_lite.checkpoint.state import VERSION, TrainState
from megatron_lite.config.load import read_recipe
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.stages import for_stage
from megatron_lite.errors import CheckpointError, require
from megatron_lite.parallel.shard import FlatShard, Piece

FILE_BYTES = 5_000_000_000
# No part of what the model computes: where it came from, padding in memory, how weights were drawn, a declared limit.
_FREE = ("preset", "vocab_multiple", "initializer_range", "scaled_output_init", "max_position_embeddings")
# What a stage may stretch to train on longer rows.
_STRETCHED = ("rope_theta", "rope_scaling")


@dataclass(frozen=True)
class SavedModel:
    """Everything but the weights."""

    config: ModelConfig  # RoPE base and scaling as in force when it was saved
    dtype: str  # fp32, bf16 or fp16: what the weights were published in, or trained in beside their fp32 masters
    tokenizer: str | None  # path
    run: TrainState | None = None  # None: imported
    other_dtypes: Mapping[str, str] = field(default_factory=dict)  # imported tensors that were published in another one
    token_ids: Mapping[str, Any] = field(default_factory=dict)  # bos, eos and pad of an import


def read_model(folder: Path) -> SavedModel:
    """The model of a checkpoint. CheckpointError: neither the state of a run nor that of an import."""
    meta = read_manifest(folder).meta
    if "imported" not in meta:
        return _of_run(TrainState.from_meta(meta))
    require(meta.get("version") == VERSION, f"{folder} was imported by another version", CheckpointError)
    state = meta["imported"]
    try:
        config = ModelConfig.model_validate(state["model"])
    except ValidationError as error:
        raise CheckpointError(f"{folder} holds a model this version does not know: {error}") from error
    return SavedModel(
        config=config,
        dtype=state["dtype"],
        tokenizer=str(folder / state["tokenizer"]) if state["tokenizer"] else None,
        other_dtypes=state["other_dtypes"],
        token_ids=state["token_ids"],
    )


def _of_run(state: TrainState) -> SavedModel:
    recipe = for_stage(read_recipe(state.recipe, launched=True), state.stage)
    # A stage with a raised RoPE base may have trained on longer rows than the model is declared for.
    positions = max(recipe.model.max_position_embeddings, recipe.stages[state.stage].seq_len)
    config = recipe.model.model_copy(update={"max_position_embeddings": positions})
    return SavedModel(config, recipe.precision, recipe.tokenizer.path, state)


def compare_models(saved: ModelConfig, now: ModelConfig) -> list[str]:
    """Whether weights of model `saved` are those of a model `now`: one line for every stretch of its positions.

    CheckpointError: it would compute something else; all differing fields are named with both values.
    """
    before, after = saved.model_dump(), now.model_dump()
    differing = [name for name in after if name not in _FREE and before[name] != after[name]]
    lines = {name: f"model.{name}: {before[name]!r} in the checkpoint, {after[name]!r} now" for name in differing}
    refused = [lines[name] for name in differing if name not in _STRETCHED]
    require(not refused, "the weights are of another model: " + "; ".join(refused), CheckpointError)
    return list(lines.values())


def write_imported(
    folder: Path,
    model: SavedModel,
    shapes: Mapping[str, tuple[int, ...]],
    blocks: Callable[[str], Iterable[np.ndarray]],
) -> None:
    """Write weights without optimizer state into `folder`, in the format of `store.save`.

    Each tensor is a bucket of its own; `blocks` of a name are as write_blocks takes them. The tokenizer's path is
    relative to the folder. Raises OSError.
    """
    shards = [
        FlatShard(name, (Piece(name, shape, (0,) * len(shape), shape),), prod(shape), 0, prod(shape), {})
        for name, shape in shapes.items()
    ]
    files: list[dict[str, Any]] = []
    group: dict[str, int] = {}
    for number, shard in enumerate(shards, 1):
        group[shard.bucket] = shard.size
        if number == len(shards) or (sum(group.values()) + shards[number].size) * WIDTH > FILE_BYTES:
            sizes = {f"{name}.master": size for name, size in group.items()}
            path = folder / f"weights-{len(files):05d}.safetensors"
            written = write_blocks(path, sizes, lambda name: blocks(name.removesuffix(".master")))
            place = {"rank": 0, "pp": 0, "tp": 0}
            files.append({**written, **place, "ranges": {name: [0, size] for name, size in group.items()}})
            group = {}
    state = {
        "model": model.config.model_dump(),
        "dtype": model.dtype,
        "other_dtypes": dict(model.other_dtypes),
        "tokenizer": model.tokenizer,
        "token_ids": dict(model.token_ids),
    }
    manifest = Manifest(
        step=0,
        kinds=["master"],
        layout={"world": 1, "pp": 1, "dp": 1, "cp": 1, "tp": 1},
        meta={"version": VERSION, "imported": state},
        coordinates=[{"pp": 0, "tp": 0, "buckets": table(shards)}],
        files=files,
    )
    write_manifest(folder, manifest)
