"""Proof that replicated tensors are equal: a hash of every copy, compared over the ranks that hold it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

import torch.distributed as dist
from xxhash import xxh3_64

from megatron_lite.checkpoint.files import host_blocks
from megatron_lite.checkpoint.layout import parts
from megatron_lite.parallel.shard import FlatShard

if TYPE_CHECKING:
    from megatron_lite.parallel.context import Axis, ParallelContext

T = TypeVar("T")
SHARED = ("tp", "kv", "ends")  # axes over which pieces may have copies
Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int, str]  # name, start, shape, range of the piece, kind


def gather_all(axis: Axis, mine: T) -> list[T]:
    """What every rank of the axis brings, in the order of ranks. A collective."""
    if axis.group is None:
        return [mine]
    everyone: list[T] = [mine] * axis.size
    dist.all_gather_object(everyone, mine, group=axis.group)
    return everyone


def copy_hashes(shards: Sequence[FlatShard], axis: str) -> dict[Key, str]:
    """A hash of the bytes this rank holds of every piece that the ranks of `axis` share."""
    found = {}
    for shard in shards:
        for part in parts(shard.pieces, shard.lo, shard.hi):
            if part.piece.copies > 1 and part.piece.axis == axis:
                start = shard.lo + part.first - part.piece.offset
                span = (start, start + part.stop - part.first)
                for kind, tensor in shard.tensors.items():
                    digest = xxh3_64()
                    for block in host_blocks(tensor[part.first : part.stop]):
                        digest.update(block.data.cast("B"))
                    found[part.piece.name, part.piece.start, part.piece.shape, *span, kind] = digest.hexdigest()
    return found


def differing_copies(shards: Sequence[FlatShard], ctx: ParallelContext, axes: Sequence[str] = SHARED) -> list[str]:
    """One line for every tensor whose copies differ over the ranks that share it. A collective."""
    wrong = []
    for name in axes:
        axis = getattr(ctx, name)
        holders: dict[Key, dict[str, list[int]]] = {}
        for rank, hashes in zip(axis.ranks, gather_all(axis, copy_hashes(shards, name)), strict=True):
            for key, digest in hashes.items():
                holders.setdefault(key, {}).setdefault(digest, []).append(rank)
        wrong += [
            f"{tensor} ({kind}, elements {start} to {stop - 1} of the piece) is not equal on ranks "
            + " and ".join(str(ranks) for ranks in groups.values())
            for (tensor, _, _, start, stop, kind), groups in holders.items()
            if len(groups) > 1
        ]
    return wrong
