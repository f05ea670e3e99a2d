"""A random bf16 checkpoint of a gigabyte, written without having it in memory."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.hf.config import to_hf
from megatron_lite.hf.names import tensor_shapes
from megatron_lite.hf.weights import plan_files, write_weights


def write_random(folder: Path, file_bytes: int) -> int:
    """An untied Qwen3 of half a billion parameters, `file_bytes` a file at most; returns the bytes of its largest
    tensor."""
    model = ModelConfig(
        model_type="qwen3", vocab_size=60_001, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
        num_attention_heads=16, num_key_value_heads=8, head_dim=128, max_position_embeddings=4096, qk_norm=True,
    )  # fmt: skip
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_hf(model, "bf16", {})))
    shapes = tensor_shapes(model)
    dtypes = dict.fromkeys(shapes, "bf16")
    plan = plan_files(shapes, dtypes, file_bytes)
    stream = torch.Generator().manual_seed(0)
    tensors = ((name, torch.randn(shapes[name], generator=stream)) for names in plan for name in names)
    write_weights(folder, plan, shapes, dtypes, tensors)
    return 2 * max(torch.Size(shape).numel() for shape in shapes.values())
