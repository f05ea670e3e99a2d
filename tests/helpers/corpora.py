"""Small corpora on disk, and recipes that read them."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.config.schema import Recipe
from megatron_lite.data.writer import IndexedWriter


def write_corpus(prefix: Path, documents: Iterable[Any], dtype: str = "<u2") -> Path:
    """A pair of these documents; returns its prefix."""
    with IndexedWriter(prefix, np.dtype(dtype)) as writer:
        for tokens in documents:
            writer.add_document(np.asarray(tokens, dtype=np.int64))
    return prefix


def counting(lengths: Iterable[int], start: int = 0) -> list[np.ndarray]:
    """Documents of these lengths whose tokens count on: every token says where in the stream it lies."""
    documents = []
    for length in lengths:
        documents.append(np.arange(start, start + length))
        start += length
    return documents


def data_recipe(
    sources: dict[str, dict[str, Any]],
    blend: dict[str, float] | None = None,
    *,
    seq_len: int = 16,
    rows: int = 4,
    steps: int = 10,
    vocab_size: int = 65536,
    seed: int = 1234,
    stage: dict[str, Any] | None = None,
    **sections: Any,
) -> Recipe:
    """A recipe of one stage; `rows` are those of one step, `stage` holds more of its fields."""
    fields = {
        "name": "only", "steps": steps, "seq_len": seq_len, "batch_tokens": rows * seq_len, "micro_batch": 1,
        "blend": blend or dict.fromkeys(sources, 1.0), "lr": {"peak": 1e-3},
    } | (stage or {})  # fmt: skip
    model = {
        "model_type": "qwen3", "vocab_size": vocab_size, "hidden_size": 64, "intermediate_size": 128,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128,
    }  # fmt: skip
    return Recipe.model_validate(
        {"run": "unused", "seed": seed, "model": model, "sources": sources, "stages": [fields]} | sections
    )
