"""Layout does not change the mathematics: every layout's losses and gradient norms equal those of one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_lite.config.schema import Optimizer
from megatron_lite.parallel.grid import kv_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Run, qwen3, stablelm, train

MODELS = {
    "stablelm": stablelm(),
    "qwen3-kv1": qwen3(num_key_value_heads=1),
    "qwen3-kv2-untied": qwen3(num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3-kv4": qwen3(num_key_value_heads=4),
}
LAYOUTS = {
    "dp2": {"world": 2},
    "dp3": {"world": 3},
    "tp2": {"world": 2, "tp": 2},
    "tp2-sp": {"world": 2, "tp": 2, "sequence_parallel": True},
    "tp2-dp2": {"world": 4, "tp": 2},
    "tp2-dp2-sp": {"world": 4, "tp": 2, "sequence_parallel": True},
    "tp4-sp": {"world": 4, "tp": 4, "sequence_parallel": True},
    "zero-off": {"world": 2, "optimizer": Optimizer(zero=0)},
}


def compare(run: Run, world: int = 1, tp: int = 1, **changes: object) -> None:
    truth, _ = run_ranks(train, 1, run)[0]
    changed = replace(run, **changes)
    if world // tp == 3:
        changed = replace(changed, micro_batch=1)
    replicas = kv_replicas(run.model.num_key_value_heads, tp)
    answers = run_ranks(train, world, changed, tp=tp, kv_replicas=replicas)
    for results, _ in answers:
        for ours, expected in zip(results, truth, strict=True):
            assert abs(ours.loss - expected.loss) <= 1e-5, (ours, expected)
            assert abs(ours.grad_norm / expected.grad_norm - 1) <= 1e-4, (ours, expected)
    check_copies([weights for _, weights in answers])
    assert truth[-1].loss < truth[0].loss


def check_copies(weights: list[dict[str, torch.Tensor]]) -> None:
    """Whatever several ranks hold is equal on all of them to the bit."""
    for i, mine in enumerate(weights):
        for other in weights[i + 1 :]:
            for name in mine.keys() & other.keys():
                assert torch.equal(mine[name], other[name]), name


PAIRS = [  # each model with several layouts, each layout with several models; make test-all runs every pair
    ("stablelm", "dp3"), ("stablelm", "tp2-dp2-sp"), ("stablelm", "zero-off"),
    ("qwen3-kv1", "tp2-sp"), ("qwen3-kv1", "tp4-sp"), ("qwen3-kv1", "dp2"),
    ("qwen3-kv2-untied", "tp2"), ("qwen3-kv2-untied", "tp4-sp"), ("qwen3-kv4", "tp2-dp2"),
]  # fmt: skip


@pytest.mark.req("E03", "E11", "E12", "F05")
@pytest.mark.parametrize("model, layout", PAIRS)
def test_a_layout_equals_one_process(model: str, layout: str) -> None:
    compare(Run(MODELS[model], steps=5), **LAYOUTS[layout])


@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("masked", [False, True])
def test_every_layout_equals_one_process(model: str, layout: str, masked: bool) -> None:
    compare(Run(MODELS[model], masked=masked, documents=masked), **LAYOUTS[layout])


@pytest.mark.req("I01", "I05")
@pytest.mark.parametrize("change", [{"micro_batch": 1}, {"micro_batch": 12}, {"micro_batch": 3, "world": 2}])
def test_slicing_the_batch_does_not_change_the_loss(change: dict[str, int]) -> None:
    compare(Run(MODELS["qwen3-kv2-untied"], steps=5, masked=True, documents=True), **change)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("layout", ["one", "tp2-sp"])
def test_recompute_is_neutral_to_the_bit(mode: str, layout: str) -> None:
    where = {"world": 1, "tp": 1} if layout == "one" else {"world": 2, "tp": 2}
    run = Run(MODELS["qwen3-kv2-untied"], steps=3, sequence_parallel=layout != "one")
    world = where.pop("world")
    for kept, redone in zip(
        run_ranks(train, world, run, **where),
        run_ranks(train, world, replace(run, recompute=mode), **where),
        strict=True,
    ):
        assert kept[0] == redone[0]
        assert all(torch.equal(kept[1][name], redone[1][name]) for name in kept[1])


@pytest.mark.req("F06")
def test_zero_on_and_off_agree_to_the_bit() -> None:
    run = Run(MODELS["qwen3-kv2-untied"], steps=5)
    on = run_ranks(train, 2, run)[0]
    off = run_ranks(train, 2, replace(run, optimizer=Optimizer(zero=0)))[0]
    assert on[0] == off[0]
    assert all(torch.equal(on[1][name], off[1][name]) for name in on[1])


def test_a_step_without_valid_tokens_changes_nothing() -> None:
    results, _ = train_masked()
    assert results[0].skipped and results[0].loss == 0.0 and math.isfinite(results[0].grad_norm)


def train_masked() -> tuple[list, dict]:
    run = Run(qwen3(), steps=1, rows=1, micro_batch=1, masked=True)
    # row number 16 k / 5 … : choose the row whose labels are all ignored
    return run_ranks(_one_masked_step, 1, run)[0]


def _one_masked_step(ctx, run: Run):  # type: ignore[no-untyped-def]
    from megatron_lite.data.batch import IGNORE
    from megatron_lite.train.step import train_step
    from tests.helpers.tiny import build_run, make_batch

    model, optimizer = build_run(run, ctx)
    batch = make_batch(run, [0])
    batch.labels[:] = IGNORE
    result = train_step(model, optimizer, [replace(batch, valid_tokens=0)], ctx, lr=1e-3, clip=1.0)
    return [result], {}
