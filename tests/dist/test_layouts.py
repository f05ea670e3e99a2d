"""Layout does not change the mathematics: every layout's losses and gradient norms equal those of one process."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from megatron_lite.config.schema import Optimizer, Parallel
from megatron_lite.parallel.grid import kv_replicas
from tests.helpers.cover import Case, every, name, pairwise
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Run, qwen3, stablelm, train

MODELS = {
    "stablelm": stablelm(),
    "qwen3-kv1": qwen3(num_key_value_heads=1),
    "qwen3-kv2-untied": qwen3(num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3-kv2-biased": qwen3(num_key_value_heads=2, attention_bias=True, mlp_bias=True),
    "qwen3-kv4": qwen3(num_key_value_heads=4),
}
AXES = {
    "model": list(MODELS),
    "tp": [1, 2, 4],
    "sp": [0, 1],
    "pp": [1, 2],
    "virtual": [1, 2],
    "cp": [1, 2, 4],
    "method": ["gather", "ring", "heads"],
    "dp": [1, 2, 3],
    "zero": [0, 1],
    "mb": [1, 2, 4],
    "masked": [0, 1],
    "recompute": ["none", "selective", "full"],
}


def ranks(case: Case) -> int:
    """How many a case needs."""
    return case["tp"] * case["pp"] * case["cp"] * case["dp"]


def possible(case: Case) -> bool:
    """On at most four ranks, with something to compare, and rows that can be divided."""
    rows = case["mb"] * case["dp"]
    return (
        1 < ranks(case) <= 4
        and (case["tp"] > 1 or not case["sp"])
        and (case["dp"] * case["cp"] > 1 or case["zero"] == 1)
        and (case["cp"] > 1 or case["method"] == "gather")
        and (case["virtual"] == 1 or case["pp"] > 1)
        and 12 % rows == 0
        and (case["virtual"] == 1 or 12 // rows % case["pp"] == 0)
    )


def compare(case: Case, steps: int) -> None:
    """The run of a case against the same one in one process, whole batches, nothing recomputed."""
    layers = 2 * case["virtual"] + (case["pp"] > 1)  # more than one for each chunk somewhere
    model = MODELS[case["model"]].model_copy(update={"num_hidden_layers": layers})
    plain = Run(model, steps=steps, masked=bool(case["masked"]), documents=bool(case["masked"]))
    changed = replace(
        plain, micro_batch=case["mb"],
        parallel=Parallel(sequence_parallel=bool(case["sp"]), recompute=case["recompute"],
                          virtual_stages=case["virtual"], cp_attention=case["method"]),
        optimizer=Optimizer(zero=case["zero"]),
    )  # fmt: skip
    truth, _ = run_ranks(train, 1, replace(plain, micro_batch=12))[0]
    replicas = kv_replicas(plain.model.num_key_value_heads, case["tp"])
    answers = run_ranks(train, ranks(case), changed, tp=case["tp"], pp=case["pp"], cp=case["cp"],
                        kv_replicas=replicas)  # fmt: skip
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
            for piece in mine.keys() & other.keys():
                assert torch.equal(mine[piece], other[piece]), piece


@pytest.mark.req("E03", "E11", "E12", "F01", "F03", "F05", "G02", "G05", "I01", "I05")
@pytest.mark.parametrize("case", pairwise(AXES, possible), ids=name)
def test_a_layout_equals_one_process(case: Case) -> None:
    compare(case, steps=5)


ONE = {axis: [1] for axis in ("pp", "virtual", "cp")} | {"method": ["gather"]}
EVERY = AXES | ONE | {"recompute": ["none"], "masked": [1]}
PARALLEL = AXES | {
    "tp": [1, 2], "virtual": [1, 2], "cp": [1, 2], "dp": [1, 2], "zero": [1], "mb": [1], "method": ["gather", "ring"],
    "recompute": ["none"],
}  # fmt: skip


def of_pipelines_and_contexts(case: Case) -> bool:
    """What EVERY does not have; StableLM's documents are not masked, Qwen3's are."""
    return possible(case) and case["pp"] * case["cp"] > 1 and case["masked"] == (case["model"] != "stablelm")


@pytest.mark.slow
@pytest.mark.parametrize("case", every(EVERY, possible), ids=name)
def test_every_layout_equals_one_process(case: Case) -> None:
    compare(case, steps=20)


@pytest.mark.slow
@pytest.mark.parametrize("case", every(PARALLEL, of_pipelines_and_contexts), ids=name)
def test_every_layout_of_pipelines_and_contexts_equals_one_process(case: Case) -> None:
    compare(case, steps=20)


EIGHT = [
    {"tp": 2, "sp": 1, "pp": 2, "cp": 2, "method": "ring"},
    {"tp": 2, "sp": 1, "pp": 2, "dp": 2, "virtual": 2},
    {"pp": 2, "cp": 2, "dp": 2, "virtual": 2, "method": "heads"},
    {"tp": 2, "sp": 1, "cp": 2, "dp": 2, "method": "gather"},
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("model", ["stablelm", "qwen3-kv1", "qwen3-kv2-untied"])
@pytest.mark.parametrize("layout", EIGHT, ids=name)
def test_eight_ranks_equal_one_process(layout: Case, model: str) -> None:
    plain = {axis: values[0] for axis, values in AXES.items()} | {"zero": 1, "masked": int(model != "stablelm")}
    compare(plain | layout | {"model": model}, steps=20)


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("layout", ["one", "tp2-sp"])
def test_recompute_is_neutral_to_the_bit(mode: str, layout: str) -> None:
    where = {"world": 1, "tp": 1} if layout == "one" else {"world": 2, "tp": 2}
    run = Run(MODELS["qwen3-kv2-untied"], steps=3, parallel=Parallel(sequence_parallel=layout != "one"))
    world = where.pop("world")
    for kept, redone in zip(
        run_ranks(train, world, run, **where),
        run_ranks(train, world, replace(run, parallel=run.parallel.model_copy(update={"recompute": mode})), **where),
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
