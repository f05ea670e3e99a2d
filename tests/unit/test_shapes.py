"""Names and shapes are those of the Hugging Face checkpoints."""

from __future__ import annotations

import pytest

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.models.shapes import parameter_shapes


def _shapes(name, **fields):
    return parameter_shapes(ModelConfig(**PRESETS[name] | fields))


def test_stablelm_has_the_published_names_in_model_order():
    table = _shapes("stablelm-3b-4e1t")
    assert list(table)[:12] == [
        "model.embed_tokens.weight",
        "model.layers.0.input_layernorm.weight",
        "model.layers.0.input_layernorm.bias",
        "model.layers.0.self_attn.q_proj.weight",
        "model.layers.0.self_attn.k_proj.weight",
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.0.self_attn.o_proj.weight",
        "model.layers.0.post_attention_layernorm.weight",
        "model.layers.0.post_attention_layernorm.bias",
        "model.layers.0.mlp.gate_proj.weight",
        "model.layers.0.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
    ]
    assert list(table)[-3:] == ["model.norm.weight", "model.norm.bias", "lm_head.weight"]
    assert table["model.layers.31.mlp.down_proj.weight"] == ((2560, 6912), "output")
    assert table["lm_head.weight"] == ((50_304, 2560), "head")


def test_qwen3_heads_are_wider_than_the_model_divided_by_them():
    table = _shapes("qwen3-0.6b")
    assert table["model.layers.0.self_attn.q_proj.weight"] == ((2048, 1024), "matrix")
    assert table["model.layers.0.self_attn.k_proj.weight"] == ((1024, 1024), "matrix")
    assert table["model.layers.0.self_attn.o_proj.weight"] == ((1024, 2048), "output")


@pytest.mark.req("E05")
def test_qk_norms_have_one_weight_of_head_dim_for_all_heads():
    table = _shapes("qwen3-1.7b")
    assert table["model.layers.3.self_attn.q_norm.weight"] == ((128,), "qk_norm")
    assert table["model.layers.3.self_attn.k_norm.weight"] == ((128,), "qk_norm")
    assert not any("norm.bias" in name for name in table)


def test_a_tied_head_is_the_embedding():
    assert "lm_head.weight" not in _shapes("qwen3-1.7b")
    assert "lm_head.weight" in _shapes("qwen3-1.7b", tie_word_embeddings=False)


def test_biases_follow_their_matrices():
    table = _shapes("tiny-qwen3", attention_bias=True, mlp_bias=True)
    biases = {name: shape for name, shape in table.items() if shape.kind == "bias"}
    assert len(biases) == 4 * 7
    assert biases["model.layers.0.self_attn.k_proj.bias"].shape == (64,)
    assert biases["model.layers.0.mlp.down_proj.bias"].shape == (128,)


def test_stablelm_2_has_biases_on_q_k_and_v_alone():
    biases = [n for n, shape in _shapes("tiny-stablelm", use_qkv_bias=True).items() if shape.kind == "bias"]
    assert biases[:3] == [f"model.layers.0.self_attn.{part}_proj.bias" for part in "qkv"]
    assert len(biases) == 3 * 4


def test_experts_are_one_tensor_each():
    table = _shapes("qwen3-30b-a3b")
    assert table["model.layers.0.mlp.gate.weight"] == ((128, 2048), "router")
    assert table["model.layers.47.mlp.experts.127.gate_proj.weight"] == ((768, 2048), "matrix")
    assert table["model.layers.47.mlp.experts.127.down_proj.weight"] == ((2048, 768), "output")
    assert "model.layers.0.mlp.gate_proj.weight" not in table
