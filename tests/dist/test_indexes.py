"""Index files of several nodes and ranks: built once for each folder, and nobody runs out of time waiting for them."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import patch

import pytest

from megatron_lite.config.load import to_toml
from megatron_lite.config.schema import Recipe
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError
from megatron_lite.parallel.context import ParallelContext, build_context
from megatron_lite.runtime.guard import PULSE_S, Stop, patiently
from megatron_lite.train.loop import run_here
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import curve, tiny_recipe

ROOT = Path(__file__).parents[2]


def _with_cache(recipe: Recipe, folder: Path) -> Recipe:
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"cache": str(folder)})})


def _two_nodes(ctx: ParallelContext, recipe: Recipe, caches: Path, delay_s: float, limit_s: float) -> list[str]:
    """Ranks 0 and 1 share a cache and check a corpus slowly, rank 2 has one of its own and does not."""
    ctx = build_context(ctx.grid, rank=ctx.world.rank, device=ctx.device, timeout_s=limit_s)
    slow = ctx.world.rank < 2
    check = IndexedDataset.check

    def check_slowly(dataset: IndexedDataset) -> None:
        time.sleep(delay_s if slow and dataset.prefix.endswith("/a") else 0.0)
        check(dataset)

    with patch.object(IndexedDataset, "check", check_slowly):
        run = run_here(_with_cache(recipe, caches / ("slow" if slow else "fast")), 0, ctx, Stop(None))
    assert run.state.complete
    return run.origin


@pytest.mark.req("B11", "B14")
def test_an_index_that_takes_three_time_limits_to_build_ends_no_run_and_is_built_once_a_node(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, stage={"steps": 1, "lr": {"peak": 1e-3}})
    for origin in run_ranks(_two_nodes, 3, recipe, tmp_path, 15.0, 5.0):
        # documents and a survey of each of two corpora; the validation set finds its own among them
        assert origin[1].startswith("indexes: 4 in ") and origin[1].endswith(", 8 built now")


def _fail_late(ctx: ParallelContext) -> str:
    def action() -> None:
        if ctx.world.rank == 1:
            time.sleep(PULSE_S + 0.3)
            raise DataError("broken corpus")

    with pytest.raises(DataError) as caught:
        patiently(ctx, action)
    return str(caught.value)


def test_what_fails_while_others_wait_is_raised_on_all() -> None:
    assert run_ranks(_fail_late, 3) == ["broken corpus (on rank 1 of 3)"] * 3


def _lose_a_rank(ctx: ParallelContext, limit_s: float) -> float:
    impatient = build_context(ctx.grid, rank=ctx.world.rank, device=ctx.device, timeout_s=limit_s)
    begin = time.monotonic()
    if ctx.world.rank == 1:
        time.sleep(3 * limit_s)  # as if it had died
    else:
        with pytest.raises(RuntimeError):
            patiently(impatient, lambda: time.sleep(limit_s / 2))
    return time.monotonic() - begin


def test_a_rank_that_is_lost_while_others_are_busy_ends_them_within_the_limit() -> None:
    waited = run_ranks(_lose_a_rank, 2, 2.0)
    assert waited[0] < 2.0 + PULSE_S + 1.5


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.mark.req("B11")
def test_two_nodes_with_a_cache_each_train_together(tmp_path: Path) -> None:
    recipe = tiny_recipe(tmp_path, stage={"steps": 3, "lr": {"peak": 1e-3}})
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    launcher = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1", "--rdzv_backend=static",
        "--master_addr=127.0.0.1", f"--master_port={_free_port()}",
    ]  # fmt: skip
    program = [str(ROOT / "pretrain.py"), "--recipe", str(tmp_path / "recipe.toml"), "--stage", "1", "--set"]
    nodes = [
        subprocess.Popen(
            [*launcher, f"--node_rank={node}", *program, f"data.cache={tmp_path / f'cache {node}'}"],
            env=os.environ | {"OMP_NUM_THREADS": "1"}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )
        for node in (0, 1)
    ]  # fmt: skip
    answers = [node.communicate(timeout=100) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], answers
    assert f"indexes: 4 in {tmp_path / 'cache 0'}, 8 built now" in answers[0][0] and not answers[1][0]
    assert len(curve(recipe)) == 3
    names = [sorted(path.name for path in (tmp_path / f"cache {node}").iterdir()) for node in (0, 1)]
    assert len(names[0]) == 4 and names[0] == names[1]
