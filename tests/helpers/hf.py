"""Tiny Hugging Face folders of every family, with random norms and biases; training of their models by torch alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, StableLmConfig

from megatron_lite.config.schema import Recipe
from megatron_lite.data.loader import open_training
from megatron_lite.optim.schedule import learning_rate

COMMON = {
    "vocab_size": 101, "intermediate_size": 112, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "attn_implementation": "eager",
}  # fmt: skip
YARN = {"rope_theta": 1e4, "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


def qwen3(**changes: Any) -> PreTrainedConfig:
    """head_dim is not hidden_size / heads."""
    return Qwen3Config(**COMMON | {"hidden_size": 60, "head_dim": 20} | changes)


def stablelm(**changes: Any) -> PreTrainedConfig:
    """A quarter of each head rotates."""
    return StableLmConfig(**COMMON | {"hidden_size": 64} | changes)


def llama(**changes: Any) -> PreTrainedConfig:
    """head_dim is not hidden_size / heads."""
    return LlamaConfig(**COMMON | {"hidden_size": 60, "head_dim": 12} | changes)


MODELS = {
    "qwen3-tied": qwen3(tie_word_embeddings=True),
    "qwen3-kv1-biases": qwen3(num_key_value_heads=1, attention_bias=True),
    "qwen3-yarn": qwen3(rope_parameters=YARN),
    "stablelm": stablelm(),
    "stablelm-tied-qkv-biases": stablelm(tie_word_embeddings=True, use_qkv_bias=True, num_key_value_heads=4),
    "stablelm-half-rotary": stablelm(
        hidden_size=48, rope_parameters={"rope_theta": 5e4, "partial_rotary_factor": 0.5}, layer_norm_eps=1e-6
    ),
    "llama": llama(rope_parameters={"rope_theta": 5e5}, rms_norm_eps=1e-5),
    "llama-tied-kv1-biases": llama(
        tie_word_embeddings=True, num_key_value_heads=1, attention_bias=True, mlp_bias=True
    ),
}  # fmt: skip


def reference(config: PreTrainedConfig, dtype: torch.dtype = torch.float32) -> torch.nn.Module:
    """Their model, every parameter random."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stream = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.1, generator=stream)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model.to(dtype)


def save(model: torch.nn.Module, folder: Path) -> Path:
    """As people save models; returns the folder."""
    model.save_pretrained(folder)
    return folder


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a folder's safetensors files."""
    found = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 the library's handle is no dictionary
                assert name not in found
                found[name] = file.get_tensor(name)
    return found


def rewrite(folder: Path, changed: dict[str, torch.Tensor | None]) -> None:
    """Replace, add or (None) remove tensors of a folder with one file."""
    all_tensors = tensors(folder) | changed
    save_file({n: t for n, t in all_tensors.items() if t is not None}, folder / "model.safetensors", {"format": "pt"})


def set_config(folder: Path, **fields: Any) -> None:
    """Change fields of config.json."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def same_bits(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Assert equal names, dtypes and bytes."""
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        assert tensor.dtype == b[name].dtype and tensor.shape == b[name].shape, name
        assert torch.equal(tensor.contiguous().view(torch.uint8), b[name].contiguous().view(torch.uint8)), name


def plain_losses(model: torch.nn.Module, recipe: Recipe) -> list[tuple[float, float]]:
    """(loss, gradient norm) of every step of the first stage, written down once more with torch alone."""
    stage, section = recipe.stages[0], recipe.optimizer
    rows = open_training(recipe, 0, Path(recipe.run) / "plain-cache")
    decayed = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": decayed, "weight_decay": section.weight_decay}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=section.betas, eps=section.eps)
    results = []
    for step in range(stage.num_steps):
        first = step * stage.rows_per_step
        tokens = torch.stack([torch.from_numpy(rows.row(first + i).tokens).long() for i in range(stage.rows_per_step)])
        logits = model(input_ids=tokens[:, :-1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), section.clip)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(stage.lr, step + 1, stage.num_steps)
        optimizer.step()
        optimizer.zero_grad()
        results.append((loss.item(), norm.item()))
    return results
