"""Initial weights: drawn by name, so that no layout changes them; and how the vocabulary is padded."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.models.init import initial_tensors
from megatron_lite.models.shapes import parameter_shapes
from megatron_lite.models.transformer import build, named_pieces
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.buffers import FlatWeights
from megatron_lite.parallel.context import Axis
from tests.helpers.tiny import qwen3, stablelm

FAMILIES = [
    stablelm(attention_bias=True, mlp_bias=True),
    qwen3(),
    qwen3(tie_word_embeddings=False, num_key_value_heads=1, head_dim=12),
]


def parts_of(config: ModelConfig, tp: int, rank: int, sequence_parallel: bool, dtype: torch.dtype) -> FlatWeights:
    """One rank's weights."""
    axis = Axis("tp", rank, tp, tuple(range(tp)))
    model = build(config, axis, default_ops(), dtype=dtype, sequence_parallel=sequence_parallel)
    weights = FlatWeights(model, named_pieces(model), torch.device("cpu"), bucket_elements=10_000)
    for name, whole in initial_tensors(config, 7):
        weights.fill(name, whole)
    return weights


@pytest.mark.req("E12")
@pytest.mark.parametrize("config", FAMILIES, ids=lambda c: c.model_type)
@pytest.mark.parametrize("tp, sequence_parallel", [(1, False), (2, True), (4, False)])
def test_every_layout_starts_from_the_same_whole_tensors(config, tp, sequence_parallel):
    expected = dict(initial_tensors(config, 7))
    found = {name: torch.full_like(whole, math.nan) for name, whole in expected.items()}
    for rank in range(tp):
        for bucket in parts_of(config, tp, rank, sequence_parallel, torch.float32).buckets:
            for piece in bucket.pieces:
                region = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                mine = bucket.base[piece.offset : piece.offset + piece.numel].view(piece.shape)
                there = found[piece.name][region]
                assert bool(there.isnan().all()) == (piece.copy == 0)  # copy 0 is the first, the others agree
                assert piece.copy == 0 or torch.equal(there, mine)
                found[piece.name][region] = mine
    for name, whole in expected.items():
        assert torch.equal(found[name], whole), name


def test_the_module_tree_holds_the_names_and_shapes_of_the_table():
    for config in FAMILIES:
        model = build(config, Axis("tp"), default_ops(), dtype=torch.float32)
        held = {piece.name: piece.whole for pieces in named_pieces(model).values() for piece in pieces}
        assert held == {name: shape.shape for name, shape in parameter_shapes(config).items()}


def test_a_tensor_depends_on_seed_and_name_only():
    small, deep = (dict(initial_tensors(qwen3(num_hidden_layers=n), 3)) for n in (1, 3))
    assert all(torch.equal(small[name], deep[name]) for name in small)
    other = dict(initial_tensors(qwen3(num_hidden_layers=1), 4))
    key = "model.layers.0.self_attn.{}_proj.weight"
    assert not torch.equal(small[key.format("q")], other[key.format("q")])
    assert not torch.equal(small[key.format("k")], small[key.format("v")])
    before = torch.get_rng_state()
    list(initial_tensors(qwen3(), 3))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("scaled", [False, True])
def test_standard_deviations(scaled):
    config = qwen3(
        hidden_size=256, intermediate_size=384, head_dim=64, vocab_size=1000, num_hidden_layers=8,
        tie_word_embeddings=False, scaled_output_init=scaled, initializer_range=0.03, attention_bias=True,
    )  # fmt: skip
    kinds = {name: shape.kind for name, shape in parameter_shapes(config).items()}
    for name, tensor in initial_tensors(config, 1):
        if kinds[name] in ("norm", "qk_norm"):
            assert tensor.eq(1).all()
        elif kinds[name] in ("bias", "norm_bias"):
            assert tensor.eq(0).all()
        else:
            output = name.endswith(("o_proj.weight", "down_proj.weight"))
            std = 0.03 / math.sqrt(16) if output and scaled else 0.03
            assert tensor.std().item() == pytest.approx(std, rel=0.02), name
            assert abs(tensor.mean().item()) < 5 * std / math.sqrt(tensor.numel()), name


def test_stablelm_3b_draws_its_outputs_with_a_quarter_of_a_hundredth():
    config = ModelConfig(**PRESETS["stablelm-3b-4e1t"])
    assert config.scaled_output_init
    assert config.initializer_range / math.sqrt(2 * config.num_hidden_layers) == 0.0025


@pytest.mark.req("E11")
@pytest.mark.parametrize("tp, rows", [(1, 50_304), (2, 50_432), (4, 50_688), (8, 51_200)])
@pytest.mark.parametrize("vocab_size", [50_257, 50_304])
def test_the_vocabulary_is_padded_to_a_multiple_of_128_tp(tp, rows, vocab_size):
    config = qwen3(vocab_size=vocab_size, vocab_multiple=128)
    assert config.padded_vocab_size(tp) == rows
    model = build(config, Axis("tp", tp - 1, tp, tuple(range(tp))), default_ops(), dtype=torch.float32)
    assert model.head.rows == rows // tp and model.head.real == vocab_size - (tp - 1) * rows // tp


@pytest.mark.req("E11")
def test_vocabulary_101_is_padded_to_104_or_112():
    assert [qwen3(vocab_size=101, vocab_multiple=8).padded_vocab_size(tp) for tp in (1, 2, 4)] == [104, 112, 128]


@pytest.mark.req("E05")
def test_qk_norms_have_one_weight_of_head_dim():
    shapes = parameter_shapes(qwen3(head_dim=24))
    assert shapes["model.layers.1.self_attn.q_norm.weight"].shape == (24,)
    assert shapes["model.layers.1.self_attn.k_norm.weight"].shape == (24,)
