"""config.json <-> ModelConfig: released files are our presets, and what is not understood is refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.errors import ConfigError
from megatron_lite.hf.config import from_hf, to_hf

# As released (transformers 4).
RELEASED: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {
        "architectures": ["Qwen3ForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 151643, "eos_token_id": 151645, "head_dim": 128, "hidden_act": "silu", "hidden_size": 1024,
        "initializer_range": 0.02, "intermediate_size": 3072, "max_position_embeddings": 40960,
        "max_window_layers": 28, "model_type": "qwen3", "num_attention_heads": 16, "num_hidden_layers": 28,
        "num_key_value_heads": 8, "rms_norm_eps": 1e-06, "rope_scaling": None, "rope_theta": 1000000,
        "sliding_window": None, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers_version": "4.51.0", "use_cache": True, "use_sliding_window": False, "vocab_size": 151936,
    },
    "stablelm-3b-4e1t": {
        "architectures": ["StableLmForCausalLM"], "bos_token_id": 0, "eos_token_id": 0, "hidden_act": "silu",
        "hidden_size": 2560, "initializer_range": 0.02, "intermediate_size": 6912, "layer_norm_eps": 1e-05,
        "max_position_embeddings": 4096, "model_type": "stablelm", "num_attention_heads": 32,
        "num_hidden_layers": 32, "num_key_value_heads": 32, "partial_rotary_factor": 0.25, "rope_theta": 10000,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.38.0",
        "use_cache": True, "use_qkv_bias": False, "vocab_size": 50304,
    },
    "llama-3-8b": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0,
        "bos_token_id": 128000, "eos_token_id": 128001, "hidden_act": "silu", "hidden_size": 4096,
        "initializer_range": 0.02, "intermediate_size": 14336, "max_position_embeddings": 8192,
        "model_type": "llama", "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_scaling": None, "rope_theta": 500000.0,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.0.dev0",
        "use_cache": True, "vocab_size": 128256,
    },
    "smollm2-135m": {
        "architectures": ["LlamaForCausalLM"], "attention_bias": False, "attention_dropout": 0.0, "bos_token_id": 1,
        "eos_token_id": 2, "hidden_act": "silu", "hidden_size": 576, "initializer_range": 0.041666666666666664,
        "intermediate_size": 1536, "is_llama_config": True, "max_position_embeddings": 8192, "model_type": "llama",
        "num_attention_heads": 9, "num_hidden_layers": 30, "num_key_value_heads": 3, "pad_token_id": 2,
        "pretraining_tp": 1, "rms_norm_eps": 1e-05, "rope_interleaved": False, "rope_scaling": None,
        "rope_theta": 100000, "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "transformers.js_config": {"kv_cache_dtype": {"q4f16": "float16"}}, "transformers_version": "4.42.3",
        "use_cache": True, "vocab_size": 49152,
    },
}  # fmt: skip


def _model(name: str, **fields: Any) -> ModelConfig:
    free = {"preset": None, "initializer_range": RELEASED[name]["initializer_range"], "scaled_output_init": False}
    return ModelConfig.model_validate(PRESETS[name] | free | fields)


def _with(name: str, **fields: Any) -> dict[str, Any]:
    return RELEASED[name] | fields


def _refused(raw: dict[str, Any], family: str | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        from_hf(raw, "config.json", family)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", RELEASED)
def test_released_configs_are_our_presets(name):
    assert from_hf(RELEASED[name], "config.json") == _model(name)


@pytest.mark.parametrize("name", RELEASED)
def test_exported_configs_look_like_released_ones(name):
    released = RELEASED[name]
    ids = {key: released.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    written = to_hf(_model(name), "bf16", ids)
    known = {"transformers_version", "is_llama_config", "rope_interleaved", "transformers.js_config"}
    assert set(released) - set(written) <= known
    assert {key: value for key, value in written.items() if released.get(key, value) != value} == {}
    assert from_hf(written, "config.json") == _model(name)


@pytest.mark.parametrize("name", RELEASED)
def test_the_form_of_transformers_5_says_the_same(name):
    raw = dict(RELEASED[name])
    rope = {"rope_type": "default", "rope_theta": float(raw.pop("rope_theta"))}
    if "partial_rotary_factor" in raw:
        rope["partial_rotary_factor"] = raw.pop("partial_rotary_factor")
    raw.pop("rope_scaling", None)
    raw["dtype"] = raw.pop("torch_dtype")
    assert from_hf(raw | {"rope_parameters": rope}, "config.json") == _model(name)
    if name.startswith("qwen3"):
        layers = ["full_attention"] * 28
        assert from_hf(raw | {"rope_parameters": rope, "layer_types": layers}, "config.json") == _model(name)


def test_absent_fields_are_what_transformers_takes_them_for():
    bare = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {key: RELEASED["llama-3-8b"][key] for key in (*bare, "max_position_embeddings", "model_type")}
    model = from_hf(raw, "config.json")
    assert (model.num_key_value_heads, model.head_dim, model.norm_eps) == (32, 128, 1e-6)
    assert (model.rope_theta, model.tie_word_embeddings, model.attention_bias) == (10_000.0, False, False)
    raw = raw | {"model_type": "stablelm", "num_key_value_heads": 32}
    assert from_hf(raw, "config.json").partial_rotary_factor == 0.25
    assert from_hf(raw | {"model_type": "qwen3", "hidden_size": 4000}, "config.json").head_dim == 128
    for name in raw:
        without = {key: value for key, value in raw.items() if key != name}
        assert name in _refused(without)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("qwen3-0.6b", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling: rope_type = 'linear'"),
        ("qwen3-0.6b", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "'dynamic' is not one of"),
        ("llama-3-8b", {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type = 'llama3'"),
        ("llama-3-8b", {"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters: rope_type = 'longrope'"),
        ("qwen3-0.6b", {"rope_scaling": YARN | {"truncate": False}}, "truncate = False is not supported"),
        ("qwen3-0.6b", {"rope_scaling": YARN | {"finetuned": True}}, "finetuned = True is not supported"),
        ("qwen3-0.6b", {"rope_scaling": YARN | {"factor": "4"}}, "factor = '4' is not a number"),
        ("qwen3-0.6b", {"rope_scaling": YARN | {"factor": 0.5}}, "rope_scaling.factor = 0.5"),
        ("qwen3-0.6b", {"rope_scaling": YARN | {"type": "linear"}}, "contradict"),
        ("qwen3-0.6b", {"rope_scaling": YARN, "rope_parameters": YARN}, "rope_parameters and rope_scaling are both"),
        ("qwen3-0.6b", {"rope_parameters": {"rope_theta": 1e4}}, "rope_theta = 1000000 and rope_parameters.rope_theta"),
        ("qwen3-0.6b", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention"),
        ("qwen3-0.6b", {"rope_parameters": "yarn"}, "is not a table"),
        ("qwen3-0.6b", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=1.0, not 0.5"),
        ("qwen3-0.6b", {"use_sliding_window": True, "sliding_window": 4096}, "use_sliding_window = True"),
        ("qwen3-0.6b", {"layer_types": ["sliding_attention"] * 28}, "layer_types = ['sliding_attention'"),
        ("llama-3-8b", {"sliding_window": 4096}, "sliding_window = 4096 is not supported"),
        ("llama-3-8b", {"hidden_act": "gelu"}, "hidden_act = 'gelu' is not supported; only 'silu' or 'swish' is"),
        ("llama-3-8b", {"attention_dropout": 0.1}, "attention_dropout = 0.1 is not supported"),
        ("llama-3-8b", {"pretraining_tp": 2}, "pretraining_tp = 2"),
        ("llama-3-8b", {"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}"),
        ("llama-3-8b", {"auto_map": {"AutoModel": "x"}}, "auto_map"),
        ("llama-3-8b", {"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ("llama-3-8b", {"clip_qkv": 8.0}, "clip_qkv = 8.0 is not supported"),
        ("smollm2-135m", {"rope_interleaved": True}, "rope_interleaved = True"),
        ("stablelm-3b-4e1t", {"use_parallel_residual": True}, "use_parallel_residual = True"),
        ("stablelm-3b-4e1t", {"qk_layernorm": True}, "qk_layernorm = True"),
        ("stablelm-3b-4e1t", {"hidden_dropout": 0.1}, "hidden_dropout = 0.1"),
        ("stablelm-3b-4e1t", {"attention_bias": True}, "attention_bias = True is not supported; only False is"),
        ("stablelm-3b-4e1t", {"head_dim": 64}, "needs head_dim=80.0, not 64"),
        ("qwen3-0.6b", {"mlp_bias": True}, "mlp_bias = True"),
        ("qwen3-0.6b", {"use_qkv_bias": True}, "use_qkv_bias = True"),
        ("qwen3-0.6b", {"num_key_value_heads": 3}, "num_attention_heads=16 is not divisible by num_key_value_heads=3"),
        ("qwen3-0.6b", {"vocab_size": "many"}, "vocab_size = 'many'"),
        ("qwen3-0.6b", {"num_hidden_layers": 0}, "num_hidden_layers = 0"),
        ("qwen3-0.6b", {"hidden_size": None}, "hidden_size is missing"),
        ("qwen3-0.6b", {"model_type": "qwen3_moe"}, "model_type = 'qwen3_moe' is not one of stablelm, qwen3, llama"),
        ("qwen3-0.6b", {"model_type": None}, "model_type = None is not one of"),
    ],
)
def test_fields_that_are_not_understood_are_refused_by_name(name, fields, said):
    assert said in _refused(_with(name, **fields))


def test_all_that_is_wrong_is_said_at_once():
    text = _refused(_with("llama-3-8b", hidden_act="gelu", clip_qkv=1, rope_scaling={"type": "linear"}))
    assert all(word in text for word in ("hidden_act", "clip_qkv", "linear"))


@pytest.mark.req("N04")
def test_another_family_is_refused_and_the_norms_are_named():
    text = _refused(RELEASED["stablelm-3b-4e1t"], "qwen3")
    assert "stablelm model (the norms are LayerNorm" in text and "not qwen3 (the norms are RMSNorm" in text
    assert "not stablelm (the norms are LayerNorm" in _refused(RELEASED["qwen3-0.6b"], "stablelm")
    assert from_hf(RELEASED["qwen3-0.6b"], "config.json", "qwen3")


@pytest.mark.parametrize("field", ["use_cache", "torch_dtype", "bos_token_id", "temperature", "id2label"])
def test_fields_that_say_nothing_about_the_model_may_be_anything(field):
    assert from_hf(_with("llama-3-8b", **{field: "whatever"}), "config.json") == _model("llama-3-8b")


def test_a_null_leaves_an_unknown_field_unset():
    assert from_hf(_with("llama-3-8b", sliding_window=None, clip_qkv=None), "x") == _model("llama-3-8b")


def test_models_that_no_architecture_holds_are_not_exported():
    with pytest.raises(ConfigError, match="a qwen3_moe model cannot be exported; stablelm, qwen3, llama can"):
        to_hf(ModelConfig.model_validate(PRESETS["qwen3-30b-a3b"]), "bf16", {})
    with pytest.raises(ConfigError, match="needs mlp_bias=False, not True"):
        to_hf(_model("qwen3-0.6b", mlp_bias=True), "bf16", {})


@pytest.mark.req("K03")
def test_yarn_survives_the_way_out_and_back():
    for extra in ({}, {"attention_factor": 1.5}, {"beta_fast": 16.0, "beta_slow": 2.0}):
        model = _model("qwen3-0.6b", rope_scaling=YARN | extra)
        written = to_hf(model, "fp32", {})
        assert written["rope_scaling"] == YARN | extra
        assert from_hf(written, "config.json") == model
