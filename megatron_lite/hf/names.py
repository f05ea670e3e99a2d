"""Which tensors a Hugging Face folder must hold for a model, and which it may.

Our names are the Hugging Face keys, so nothing is renamed. What differs: the head of a tied model may be there as a
copy of the embedding, and older Llama files carry the rotary frequencies, which follow from the configuration.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.shapes import parameter_shapes

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_FREQUENCIES = re.compile(r"model\.(?:layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


def tensor_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name -> shape of everything that is imported and exported, in model order."""
    return {name: shape.shape for name, shape in parameter_shapes(model).items()}


def compare_names(model: ModelConfig, found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One line for every tensor of a folder that is missing, has another shape, or is not one of the model's."""
    wanted = tensor_shapes(model)
    spare = {HEAD: wanted[EMBEDDING]} if model.tie_word_embeddings else {}
    spare |= {name: (model.rotary_dim // 2,) for name in found if _FREQUENCIES.fullmatch(name)}
    lines = [f"{name} {list(shape)} is missing" for name, shape in wanted.items() if name not in found]
    if HEAD in wanted and HEAD not in found:
        lines.append("config.json says tie_word_embeddings = false, so the head is a tensor of its own")
    for name, shape in found.items():
        expected = wanted.get(name, spare.get(name))
        if expected is None:
            lines.append(f"{name} {list(shape)} is not a tensor of a {model.model_type} model with this config.json")
        elif expected != shape:
            lines.append(f"{name} is {list(shape)}, but config.json makes it {list(expected)}")
    return lines
