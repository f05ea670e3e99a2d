"""Proof that ranks which should hold the same weights do: data ranks all of them, others those that have copies."""

from __future__ import annotations

from dataclasses import replace

from megatron_lite.checkpoint.copies import differing_copies, gather_all
from megatron_lite.errors import TrainingError, require
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.shard import FlatShard


def check_replicas(optimizer: Zero1, ctx: ParallelContext, when: str) -> None:
    """Compare hashes of the weights, to the bit. A collective. TrainingError naming tensors and ranks, on all ranks."""
    optimizer.wait()
    weights = [
        FlatShard(b.name, b.pieces, b.base.numel(), 0, b.base.numel(), {"weight": b.base})
        for b in optimizer.weights.buckets
    ]
    everywhere = [
        replace(shard, pieces=tuple(replace(piece, copies=ctx.data.size, axis="data") for piece in shard.pieces))
        for shard in weights
    ]
    differing = differing_copies(everywhere, ctx, ["data"]) + differing_copies(weights, ctx)
    # a group may see no difference among its own ranks: everybody hears of everybody's
    found = list(dict.fromkeys(line for lines in gather_all(ctx.world, differing) for line in lines))
    require(not found, f"{when}, weights that should be equal are not: " + "; ".join(found[:8]), TrainingError)
