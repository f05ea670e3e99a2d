"""A stage from its first step to its last: fetch, step, report, evaluate, save."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from time import perf_counter

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.state import TrainState
from megatron_lite.config.check import check
from megatron_lite.config.schema import Recipe
from megatron_lite.config.stages import for_stage
from megatron_lite.data.batch import Batch
from megatron_lite.data.loader import StepLoader
from megatron_lite.errors import ConfigError, TrainingError, require
from megatron_lite.optim.schedule import learning_rate
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid, kv_replicas
from megatron_lite.runtime.guard import Stop, sum_over, together
from megatron_lite.runtime.launch import process_groups, read_launch
from megatron_lite.runtime.lock import folder_lock
from megatron_lite.train.evaluate import evaluate
from megatron_lite.train.journal import Journal
from megatron_lite.train.replicas import check_replicas
from megatron_lite.train.stage import StageRun, open_stage
from megatron_lite.train.step import StepResult, train_step


def run_stage(recipe: Recipe, index: int, resume: str = "auto") -> None:
    """Run stage `index` (from 0) on the ranks that were launched; returns when it is complete or was asked to stop.

    resume: "auto", "none" or a checkpoint folder. Errors a user can mend are raised on every rank alike.
    """
    launch = read_launch()
    if problems := check(recipe, launch.world_size, stage=index):
        raise ConfigError("\n  - ".join([f"the recipe cannot run on {launch.world_size} ranks:", *problems]))
    merged = for_stage(recipe, index)
    parallel = merged.parallel
    replicas = kv_replicas(merged.model.num_key_value_heads, parallel.tp)
    grid = Grid(launch.world_size, parallel.tp, parallel.pp, parallel.cp, parallel.ep, replicas)
    with Stop(recipe.runtime.stop_after_s) as stop, process_groups(launch, grid, recipe.runtime.timeout_s) as ctx:
        run_here(recipe, index, ctx, stop, resume)


def run_here(recipe: Recipe, index: int, ctx: ParallelContext, stop: Stop, resume: str = "auto") -> StageRun:
    """The same on ranks whose process groups exist; returns the stage as it was left."""
    run = open_stage(recipe, index, ctx, resume)
    with ExitStack() as held:
        writes = ctx.world.rank == 0
        together(ctx, lambda: held.enter_context(folder_lock(run.folder)) if writes else None)
        journal = held.enter_context(Journal(run))
        journal.opening()
        if not run.state.complete:
            steps(run, stop, journal)
    run.optimizer.wait()
    return run


def steps(run: StageRun, stop: Stop, journal: Journal) -> None:
    """Train from where the stage stands to its end, or until some rank is asked to stop."""
    loader = together(run.ctx, lambda: open_loader(run))
    try:
        if run.state.step == 0:
            measure(run, journal)
        while run.state.step < run.stage.num_steps:
            if sum_over(run.ctx, run.ctx.world, stop.wanted())[0]:
                save(run, journal)
                journal.say(f"stopped after step {run.state.step} ({stop.reason or 'asked on another rank'})")
                return
            one_step(run, loader, journal)
            if due(run.recipe.guard.check_replicas_every, run.state.step):
                check_replicas(run.optimizer, run.ctx, f"after step {run.state.step}")
            last = run.state.step == run.stage.num_steps
            if last or due(run.recipe.evaluation.every, run.state.step):
                measure(run, journal)
            if last or due(run.recipe.checkpoint.every, run.state.step):
                save(run, journal)
    finally:
        loader.close()


def one_step(run: StageRun, loader: StepLoader, journal: Journal) -> None:
    """Fetch the rows of a step, train on them, count, report."""
    begin = perf_counter()
    number = run.state.step + 1
    batches = fetch(run, loader)
    fetched = perf_counter()
    lr = learning_rate(run.stage.lr_in_steps, number, run.stage.num_steps)
    sources = [[run.rows.source_of(row) for row in batch.samples] for batch in batches]
    result = train_step(
        run.model, run.optimizer, batches, run.ctx, lr=lr, clip=run.recipe.optimizer.clip,
        overlap=run.recipe.parallel.overlap_pipeline, sources=sources, num_sources=len(run.rows.names),
    )  # fmt: skip
    run.state = advance(run.state, result, run)
    journal.step(result, lr=lr, seconds=perf_counter() - begin, data_seconds=fetched - begin)
    limit = run.recipe.guard.max_skips
    require(
        run.state.consecutive_skips <= limit,
        f"step {number}: loss or gradients were not finite {run.state.consecutive_skips} steps in a row, more than "
        f"guard.max_skips={limit}; the last checkpoint is untouched: lower the learning rate, or look at the data of "
        "these steps (logging.samples names the rows)",
        TrainingError,
    )


def fetch(run: StageRun, loader: StepLoader) -> list[Batch]:
    """The next step's micro-batches of this rank. If any rank cannot read its rows, all raise that rank's error."""
    return together(run.ctx, lambda: next(loader))


def advance(state: TrainState, result: StepResult, run: StageRun) -> TrainState:
    """Count a step. A skipped one uses up its rows and its place in the schedule, but is no update."""
    tokens = run.stage.batch_at(state.step + 1)
    return replace(
        state,
        step=state.step + 1,
        consumed_samples=state.consumed_samples + tokens // run.stage.seq_len,
        consumed_tokens=state.consumed_tokens + tokens,
        total_tokens=state.total_tokens + tokens,
        optimizer_steps=run.optimizer.updates,
        skipped=state.skipped + result.skipped,
        consecutive_skips=state.consecutive_skips + 1 if result.skipped else 0,
        complete=state.step + 1 == state.num_steps,
    )


def due(every: int, step: int) -> bool:
    """Whether something done every `every` steps (0: never) falls on this one."""
    return every > 0 and step % every == 0


def measure(run: StageRun, journal: Journal) -> None:
    """Evaluate on every validation set."""
    if run.validation:
        losses = evaluate(
            run.model, run.validation, run.ctx, rows=run.recipe.evaluation.rows, micro_batch=run.stage.micro_batch,
            mask_documents=run.stage.mask_documents,
        )  # fmt: skip
        journal.evaluation(losses)


def save(run: StageRun, journal: Journal) -> None:
    """Write a checkpoint of the state as it is."""
    begin = perf_counter()
    keep = run.recipe.checkpoint.keep
    folder = store.save(run.checkpoints, run.state.step, run.optimizer.owned(), run.ctx, run.state.to_meta(), keep)
    journal.say(f"saved {folder} in {perf_counter() - begin:.1f} s")


def open_loader(run: StageRun) -> StepLoader:
    """The rows from where the stage stands to its end."""
    stage, dp, done = run.stage, run.ctx.dp, run.state.step
    return StepLoader(
        run.rows, steps=(stage.rows_after(step + 1) - stage.rows_after(step) for step in range(done, stage.num_steps)),
        start_row=run.state.consumed_samples, micro_batch=stage.micro_batch, rank=dp.rank, size=dp.size,
        mask_documents=stage.mask_documents,
    )  # fmt: skip
