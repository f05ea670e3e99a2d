"""Every parameter of a model by its Hugging Face name: whole shape and kind. Pure arithmetic.

The module tree is asserted equal to this table, initial weights and weight decay are decided by its kinds, and a plan
counts with it.
"""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

from megatron_lite.config.model import Layer, ModelConfig

Kind = Literal["embedding", "head", "matrix", "output", "norm", "norm_bias", "bias", "qk_norm", "router"]


class Shape(NamedTuple):
    """One parameter on disk."""

    shape: tuple[int, ...]
    kind: Kind  # "output" = o_proj and down_proj; "matrix" = every other linear of a block

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return prod(self.shape)


def parameter_shapes(model: ModelConfig) -> dict[str, Shape]:
    """Hugging Face key -> Shape, in model order. A tied model has no lm_head.weight."""
    embedding = (model.vocab_size, model.hidden_size)
    table = {"model.embed_tokens.weight": Shape(embedding, "embedding")}
    for i, layer in enumerate(model.layers):
        for name, shape in layer_shapes(model, layer).items():
            table[f"model.layers.{i}.{name}"] = shape
    table |= _norm(model, "model.norm")
    if not model.tie_word_embeddings:
        table["lm_head.weight"] = Shape(embedding, "head")
    return table


def layer_shapes(model: ModelConfig, layer: Layer) -> dict[str, Shape]:
    """Parameters of one block, by their names inside it."""
    table = _norm(model, "input_layernorm") | _attention(model) | _norm(model, "post_attention_layernorm")
    return table | (_moe(model) if layer.ffn == "moe" else _mlp(model, "mlp", model.intermediate_size))


def num_parameters(model: ModelConfig) -> int:
    """All parameters; a tied embedding is counted once."""
    return sum(shape.numel for shape in parameter_shapes(model).values())


def num_non_embedding_parameters(model: ModelConfig) -> int:
    """Parameters without the embedding and the head."""
    table = parameter_shapes(model).values()
    return sum(shape.numel for shape in table if shape.kind not in ("embedding", "head"))


def num_active_parameters(model: ModelConfig) -> int:
    """Parameters one token passes through: all but the experts it is not sent to."""
    return num_parameters(model) - sum(_idle_experts(model) for layer in model.layers if layer.ffn == "moe")


def matmul_parameters(model: ModelConfig) -> int:
    """Elements of the matrices one token is multiplied with: linears, router, its experts, and the head once."""
    blocks = sum(layer_matmul_parameters(model, layer) for layer in model.layers)
    return blocks + model.vocab_size * model.hidden_size


def layer_matmul_parameters(model: ModelConfig, layer: Layer) -> int:
    """The same of one block."""
    table = layer_shapes(model, layer).values()
    linears = sum(shape.numel for shape in table if shape.kind in ("matrix", "output", "router"))
    return linears - (_idle_experts(model) if layer.ffn == "moe" else 0)


def _idle_experts(model: ModelConfig) -> int:
    """Elements of the experts of one block that a token is not sent to."""
    return (model.num_experts - model.num_experts_per_tok) * 3 * model.hidden_size * model.moe_intermediate_size


def _norm(model: ModelConfig, name: str) -> dict[str, Shape]:
    table = {f"{name}.weight": Shape((model.hidden_size,), "norm")}
    if model.norm == "layernorm":
        table[f"{name}.bias"] = Shape((model.hidden_size,), "norm_bias")
    return table


def _linear(name: str, d_out: int, d_in: int, kind: Kind, bias: bool) -> dict[str, Shape]:
    table = {f"{name}.weight": Shape((d_out, d_in), kind)}
    if bias:
        table[f"{name}.bias"] = Shape((d_out,), "bias")
    return table


def _attention(model: ModelConfig) -> dict[str, Shape]:
    hidden, bias = model.hidden_size, model.attention_bias or model.use_qkv_bias
    q, kv = model.num_attention_heads * model.head_dim, model.num_key_value_heads * model.head_dim
    table = _linear("self_attn.q_proj", q, hidden, "matrix", bias)
    table |= _linear("self_attn.k_proj", kv, hidden, "matrix", bias)
    table |= _linear("self_attn.v_proj", kv, hidden, "matrix", bias)
    if model.qk_norm:
        table["self_attn.q_norm.weight"] = Shape((model.head_dim,), "qk_norm")
        table["self_attn.k_norm.weight"] = Shape((model.head_dim,), "qk_norm")
    return table | _linear("self_attn.o_proj", hidden, q, "output", model.attention_bias)


def _mlp(model: ModelConfig, name: str, ffn: int) -> dict[str, Shape]:
    hidden, bias = model.hidden_size, model.mlp_bias
    table = _linear(f"{name}.gate_proj", ffn, hidden, "matrix", bias)
    table |= _linear(f"{name}.up_proj", ffn, hidden, "matrix", bias)
    return table | _linear(f"{name}.down_proj", hidden, ffn, "output", bias)


def _moe(model: ModelConfig) -> dict[str, Shape]:
    table = {"mlp.gate.weight": Shape((model.num_experts, model.hidden_size), "router")}
    for e in range(model.num_experts):
        table |= _mlp(model, f"mlp.experts.{e}", model.moe_intermediate_size)
    return table
