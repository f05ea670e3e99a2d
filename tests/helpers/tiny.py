"""Tiny models, and the training run over synthetic rows that compares layouts."""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.train.trial import Run, build_run, make_batch, step_batches, train

__all__ = ["Run", "build_run", "make_batch", "qwen3", "stablelm", "step_batches", "train"]


def qwen3(**fields: object) -> ModelConfig:
    """Q of the requirements: Qwen3 with head_dim * heads = hidden, vocabulary 101."""
    return ModelConfig.model_validate(
        {
            "model_type": "qwen3", "vocab_size": 101, "vocab_multiple": 8, "hidden_size": 64, "intermediate_size": 128,
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
            "max_position_embeddings": 128, "qk_norm": True, "tie_word_embeddings": True,
        } | fields
    )  # fmt: skip


def stablelm(**fields: object) -> ModelConfig:
    """S of the requirements: LayerNorm, a quarter of each head rotates, untied."""
    return qwen3(
        **{
            "model_type": "stablelm", "num_key_value_heads": 4, "qk_norm": False, "tie_word_embeddings": False,
            "norm": "layernorm", "norm_eps": 1e-5, "partial_rotary_factor": 0.25, "scaled_output_init": True,
        } | fields
    )  # fmt: skip
