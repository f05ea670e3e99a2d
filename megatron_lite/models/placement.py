"""Which blocks each pipeline rank holds. Pure arithmetic.

The blocks are cut into pp * virtual_stages runs of neighbours; run c * pp + r is chunk c of pp rank r. The first run
also embeds the ids, the last one also holds the final norm, the head and the loss. Runs are as even as they can be in
the elements of the matrices a token is multiplied with, the head's included; a look-up in the embedding costs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.models.shapes import layer_matmul_parameters


class Chunk(NamedTuple):
    """Consecutive blocks that one pipeline rank runs without a message in between."""

    layers: range
    first: bool  # embeds the ids
    last: bool  # ends in the loss


def place(model: ModelConfig, pp: int, virtual_stages: int = 1) -> tuple[tuple[Chunk, ...], ...]:
    """The chunks of every pp rank, in the order a token meets them.

    There must be a block for each of them (config/layout_rules.py refuses the rest).
    """
    costs = [layer_matmul_parameters(model, layer) for layer in model.layers]
    runs = even_runs(costs, pp * virtual_stages, model.vocab_size * model.hidden_size)
    chunks = [Chunk(run, i == 0, i == len(runs) - 1) for i, run in enumerate(runs)]
    return tuple(tuple(chunks[rank::pp]) for rank in range(pp))


def even_runs(costs: Sequence[int], parts: int, tail: int) -> list[range]:
    """Cut `costs` into `parts` runs, none empty, whose largest sum is as small as can be; the last has `tail` on top.

    Among equals the later runs are the longer ones: they hold fewer micro-batches at a time than the first, which has
    the embedding as well.
    """
    assert 1 <= parts <= len(costs), f"{parts} runs of {len(costs)} blocks"
    sums = {sum(costs[i:j]) for i in range(len(costs)) for j in range(i + 1, len(costs) + 1)}
    limits = sorted(sums | {total + tail for total in sums})
    for limit in limits:
        runs = _within(costs, parts, tail, limit)
        if runs is not None:
            return runs
    raise AssertionError("one run of everything is always possible")


def _within(costs: Sequence[int], parts: int, tail: int, limit: int) -> list[range] | None:
    """The cut in which each run, from the last to the first, is as long as `limit` allows."""
    runs, stop = [], len(costs)
    for left in range(parts - 1, -1, -1):  # runs still to come before this one
        start, total = stop, tail if left == parts - 1 else 0
        while start > left and total + costs[start - 1] <= limit:
            start -= 1
            total += costs[start]
        if start == stop or total > limit:
            return None
        runs.append(range(start, stop))
        stop = start
    return runs[::-1] if stop == 0 else None
