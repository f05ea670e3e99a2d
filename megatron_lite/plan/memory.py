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
    working: int  # what one block computes again, as much as a whole block for its gradients, messages of pp ranks
    logits: int  # the head: a chunk of logits, and the gradients that the loss leaves behind

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
    block, kept_of_block = sum(saved(recompute="none").blocks.values()), sum(kept.blocks.values())
    # fp32 weights are their own master; AdamW adds two moments.
    state = 8 if size == 4 else 12
    shares = (division.data_ranks, division.expert_data_ranks) if zero else (1, 1)
    head = ("gradient of the head", "gradient of the head's input")
    final_norm = sum(number for what, number in kept.ends.items() if what not in (*head, "cos, sin"))
    rows = vocab_rows(model, parallel.tp)
    # logits in the run's type and in fp32, which become their gradient, and that in the run's type
    chunk = chunk_tokens(tokens, model.hidden_size, rows) * rows * (4 + 2 * size)
    forwards = live(parallel.pp, at.rank, len(at.chunks), division.micro_batches)  # whose backward is still to come
    message = tokens // (parallel.tp if parallel.sequence_parallel else 1) * model.hidden_size * size
    return Memory(
        weights=held.total * size,
        gradients=held.total * 4,
        optimizer=state * (-(-held.dense // shares[0]) + -(-held.experts // shares[1])),
        activations=alive * kept_of_block
        + forwards * kept.ends["cos, sin"]
        + (final_norm if at.last else 0),  # its backward is next
        # one message each way arriving, one each way leaving
        working=2 * block - kept_of_block + (4 * message if parallel.pp > 1 else 0),
        logits=sum(kept.ends[what] for what in head) + chunk if at.last else 0,
    )
