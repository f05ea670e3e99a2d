"""Published models by name, and two tiny ones for tests and first steps.

StableLM: the published training configuration; its tokenizer has 50,277 ids, the embedding 50,304 rows. Qwen3: the
released configurations, whose max_position_embeddings of 40,960 is 32,768 of output and 8,192 of prompt and whose
rope_theta is that of the last pretraining stage (earlier ones trained with 10,000). Llama and SmolLM2: as released.
"""

from __future__ import annotations

from typing import Any


def _qwen3(hidden: int, ffn: int, layers: int, heads: int, kv_heads: int, *, tied: bool) -> dict[str, Any]:
    return {
        "model_type": "qwen3",
        "vocab_size": 151_936,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40_960,
        "rope_theta": 1_000_000.0,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "qk_norm": True,
        "tie_word_embeddings": tied,
    }


def _qwen3_moe(hidden: int, ffn: int, expert_ffn: int, layers: int, heads: int) -> dict[str, Any]:
    return _qwen3(hidden, ffn, layers, heads, 4, tied=False) | {
        "model_type": "qwen3_moe",
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": expert_ffn,
        "norm_topk_prob": True,
    }


PRESETS: dict[str, dict[str, Any]] = {
    "stablelm-3b-4e1t": {
        "model_type": "stablelm",
        "vocab_size": 50_304,
        "hidden_size": 2560,
        "intermediate_size": 6912,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 32,
        "head_dim": 80,
        "max_position_embeddings": 4096,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "scaled_output_init": True,
    },
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, 8, tied=True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, 8, tied=True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, 8, tied=True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, 8, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, 8, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, 8, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 6144, 768, 48, 32),
    "qwen3-235b-a22b": _qwen3_moe(4096, 12288, 1536, 94, 64),
    "llama-3-8b": {
        "model_type": "llama",
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 8192,
        "rope_theta": 500_000.0,
        "norm_eps": 1e-5,
    },
    "smollm2-135m": {
        "model_type": "llama",
        "vocab_size": 49_152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
        "max_position_embeddings": 8192,
        "rope_theta": 100_000.0,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "initializer_range": 1 / 24,
    },
    "tiny-qwen3": {
        "model_type": "qwen3",
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "norm": "rmsnorm",
        "norm_eps": 1e-6,
        "qk_norm": True,
        "tie_word_embeddings": True,
    },
    "tiny-stablelm": {
        "model_type": "stablelm",
        "vocab_size": 2048,
        "hidden_size": 128,
        "intermediate_size": 384,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "max_position_embeddings": 2048,
        "rope_theta": 10_000.0,
        "partial_rotary_factor": 0.25,
        "norm": "layernorm",
        "norm_eps": 1e-5,
        "scaled_output_init": True,
    },
}
