"""Runs of stages that pack by best fit, mix by fractions and end where a source runs dry."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_lite.checkpoint import store
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.context import ParallelContext, single_process
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import curve, lines, run_stages, tiny_recipe

STAGE = {"packing": "best_fit", "blend": None, "fractions": {"a": 1.0, "b": 0.5}}


def _both(ctx: ParallelContext, straight, broken) -> tuple[dict, dict]:
    return run_stages(ctx, straight, 0), (run_stages(ctx, broken, 0, stop_after=4), run_stages(ctx, broken, 0))[1]


@pytest.mark.req("D12", "D14")
def test_stopping_and_going_on_with_packed_documents_is_to_the_bit(tmp_path: Path) -> None:
    straight, broken = (tiny_recipe(tmp_path, run=str(tmp_path / name), stage=STAGE) for name in ("one", "two"))
    ((never, resumed),) = run_ranks(_both, 1, straight, broken)
    assert never["weights"] == resumed["weights"] and curve(straight) == curve(broken)
    assert lines(straight, 0, "samples") == lines(broken, 0, "samples")


def test_a_change_of_fractions_is_refused_on_resume(tmp_path: Path) -> None:
    def resume(ctx: ParallelContext) -> None:
        recipe = tiny_recipe(tmp_path, stage=STAGE)
        run_stages(ctx, recipe, 0, stop_after=1)
        other = tiny_recipe(tmp_path, stage=STAGE | {"fractions": {"a": 1.0, "b": 0.25}})
        with pytest.raises(CheckpointError, match=r"fractions.b: 0.5 in the checkpoint, 0.25 now"):
            run_stages(ctx, other, 0)

    resume(single_process())


def test_a_stage_is_complete_where_its_source_runs_dry_and_the_next_one_starts_there(tmp_path: Path, capsys) -> None:
    sources = {"a": {"path": str(tmp_path / "a"), "max_epochs": 0.5, "when_exhausted": "stop"}}
    recipe = tiny_recipe(tmp_path, sources=sources, stage=STAGE | {"steps": 50})
    run_stages(single_process(), recipe, 0, 1)
    out = capsys.readouterr().out
    steps = len(curve(recipe))
    assert 3 < steps < 50
    assert f"the stage ends after {steps} of 50 steps: sources.a has rows for max_epochs=0.5" in out
    assert lines(recipe, 0, "metrics")[-1]["lr"] == 0.0, "the schedule ends with the stage"
    folder = store.latest(Path(recipe.run) / "stage-1/checkpoints")
    assert folder is not None and folder.name == f"step-{steps:08d}"
    assert len(curve(recipe, 1)) < 50
