"""Initial weights: every whole tensor is drawn from a stream of its own, seeded by the run's seed and its name.

A rank keeps its rectangle, so that every layout starts from the same weights. Matrices are N(0, initializer_range),
outputs of a block optionally divided by sqrt(2 layers) (GPT-NeoX's scaled_normal); norms start at 1, biases at 0.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.shapes import Shape, parameter_shapes


def initial_tensors(config: ModelConfig, seed: int) -> Iterator[tuple[str, Tensor]]:
    """(name, whole fp32 tensor on the CPU) of every parameter, one at a time."""
    for name, shape in parameter_shapes(config).items():
        yield name, _draw(config, seed, name, shape)


def _draw(config: ModelConfig, seed: int, name: str, shape: Shape) -> Tensor:
    if shape.kind in ("norm", "qk_norm"):
        return torch.ones(shape.shape)
    if shape.kind in ("bias", "norm_bias"):
        return torch.zeros(shape.shape)
    std = config.initializer_range
    if shape.kind == "output" and config.scaled_output_init:
        std /= math.sqrt(2 * config.num_hidden_layers)
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    stream = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.empty(shape.shape).normal_(0.0, std, generator=stream)
