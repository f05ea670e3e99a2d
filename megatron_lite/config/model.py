"""The shape of a model. Field names are those of the Hugging Face configs, so that both read the same."""

from __future__ import annotations

from typing import Literal, NamedTuple

from pydantic import Field

from megatron_lite.config.section import Section


class Layer(NamedTuple):
    """What one transformer block is made of."""

    mixer: Literal["attention"]
    ffn: Literal["mlp", "moe"]


class RopeScaling(Section):
    """YaRN (arXiv 2309.00071): frequencies interpolated for a context `factor` times the original one."""

    rope_type: Literal["yarn"] = "yarn"
    factor: float = Field(ge=1.0)
    original_max_position_embeddings: int = Field(gt=0)
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None  # default: 0.1 ln(factor) + 1, applied to cos and sin


class ModelConfig(Section):
    """Widths of the whole model; what a rank holds of it is decided elsewhere."""

    preset: str | None = None  # where the fields started from; informative once loaded
    model_type: Literal["stablelm", "qwen3", "qwen3_moe", "llama"]
    vocab_size: int = Field(gt=0)  # rows of the embedding on disk
    vocab_multiple: int = Field(default=128, gt=0)  # rows are padded to a multiple of this times tp
    hidden_size: int = Field(gt=0)
    intermediate_size: int = Field(gt=0)
    num_hidden_layers: int = Field(gt=0)
    num_attention_heads: int = Field(gt=0)
    num_key_value_heads: int = Field(gt=0)
    head_dim: int = Field(gt=0)
    max_position_embeddings: int = Field(gt=0)
    rope_theta: float = Field(default=10_000.0, gt=0)
    rope_scaling: RopeScaling | None = None
    partial_rotary_factor: float = Field(default=1.0, gt=0, le=1)
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    norm_eps: float = Field(default=1e-6, gt=0)  # rms_norm_eps or layer_norm_eps
    qk_norm: bool = False  # RMSNorm of head_dim on q and k, one weight shared by all heads
    attention_bias: bool = False  # on q, k, v and o
    use_qkv_bias: bool = False  # on q, k and v alone (StableLM 2)
    mlp_bias: bool = False  # on gate, up and down
    tie_word_embeddings: bool = False
    initializer_range: float = Field(default=0.02, gt=0)
    scaled_output_init: bool = False  # o_proj and down_proj drawn with initializer_range / sqrt(2 layers)
    # mixture of experts (0 experts: every block has a dense MLP)
    num_experts: int = Field(default=0, ge=0)
    num_experts_per_tok: int = Field(default=0, ge=0)
    moe_intermediate_size: int = Field(default=0, ge=0)
    norm_topk_prob: bool = True

    @property
    def layers(self) -> tuple[Layer, ...]:
        """One entry per block, first to last."""
        return (Layer("attention", "moe" if self.num_experts else "mlp"),) * self.num_hidden_layers

    @property
    def rotary_dim(self) -> int:
        """Leading dims of each head that rotate."""
        return int(self.head_dim * self.partial_rotary_factor)

    def padded_vocab_size(self, tp: int) -> int:
        """Rows of the embedding in memory: vocab_size rounded up to a multiple of vocab_multiple * tp."""
        multiple = self.vocab_multiple * tp
        return -(-self.vocab_size // multiple) * multiple
