"""Ranks of a job on tensors without numbers: what a step costs, whether all ranks would meet, who does not."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Optimizer, Parallel
from megatron_lite.errors import ConfigError, TrainingError
from megatron_lite.models.shapes import matmul_parameters, num_parameters
from megatron_lite.ops.documents import Documents
from megatron_lite.ops.select import default_ops
from megatron_lite.ops.stand_in import flash_attention, flash_parts
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import single_process
from megatron_lite.parallel.cp_attention import attention_over
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.agreement import first_mismatch, groups_of
from megatron_lite.plan.division import Division
from megatron_lite.plan.flops import flops_per_token
from megatron_lite.plan.rank_report import differences
from megatron_lite.plan.ranks import Call, Job, job_of, model_ranks, whole_step
from megatron_lite.train import rehearsal, step
from megatron_lite.train.recorder import Recorder, Watch
from tests.helpers import tiny
from tests.helpers.recipes import read

ROOT = Path(__file__).parents[2]
LARGE = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 6, "num_attention_heads": 8,
         "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 16_000, "vocab_multiple": 64,
         "max_position_embeddings": 4096}  # fmt: skip


def job(world: int, model: ModelConfig | None = None, *, micro_batches: int = 4, seq_len: int = 32,
        micro_batch: int = 2, precision: str = "fp32", zero: int = 1, **parallel: object) -> Job:  # fmt: skip
    """A job of a small model."""
    layout = Parallel.model_validate(parallel)
    model = model or tiny.qwen3()
    grid = Grid(world, layout.tp, layout.pp, layout.cp)
    data, tokens = grid.dp * layout.cp, micro_batch * seq_len // layout.cp
    return Job(
        model=model, parallel=layout, optimizer=Optimizer(zero=zero), grid=grid, precision=precision, seq_len=seq_len,
        micro_batch=micro_batch, mask_documents=False, bucket_elements=20_000,
        division=Division(tokens, micro_batches, data, data, 2 if precision == "bf16" else 4),
    )  # fmt: skip


@cache
def large(world: int, layout: tuple[tuple[str, object], ...], model: tuple[tuple[str, object], ...] = ()) -> tuple:
    """(job, its rehearsed kinds of ranks) of a model whose buckets and activations outweigh what is small and fixed."""
    made = job(world, tiny.qwen3(**LARGE, **dict(model)), seq_len=2048, micro_batch=1, precision="bf16", **dict(layout))
    made = replace(made, bucket_elements=None)
    return made, [
        rehearsal.rehearse_rank(made, rank, made.grid.dp) for rank in sorted(set(model_ranks(made.grid).values()))
    ]


def test_a_data_parallel_rank_stands_for_its_replicas():
    grid = Grid(24, tp=2, pp=2, cp=3)
    like = model_ranks(grid)
    assert len(set(like.values())) == 12 and all(like[model] == model for model in like.values())
    for axis in ("tp", "cp", "pp"):
        places = [next((rank, row.index(rank)) for row in grid.rows(axis) if rank in row) for rank in range(24)]
        assert [places[rank][1] for rank in range(24)] == [places[like[rank]][1] for rank in range(24)]


def test_every_group_of_a_grid_is_compared_once():
    groups = groups_of(Grid(4, tp=2))
    assert groups.pop((0, 1, 2, 3)) == ("edp", "world")
    assert groups == {(0, 1): ("tp",), (2, 3): ("tp",), (0, 2): ("dp", "data"), (1, 3): ("dp", "data")}


def test_a_step_is_counted_from_a_few_of_its_micro_batches():
    found = [("forward", 15), ("backward", 20), ("last backward", 11), ("step", 7), ("message", 30)]
    assert whole_step(found, 3, 3) == 15 + 20 + 11 + 7 + 30
    assert whole_step(found, 3, 10) == 50 + 90 + 11 + 7 + 100
    assert whole_step([("forward", 5), ("last backward", 6)], 1, 1) == 11


@pytest.mark.parametrize(
    "layout",
    [
        {"world": 4, "tp": 2, "sequence_parallel": True},
        {"world": 4, "pp": 2, "tp": 2},
        {"world": 2, "pp": 2, "virtual_stages": 2},
    ],
)
def test_what_is_left_out_of_a_long_step_is_what_it_repeats(layout, monkeypatch):
    long = job(micro_batches=8, model=tiny.qwen3(num_hidden_layers=4), **layout)
    short = [rehearsal.rehearse_rank(long, rank) for rank in range(long.grid.world)]
    assert long.ran < 8
    monkeypatch.setattr(Job, "ran", property(lambda self: self.micro_batches))
    for few, all_of_them in zip(short, [rehearsal.rehearse_rank(long, r) for r in range(long.grid.world)], strict=True):
        assert (few.flops, few.sent, few.peak) == (all_of_them.flops, all_of_them.sent, all_of_them.peak)
        assert len(few.calls) < len(all_of_them.calls)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("layout", [{"world": 1}, {"world": 2}, {"world": 2, "tp": 2}, {"world": 2, "pp": 2}])
def test_flops_of_all_ranks_are_those_of_the_formula(layout, recompute):
    made = job(recompute=recompute, **layout)
    model = made.model
    tokens = made.seq_len * made.micro_batch * made.micro_batches * made.grid.dp
    per_token = flops_per_token(model, made.seq_len)
    product = (per_token.full - per_token.causal) // 3  # q k^T, or p v, of all blocks; every token sees the whole row
    padding = 6 * (model.padded_vocab_size(made.grid.tp) - model.vocab_size) * model.hidden_size
    down = 2 * model.intermediate_size * model.hidden_size * model.num_hidden_layers
    blocks = 2 * matmul_parameters(model) - 2 * model.vocab_size * model.hidden_size + 2 * product  # forward
    again = {"none": 0, "selective": 2 * product, "full": blocks - down}[recompute]  # up to the last tensor needed
    expected = per_token.full + padding + product + again  # a flash kernel computes q k^T once more in its backward
    found = sum(rehearsal.rehearse_rank(made, rank).flops for rank in range(made.grid.world))
    assert found == tokens * expected


def test_memory_that_stays_is_that_of_the_parameters():
    made = job(4, micro_batches=2, precision="bf16")
    rank = rehearsal.rehearse_rank(made, 0)
    assert rank.parameters == num_parameters(made.model) + 3 * made.model.hidden_size  # 101 ids padded to 104 rows
    buckets = rank.peak["weights"] // 2
    assert rank.parameters <= buckets < rank.parameters + 64 * 4 * 10
    assert rank.peak["gradients"] == 4 * buckets and rank.peak["optimizer"] == 12 * buckets // 4
    whole = rehearsal.rehearse_rank(job(4, micro_batches=2, precision="bf16", zero=0), 0)
    assert whole.peak["optimizer"] == 12 * buckets


def test_activations_are_what_lives_from_a_forward_to_its_backward():
    few, more = (rehearsal.rehearse_rank(job(2, pp=2, micro_batches=m), 0).peak["activations"] for m in (1, 2))
    assert more == pytest.approx(2 * few, rel=0.1)  # the first of two pp ranks has two micro-batches under way
    assert rehearsal.rehearse_rank(job(2, pp=2, micro_batches=4), 0).peak["activations"] == more
    kept = {mode: rehearsal.rehearse_rank(job(1, recompute=mode), 0).peak for mode in ("none", "selective", "full")}
    assert kept["none"]["activations"] > kept["selective"]["activations"] > kept["full"]["activations"] > 0


def test_a_storage_counts_once_and_until_nothing_refers_to_it():
    recorder = Recorder(single_process())
    with Watch(recorder):
        x = torch.ones(1000)
        y = x[::2].view(5, 100).add_(1)
        z = y + 1  # 500
        del x, y
        z = z + z  # two of 500 for a moment
        del z
        torch.ones(100)
    assert recorder.peak()["working"] == 4 * 1500


LAYOUTS = [
    (2, (("tp", 2),), ()),
    (2, (("tp", 2), ("sequence_parallel", True), ("recompute", "selective")), ()),
    (4, (("pp", 2), ("tp", 2), ("sequence_parallel", True)), (("tie_word_embeddings", False),)),
    (4, (("pp", 2),), ()),
    (4, (("pp", 2), ("virtual_stages", 2)), ()),
    (2, (("cp", 2), ("cp_attention", "gather")), ()),
    (4, (("cp", 4), ("cp_attention", "ring"), ("recompute", "full")), ()),
    (2, (("cp", 2), ("cp_attention", "heads"), ("recompute", "selective")), ()),
    (4, (("cp", 2), ("pp", 2)), ()),
    (4, (("cp", 2), ("tp", 2), ("sequence_parallel", True)), ()),
]


@pytest.mark.parametrize(("world", "layout", "model"), LAYOUTS)
def test_the_plan_foretells_what_ranks_send(world, layout, model):
    made, ranks = large(world, layout, model)
    found = [each for each in differences(made, ranks) if each.what != "memory"]
    assert found and [each for each in found if abs(each.share) > 0.001] == []


@pytest.mark.parametrize(
    ("preset", "layers", "world", "layout"),
    [
        ("qwen3-32b", 8, 64, {"tp": 8, "pp": 4, "sequence_parallel": True, "recompute": "selective"}),
        ("qwen3-32b", 32, 64, {"tp": 8, "pp": 4, "sequence_parallel": True, "recompute": "full"}),
        ("qwen3-8b", 6, 8, {"tp": 2, "pp": 2}),
        ("stablelm-3b-4e1t", 8, 4, {"tp": 4, "sequence_parallel": True}),
        ("stablelm-3b-4e1t", 4, 2, {"recompute": "full"}),
        ("qwen3-8b", 4, 4, {"cp": 4, "cp_attention": "gather"}),
        ("qwen3-8b", 4, 4, {"cp": 4, "cp_attention": "ring", "recompute": "full"}),
        ("qwen3-8b", 4, 4, {"cp": 4, "cp_attention": "heads", "recompute": "selective"}),
        ("qwen3-32b", 16, 64, {"tp": 8, "pp": 4, "cp": 2, "sequence_parallel": True, "recompute": "full"}),
    ],
)
def test_the_plan_foretells_the_memory_of_a_rank(preset, layers, world, layout):
    model = ModelConfig.model_validate(PRESETS[preset] | {"num_hidden_layers": layers})
    made = replace(job(world, model, seq_len=4096, micro_batch=1, precision="bf16", **layout), bucket_elements=None)
    ranks = [
        rehearsal.rehearse_rank(made, rank) for rank in range(0, world, made.grid.dp * made.grid.cp * made.grid.tp)
    ]
    found = [each for each in differences(made, ranks) if each.what == "memory"]
    assert len(found) == made.grid.pp
    for each in found:
        assert abs(each.share) < 0.01, each


@pytest.mark.parametrize(("world", "layout", "model"), LAYOUTS)
def test_ranks_of_a_layout_meet(world, layout, model):
    made, ranks = large(world, layout, model)
    mismatch, groups = first_mismatch(made.grid, {rank.rank: rank.calls for rank in ranks})
    assert mismatch is None and groups == len(groups_of(made.grid))


def test_rehearsing_every_rank_finds_what_one_of_each_kind_finds():
    made = job(4, tp=2, micro_batches=2)
    ranks = rehearsal.rehearse(made, every=True)
    assert [rank.rank for rank in ranks] == [0, 1, 2, 3]
    assert [(r.peak, r.sent, r.calls) for r in ranks[:2]] == [(r.peak, r.sent, r.calls) for r in ranks[2:]]
    assert first_mismatch(made.grid, {rank.rank: rank.calls for rank in ranks})[0] is None


def test_a_rank_that_skips_a_collective_is_named(monkeypatch):
    made = job(4, tp=2, micro_batches=2)
    calls = {rank: rehearsal.rehearse_rank(made, rank).calls for rank in (0, 1, 2)}
    monkeypatch.setattr(step, "all_sum", lambda x, axis: x)  # the loss and the norm, over the world
    calls[3] = rehearsal.rehearse_rank(made, 3).calls
    found, _ = first_mismatch(made.grid, calls)
    assert found is not None and found.ranks == (0, 1, 2, 3) and found.group == "group edp = world"
    assert found.text == "call 1 of 1: rank 0: all_reduce of float64 [3] to [3]; rank 3: nothing more"


def test_a_rank_with_another_shape_is_named_with_its_place():
    made = job(4, tp=2, micro_batches=2)
    calls = {rank: rehearsal.rehearse_rank(made, rank).calls for rank in (0, 1, 2)}
    calls[3] = rehearsal.rehearse_rank(replace(made, seq_len=33), 3).calls
    found, _ = first_mismatch(made.grid, calls)
    assert found is not None and (found.group, found.ranks) == ("group tp", (2, 3))
    place = next(i for i, call in enumerate([c for c in calls[3] if c.axis == "tp"]) if 66 in call.given) + 1
    assert found.text.startswith(f"call {place} of ")
    assert found.text.endswith("rank 2: all_reduce of float32 [64, 64] to [64, 64]; rank 3: all_reduce of float32 "
                               "[66, 64] to [66, 64]")  # fmt: skip


def test_a_wrong_rank_of_a_kind_is_found_in_the_group_it_belongs_to(monkeypatch):
    made = job(4, tp=2, micro_batches=2)
    calls = {rank: rehearsal.rehearse_rank(made, rank).calls for rank in range(4)}
    monkeypatch.setattr(comm, "all_sum", lambda x, axis: x)  # gradients of norms that tp ranks share
    calls[1] = rehearsal.rehearse_rank(made, 1).calls
    found, _ = first_mismatch(made.grid, calls)
    assert found is not None and (found.group, found.ranks) == ("group tp", (0, 1))


def test_a_message_that_nobody_receives_is_named():
    made = job(2, pp=2, micro_batches=2)
    calls = {rank: list(rehearsal.rehearse_rank(made, rank).calls) for rank in (0, 1)}
    assert first_mismatch(made.grid, calls)[0] is None
    gone = next(i for i, call in enumerate(calls[1]) if call.kind == "receive")
    lost = calls[1].pop(gone)
    found, _ = first_mismatch(made.grid, calls)
    assert lost.peer == 0 and found is not None and found.group.startswith("group pp")
    assert found.text.startswith("message 2 of 2: rank 0 sends: ") and found.text.endswith("nothing more")


def test_a_replica_that_differs_is_found_when_every_rank_is_rehearsed():
    grid = Grid(4, tp=2)
    call = Call("all_reduce", "dp", "float32", (3,), (3,), 12)
    calls = {rank: [call] for rank in range(4)}
    assert first_mismatch(grid, calls)[0] is None
    calls[3] = [call._replace(dtype="bfloat16")]
    found, _ = first_mismatch(grid, calls)
    assert found is not None and str(found) == (
        "group dp = data of ranks 1, 3: call 1 of 1: rank 1: all_reduce of float32 [3] to [3]; "
        "rank 3: all_reduce of bfloat16 [3] to [3]"
    )


def test_groups_entered_in_opposite_orders_are_found():
    grid = Grid(4, tp=2)
    tp, dp = (Call("all_reduce", axis, "float32", (3,), (3,), 12) for axis in ("tp", "dp"))
    assert first_mismatch(grid, {0: [tp, dp], 1: [tp, dp]})[0] is None
    calls = {0: [tp, dp], 1: [dp, tp], 2: [dp, tp], 3: [tp, dp]}  # every group sees one call from each of its members
    found, _ = first_mismatch(grid, calls)
    assert found is not None and (found.group, found.ranks) == ("group tp", (0, 1))
    assert found.text.startswith("nobody can go on: rank 0: call 1, all_reduce") and found.text.endswith("over dp")
    two = Grid(2, pp=2)
    send, receive = (Call(kind, "pp", "float32", (3,), (3,), 12, peer=1) for kind in ("send", "receive"))
    late = {0: [receive, send], 1: [receive._replace(peer=0), send._replace(peer=0)]}
    assert first_mismatch(two, late)[0] is not None
    assert first_mismatch(two, late | {0: [send, receive]})[0] is None


@pytest.mark.parametrize("method", ["gather", "ring", "heads"])
def test_context_parallel_ranks_meet_in_attention(method):
    grid, calls = Grid(4, cp=4), {}
    ops = replace(default_ops(), attention=flash_attention, attention_parts=flash_parts())
    for rank in range(4):
        with rehearsal.fake_ranks(grid, rank) as ctx:
            recorder = Recorder(ctx)
            with rehearsal.WatchedFakes(recorder):
                q, k, v = (torch.ones(16, heads, 8, requires_grad=True) for heads in (4, 2, 2))
                borders = torch.tensor([0, 20, 32, 64], dtype=torch.int32)
                doc = Documents(borders, (20, 12, 32), 32, torch.arange(16), rows=2)
                attention_over(ctx.cp, ops, method)(q, k, v, doc, 1.0).sum().backward()
            calls[rank] = recorder.calls
    kinds = {"gather": ["all_gather", "reduce_scatter"], "heads": ["all_to_all"], "ring": ["receive", "send"]}
    assert sorted({call.kind for call in calls[0]}) == kinds[method]
    assert first_mismatch(grid, calls)[0] is None
    calls[2] = calls[2][:-1]
    assert first_mismatch(grid, calls)[0] is not None


def test_the_report_says_what_was_found(monkeypatch):
    recipe = read("stages.0.batch_tokens=1512", "stages.1.batch_tokens=2016", "parallel.tp=2")
    text = rehearsal.report(recipe, [0, 1], 4)
    assert text.count("no mismatch among 5 groups") == 2 and "stage 2, long: 4 ranks, 2 rehearsed" in text
    with pytest.raises(ConfigError, match="cannot run on 3 ranks"):
        job_of(recipe, 0, 3)
    whole = rehearsal.rehearse_rank
    monkeypatch.setattr(
        rehearsal, "rehearse", lambda job, every: [whole(replace(job, seq_len=63 - r), r) for r in (0, 1)]
    )
    with pytest.raises(TrainingError, match=r"(?s)MISMATCH: group tp of ranks 0, 1: call 1 of .* rank 0: .* rank 1: "):
        rehearsal.report(recipe, [0], 4)


def test_the_flag_rehearses():
    command = [sys.executable, "pretrain.py", "--dry-run", "ranks", "--world-size", "2", "--set", "parallel.tp=2"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 2 rehearsed" in done.stdout and "no mismatch among 1 group\n" in done.stdout
