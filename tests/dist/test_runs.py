"""Runs of a recipe: stop and resume, other layouts, stages, refusals. One process starts all ranks of a run."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import store
from megatron_lite.config.schema import Recipe
from megatron_lite.data.loader import validation_batches
from megatron_lite.data.source import TrainingRows
from megatron_lite.errors import CheckpointError, ConfigError, DataError, TrainingError
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import ParallelContext, single_process
from megatron_lite.runtime.lock import folder_lock
from megatron_lite.train.evaluate import mean_loss
from megatron_lite.train.stage import open_stage
from megatron_lite.train.step import train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import curve, lines, run_stages, tiny_recipe


def interrupted(ctx: ParallelContext, recipe: Recipe, at: int) -> dict:
    """Stop the first stage after step `at`, then go on to its end, as a second start would."""
    stopped = run_stages(ctx, recipe, 0, stop_after=at)
    assert stopped["step"] == at
    return run_stages(ctx, recipe, 0)


def both(ctx: ParallelContext, straight: Recipe, broken: Recipe, at: int) -> tuple[dict, dict]:
    return run_stages(ctx, straight, 0), interrupted(ctx, broken, at)


@pytest.mark.req("D01", "D05", "D10", "D12", "D14", "F09")
@pytest.mark.parametrize("world, micro_batch, at", [(1, 2, 5), (2, 1, 5), (2, 3, 7)])
def test_stop_and_resume_equals_never_stopped_to_the_bit(tmp_path: Path, world: int, micro_batch: int, at: int) -> None:
    stage = {"micro_batch": micro_batch, "steps": 12, "lr": {"peak": 5e-3, "warmup_steps": 3}}
    straight = tiny_recipe(tmp_path, run=str(tmp_path / "straight"), stage=stage)
    broken = tiny_recipe(tmp_path, run=str(tmp_path / "broken"), stage=stage)
    for never, resumed in run_ranks(both, world, straight, broken, at):
        assert never["weights"] == resumed["weights"]
        assert f"resumed from {broken.run}/stage-1/checkpoints/step-{at:08d}" in resumed["origin"]
    assert curve(straight) == curve(broken)
    assert lines(straight, 0, "samples") == lines(broken, 0, "samples")
    assert lines(straight, 0, "evaluations") == lines(broken, 0, "evaluations")


LAYOUTS: dict[str, tuple[int, dict[str, int], dict[str, object]]] = {
    "one": (1, {}, {}),
    "dp2": (2, {}, {}),
    "dp3": (3, {}, {}),
    "tp2": (2, {"tp": 2}, {}),
    "pp2": (2, {"pp": 2}, {}),
    "pp3": (3, {"pp": 3}, {}),
    "pp2 in 2 parts": (2, {"pp": 2}, {"virtual_stages": 2}),
    "pp2 tp2": (4, {"pp": 2, "tp": 2}, {"sequence_parallel": True}),
    "cp2": (2, {"cp": 2}, {"cp_attention": "ring"}),
    "cp2 pp2": (4, {"cp": 2, "pp": 2}, {}),
    "cp2 tp2": (4, {"cp": 2, "tp": 2}, {"sequence_parallel": True, "cp_attention": "heads"}),
}
PAIRS = [
    ("dp2", "one"), ("dp2", "dp3"), ("tp2", "one"), ("one", "tp2"), ("tp2", "dp2"), ("pp2", "one"), ("one", "pp3"),
    ("pp2 in 2 parts", "dp2"), ("tp2", "pp2 in 2 parts"), ("pp2 tp2", "pp2"), ("pp3", "pp2 tp2"),
    ("cp2", "one"), ("tp2", "cp2"), ("cp2 pp2", "dp2"), ("pp2 in 2 parts", "cp2 tp2"), ("cp2 tp2", "cp2 pp2"),
]  # fmt: skip


@pytest.mark.req("M09", "C12")
def test_a_run_goes_on_in_another_layout(tmp_path: Path) -> None:
    deep = {"num_hidden_layers": 4}
    truth = tiny_recipe(tmp_path, run=str(tmp_path / "truth"), model=deep)
    run_ranks(run_stages, 1, truth, 0)
    for before, after in PAIRS:
        recipe = tiny_recipe(tmp_path, run=str(tmp_path / f"{before}-{after}"), model=deep)
        for where, stop in ((before, 5), (after, None)):
            world, axes, more = LAYOUTS[where]
            changed = tiny_recipe(tmp_path, run=recipe.run, model=deep, parallel=axes | more)
            run_ranks(_run_and_stop, world, changed, stop, **axes)
        for ours, expected in zip(curve(recipe), curve(truth), strict=True):
            assert ours[0] == expected[0] and abs(ours[1] - expected[1]) <= 1e-5, (before, after)
            assert abs(ours[2] / expected[2] - 1) <= 1e-4, (before, after)
        assert lines(recipe, 0, "samples") == lines(truth, 0, "samples")
        for kind in store.KINDS:
            saved = [
                dict(store.read_tensors(Path(r.run) / "stage-1/checkpoints/step-00000010", kind))
                for r in (recipe, truth)
            ]
            for name, expected_tensor in saved[1].items():
                difference = (saved[0][name] - expected_tensor).abs().max()
                assert difference <= 1e-4 * expected_tensor.abs().max(), (before, after, kind, name)


def _run_and_stop(ctx: ParallelContext, recipe: Recipe, stop_after: int | None) -> None:
    run_stages(ctx, recipe, 0, stop_after=stop_after)


@pytest.mark.req("F12")
def test_the_second_stage_starts_from_the_first_and_says_so(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    first = run_ranks(run_stages, 2, recipe, 0)
    second = run_ranks(_open_second, 2, recipe)
    assert [answer["weights"] for answer in second] == [answer["weights"] for answer in first]
    assert second[0]["origin"][0] == f"weights of stage 1 (first), {recipe.run}/stage-1/checkpoints/step-00000010"
    assert second[0]["updates"] == 10
    run_ranks(run_stages, 2, recipe, 1)
    assert [entry["step"] for entry in lines(recipe, 1, "metrics")] == list(range(1, 11))
    assert lines(recipe, 1, "metrics")[-1]["total_tokens"] == 2 * 1920
    assert lines(recipe, 1, "evaluations")[-1]["losses"]["b"] < lines(recipe, 0, "evaluations")[0]["losses"]["b"]


def _open_second(ctx: ParallelContext, recipe: Recipe) -> dict:
    return run_stages(ctx, recipe, 1, stop_after=0)


def test_moments_are_reset_when_the_stage_says_so(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, stage={"moments": "reset"})
    run_ranks(run_stages, 1, recipe, 0)
    (opened,) = run_ranks(_open_second, 1, recipe)
    assert opened["updates"] == 0 and "optimizer moments start at zero" in opened["origin"]
    assert not any(exp_avg.any() for exp_avg in opened["moments"])


def test_a_stage_waits_for_the_one_before(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with pytest.raises(CheckpointError, match=r"stage 2 starts from stage 1 \(first\), which has no checkpoint"):
        run_ranks(run_stages, 1, recipe, 1)
    run_ranks(_run_and_stop, 1, recipe, 5)
    with pytest.raises(CheckpointError, match="step 5 of 10; finish it first"):
        run_ranks(run_stages, 1, recipe, 1)


@pytest.mark.req("M05")
def test_resume_is_what_was_asked_for_or_an_error(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    run_ranks(_run_and_stop, 1, recipe, 5)
    with pytest.raises(CheckpointError, match=r"--resume none, but .*/stage-1/checkpoints holds the run"):
        run_stages(single_process(), recipe, 0, resume="none")
    with pytest.raises(CheckpointError, match="--resume: there is no folder /nope"):
        run_stages(single_process(), recipe, 0, resume="/nope")
    with pytest.raises(CheckpointError, match="init_from: there is no folder /nope"):
        run_stages(single_process(), tiny_recipe(tmp_path, run=str(tmp_path / "other"), init_from="/nope"), 0)
    for change, key in (({"seed": 7}, "seed: 1234 in the checkpoint, 7 now"), ({"stage": {"seq_len": 8}}, "seq_len")):
        with pytest.raises(CheckpointError, match=key):
            run_stages(single_process(), tiny_recipe(tmp_path, **change), 0)


def test_a_learning_rate_changed_on_resume_is_in_force_and_said(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    run_stages(single_process(), recipe, 0, stop_after=5)
    changed = tiny_recipe(tmp_path, stage={"lr": {"peak": 1e-3, "shape": "constant"}})
    answer = run_stages(single_process(), changed, 0)
    assert [entry["lr"] for entry in lines(recipe, 0, "metrics")[5:]] == [1e-3] * 5
    assert "stages.0.lr.peak: 0.005 in the checkpoint, 0.001 now" in answer["origin"]


def test_init_from_continues_another_runs_weights(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    first = run_stages(single_process(), recipe, 0)
    other = tiny_recipe(tmp_path, run=str(tmp_path / "other"), init_from=f"{recipe.run}/stage-1", seed=7)
    assert run_stages(single_process(), other, 0, stop_after=0)["weights"] == first["weights"]


@pytest.mark.req("L01", "L05")
def test_steps_that_are_not_finite_are_skipped_by_everybody_and_counted(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, guard={"max_skips": 2})
    for answer in run_ranks(_poisoned, 2, recipe, {3, 4}):
        assert answer["step"] == 10 and answer["updates"] == 8
    metrics = lines(recipe, 0, "metrics")
    assert [entry["skipped"] for entry in metrics] == [0, 0, 1, 2, 2, 2, 2, 2, 2, 2]
    assert metrics[0]["lr"] == pytest.approx(5e-3 / 3) and metrics[2]["lr"] == 5e-3  # a skipped step keeps its place
    worse = tiny_recipe(tmp_path, run=str(tmp_path / "worse"), guard={"max_skips": 2})
    for message in run_ranks(_gives_up, 2, worse, {3, 4, 5}):
        assert message.startswith("step 5: loss or gradients were not finite 3 steps in a row, more than")
    assert store.latest(Path(worse.run) / "stage-1" / "checkpoints") is None


def _poisoned(ctx: ParallelContext, recipe: Recipe, steps: set[int]) -> dict:
    """Rank 1's gradient turns infinite at these steps."""
    plain, done = Zero1.expect, itertools.count(1)

    def expect(self: Zero1, last: bool) -> None:
        if last and next(done) in steps and ctx.world.rank == 1:
            self.states[0].grad[0] = float("inf")
        plain(self, last)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Zero1, "expect", expect)
        return run_stages(ctx, recipe, 0)


