"""Bytes each rank sends in one optimizer step, by axis, with ring collectives: of a tensor of B bytes over n ranks,

all-gather or reduce-scatter   B (n - 1) / n
all-reduce                   2 B (n - 1) / n      also a reduce-scatter and an all-gather, as sequence parallelism does
all-to-all                     B (n - 1) / n      B = what a rank holds

Beside it the least that the same layout could send: every activation that another rank needs goes out once, and so does
its gradient; nothing is repeated for recomputation, nothing goes out twice because tp ranks hold the same.
  tp   2 all-reduces a block forward and 2 backward, and one at each end of the model
  cp   the cheapest of gathering, ring and heads: keys and values forward, their gradients backward
  pp   an activation of T/tp tokens and its gradient for each micro-batch, with one chunk on each rank
  dp   gradients of N elements in fp32 and weights back, (4 + 2) N (n - 1) / n in bf16; without ZeRO 8 N (n - 1) / n
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel
from megatron_lite.plan.division import Division, PipelineRank, kinds, pipeline_ranks, vocab_rows
from megatron_lite.plan.memory import cp_method

BUCKET_ELEMENTS = 40_000_000  # of gradients that are reduced together, as in optim/zero1.py

Behind = Literal["nothing", "attention", "task", "last backward", "next forward"]


class Flow(NamedTuple):
    """What goes over one axis in a step."""

    axis: Literal["tp", "cp", "pp", "ends", "ep", "dp", "edp"]
    what: str
    sent: int  # bytes
    least: int
    calls: int  # collectives, or messages
    behind: Behind = "nothing"  # what can hide it

    @property
    def name(self) -> str:
        """Axis and what goes over it."""
        return f"{'pp' if self.axis == 'ends' else self.axis}: {self.what}"


def flows(model: ModelConfig, parallel: Parallel, division: Division, at: PipelineRank, *, zero: int) -> list[Flow]:
    """All traffic of one rank."""
    found = []
    if parallel.tp > 1:
        found.append(_tensor(model, parallel, division, at))
    if parallel.cp > 1:
        found.append(_context(model, parallel, division, at))
    if parallel.pp > 1:
        found += _pipeline(model, parallel, division, at)
    if parallel.ep > 1:
        routed = _hidden(model, parallel, division) * model.num_experts_per_tok
        sent = division.micro_batches * at.blocks * 4 * _ring(routed, parallel.ep)
        found.append(Flow("ep", "tokens to experts and back", sent, sent, division.micro_batches * at.blocks * 4))
    return found + _gradients(parallel, division, at, zero)


def most(each: Iterable[Iterable[Flow]]) -> list[Flow]:
    """Of every kind of traffic that of the pp rank which sends the most of it."""
    found: dict[str, Flow] = {}
    for of_rank in each:
        for flow in of_rank:
            if flow.name not in found or flow.sent > found[flow.name].sent:
                found[flow.name] = flow
    return list(found.values())


def bytes_per_step(
    model: ModelConfig,
    parallel: Parallel,
    *,
    zero: int,
    tokens: int,
    micro_batches: int,
    data_ranks: int,
    expert_data_ranks: int,
    bytes_per_element: int,
) -> dict[str, int]:
    """Axis and what goes over it -> the most bytes any rank sends. `tokens` of a micro-batch on a rank."""
    division = Division(tokens, micro_batches, data_ranks, expert_data_ranks, bytes_per_element)
    ranks = kinds(pipeline_ranks(model, parallel))
    return {flow.name: flow.sent for flow in most(flows(model, parallel, division, at, zero=zero) for at, _ in ranks)}


def _hidden(model: ModelConfig, parallel: Parallel, division: Division) -> int:
    """Bytes of the activations between blocks."""
    tokens = division.tokens // (parallel.tp if parallel.sequence_parallel else 1)
    return tokens * model.hidden_size * division.bytes_per_element


def _tensor(model: ModelConfig, parallel: Parallel, division: Division, at: PipelineRank) -> Flow:
    tp, m = parallel.tp, division.micro_batches
    # Per block 2 all-reduces (or gather + scatter pairs) forward and 2 backward. Recomputing a whole block repeats
    # the first half of its forward: what follows the last kept tensor is not computed again.
    repeated = {"none": 0.0, "selective": 0.0, "full": 1.5 if parallel.sequence_parallel else 1.0}[parallel.recompute]
    ends = at.first + at.last  # embedding forward, head backward
    numbers = 3 * 4 * division.tokens * (tp - 1) if at.last else 0  # of the loss, per token and rank
    one = _ring(2 * division.tokens * model.hidden_size * division.bytes_per_element, tp)
    what = "gather and scatter of activations" if parallel.sequence_parallel else "all-reduce of activations"
    passes = at.blocks * (4 + repeated) + ends
    return Flow(
        "tp",
        what,
        sent=int(m * (passes * one + numbers)),
        least=m * ((at.blocks * 4 + ends) * one + numbers),
        calls=int(m * (passes * (2 if parallel.sequence_parallel else 1) + at.last)),
    )


def _context(model: ModelConfig, parallel: Parallel, division: Division, at: PipelineRank) -> Flow:
    cp, method = parallel.cp, cp_method(model, parallel, division)
    heads, kv_heads = model.num_attention_heads // parallel.tp, max(1, model.num_key_value_heads // parallel.tp)
    head = division.tokens * model.head_dim * division.bytes_per_element  # of one head on this rank's tokens
    keys_values = _ring(2 * kv_heads * head * cp, cp)  # those of whole rows reach everybody
    # q and the output in parts of n/cp heads; a kv head goes to several ranks when there are fewer than cp.
    outputs = heads * head // cp * (cp - 1)
    exchange = 2 * outputs + 2 * max(1, kv_heads // cp) * head * (cp - 1)
    again = parallel.recompute != "none"
    outputs_again = parallel.recompute == "full"  # else nothing that comes after them is computed again
    gradients = keys_values * 4 // division.bytes_per_element  # of keys and values; summed, and sent, in fp32
    # forward, again, backward: around the ring that is keys and values once more, their gradients one step behind
    sent, calls = {
        "gather": ((1 + again) * keys_values + gradients, 2 + again),
        "ring": ((2 + again) * keys_values + gradients, (3 + again) * (cp - 1)),
        "heads": (2 * exchange + again * (exchange - outputs) + outputs_again * outputs, 4 + again + outputs_again),
    }[method]
    what = {
        "gather": "keys and values, gathered",
        "ring": "keys and values, around the ring",
        "heads": "heads, from all to all",
    }
    times = division.micro_batches * at.blocks
    return Flow(
        "cp",
        what[method],
        sent=times * sent,
        least=times * 2 * min(keys_values, exchange),
        calls=times * calls,
        behind="attention" if method == "ring" else "nothing",
    )


def _pipeline(model: ModelConfig, parallel: Parallel, division: Division, at: PipelineRank) -> list[Flow]:
    m, hidden = division.micro_batches, _hidden(model, parallel, division)
    messages = m * (2 * len(at.chunks) - at.first - at.last)  # forward but from the last chunk, backward from the first
    part = division.tokens * model.hidden_size * division.bytes_per_element // parallel.tp
    behind: Behind = "task" if parallel.overlap_pipeline else "nothing"
    found = [
        Flow(
            "pp",
            "activations and their gradients",
            sent=messages * hidden,
            least=m * (2 - at.first - at.last) * part,
            calls=messages,
            behind=behind,
        )
    ]
    if model.tie_word_embeddings and (at.first or at.last):
        matrix = _ring(2 * 4 * vocab_rows(model, parallel.tp) * model.hidden_size, 2)
        found.append(Flow("ends", "gradient of the tied matrix, over both ends", matrix, matrix, 1))
    return found


def _gradients(parallel: Parallel, division: Division, at: PipelineRank, zero: int) -> list[Flow]:
    """Once per step, whatever the number of micro-batches; gradients travel in fp32."""
    found = []
    backward: Behind = "last backward" if parallel.overlap_gradients else "nothing"
    forward: Behind = "next forward" if parallel.overlap_weights else "nothing"
    axes: tuple[tuple[Literal["dp", "edp"], int, int], ...] = (
        ("dp", at.parameters.dense, division.data_ranks),
        ("edp", at.parameters.experts, division.expert_data_ranks),
    )
    for axis, numel, ranks in axes:
        if ranks == 1 or not numel:
            continue
        calls = -(-numel // BUCKET_ELEMENTS)
        if zero:
            scatter, gather = _ring(4 * numel, ranks), _ring(division.bytes_per_element * numel, ranks)
            found.append(Flow(axis, "reduce-scatter of fp32 gradients", scatter, scatter, calls, backward))
            found.append(Flow(axis, "all-gather of weights", gather, gather, calls, forward))
        else:
            both = _ring(8 * numel, ranks)
            found.append(Flow(axis, "all-reduce of fp32 gradients", both, both, calls, backward))
    return found


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks
