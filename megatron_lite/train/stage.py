"""Opening one stage of a recipe: where it starts from, its data, its model with weights, its optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.model import compare_models, read_model
from megatron_lite.checkpoint.state import TrainState, check_data, compare_recipes
from megatron_lite.config.load import read_recipe, to_toml
from megatron_lite.config.schema import Recipe, Stage
from megatron_lite.config.stages import for_stage
from megatron_lite.data.loader import (
    cache_folder,
    check_tokenizer,
    count_indexes,
    ended,
    open_training,
    open_validation,
)
from megatron_lite.data.source import Rows, TrainingRows
from megatron_lite.errors import CheckpointError, require
from megatron_lite.hf.names import tensor_shapes
from megatron_lite.models.init import initial_tensors
from megatron_lite.models.transformer import Transformer, build_rank, named_pieces
from megatron_lite.monitor.sinks import check_packages
from megatron_lite.ops import select
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.runtime.guard import patiently, sum_over, together
from megatron_lite.train.replicas import check_replicas

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass
class StageRun:
    """Everything one stage of a run works with."""

    recipe: Recipe  # as this stage sees it
    index: int  # from 0
    ctx: ParallelContext
    kernels: Mapping[str, str]  # op -> backend
    model: Transformer
    optimizer: Zero1
    rows: TrainingRows
    validation: Mapping[str, Rows]
    state: TrainState  # where it stands; replaced after every step
    origin: list[str]  # how it came to start there, in lines to print

    @property
    def stage(self) -> Stage:
        """The stage's section of the recipe."""
        return self.recipe.stages[self.index]

    @property
    def folder(self) -> Path:
        """Where this stage writes."""
        return stage_folder(self.recipe, self.index)

    @property
    def checkpoints(self) -> Path:
        """Where this stage's checkpoints are."""
        return self.folder / "checkpoints"


def stage_folder(recipe: Recipe, index: int) -> Path:
    """Output folder of a stage; index counts from 0, the folder's number from 1."""
    return Path(recipe.run) / f"stage-{index + 1}"


@dataclass(frozen=True)
class Start:
    """What a stage starts from: a checkpoint of its own, another one's weights, or nothing."""

    checkpoint: Path | None
    resumed: bool  # the checkpoint is one of this very stage
    tokens_before: int  # seen by earlier stages
    why: str


def find_start(recipe: Recipe, index: int, resume: str) -> Start:
    """Decide where stage `index` starts. CheckpointError when what it should start from is missing or not complete."""
    stage, own = recipe.stages[index], stage_folder(recipe, index) / "checkpoints"
    newest = store.latest(own)
    if resume == "none":
        require(newest is None, f"--resume none, but {own} holds the run of an earlier start ({newest}); "
                                "move it away, or leave --resume out to go on from it", CheckpointError)  # fmt: skip
    elif resume != "auto":
        newest = store.find(Path(resume), "--resume")
    if newest is not None:
        return Start(newest, True, 0, f"resumed from {newest}")

    if stage.start == "random" or (stage.start == "previous" and index == 0 and recipe.init_from is None):
        return Start(None, False, 0, f"random weights from seed {recipe.seed}")
    if stage.start != "previous":
        folder = store.find(Path(stage.start), f"stages.{index}.start")
    elif index == 0:
        folder = store.find(Path(str(recipe.init_from)), "init_from")
    else:
        before = stage_folder(recipe, index - 1) / "checkpoints"
        found = store.latest(before)
        name = f"stage {index} ({recipe.stages[index - 1].name})"
        require(found is not None, f"stage {index + 1} starts from {name}, which has no checkpoint in {before}; "
                                   "run it first, or name another in the stage's `start`", CheckpointError)  # fmt: skip
        assert found is not None
        state = TrainState.from_meta(store.read_meta(found))
        require(state.complete, f"stage {index + 1} starts from {name}, which is at step {state.step} of "
                                f"{state.num_steps}; finish it first", CheckpointError)  # fmt: skip
        return Start(found, False, state.total_tokens, f"weights of {name}, {found}")
    return Start(folder, False, 0, f"weights of {folder}")


def open_stage(recipe: Recipe, index: int, ctx: ParallelContext, resume: str) -> StageRun:
    """Build a stage and bring it to where it starts. A collective: what fails on one rank is raised on all."""
    whole, recipe = recipe, for_stage(recipe, index)
    stage = recipe.stages[index]
    start = together(ctx, lambda: find_start(recipe, index, resume))
    cache = cache_folder(recipe)
    kernels = together(ctx, lambda: select.resolve(recipe.kernels.model_dump(), ctx.device.type, recipe.precision))
    together(ctx, lambda: check_packages(recipe.logging))
    rows = patiently(ctx, lambda: open_training(recipe, index, cache))
    recipe = ended(recipe, index, rows)
    stage = recipe.stages[index]
    validation = patiently(ctx, lambda: open_validation(recipe, index, cache))
    num_indexes, built = count_indexes(rows, validation)
    (built_by_all,) = sum_over(ctx, ctx.world, built)
    together(ctx, lambda: check_tokenizer(recipe, index) if ctx.world.rank == 0 else None)

    ops = select.build(kernels)
    model = build_rank(recipe.model, ctx, ops, recipe.parallel, DTYPES[recipe.precision])
    optimizer = Zero1(
        model, named_pieces(model), ctx, recipe.optimizer, ops,
        overlap_gradients=recipe.parallel.overlap_gradients, overlap_weights=recipe.parallel.overlap_weights,
    )  # fmt: skip
    state = TrainState(
        stage=index, stage_name=stage.name, step=0, num_steps=stage.num_steps, consumed_samples=0, consumed_tokens=0,
        total_tokens=start.tokens_before, optimizer_steps=0, skipped=0, consecutive_skips=0, complete=False,
        data=rows.fingerprint, recipe=to_toml(whole),
    )  # fmt: skip
    lines = [start.why, f"indexes: {num_indexes} in {cache}, {int(built_by_all) or 'none'} built now"]
    if start.checkpoint is None:
        optimizer.fill(initial_tensors(recipe.model, recipe.seed))
    else:
        folder = start.checkpoint
        saved, more = together(ctx, lambda: _load(folder, start, state, recipe, optimizer))
        optimizer.publish()
        check_replicas(optimizer, ctx, f"after loading {folder}")
        lines += more
        if start.resumed:
            assert saved is not None
            state = replace(saved, num_steps=state.num_steps, recipe=state.recipe,
                            complete=saved.complete and saved.step >= stage.num_steps)  # fmt: skip
    return StageRun(recipe, index, ctx, kernels, model, optimizer, rows, validation, state, lines)


def _load(folder: Path, start: Start, fresh: TrainState, recipe: Recipe,
          optimizer: Zero1) -> tuple[TrainState | None, list[str]]:  # fmt: skip
    """Read a checkpoint into the optimizer; the state it was saved with, and lines about what differs."""
    stage = recipe.stages[fresh.stage]
    lines: list[str] = []
    held = read_model(folder)
    saved = held.run
    if start.resumed:
        require(saved is not None, f"{folder} was imported and is no run to go on with; name it in `init_from`, or in "
                                   "the stage's `start`", CheckpointError)  # fmt: skip
        assert saved is not None
        require(saved.stage_name == stage.name, f"{folder} is of stage {saved.stage_name}, not {stage.name}; "
                                                "to start from its weights name it in the stage's `start`",
                CheckpointError)  # fmt: skip
        now = read_recipe(fresh.recipe, launched=True).model_dump()
        lines += compare_recipes(read_recipe(saved.recipe, launched=True).model_dump(), now, fresh.stage)
        check_data(saved.data, fresh.data)
        require(saved.step <= stage.num_steps, f"{folder} is at step {saved.step}, the stage now ends at "
                                               f"{stage.num_steps}", CheckpointError)  # fmt: skip
    else:
        lines += compare_models(held.config, recipe.model)
    keep = start.resumed or stage.moments == "keep"
    if keep and saved is None:  # nothing was dropped: an import never had any
        keep = False
        lines.append("imported weights: optimizer moments start at zero")
    elif keep and recipe.checkpoint.on_missing_optimizer == "reset" and not store.has_moments(folder):
        keep = False
        lines.append("the checkpoint has no optimizer moments: they start at zero")
    elif not keep:
        lines.append("optimizer moments start at zero")
    store.load(folder, optimizer.shards(), tensor_shapes(recipe.model), store.KINDS if keep else ("master",))
    if keep:
        assert saved is not None
        optimizer.updates = saved.optimizer_steps
    return saved, lines
