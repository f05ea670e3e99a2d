"""Flat buckets: which parameter goes where, for many small models, and how whole tensors come into them."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from torch import nn

from megatron_lite.models.transformer import build, named_pieces
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.buffers import ALIGN, FlatWeights, plan_buckets
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.embedding import VocabRows
from megatron_lite.parallel.linear import ColumnParallelLinear, Part
from megatron_lite.parallel.shard import Piece
from tests.helpers.tiny import qwen3, stablelm

CPU = torch.device("cpu")


def models() -> list[list[tuple[str, int, bool, bool]]]:
    """All sequences of up to four parameters of three kinds, and 200 longer ones by chance."""
    kinds = [(70, True, False), (3, False, True), (64, True, True)]
    short = [list(model) for n in range(1, 5) for model in itertools.product(kinds, repeat=n)]
    rng = random.Random(0)
    longer = [
        [(rng.randint(1, 300), rng.random() < 0.6, rng.random() < 0.4) for _ in range(rng.randint(5, 30))]
        for _ in range(200)
    ]
    return [[(f"p{i}", *kind) for i, kind in enumerate(model)] for model in [*short, *longer]]


LIMITS = list(itertools.product([1, 64, 150, 1000, 10**9], [1, 64, 3 * ALIGN]))


def test_every_parameter_lies_in_one_bucket_of_its_class():
    for model, (limit, multiple) in itertools.product(models(), LIMITS):
        plans = plan_buckets(model, limit, multiple)
        kinds = {name: (decay, replicated) for name, _, decay, replicated in model}
        numels = {name: numel for name, numel, _, _ in model}
        placed = [slot.parameter for plan in plans for slot in plan.slots]
        assert sorted(placed) == sorted(kinds)
        for plan in plans:
            assert all(kinds[slot.parameter] == (plan.decay, plan.held) for slot in plan.slots)
            assert all(numels[slot.parameter] == slot.numel for slot in plan.slots)


def test_slots_are_aligned_and_apart_and_sizes_padded():
    for model, (limit, multiple) in itertools.product(models(), LIMITS):
        for plan in plan_buckets(model, limit, multiple):
            assert plan.size % multiple == 0
            ends = [0, *(slot.offset + slot.numel for slot in plan.slots)]
            for end, slot in zip(ends, plan.slots, strict=False):
                assert slot.offset % ALIGN == 0 and end <= slot.offset < end + ALIGN
            assert ends[-1] <= plan.size < ends[-1] + ALIGN + multiple


def test_a_bucket_closes_when_it_reaches_the_limit():
    for model, (limit, multiple) in itertools.product(models(), LIMITS):
        plans = plan_buckets(model, limit, multiple)
        for plan in plans:
            # the slot that came last (the earliest parameter) is the one that reached it
            assert sum(slot.numel for slot in plan.slots[1:]) < limit
        for kind in {(plan.decay, plan.held) for plan in plans}:
            short = [p for p in plans if (p.decay, p.held) == kind and sum(s.numel for s in p.slots) < limit]
            assert len(short) <= 1  # what was left


def test_buckets_come_in_the_order_in_which_gradients_complete():
    for model, (limit, multiple) in itertools.product(models(), LIMITS):
        number = {name: i for i, (name, *_) in enumerate(model)}
        plans = plan_buckets(model, limit, multiple)
        complete = [min(number[slot.parameter] for slot in plan.slots) for plan in plans]
        assert complete == sorted(complete, reverse=True)  # a backward reaches parameters last to first
        for plan in plans:
            inside = [number[slot.parameter] for slot in plan.slots]
            assert inside == sorted(inside)


def test_a_plan_worked_by_hand():
    model = [("embed", 100, True, False), ("norm", 8, False, True), ("up", 90, True, False), ("down", 80, True, False)]
    plans = plan_buckets(model, limit=150, multiple=96)
    assert [[(s.parameter, s.offset, s.numel) for s in plan.slots] for plan in plans] == [
        [("up", 0, 90), ("down", 128, 80)],
        [("norm", 0, 8)],
        [("embed", 0, 100)],
    ]
    assert [plan.size for plan in plans] == [288, 96, 192]


def axis(rank: int, size: int) -> Axis:
    """A place on a tensor-parallel axis; nothing here communicates."""
    return Axis("tp", rank, size, tuple(range(size)))


class Holder(nn.Module):
    """q|k|v of 4 heads and 2 kv heads with biases, and a vocabulary of 13 padded to 16."""

    def __init__(self, tp: Axis):
        super().__init__()
        parts = (Part("q_proj", 20, 4), Part("k_proj", 10, 2), Part("v_proj", 10, 2))
        self.qkv_proj = ColumnParallelLinear(6, parts, tp, bias=True)
        self.lm_head = VocabRows(13, 16, 6, tp)


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_merged_replicated_and_padded_tensors_are_cut_from_whole_ones(tp):
    wholes = {
        "q_proj.weight": torch.randn(20, 6), "q_proj.bias": torch.randn(20), "k_proj.weight": torch.randn(10, 6),
        "k_proj.bias": torch.randn(10), "v_proj.weight": torch.randn(10, 6), "v_proj.bias": torch.randn(10),
        "lm_head.weight": torch.randn(13, 6),
    }  # fmt: skip
    kv, copies = min(tp, 2), max(1, tp // 2)
    for rank in range(tp):
        with torch.device("meta"):
            model = Holder(axis(rank, tp))
        weights = FlatWeights(model, named_pieces(model), CPU, bucket_elements=100)
        assert set(weights.names) <= set(wholes)
        for name, whole in wholes.items():
            weights.fill(name, whole)
        for kind, parameter in (("weight", model.qkv_proj.weight), ("bias", model.qkv_proj.bias)):
            mine = [wholes[f"q_proj.{kind}"].chunk(tp)[rank]]
            mine += [wholes[f"{part}.{kind}"].chunk(kv)[rank // copies] for part in ("k_proj", "v_proj")]
            assert torch.equal(parameter.data, torch.cat(mine))
        padded = torch.cat((wholes["lm_head.weight"], torch.zeros(3, 6)))
        assert torch.equal(model.lm_head.weight.data, padded.chunk(tp)[rank])


def test_a_rank_with_only_padding_holds_an_empty_rectangle():
    with torch.device("meta"):
        head = VocabRows(5, 16, 6, axis(3, 4))
    assert head.real == 0
    assert head.pieces("lm_head") == {"weight": (Piece("lm_head.weight", (5, 6), (5, 0), (0, 6)),)}


def test_parameters_are_views_of_their_buckets_and_a_bucket_has_a_version_of_its_own():
    tp = axis(0, 1)
    model = build(stablelm(), tp, default_ops(), dtype=torch.float32)
    weights = FlatWeights(model, named_pieces(model), CPU, bucket_elements=20_000, multiple=192)
    bases = [bucket.base for bucket in weights.buckets]
    assert len({base.untyped_storage().data_ptr() for base in bases}) == len(bases) > 3
    before = [base._version for base in bases]
    for bucket in weights.buckets[:1]:
        for slot in bucket.slots:
            parameter = model.get_parameter(slot.parameter)
            assert parameter is weights.parameters[slot.parameter] and isinstance(parameter, nn.Parameter)
            assert parameter.data_ptr() == bucket.base.data_ptr() + 4 * slot.offset
        bucket.base.fill_(1.5)
        assert all(bool((model.get_parameter(slot.parameter) == 1.5).all()) for slot in bucket.slots)
    assert [base._version - old for base, old in zip(bases, before, strict=True)] == [1, *[0] * (len(bases) - 1)]


@pytest.mark.req("F15")
def test_one_dimensional_parameters_are_in_buckets_without_decay():
    for config in (stablelm(attention_bias=True, mlp_bias=True), qwen3()):
        model = build(config, axis(0, 1), default_ops(), dtype=torch.float32)
        shapes = {name: p.dim() for name, p in model.named_parameters()}
        weights = FlatWeights(model, named_pieces(model), CPU, bucket_elements=20_000)
        for bucket in weights.buckets:
            assert all((shapes[slot.parameter] > 1) == bucket.decay for slot in bucket.slots)
