"""Reading recipes: presets, options, stages, and what is said about mistakes."""

from __future__ import annotations

import tomllib
from datetime import date
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from megatron_lite.config import toml
from megatron_lite.config.load import for_stage, load_recipe, read_recipe, stage_index, to_toml
from megatron_lite.config.presets import PRESETS
from megatron_lite.errors import ConfigError
from tests.helpers.recipes import TEXT, problems, read

EXAMPLES = sorted((Path(__file__).parents[2] / "examples").glob("*/recipe.toml"))


def test_a_preset_fills_the_model_and_fields_over_it_win():
    model = read("model.hidden_size=96", "model.vocab_multiple=64").model
    assert (model.preset, model.hidden_size, model.vocab_multiple) == ("tiny-qwen3", 96, 64)
    assert model.intermediate_size == PRESETS["tiny-qwen3"]["intermediate_size"]


def test_numbers_of_steps_and_rows_follow_from_tokens():
    general, long = read().stages
    assert (general.num_steps, general.rows_per_step) == (10, 12)
    assert (long.num_steps, long.rows_per_step) == (4, 6)  # 5,000 tokens need a fourth step of 1,512


@pytest.mark.parametrize("text", [TEXT, *(path.read_text() for path in EXAMPLES)])
def test_the_resolved_recipe_reads_back_as_an_equal_one(text, tmp_path):
    recipe = read_recipe(text)
    (tmp_path / "recipe.toml").write_text(to_toml(recipe))
    assert load_recipe(tmp_path / "recipe.toml") == recipe
    assert "preset" in to_toml(recipe)


def test_resolved_recipes_keep_yarn_and_overrides_of_stages():
    yarn = "stages.1.rope_scaling={factor=4, original_max_position_embeddings=63}"
    recipe = read(yarn, "stages.0.optimizer={betas=[0.8, 0.9], zero=0}", "model.rope_scaling.factor=2.0",
                  "model.rope_scaling.original_max_position_embeddings=2048")  # fmt: skip
    assert read_recipe(to_toml(recipe)) == recipe
    assert for_stage(recipe, 0).optimizer.betas == (0.8, 0.9)


def test_for_stage_merges_overrides_and_the_rope_in_force():
    recipe = read("stages.0.kernels.norm=torch", "parallel.tp=2", "stages.1.optimizer.clip=0.5")
    first, second = for_stage(recipe, 0), for_stage(recipe, 1)
    assert (first.kernels.norm, first.parallel.recompute, first.model.rope_theta) == ("torch", "none", 10_000.0)
    assert (second.kernels.norm, second.parallel.recompute, second.model.rope_theta) == ("auto", "full", 100_000.0)
    assert (first.parallel.tp, second.parallel.tp, first.optimizer.clip, second.optimizer.clip) == (2, 2, 1.0, 0.5)
    assert for_stage(second, 1) == second
    assert second.stages == recipe.stages


def test_a_stage_is_named_by_number_or_name():
    recipe = read()
    assert [stage_index(recipe, key) for key in ("1", "2", "general", "long")] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"no stage 3; the recipe has 1 \(general\), 2 \(long\)"):
        stage_index(recipe, "3")
    with pytest.raises(ConfigError, match="no stage 0"):
        stage_index(recipe, "0")
    with pytest.raises(ConfigError, match="no stage 'genral'; did you mean 'general'"):
        stage_index(recipe, "genral")


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("seed=7", {"seed": 7}),
        ("run=out/a", {"run": "out/a"}),
        ('run="out"', {"run": "out"}),
        ("run=2024-01-31", {"run": "2024-01-31"}),
        ("logging.samples=true", {"logging": {"samples": True}}),
        ("optimizer.eps=1e-6", {"optimizer": {"eps": 1e-6}}),
        ("optimizer.betas=[0.5, 0.75]", {"optimizer": {"betas": (0.5, 0.75)}}),
        (" parallel.tp = 2 ", {"parallel": {"tp": 2}}),
    ],
)
def test_options_are_toml_values_or_plain_text(option, expected):
    dumped = read(option).model_dump()
    for key, value in expected.items():
        assert dumped[key] == value if not isinstance(value, dict) else value.items() <= dumped[key].items()


def test_an_option_without_a_value_removes_the_key():
    stage = read("stages.0.steps=", "stages.0.tokens=7_560").stages[0]
    assert (stage.steps, stage.tokens, stage.num_steps) == (None, 7560, 10)


