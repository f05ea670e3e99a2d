"""Published models have exactly the published sizes."""

from __future__ import annotations

import pytest

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.models.shapes import (
    matmul_parameters,
    num_active_parameters,
    num_non_embedding_parameters,
    num_parameters,
    parameter_shapes,
)

# name: all, without embedding and head, multiplied with per token, tensors
SIZES = {
    "stablelm-3b-4e1t": (2_795_443_200, 2_537_886_720, 2_666_332_160, 356),
    "qwen3-0.6b": (596_049_920, 440_467_456, 595_984_384, 310),
    "qwen3-1.7b": (1_720_574_976, 1_409_410_048, 1_720_451_072, 310),
    "qwen3-4b": (4_022_468_096, 3_633_511_936, 4_022_272_000, 398),
    "qwen3-8b": (8_190_735_360, 6_946_075_648, 7_568_097_280, 399),
    "qwen3-14b": (14_768_307_200, 13_212_482_560, 13_989_969_920, 443),
    "qwen3-32b": (32_762_123_264, 31_206_298_624, 31_983_534_080, 707),
    "qwen3-30b-a3b": (30_532_122_624, 29_909_792_768, 3_041_656_832, 18_867),
    "qwen3-235b-a22b": (235_093_634_560, 233_848_974_848, 21_567_635_456, 36_945),
    "llama-3-8b": (8_030_261_248, 6_979_588_096, 7_504_658_432, 291),
    "smollm2-135m": (134_515_008, 106_203_456, 134_479_872, 272),
    "tiny-qwen3": (1_049_984, 787_840, 1_048_576, 46),
    "tiny-stablelm": (1_378_560, 854_272, 1_114_112, 48),
}


@pytest.mark.parametrize("name", PRESETS)
def test_sizes_are_exact(name):
    model = ModelConfig(**PRESETS[name])
    counts = (num_parameters(model), num_non_embedding_parameters(model), matmul_parameters(model))
    assert (*counts, len(parameter_shapes(model))) == SIZES[name]


@pytest.mark.parametrize(("name", "active"), [("qwen3-30b-a3b", 3_353_032_704), ("qwen3-235b-a22b", 22_190_763_520)])
def test_active_parameters_of_experts_are_exact(name, active):
    model = ModelConfig(**PRESETS[name])
    assert num_active_parameters(model) == active
    assert active - 2 * model.vocab_size * model.hidden_size == {3: 2_730_702_848, 22: 20_946_103_808}[active // 10**9]


def test_dense_models_are_active_in_full():
    assert num_active_parameters(ModelConfig(**PRESETS["qwen3-8b"])) == 8_190_735_360


def test_stablelm_rotates_the_first_20_dims_and_qwen3_all():
    assert ModelConfig(**PRESETS["stablelm-3b-4e1t"]).rotary_dim == 20
    assert ModelConfig(**PRESETS["qwen3-0.6b"]).rotary_dim == 128


@pytest.mark.req("E11")
@pytest.mark.parametrize(
    ("vocab", "padded"),
    [(50_257, (50_304, 50_432, 50_688, 51_200)), (50_304, (50_304, 50_432, 50_688, 51_200))],
)
def test_the_vocabulary_is_padded_to_whole_rows_on_every_rank(vocab, padded):
    model = ModelConfig(**PRESETS["stablelm-3b-4e1t"] | {"vocab_size": vocab})
    assert tuple(model.padded_vocab_size(tp) for tp in (1, 2, 4, 8)) == padded
