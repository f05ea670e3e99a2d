"""Bytes each rank sends in one optimizer step, by axis, with ring collectives: of a tensor of B bytes over n ranks,

all-gather or reduce-scatter   B (n - 1) / n
all-reduce                   2 B (n - 1) / n      also a reduce-scatter and an all-gather, as sequence parallelism does
"""

from __future__ import annotations

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel
from megatron_lite.plan.memory import Parameters, rank_parameters


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
    """Axis and what goes over it -> bytes. `tokens` of one micro-batch on a rank (rows x seq_len / cp)."""
    tp, pp, cp, ep = parallel.tp, parallel.pp, parallel.cp, parallel.ep
    hidden = tokens * model.hidden_size * bytes_per_element
    layers = -(-model.num_hidden_layers // pp)
    traffic = {}
    if tp > 1:
        # Per block 2 all-reduces (or gather + scatter pairs) forward and 2 backward. Recomputing a whole block repeats
        # the first half of its forward: what follows the last kept tensor is not computed again.
        repeated = {"none": 0.0, "selective": 0.0, "full": 1.5 if parallel.sequence_parallel else 1.0}
        per_block = 4 + repeated[parallel.recompute]
        ends = 2  # embedding forward, head backward
        numbers = 3 * 4 * tokens  # of the loss, per token and rank
        what = "gather and scatter of activations" if parallel.sequence_parallel else "all-reduce of activations"
        one = _ring(2 * hidden, tp)
        traffic[f"tp: {what}"] = int(micro_batches * ((layers * per_block + ends) * one + numbers * (tp - 1)))
    if cp > 1:
        kv_heads = max(1, model.num_key_value_heads // tp)
        keys_values = 2 * tokens * cp * kv_heads * model.head_dim * bytes_per_element
        passes = 2 if parallel.recompute == "none" else 3
        traffic["cp: keys and values, gathered"] = micro_batches * layers * passes * _ring(keys_values, cp)
    if pp > 1:
        traffic["pp: activations and their gradients"] = (
            micro_batches * 2 * hidden // (tp if parallel.sequence_parallel else 1)
        )
    if ep > 1:
        routed = hidden // (tp if parallel.sequence_parallel else 1) * model.num_experts_per_tok
        traffic["ep: tokens to experts and back"] = micro_batches * layers * 4 * _ring(routed, ep)
    return traffic | _gradients(
        rank_parameters(model, parallel), zero, data_ranks, expert_data_ranks, bytes_per_element
    )


def _gradients(parameters: Parameters, zero: int, data: int, expert_data: int, size: int) -> dict[str, int]:
    """Once per step, whatever the number of micro-batches; gradients travel in fp32."""
    traffic = {}
    for name, numel, ranks in (("dp", parameters.dense, data), ("edp", parameters.experts, expert_data)):
        if ranks > 1 and numel and zero:
            traffic[f"{name}: reduce-scatter of fp32 gradients"] = _ring(4 * numel, ranks)
            traffic[f"{name}: all-gather of weights"] = _ring(size * numel, ranks)
        elif ranks > 1 and numel:
            traffic[f"{name}: all-reduce of fp32 gradients"] = _ring(8 * numel, ranks)
    return traffic


def _ring(size: int, ranks: int) -> int:
    return size * (ranks - 1) // ranks
