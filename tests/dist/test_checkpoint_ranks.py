"""Checkpoints written by several ranks: one folder from all, one answer for all."""

import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.store import latest, read_tensors, save
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.shard import FlatShard, Piece
from tests.helpers.ranks import run_ranks
from tests.helpers.shards import KINDS, expected, load, make_shards, whole_tensor


def _mine(ctx, filled=True):
    return make_shards(ctx.tp.size, ctx.tp.rank, ctx.data.size, ctx.data.rank, filled=filled)


def _save(ctx, root, step=10, shards=None):
    return save(root, step, _mine(ctx) if shards is None else shards, ctx, {"ranks": ctx.world.size}, keep=2)


def _load(ctx, folder):
    shards = _mine(ctx, filled=False)
    load(folder, shards)
    for shard in shards:
        for kind in KINDS:
            assert shard.tensors[kind].numpy().tobytes() == expected(shard, kind).tobytes()


@pytest.mark.req("M09", "F14")
@pytest.mark.parametrize(("world", "tp"), [(1, 1), (2, 2), (3, 1), (4, 2), (4, 4)])
def test_any_layout_saves_what_any_other_loads_to_the_bit(tmp_path, world, tp):
    run_ranks(_save, world, tmp_path, tp=tp)
    folder = latest(tmp_path)
    assert store.read_meta(folder) == {"ranks": world}
    for name, tensor in read_tensors(folder):
        assert np.array_equal(tensor.numpy(), whole_tensor(name, "master"))
    for other_tp, other_dp in [(1, 1), (1, 3), (2, 2), (4, 1)]:
        for rank in range(other_tp * other_dp):
            shards = make_shards(other_tp, rank % other_tp, other_dp, rank // other_tp, filled=False)
            load(folder, shards)
            for shard in shards:
                assert shard.tensors["exp_avg"].numpy().tobytes() == expected(shard, "exp_avg").tobytes()


def _save_then_load(ctx, root):
    _load(ctx, _save(ctx, root))


@pytest.mark.req("M09")
def test_ranks_load_together_what_they_and_others_saved(tmp_path):
    run_ranks(_save_then_load, 4, tmp_path / "a", tp=2)
    run_ranks(_load, 3, tmp_path / "a" / "step-00000010")


def _perturbed(ctx, root):
    shards = _mine(ctx)
    if ctx.world.rank == 3:  # tp rank 1 of data rank 1 (k_norm lies in its range)
        shards[1].tensors["master"][-1 - (shards[1].size - 13)] += 1e-7
    try:
        _save(ctx, root, shards=shards)
    except CheckpointError as error:
        return str(error)
    return None


@pytest.mark.req("N03", "E14")
def test_copies_that_differ_stop_a_save_on_all_ranks_before_anything_is_written(tmp_path):
    said = run_ranks(_perturbed, 4, tmp_path / "runs", tp=2)
    assert len(set(said)) == 1
    assert "model.k_norm.weight (master, " in said[0] and "is not equal on ranks [2] and [3]" in said[0]
    assert not (tmp_path / "runs").exists()


def _full_disk(ctx, root):
    _save(ctx, root, step=5)
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if ctx.world.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        _save(ctx, root, step=10)
    except CheckpointError as error:
        said = str(error)
    else:
        said = "saved"
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return said, _gather(ctx)  # the ranks can still talk


def _gather(ctx):
    total = torch.ones(1)
    torch.distributed.all_reduce(total, group=ctx.world.group)
    return int(total)


@pytest.mark.req("M03")
def test_one_full_disk_is_the_same_error_on_every_rank_and_no_hang(tmp_path):
    answers = run_ranks(_full_disk, 3, tmp_path)
    assert len(set(answers)) == 1 and answers[0][1] == 3
    assert "rank 1 cannot write" in answers[0][0] and "rank-00001.safetensors" in answers[0][0]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000005"]


def _huge(ctx, root, ranks):
    count = 20_000 * 64
    per_rank = -(-(count + 8) // ctx.data.size)
    lo, hi = ctx.data.rank * per_rank, (ctx.data.rank + 1) * per_rank
    pieces = (Piece("embed", (20_000, 64), (0, 0), (20_000, 64)), Piece("norm", (8,), (0,), (8,), count))
    values = torch.arange(per_rank * ctx.data.size, dtype=torch.float32)
    values[count + 8 :] = 0
    shard = FlatShard("b", pieces, len(values), lo, hi, {kind: values[lo:hi].clone() for kind in KINDS})
    folder = save(root, ranks, [shard], ctx, {}, keep=3)
    for kind in KINDS:
        shard.tensors[kind].fill_(torch.nan)
    load(folder, [shard])
    for kind in KINDS:
        assert torch.equal(shard.tensors[kind], values[lo:hi])


@pytest.mark.req("F09")
@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_whose_shard_is_one_piece_of_a_huge_tensor_resumes(tmp_path, ranks):
    run_ranks(_huge, ranks, tmp_path, ranks)


def _killed(ctx, root):
    _save(ctx, root, step=5)
    if ctx.world.rank == 1:
        store.write_file = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
    _save(ctx, root, step=10)


@pytest.mark.req("M01")
def test_a_rank_killed_while_it_writes_leaves_the_older_checkpoint(tmp_path):
    with pytest.raises(pytest.fail.Exception):
        run_ranks(_killed, 2, tmp_path)
    assert latest(tmp_path) == tmp_path / "step-00000005"
    run_ranks(_load, 2, Path(latest(tmp_path)))
    run_ranks(_save, 2, tmp_path, 10)
    assert latest(tmp_path) == tmp_path / "step-00000010"


def _state_in_parts(ctx, root):
    """Ranks with nothing of their own still take part: tp rank 1 holds copies only."""
    piece = Piece("norm", (5,), (0,), (5,), 0, ctx.tp.size, ctx.tp.rank)
    shard = FlatShard("plain", (piece,), 5, 0, 5, {"master": torch.arange(5.0)})
    folder = save(root, 1, [shard], ctx, {}, keep=1)
    shard.tensors["master"].fill_(torch.nan)
    load(folder, [shard], ("master",))
    assert torch.equal(shard.tensors["master"], torch.arange(5.0))
    return sorted(path.name for path in folder.iterdir())


def test_copies_are_saved_once_and_loaded_by_every_rank(tmp_path):
    assert run_ranks(_state_in_parts, 2, tmp_path, tp=2)[0] == ["manifest.json", "rank-00000.safetensors"]