def _gives_up(ctx: ParallelContext, recipe: Recipe, steps: set[int]) -> str:
    with pytest.raises(TrainingError) as caught:
        _poisoned(ctx, recipe, steps)
    return str(caught.value)


@pytest.mark.req("E14", "F12")
@pytest.mark.parametrize("axes", [{}, {"tp": 2}])
def test_a_replica_that_drifts_stops_the_run_and_is_named(tmp_path: Path, axes: dict[str, int]) -> None:
    recipe = tiny_recipe(tmp_path, guard={"check_replicas_every": 3}, parallel=axes)
    for message in run_ranks(_drifts, 2, recipe, **axes):
        assert message.startswith("after step 3, weights that should be equal are not: model.norm.weight (weight")
        assert "is not equal on ranks [0] and [1]" in message


def _drifts(ctx: ParallelContext, recipe: Recipe) -> str:
    """On rank 1 the last norm moves by itself after the third step."""
    plain, done = Zero1.update, itertools.count(1)

    def update(self: Zero1, *args: float) -> None:
        plain(self, *args)
        self.wait()
        if next(done) == 3 and ctx.world.rank == 1:
            with torch.no_grad():
                self.weights.parameters["model.norm.weight"].add_(1e-3)

    with pytest.MonkeyPatch.context() as patch, pytest.raises(TrainingError) as caught:
        patch.setattr(Zero1, "update", update)
        run_stages(ctx, recipe, 0)
    return str(caught.value)


