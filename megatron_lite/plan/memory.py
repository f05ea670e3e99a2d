"""Bytes a rank needs, by kind. Pure arithmetic; a test holds the activations to what torch really saves.

Tensor suffixes: T tokens of a micro-batch on this rank (rows x seq_len / cp), t = T/tp under sequence parallelism, else
T, D hidden, n and g this rank's query and kv heads of H dims, f its part of the MLP.
"""

from __future__ import annotations

from functools import partial
from typing import Literal, NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel
from megatron_lite.parallel.chunks import chunk_tokens
from megatron_lite.parallel.cp_split import choose_method
from megatron_lite.pipeline.schedule import live
from megatron_lite.plan.division import Division, PipelineRank, live_blocks, rank_parameters, vocab_rows

__all__ = ["Activations", "Memory", "activation_bytes", "rank_memory", "rank_parameters"]

Recompute = Literal["none", "selective", "full"]


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
    working: int  # what else is alive then: of a block in backward, or of the head

    @property
    def total(self) -> int:
        """Sum of all kinds."""
        return sum(self)


def cp_method(model: ModelConfig, parallel: Parallel, division: Division) -> Literal["gather", "ring", "heads"]:
    """How context-parallel ranks share keys and values: what "auto" comes to."""
    if parallel.cp_attention != "auto":
        return parallel.cp_attention
    kv_heads = max(1, model.num_key_value_heads // parallel.tp)
    elements = 2 * kv_heads * model.head_dim * division.tokens * parallel.cp
    return choose_method(elements * division.bytes_per_element)


def activation_bytes(
    model: ModelConfig,
    tokens: int,
    *,
    tp: int = 1,
    cp: int = 1,
    cp_attention: Literal["gather", "ring", "heads"] = "gather",
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
    # What attention keeps besides this rank's own: keys and values of whole rows; nothing, since ring blocks pass
    # through; or values and output of its heads in whole rows, kv heads copied when they are fewer than cp.
    others = {"gather": 2 * g * cp, "ring": 0, "heads": max(g, cp) + n}
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
        ("exchanged q, k, v", 0 if cp == 1 else T * others[cp_attention] * H * size, ("none",)),
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
    division: Division,
    at: PipelineRank,
    *,
    zero: int,
    alive: int | None = None,
) -> Memory:
    """Bytes on one rank in a step. `alive`: plan.division.live_blocks, if it is known."""
    if alive is None:
        alive = live_blocks(parallel.pp, at, division.micro_batches)
    size, tokens, held = division.bytes_per_element, division.tokens, at.parameters
    saved = partial(
        activation_bytes,
        model,
        tokens,
        tp=parallel.tp,
        cp=parallel.cp,
        cp_attention=cp_method(model, parallel, division),
        sequence_parallel=parallel.sequence_parallel,
        bytes_per_element=size,
        layers=1,
    )
    kept = saved(recompute=parallel.recompute)
    # fp32 weights are their own master; AdamW adds two moments.
    state = 8 if size == 4 else 12
    shares = (division.data_ranks, division.expert_data_ranks) if zero else (1, 1)
    forwards = live(parallel.pp, at.rank, len(at.chunks), division.micro_batches)  # whose backward is still to come
    activations = alive * sum(kept.blocks.values()) + forwards * kept.ends["cos, sin"]
    message = tokens // (parallel.tp if parallel.sequence_parallel else 1) * model.hidden_size * size
    working = _block_backward(model, parallel, tokens, size, kept, saved(recompute="none"))
    working += 2 * message if parallel.pp > 1 else 0
    if at.last:
        at_head = sum(number for what, number in kept.ends.items() if what != "cos, sin")
        logits = _head(model, parallel, tokens, size)
        if at_head + logits > working:  # one is over when the other begins
            activations, working = activations + at_head, logits
    return Memory(
        weights=held.total * size,
        gradients=held.total * 4,
        optimizer=state * (-(-held.dense // shares[0]) + -(-held.experts // shares[1])),
        activations=activations,
        working=working,
    )


def _block_backward(
    model: ModelConfig, parallel: Parallel, tokens: int, size: int, kept: Activations, whole: Activations
) -> int:
    """Bytes beside what was kept when a block's backward needs most: one of three moments in its second half."""
    D, f = (
        model.hidden_size,
        model.moe_intermediate_size if model.num_experts else model.intermediate_size // parallel.tp,
    )
    T_D, t_D = tokens * D, tokens * D // (parallel.tp if parallel.sequence_parallel else 1)
    T_f = whole.blocks["swiglu"] // size
    again = {
        "none": 0,
        "selective": size * T_f,  # the other core comes when this one is gone
        "full": sum(whole.blocks.values()) - sum(kept.blocks.values()),
    }[parallel.recompute]
    down = T_D + T_f + D * f + t_D  # gradients of its output, its input, its weight and the residual stream
    gate_up = T_D + 2 * T_f + 2 * D * f + t_D - 3 * T_f  # the same, when gate, up and swiglu are gone
    norm = (12 if size == 2 else 6) * t_D - 3 * T_f - T_D  # in fp32, when the MLP is gone
    return again + size * max(down, gate_up, norm)


def _head(model: ModelConfig, parallel: Parallel, tokens: int, size: int) -> int:
    """Bytes of the head's input and a chunk: fp32 logits; in bf16 their gradient and its share of the weight's too."""
    D, rows = model.hidden_size, vocab_rows(model, parallel.tp)
    chunk = chunk_tokens(tokens, D, rows) * rows
    return tokens * D * size + 4 * chunk + (size * (chunk + rows * D) if size < 4 else 0)
