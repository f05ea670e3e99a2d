"""The state of a run, and what a resumed run may change."""

import copy

import pytest

from megatron_lite.checkpoint.state import TrainState, check_data, compare_recipes
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Recipe, Schedule, Source, Stage
from megatron_lite.errors import CheckpointError


def _recipe():
    model = ModelConfig(
        model_type="qwen3", vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=128,
    )  # fmt: skip
    lr = Schedule(peak=1e-3)
    stages = tuple(
        Stage(name=n, steps=10, seq_len=32, batch_tokens=384, micro_batch=2, blend={"a": 1.0}, lr=lr) for n in "xy"
    )
    sources = {"a": Source(path="one"), "c": Source(path="two")}
    return Recipe(run="runs/t", model=model, sources=sources, stages=stages).model_dump()


def _changed(path, value):
    recipe = copy.deepcopy(_recipe())
    at = recipe
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    return recipe


REFUSED = [
    (("seed",), 7),
    (("model", "hidden_size"), 32),
    (("model", "rope_scaling"), {"factor": 2.0}),
    (("sources", "a", "min_length"), 5),
    (("stages", 0, "blend"), {"a": 1.0, "c": 2.0}),
    (("stages", 0, "seq_len"), 64),
    (("stages", 0, "mask_documents"), True),
    (("stages", 0, "rope_theta"), 1e6),
    (("stages", 0, "batch_tokens"), 768),
    (("stages", 0, "name"), "z"),
]
ACCEPTED = [
    (("stages", 0, "lr", "peak"), 2e-3),
    (("stages", 0, "micro_batch"), 1),
    (("stages", 0, "steps"), 20),
    (("stages", 1, "seq_len"), 64),
    (("stages", 0, "parallel"), {"tp": 2}),
    (("kernels", "norm"), "reference"),
    (("parallel", "tp"), 2),
    (("logging", "every"), 1),
    (("checkpoint", "keep"), 1),
    (("evaluation", "rows"), 1),
    (("runtime", "timeout_s"), 5.0),
    (("guard", "max_skips"), 1),
    (("optimizer", "betas"), (0.9, 0.99)),
    (("sources", "a", "path"), "moved/one"),
    (("sources", "c", "min_length"), 5),
    (("model", "vocab_multiple"), 64),
    (("data", "mmap"), False),
    (("run",), "runs/u"),
]


def test_the_same_recipe_goes_on_without_a_word():
    assert compare_recipes(_recipe(), _recipe(), 0) == []


@pytest.mark.parametrize(("path", "value"), REFUSED, ids=lambda x: str(x))
def test_another_model_seed_source_or_order_is_refused_with_both_values(path, value):
    key = r"\.".join(str(part) for part in path)
    with pytest.raises(CheckpointError, match=f"another run; .*{key}.* in the checkpoint, .* now"):
        compare_recipes(_recipe(), _changed(path, value), 0)


@pytest.mark.parametrize(("path", "value"), ACCEPTED, ids=lambda x: str(x))
def test_rates_layout_and_logging_are_accepted_and_told(path, value):
    lines = compare_recipes(_recipe(), _changed(path, value), 0)
    assert lines and all(line.startswith(".".join(str(part) for part in path)) for line in lines)


def test_all_refused_changes_are_told_at_once():
    recipe = _changed(("seed",), 7)
    recipe["model"]["hidden_size"] = 32
    with pytest.raises(CheckpointError, match="seed: 1234 in the checkpoint, 7 now; model.hidden_size: 64 in the"):
        compare_recipes(_recipe(), recipe, 0)


STATE = TrainState(
    stage=1, stage_name="y", step=10, num_steps=10, consumed_samples=2**33, consumed_tokens=2**40, total_tokens=2**41,
    optimizer_steps=19, skipped=1, consecutive_skips=0, complete=True, data="abc", recipe='run = "r"\n',
)  # fmt: skip


def test_the_state_survives_its_meta():
    assert TrainState.from_meta(STATE.to_meta()) == STATE


def test_a_meta_that_is_no_training_state_is_refused():
    for meta in ({}, {"version": 99, "state": {}}, {"version": 1, "state": {"step": 3}}):
        with pytest.raises(CheckpointError, match="no training state"):
            TrainState.from_meta(meta)


def test_other_data_are_refused_with_both_fingerprints():
    check_data("abc", "abc")
    with pytest.raises(CheckpointError, match="fingerprint abc then, abd now"):
        check_data("abc", "abd")
