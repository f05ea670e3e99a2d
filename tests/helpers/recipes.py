"""A small recipe that is right, as text, for tests to change with `--set` options."""

from __future__ import annotations

import pytest

from megatron_lite.config.load import read_recipe
from megatron_lite.config.schema import Recipe
from megatron_lite.errors import ConfigError

TEXT = """
run = "out"
precision = "fp32"

[model]
preset = "tiny-qwen3"

[sources.prose]
path = "data/prose"

[sources.code]
path = "data/code"

[[stages]]
name = "general"
steps = 10
seq_len = 63
batch_tokens = 756
micro_batch = 1
blend = { prose = 4, code = 1 }
lr = { peak = 1e-3, warmup_steps = 2 }

[[stages]]
name = "long"
tokens = 5_000
seq_len = 252
batch_tokens = 1_512
micro_batch = 2
rope_theta = 100_000.0
blend = { code = 1 }
lr = { peak = 5e-4, final = 1e-5, warmup_tokens = 1_600, decay_tokens = 1_513, shape = "wsd" }
parallel = { recompute = "full" }
"""


def read(*options: str) -> Recipe:
    """The recipe with `--set` options applied."""
    return read_recipe(TEXT, options)


def problems(*options: str) -> list[str]:
    """What is wrong with it then, one entry per problem."""
    with pytest.raises(ConfigError) as caught:
        read(*options)
    first, *found = str(caught.value).split("\n  - ")
    assert first == f"recipe has {len(found)} problem{'s' if len(found) > 1 else ''}:"
    return found
