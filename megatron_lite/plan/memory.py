"""Bytes a rank needs, by kind. Pure arithmetic; a test holds the activations to what torch really saves.

Tensor suffixes: T tokens of a micro-batch on this rank (rows x seq_len / cp), t = T/tp under sequence parallelism, else
T, D hidden, n and g this rank's query and kv heads of H dims, f its part of the MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Optimizer, Parallel
from megatron_lite.models.shapes import Shape, layer_shapes
from megatron_lite.parallel.chunks import chunk_tokens

Recompute = Literal["none", "selective", "full"]


class Parameters(NamedTuple):
    """Elements of parameters one rank holds, vocabulary padding included; the fullest pipeline rank's."""

    dense: int  # sharded over dp x cp by ZeRO-1
    experts: int  # sharded over edp

    @property
    def total(self) -> int:
        """Both."""
        return self.dense + self.experts


class Activations(NamedTuple):
    """Bytes of tensors that live from a forward to its backward, by what they are."""

    blocks: dict[str, int]  # of all blocks of this rank
    ends: dict[str, int]  # final norm, head and loss

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.blocks.values()) + sum(self.ends.values())


class Memory(NamedTuple):
    """Bytes on one rank at the worst moment."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # kept for backward
    working: int  # what one block computes again, and as much as a whole block for its gradients
    logits: int  # the head: a chunk of logits, and the gradients that the loss leaves behind

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(self)


def rank_parameters(model: ModelConfig, parallel: Parallel) -> Parameters:
    """Parameters of the fullest rank. KV heads fewer than tp are held by several ranks, experts are never cut."""
    dense = experts = 0
    for name, shape in layer_shapes(model, model.layers[0]).items():
        if ".experts." in name:
            experts += shape.numel
        else:
            dense += _on_rank(name, shape, model, parallel.tp)
    layers = -(-model.num_hidden_layers // parallel.pp)
    vocabulary = model.padded_vocab_size(parallel.tp) // parallel.tp * model.hidden_size
    matrices = 1 if model.tie_word_embeddings or parallel.pp > 1 else 2  # of a pipeline rank at an end
    final_norm = model.hidden_size * (2 if model.norm == "layernorm" else 1)
    return Parameters(layers * dense + matrices * vocabulary + final_norm, layers * experts // parallel.ep)


def _on_rank(name: str, shape: Shape, model: ModelConfig, tp: int) -> int:
    """Elements of one parameter of a block on a rank."""
    cut_biases = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    if shape.kind in ("norm", "norm_bias", "qk_norm", "router"):
        return shape.numel
    if shape.kind == "bias" and not any(part in name for part in cut_biases):
        return shape.numel
    if "k_proj" in name or "v_proj" in name:
        return shape.numel // min(tp, model.num_key_value_heads)
    return shape.numel // tp


def activation_bytes(
    model: ModelConfig,
    tokens: int,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: Recompute = "none",
    bytes_per_element: int = 2,
    layers: int | None = None,
) -> Activations:
    """Bytes of what one micro-batch of `tokens` tokens on this rank keeps for its backward (T above).

    `layers`: blocks on this rank (default: all). Dense blocks; of a mixture of experts the tokens' own experts.
    """
    T, D, H = tokens, model.hidden_size, model.head_dim
    t = T // tp if sequence_parallel else T
    n, g = model.num_attention_heads // tp, max(1, model.num_key_value_heads // tp)
    if model.num_experts:
        T_ffn, f = t * model.num_experts_per_tok, model.moe_intermediate_size  # whole experts, routed copies of tokens
    else:
        T_ffn, f = T, model.intermediate_size // tp
    size, fp32 = bytes_per_element, 4
    # RMSNorm keeps one fp32 number per row, LayerNorm a mean and a deviation in the type of its input.
    statistics = fp32 if model.norm == "rmsnorm" else 2 * size
    rotary = T * model.rotary_dim  # elements of cos and sin, half the dims each
    cast = size < fp32 and recompute == "none"  # every use has its own cast and keeps that; else all share the tables
    everything: tuple[Recompute, ...] = ("none", "selective", "full")
    unless_full: tuple[Recompute, ...] = ("none", "selective")
    # what, bytes per block, kept when recompute is one of
    table: tuple[tuple[str, int, tuple[Recompute, ...]], ...] = (
        ("block input", t * D * size, everything),
        ("input norm statistics", t * statistics, unless_full),
        ("input norm output", T * D * size, unless_full),
        ("q, k, v", T * (n + 2 * g) * H * size, unless_full),
        ("q, k norm statistics", T * (n + g) * fp32 if model.qk_norm else 0, ("none",)),
        ("cos, sin as q and k used them", 2 * rotary * size if cast else 0, ("none",)),
        ("rotated q, k", T * (n + g) * H * size, ("none",)),
        ("attention log-sum-exp", T * n * fp32, ("none",)),
        ("attention output", T * n * H * size, unless_full),
        ("second norm input", t * D * size, unless_full),
        ("second norm statistics", t * statistics, unless_full),
        ("second norm output", T_ffn * D * size, unless_full),
        ("gate, up", T_ffn * 2 * f * size, unless_full),
        ("swiglu", T_ffn * f * size, ("none",)),
    )
    blocks = model.num_hidden_layers if layers is None else layers
    vocabulary = model.padded_vocab_size(tp) // tp
    return Activations(
        blocks={what: blocks * number for what, number, modes in table if recompute in modes},
        ends={
            "cos, sin": 0 if cast else rotary * fp32,
            "final norm input": t * D * size,
            "final norm statistics": t * statistics,
            "gradient of the head's input": T * D * size,
            "gradient of the head": vocabulary * D * fp32,
        },
    )


def rank_memory(
    model: ModelConfig,
    parallel: Parallel,
    optimizer: Optimizer,
    *,
    tokens: int,
    micro_batches: int,
    data_ranks: int,
    expert_data_ranks: int,
    precision: Literal["bf16", "fp32"],
) -> Memory:
    """Bytes on the fullest rank with `micro_batches` of `tokens` tokens in a step; data_ranks = dp x cp."""
    size = 2 if precision == "bf16" else 4
    parameters = rank_parameters(model, parallel)
    layers = -(-model.num_hidden_layers // parallel.pp)
    saved = partial(
        activation_bytes,
        model,
        tokens,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        bytes_per_element=size,
    )
    kept = saved(recompute=parallel.recompute, layers=layers)
    block = sum(saved(recompute="none", layers=1).blocks.values())
    kept_of_block = sum(kept.blocks.values()) // layers
    # fp32 weights are their own master; AdamW adds two moments.
    state = 8 if precision == "fp32" else 12
    shares = (data_ranks, expert_data_ranks) if optimizer.zero else (1, 1)
    head = kept.ends["gradient of the head"] + kept.ends["gradient of the head's input"]
    vocab_rows = model.padded_vocab_size(parallel.tp) // parallel.tp
    # logits in the run's type and in fp32, which become their gradient, and that in the run's type
    chunk = chunk_tokens(tokens, model.hidden_size, vocab_rows) * vocab_rows * (4 + 2 * size)
    in_flight = min(parallel.pp, micro_batches)  # forwards that the first pipeline rank runs before a backward
    return Memory(
        weights=parameters.total * size,
        gradients=parameters.total * 4,
        optimizer=state * (-(-parameters.dense // shares[0]) + -(-parameters.experts // shares[1])),
        activations=(kept.total - head) * in_flight,
        working=2 * block - kept_of_block,
        logits=head + chunk,
    )
