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
    from megatron_lite.parallel.context import Axis

T = TypeVar("T")
Key = tuple[str, tuple[int, ...], tuple[int, ...], int, int, str]  # name, start, shape, range of the piece, kind


def gather_all(axis: Axis, mine: T) -> list[T]:
    """What every rank of the axis brings, in the order of ranks. A collective."""
    if axis.group is None:
        return [mine]
    everyone: list[T] = [mine] * axis.size
    dist.all_gather_object(everyone, mine, group=axis.group)
    return everyone


def copy_hashes(shards: Sequence[FlatShard]) -> dict[Key, str]:
    """A hash of the bytes this rank holds of every replicated piece."""
    found = {}
    for shard in shards:
        for part in parts(shard.pieces, shard.lo, shard.hi):
            if part.piece.copies > 1:
                start = shard.lo + part.first - part.piece.offset
                span = (start, start + part.stop - part.first)
                for kind, tensor in shard.tensors.items():
                    digest = xxh3_64()
                    for block in host_blocks(tensor[part.first : part.stop]):
                        digest.update(block.data.cast("B"))
                    found[part.piece.name, part.piece.start, part.piece.shape, *span, kind] = digest.hexdigest()
    return found


def differing_copies(shards: Sequence[FlatShard], tp: Axis) -> list[str]:
    """One line for every replicated tensor whose copies differ over the tensor-parallel ranks. A collective."""
    holders: dict[Key, dict[str, list[int]]] = {}
    for rank, hashes in zip(tp.ranks, gather_all(tp, copy_hashes(shards)), strict=True):
        for key, digest in hashes.items():
            holders.setdefault(key, {}).setdefault(digest, []).append(rank)
    return [
        f"{name} ({kind}, elements {start} to {stop - 1} of the piece) is not equal on ranks "
        + " and ".join(str(ranks) for ranks in groups.values())
        for (name, _, _, start, stop, kind), groups in holders.items()
        if len(groups) > 1
    ]
