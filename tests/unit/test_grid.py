"""The grid of ranks: every axis divides the world into groups that hold each rank once, for all small grids."""

from __future__ import annotations

from itertools import product

import pytest

from megatron_lite.errors import ConfigError
from megatron_lite.parallel.context import single_process
from megatron_lite.parallel.grid import Grid, coordinates, kv_replicas

AXES = ("world", "pp", "dp", "cp", "tp", "data", "kv", "ep", "edp", "ends")


def grids() -> list[Grid]:
    """Every grid with axes of up to 4 ranks, in worlds of up to 24."""
    found = []
    for world, tp, pp, cp in product(range(1, 25), range(1, 5), range(1, 4), range(1, 4)):
        if world % (tp * pp * cp):
            continue
        for ep, replicas in product(range(1, 5), range(1, tp + 1)):
            if world // pp % ep == 0 and tp % replicas == 0:
                found.append(Grid(world, tp=tp, pp=pp, cp=cp, ep=ep, kv_replicas=replicas))
    return found


def sizes(grid: Grid) -> dict[str, int]:
    """Ranks in one group of each axis."""
    return {
        "world": grid.world, "pp": grid.pp, "dp": grid.dp, "cp": grid.cp, "tp": grid.tp, "data": grid.dp * grid.cp,
        "kv": grid.kv_replicas, "ep": grid.ep, "edp": grid.world // grid.pp // grid.ep,
    }  # fmt: skip


def test_the_groups_of_every_axis_hold_each_rank_once():
    for grid in grids():
        for axis, size in sizes(grid).items():
            rows = grid.rows(axis)
            assert sorted(rank for row in rows for rank in row) == list(range(grid.world)), (grid, axis)
            assert {len(row) for row in rows} == {size}, (grid, axis)
            assert all(row == tuple(sorted(row)) for row in rows), (grid, axis)


def test_tensor_parallel_neighbours_are_neighbouring_ranks_then_cp_then_dp_then_pp():
    for grid in grids():
        strides = {"tp": 1, "cp": grid.tp, "dp": grid.tp * grid.cp, "pp": grid.world // grid.pp, "kv": 1, "ep": 1}
        for axis, stride in strides.items():
            for row in grid.rows(axis):
                assert all(after - before == stride for before, after in zip(row, row[1:], strict=False)), (grid, axis)


def test_the_axes_cross_in_one_rank():
    for grid in grids():
        for a, b in (("pp", "dp"), ("dp", "cp"), ("cp", "tp"), ("data", "tp"), ("ep", "edp"), ("pp", "edp")):
            assert all(len(set(x) & set(y)) <= 1 for x in grid.rows(a) for y in grid.rows(b)), (grid, a, b)


def test_kv_groups_lie_inside_one_tensor_parallel_group():
    for grid in grids():
        owner = {rank: row for row in grid.rows("tp") for rank in row}
        assert all(set(row) <= set(owner[row[0]]) for row in grid.rows("kv")), grid


def test_the_rows_of_a_grid_of_eight():
    grid = Grid(8, tp=4, kv_replicas=2)
    assert grid.rows("tp") == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert grid.rows("dp") == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert grid.rows("kv") == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert Grid(8, tp=2, cp=2).rows("data") == [(0, 2, 4, 6), (1, 3, 5, 7)]
    assert Grid(8, pp=2, tp=2).rows("pp") == [(0, 4), (1, 5), (2, 6), (3, 7)]


def test_the_ends_are_the_first_and_last_rank_of_a_pipeline_and_the_rest_stand_alone():
    assert Grid(8, pp=2, tp=2).rows("ends") == Grid(8, pp=2, tp=2).rows("pp")
    for grid in grids():
        rows = grid.rows("ends")
        assert sorted(rank for row in rows for rank in row) == list(range(grid.world)), grid
        assert {row for row in rows if len(row) > 1} == {(row[0], row[-1]) for row in grid.rows("pp") if grid.pp > 1}


def test_coordinates_count_like_an_odometer():
    shape = (2, 3, 4)
    assert [coordinates(rank, shape) for rank in range(24)] == list(product(range(2), range(3), range(4)))


@pytest.mark.parametrize("heads, tp, replicas", [(1, 1, 1), (1, 4, 4), (2, 4, 2), (4, 4, 1), (8, 2, 1), (3, 6, 2)])
def test_a_kv_head_has_copies_only_when_tp_exceeds_the_heads(heads, tp, replicas):
    assert kv_replicas(heads, tp) == replicas


def test_a_world_that_does_not_divide_is_refused_with_the_numbers():
    with pytest.raises(ConfigError, match=r"world_size=3 is not divisible by pp\*cp\*tp=1\*1\*2=2.* a multiple of 2"):
        Grid(3, tp=2)
    with pytest.raises(ConfigError, match="ep=3 does not divide the 4 ranks"):
        Grid(8, pp=2, ep=3)
    with pytest.raises(ConfigError, match="kv_replicas=3 does not divide tp=4"):
        Grid(4, tp=4, kv_replicas=3)


def test_one_process_has_every_axis_at_size_one_and_no_group():
    ctx = single_process()
    for name in AXES:
        axis = getattr(ctx, name)
        assert (axis.name, axis.rank, axis.size, axis.ranks, axis.group) == (name, 0, 1, (0,), None)