def test_options_that_lead_nowhere_say_so():
    found = problems(
        "stages.7.steps=1", "stages.first.steps=1", "precision.x=1", "seed", "a..b=1", "stages.0=", "seed=7"
    )
    assert found[0] == "--set stages.7.steps=1: stages has entries 0 to 1, not '7'"
    assert "not 'first'" in found[1]
    assert found[2] == "--set precision.x=1: precision is 'fp32', which has no keys"
    assert found[3].startswith("--set seed: write it as section.key=value")
    assert found[4].startswith("--set a..b=1: write it as")
    assert found[5] == "--set stages.0=: entry 0 of stages cannot be removed"


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("stages.0.seqlen=63", "unknown key stages.0.seqlen; did you mean 'seq_len'?"),
        ("paralel.tp=2", "unknown key paralel; did you mean 'parallel'?"),
        ("model.hiden_size=64", "unknown key model.hiden_size; did you mean 'hidden_size'?"),
        ("stages.0.lr.warmup-steps=3", "unknown key stages.0.lr.warmup-steps; did you mean 'warmup_steps'?"),
        ("stages.1.parallel.recomputes=full", "unknown key stages.1.parallel.recomputes; did you mean 'recompute'?"),
        ("stages.1.kernels.atention=sdpa", "unknown key stages.1.kernels.atention; did you mean 'attention'?"),
        ("stages.1.optimizer.beta=[0.9, 0.95]", "unknown key stages.1.optimizer.beta; did you mean 'betas'?"),
        ("sources.prose.paths=x", "unknown key sources.prose.paths; did you mean 'path'?"),
        ("model.rope_scaling={factors=2}", "unknown key model.rope_scaling.factors; did you mean 'factor'?"),
        ("data.zzz=1", "unknown key data.zzz; there are cache, mmap"),
        (
            "model.preset=qwen3-1.8b",
            "unknown preset 'qwen3-1.8b'; did you mean 'qwen3-1.7b'?; there are stablelm-3b-4e1t",
        ),
    ],
)
def test_unknown_keys_are_answered_with_the_one_that_was_meant(option, said):
    assert problems(option)[0].startswith(said)


@pytest.mark.parametrize(
    ("option", "key", "value"),
    [
        ('stages.0.seq_len="63"', "stages.0.seq_len", "'63'"),
        ("stages.0.seq_len=63.0", "stages.0.seq_len", "63.0"),
        ("stages.0.seq_len=0", "stages.0.seq_len", "0"),
        ("seed=true", "seed", "True"),
        ("parallel.tp=0", "parallel.tp", "0"),
        ("stages.1.parallel.tp=0", "stages.1.parallel.tp", "0"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas.1", "1.0"),
        ("optimizer.eps=nan", "optimizer.eps", "nan"),
        ("stages.0.lr.peak=inf", "stages.0.lr.peak", "inf"),
        ("stages.0.blend.prose=much", "stages.0.blend.prose", "'much'"),
        ("precision=fp16", "precision", "'fp16'"),
        ("optimizer.zero=2", "optimizer.zero", "2"),
        ("model.num_hidden_layers=-1", "model.num_hidden_layers", "-1"),
        ("stages.0.blend=3", "stages.0.blend", "3"),
        ("stages.0.parallel=3", "stages.0.parallel", "3"),
        ("stages=3", "stages", "3"),
        ("model=3", "model", "3"),
        ("run=''", "run", "''"),
    ],
)
def test_values_of_the_wrong_type_or_range_are_named_once_with_the_value(option, key, value):
    (found,) = problems(option)
    assert found.startswith(f"{key} = {value}: ")


@pytest.mark.parametrize(
    "key", ["run", "model", "sources", "stages", "stages.0.seq_len", "stages.1.lr", "sources.code.path"]
)
def test_missing_keys_are_named(key):
    assert problems(f"{key}=") == [f"missing key {key}"]


def test_everything_wrong_is_said_at_once_types_and_rules_together():
    found = problems(
        "stages.0.seqlen=62", "stages.0.seq_len=",  # a misspelt required key is read as the one that was meant
        "seed=x", "parallel.tp=3", "stages.1.steps=4", "stages.0.lr.peak=0", "stages.0.lr.final=1.0",
        "stages.1.parallel.recompte=none", "sources.code.min_length=8", "sources.code.max_length=7",
    )  # fmt: skip
    said = "\n".join(found)
    for part in (
        "unknown key stages.0.seqlen; did you mean 'seq_len'?",
        "unknown key stages.1.parallel.recompte; did you mean 'recompute'?",
        "seed = 'x'",
        "stages.0.lr.peak = 0",
        "batch_tokens=756 is not divisible by seq_len=62; use 744 or 806",
        "num_attention_heads=4 is not divisible by tp=3",
        "tokens=5000 and steps=4 are both set",
        "sources.code: min_length=8 is above max_length=7",
    ):
        assert part in said
    assert "lr.final" not in said  # the peak it is compared with is not known
    assert "missing key" not in said


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"cannot read the recipe .*nowhere.toml: No such file"):
        load_recipe(tmp_path / "nowhere.toml")
    (tmp_path / "bad.toml").write_text("run = 'x'\nseed = \n")
    with pytest.raises(ConfigError, match=r"bad.toml is not valid TOML: .*line 2"):
        load_recipe(tmp_path / "bad.toml")
    (tmp_path / "latin.toml").write_bytes(b"run = '\xe4'\n")
    with pytest.raises(ConfigError, match=r"latin.toml is not UTF-8 text \(byte 7\)"):
        load_recipe(tmp_path / "latin.toml")


def test_a_loaded_recipe_never_changes():
    with pytest.raises(ValidationError, match="frozen"):
        read().seed = 3


keys = st.text(st.characters(exclude_categories=["Cs"]), min_size=1)
scalars = st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.floats(allow_nan=False) | keys
values = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner, min_size=1), max_leaves=8)


@settings(max_examples=100, deadline=None)
@given(st.dictionaries(keys, values))
def test_what_is_written_as_toml_reads_back_equal(table):
    assert tomllib.loads(toml.write(table)) == table


def test_what_toml_cannot_hold_is_refused():
    with pytest.raises(ConfigError, match="of type date cannot be written"):
        toml.write({"day": date(2024, 1, 31)})
