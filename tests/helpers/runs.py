"""Short real runs of a recipe: corpora on disk, two stages, checkpoints; on as many ranks as a test wants."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config.load import read_recipe, to_toml
from megatron_lite.config.schema import Recipe
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.guard import Stop
from megatron_lite.train.loop import run_here
from tests.helpers.corpora import write_corpus

MODEL = {
    "model_type": "qwen3", "vocab_size": 101, "vocab_multiple": 8, "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 128, "qk_norm": True, "tie_word_embeddings": True, "initializer_range": 0.1,
}  # fmt: skip


def tiny_recipe(folder: Path, **sections: Any) -> Recipe:
    """A recipe of two stages of 10 steps over two corpora in `folder`; `sections` replace or extend its top level.

    A section given as a dictionary is merged into the default one; `stage` is merged into every stage.
    """
    for i, name in enumerate(("a", "b")):
        if not (folder / f"{name}.idx").exists():
            rng = np.random.default_rng(i)
            documents = [(rng.integers(0, 101) + 7 * np.arange(rng.integers(3, 90))) % 101 for _ in range(40)]
            write_corpus(folder / name, documents)
    stage = {
        "steps": 10, "seq_len": 16, "batch_tokens": 192, "micro_batch": 2, "mask_documents": True,
        "blend": {"a": 2.0, "b": 1.0}, "lr": {"peak": 5e-3, "warmup_steps": 3},
    } | sections.pop("stage", {})  # fmt: skip
    recipe: dict[str, Any] = {
        "run": str(folder / "run"),
        "precision": "fp32",
        "model": MODEL,
        "sources": {name: {"path": str(folder / name)} for name in ("a", "b")},
        "validation": {"b": {"path": str(folder / "b")}},
        "evaluation": {"rows": 5},
        "checkpoint": {"every": 5, "keep": 4},
        "logging": {"samples": True},
        "stages": [
            {"name": "first"} | stage,
            {"name": "second"} | stage | {"seq_len": 32, "rope_theta": 20_000.0, "micro_batch": 1},
        ],
    }
    for key, value in sections.items():
        recipe[key] = recipe.get(key, {}) | value if isinstance(value, dict) else value
    return read_recipe(to_toml(Recipe.model_validate(recipe)))


def run_stages(ctx: ParallelContext, recipe: Recipe, *indices: int, resume: str = "auto",
               stop_after: int | None = None) -> dict[str, Any]:  # fmt: skip
    """Run stages on these ranks, the last one only up to step `stop_after`; what the last was left with."""
    for index in indices:
        last = index == indices[-1]
        run = run_here(recipe, index, ctx, StopAt(stop_after if last else None), resume)
    return {
        "step": run.state.step,
        "origin": run.origin,
        "weights": hashlib.sha256(
            b"".join(bucket.base.numpy().tobytes() for bucket in run.optimizer.weights.buckets)
        ).hexdigest(),
        "updates": run.optimizer.updates,
        "moments": [shard.tensors["exp_avg"].numpy().copy() for shard in run.optimizer.shards()],
    }


class StopAt(Stop):
    """Asks to stop when it has been asked `steps` times: before step `steps` + 1."""

    def __init__(self, steps: int | None):
        super().__init__(None)
        self.left = steps

    def wanted(self) -> bool:
        if self.left is None:
            return False
        self.left -= 1
        return self.left < 0


def lines(recipe: Recipe, stage: int, name: str) -> list[dict[str, Any]]:
    """The objects of a stage's .jsonl file; stage counts from 0."""
    path = Path(recipe.run) / f"stage-{stage + 1}" / f"{name}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


def curve(recipe: Recipe, stage: int = 0) -> list[tuple[float, ...]]:
    """(step, loss, grad norm, lr) of every step, to the last digit."""
    return [
        tuple(entry[key] for key in ("step", "loss", "grad_norm", "lr")) for entry in lines(recipe, stage, "metrics")
    ]
