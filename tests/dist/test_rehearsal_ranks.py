"""A rehearsed rank does what a real one does: the same collectives, FLOPs and bytes alive at the peak."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config.schema import Optimizer, Parallel
from megatron_lite.ops.select import default_ops
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.division import Division
from megatron_lite.plan.ranks import Call, Job, Rehearsed
from megatron_lite.train.recorder import Watch
from megatron_lite.train.rehearsal import WatchedFakes, fake_ranks, record, summary
from tests.helpers import tiny
from tests.helpers.ranks import run_ranks


def _job(world: int, layout: dict[str, Any], zero: int) -> Job:
    parallel = Parallel.model_validate(layout)
    model = tiny.qwen3(num_hidden_layers=3) if parallel.pp == 1 else tiny.stablelm(num_hidden_layers=4)
    grid = Grid(world, parallel.tp, parallel.pp, parallel.cp)
    return Job(
        model=model, parallel=parallel, optimizer=Optimizer(zero=zero), grid=grid, precision="fp32", seq_len=32,
        micro_batch=2, mask_documents=False, bucket_elements=20_000,
        division=Division(64 // parallel.cp, 2, grid.dp * parallel.cp, grid.dp * parallel.cp, 4),
    )  # fmt: skip


def _step(ctx: ParallelContext, job: Job, fake: bool) -> Rehearsed:
    """One step with the CPU's kernels, watched."""
    recorder, model = record(job, ctx, default_ops(), WatchedFakes if fake else Watch)
    return summary(job, ctx, recorder, model)


def _by_group(ctx_axes: dict[str, tuple[int, ...]], calls: tuple[Call, ...]) -> list[tuple[Any, ...]]:
    """The calls with the ranks of their groups; gloo sums a bucket everywhere instead of scattering it."""
    found = []
    for call in calls:
        if call.kind == "reduce_scatter" and call.axis == "data":
            call = call._replace(kind="all_reduce", made=call.given)
        found.append((ctx_axes[call.axis], call._replace(axis="")))
    return found


@pytest.mark.parametrize(
    ("world", "layout", "zero"),
    [
        (1, {}, 1),
        (1, {"recompute": "full"}, 0),
        (2, {"tp": 2}, 1),
        (2, {"tp": 2, "sequence_parallel": True, "recompute": "full"}, 1),
        (2, {}, 1),
        (2, {}, 0),
        (2, {"pp": 2}, 1),
        (2, {"pp": 2, "virtual_stages": 2, "recompute": "selective"}, 1),
        (2, {"cp": 2, "cp_attention": "gather"}, 1),
        (2, {"cp": 2, "cp_attention": "ring", "recompute": "full"}, 1),
        (2, {"cp": 2, "cp_attention": "heads", "recompute": "selective"}, 1),
        (4, {"cp": 2, "pp": 2}, 1),
        (4, {"cp": 2, "tp": 2, "sequence_parallel": True}, 1),
    ],
)
def test_a_rehearsed_rank_equals_a_real_one(world, layout, zero):
    job = _job(world, layout, zero)
    sizes = {axis: size for axis, size in layout.items() if axis in ("tp", "pp", "cp")}
    for rank, real in enumerate(run_ranks(_step, world, job, False, **sizes)):
        with fake_ranks(job.grid, rank) as ctx:
            found = _step(ctx, job, True)
            groups = {name: getattr(ctx, name).ranks for name in found.sent}
        axes = {axis: row for axis in {call.axis for call in real.calls} for row in job.grid.rows(axis) if rank in row}
        assert _by_group(groups, found.calls) == _by_group(axes, real.calls)
        assert (found.flops, found.parameters) == (real.flops, real.parameters)
        if world == 1:
            assert found.peak == real.peak
        for kind in ("weights", "gradients", "optimizer"):
            assert found.peak[kind] == real.peak[kind]
        # Threads of gloo let go of what they sent or summed a little later than the step does.
        assert found.memory == pytest.approx(real.memory, rel=0.05)