def test_a_folder_takes_one_run_at_a_time(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path)
    with folder_lock(Path(recipe.run) / "stage-1"):
        for message in run_ranks(_refused, 2, recipe):
            assert message.startswith(f"another run writes to {recipe.run}/stage-1 and holds")
    run_stages(single_process(), recipe, 0)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot write to .*/file/stage-1: Not a directory"):
        run_stages(
            single_process(), tiny_recipe(tmp_path, run=str(tmp_path / "file"), data={"cache": str(tmp_path)}), 0
        )


def _refused(ctx: ParallelContext, recipe: Recipe) -> str:
    with pytest.raises(ConfigError) as caught:
        run_stages(ctx, recipe, 0)
    return str(caught.value)


@pytest.mark.req("R02", "R03")
def test_every_validation_set_has_the_loss_it_has_alone_and_the_one_training_sees(tmp_path: Path) -> None:
    sets = {name: {"path": str(tmp_path / name)} for name in ("a", "b")}
    both = tiny_recipe(tmp_path, run=str(tmp_path / "both"), validation=sets)
    alone = tiny_recipe(tmp_path, run=str(tmp_path / "alone"))
    for recipe in (both, alone):
        run_stages(single_process(), recipe, 0, stop_after=0)
    losses = lines(both, 0, "evaluations")[0]["losses"]
    assert losses["b"] == lines(alone, 0, "evaluations")[0]["losses"]["b"] and losses["a"] != losses["b"]
    run = open_stage(alone, 0, single_process(), "auto")
    batches = list(validation_batches(run.validation["b"], 4, 2, 0, 1, True))
    evaluated = mean_loss(run.model, batches, run.ctx)
    trained = train_step(run.model, run.optimizer, batches, run.ctx, lr=0.0, clip=0.0).loss
    assert trained == pytest.approx(evaluated, rel=1e-6)


