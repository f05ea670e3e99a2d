"""Rotary position tables, always computed in fp32.

inv_freq[i] = theta^(-2i/d), i < d/2. YaRN (arXiv 2309.00071) blends each frequency with the one divided by `factor`,
by how often its wave turns within the original context, and scales cos and sin by 0.1 ln(factor) + 1.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig, RopeScaling


def inverse_frequencies(dim: int, theta: float, scaling: RopeScaling | None = None) -> Tensor:
    """fp32 [dim / 2]."""
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    inv_freq = 1.0 / theta**exponents
    if scaling is None:
        return inv_freq

    def turns_at(rotations: float) -> float:
        """The (fractional) index whose wave turns that often within the original context."""
        length = scaling.original_max_position_embeddings
        return dim * math.log(length / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = max(math.floor(turns_at(scaling.beta_fast)), 0)
    high = min(math.ceil(turns_at(scaling.beta_slow)), dim - 1)
    span = high - low if high > low else 0.001
    ramp = ((torch.arange(dim // 2).float() - low) / span).clamp(0, 1)
    return inv_freq * (1 - ramp) + inv_freq / scaling.factor * ramp


def attention_factor(scaling: RopeScaling | None) -> float:
    """What cos and sin are multiplied by."""
    if scaling is None:
        return 1.0
    if scaling.attention_factor is not None:
        return scaling.attention_factor
    return 0.1 * math.log(scaling.factor) + 1.0


def rotary_tables(config: ModelConfig, position_ids_T: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every token's angles, fp32 [T, rotary_dim / 2] on the ids' device."""
    inv_freq = inverse_frequencies(config.rotary_dim, config.rope_theta, config.rope_scaling)
    angles = position_ids_T[:, None].float() * inv_freq.to(position_ids_T.device)
    factor = attention_factor(config.rope_scaling)
    return angles.cos() * factor, angles.sin() * factor
