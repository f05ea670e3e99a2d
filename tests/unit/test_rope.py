"""Rotary frequencies, against the anchors of published models."""

from __future__ import annotations

import math

import pytest
import torch

from megatron_lite.config.model import ModelConfig, RopeScaling
from megatron_lite.config.presets import PRESETS
from megatron_lite.models.rope import attention_factor, inverse_frequencies, rotary_tables
from tests.helpers.tiny import qwen3

YARN_QWEN3 = RopeScaling(factor=4.0, original_max_position_embeddings=32_768)
YARN_ZEBRA = RopeScaling(factor=32.0, original_max_position_embeddings=32_768)


@pytest.mark.req("K05")
def test_stablelm_rotates_twenty_dims_with_these_frequencies():
    assert ModelConfig(**PRESETS["stablelm-3b-4e1t"]).rotary_dim == 20
    anchors = [1, 0.398107171, 0.158489319, 0.0630957344, 0.0251188643, 0.01, 0.00398107171, 0.00158489319,
               6.30957344e-4, 2.51188643e-4]  # fmt: skip
    assert inverse_frequencies(20, 10_000.0).tolist() == pytest.approx(anchors, rel=1e-6)


def test_a_larger_base_slows_the_last_frequency():
    small, large = inverse_frequencies(128, 1e4), inverse_frequencies(128, 1e6)
    assert small[-1].item() == pytest.approx(1.154782e-4, rel=1e-6)
    assert large[-1].item() == pytest.approx(1.240938e-6, rel=1e-6)
    assert 2 * math.pi / small[-1].item() == pytest.approx(54_410, rel=1e-5)
    assert 2 * math.pi / large[-1].item() == pytest.approx(5_063_256, rel=1e-5)
    assert small[0] == large[0] == 1


@pytest.mark.req("K03")
@pytest.mark.parametrize(
    "dim, scaling, anchors",
    [
        (128, YARN_QWEN3, {0: 1.0, 1: 0.80584218776, 23: 6.9783058486e-3, 31: 8.0295972755e-4, 40: 4.4456985251e-5,
                           63: 3.1023444019e-7}),
        (64, YARN_ZEBRA, {1: 0.64938163158, 11: 8.6596432336e-3, 15: 8.7690260512e-4, 20: 5.5571231564e-6,
                          31: 4.8122703939e-8}),
    ],
    ids=["qwen3", "zebra"],
)  # fmt: skip
def test_yarn_frequencies(dim, scaling, anchors):
    ours = inverse_frequencies(dim, 1e6, scaling)
    assert {i: ours[i].item() for i in anchors} == pytest.approx(anchors, rel=2e-6)


@pytest.mark.req("K04")
@pytest.mark.parametrize("factor, expected", [(1, 1.0), (2, 1.06931), (4, 1.138629436111989), (32, 1.3465735902799727)])
def test_yarn_scales_cos_and_sin(factor, expected):
    scaling = RopeScaling(factor=float(factor), original_max_position_embeddings=32)
    assert attention_factor(scaling) == pytest.approx(expected, rel=5e-6)
    cos, sin = rotary_tables(qwen3(rope_scaling=scaling), torch.arange(70))
    torch.testing.assert_close(cos.square() + sin.square(), torch.full_like(cos, attention_factor(scaling) ** 2))


def test_a_given_attention_factor_is_taken():
    scaling = RopeScaling(factor=4.0, original_max_position_embeddings=32, attention_factor=0.75)
    assert attention_factor(scaling) == 0.75
    assert attention_factor(None) == 1.0


def test_tables_are_fp32_and_know_positions_beyond_256():
    config = qwen3(head_dim=16)
    cos, sin = rotary_tables(config, torch.tensor([0, 257, 70_001]))
    assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (3, 8)
    angles = torch.tensor([0.0, 257.0, 70_001.0], dtype=torch.float64)[:, None] * inverse_frequencies(16, 1e4).double()
    torch.testing.assert_close(cos.double(), angles.cos(), rtol=0, atol=5e-3)  # fp32 angle: 70,001 has 0.008 of room
    torch.testing.assert_close(sin[1].double(), angles[1].sin(), rtol=0, atol=2e-5)