def test_unreadable_rows_of_one_rank_stop_all_with_its_words(tmp_path: Path) -> None:
    answers = run_ranks(_one_rank_cannot_read, 2, tiny_recipe(tmp_path))
    assert answers == ["row 13 is gone (on rank 1 of 2)"] * 2


def _one_rank_cannot_read(ctx: ParallelContext, recipe: Recipe) -> str:
    def row(self: TrainingRows, index: int) -> object:
        if index == 14 and ctx.world.rank == 1:
            raise DataError("row 13 is gone")
        return plain(self, index)

    plain = TrainingRows.row
    with pytest.MonkeyPatch.context() as patch, pytest.raises(DataError) as caught:
        patch.setattr(TrainingRows, "row", row)
        run_stages(ctx, recipe, 0)
    return str(caught.value)


def test_the_log_tells_the_loss_of_each_source_apart_in_any_layout(tmp_path: Path) -> None:
    logs = {}
    for world, axes in ((1, {}), (2, {}), (2, {"tp": 2})):
        recipe = tiny_recipe(tmp_path, run=str(tmp_path / f"run-{world}-{axes}"), stage={"steps": 4}, parallel=axes)
        run_ranks(run_stages, world, recipe, 0, **axes)
        logs[world, *axes] = lines(recipe, 0, "metrics")
    for entry in logs[1,]:
        facts = entry["sources"].values()
        assert set(entry["sources"]) == {"a", "b"} and sum(f["tokens"] for f in facts) == entry["valid_tokens"]
        mean = sum(f["loss"] * f["tokens"] for f in facts) / entry["valid_tokens"]
        assert mean == pytest.approx(entry["loss"], rel=1e-6)
    for log in logs.values():
        for ours, one in zip(log, logs[1,], strict=True):
            for name, facts in one["sources"].items():
                assert ours["sources"][name]["tokens"] == facts["tokens"]
                assert ours["sources"][name]["loss"] == pytest.approx(facts["loss"], rel=1e-5)


def test_a_batch_ramp_takes_smaller_steps_first_and_goes_on_after_a_stop(tmp_path: Path) -> None:
    stage = {"steps": None, "tokens": 1536, "batch_ramp": [[192, 64], [512, 128]], "micro_batch": 2}
    straight = tiny_recipe(tmp_path, run=str(tmp_path / "straight"), stage=stage)
    stopped = tiny_recipe(tmp_path, run=str(tmp_path / "stopped"), stage=stage)
    run_ranks(run_stages, 2, straight, 0)
    run_stages(single_process(), stopped, 0, stop_after=4)
    run_ranks(run_stages, 2, stopped, 0)
    entries = lines(straight, 0, "metrics")
    assert [
        entry["valid_tokens"] <= size for entry, size in zip(entries, [64] * 3 + [128] * 3 + [192] * 5, strict=True)
    ]
    assert [entry["consumed_samples"] for entry in entries] == [4, 8, 12, 20, 28, 36, 48, 60, 72, 84, 96]
    assert [entry["samples"] for entry in lines(straight, 0, "samples")] == [
        entry["samples"] for entry in lines(stopped, 0, "samples")
    ]
    for ours, theirs in zip(lines(stopped, 0, "metrics"), entries, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
