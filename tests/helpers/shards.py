"""A small model's flat shards under any tp and dp, built from whole tensors: the truth that checkpoints are held to."""

from __future__ import annotations

import zlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_lite.checkpoint import store
from megatron_lite.parallel.context import Axis
from megatron_lite.parallel.shard import FlatShard, Piece

KINDS = ("master", "exp_avg", "exp_avg_sq")
D, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 10, 4, 2, 3, 37
SHAPES = {
    "model.embed_tokens.weight": (VOCAB, D),
    "model.q_proj.weight": (HEADS * HEAD_DIM, D),
    "model.k_proj.weight": (KV_HEADS * HEAD_DIM, D),
    "model.v_proj.weight": (KV_HEADS * HEAD_DIM, D),
    "model.o_proj.weight": (D, HEADS * HEAD_DIM),
    "model.conv.weight": (3, 8, 5),
    "model.norm.weight": (D,),
    "model.k_norm.weight": (HEAD_DIM,),
}


def whole_tensor(name: str, kind: str) -> np.ndarray:
    """The values of a tensor; every element of the model differs from every other, nearly."""
    rng = np.random.default_rng(zlib.crc32(f"{name}.{kind}".encode()))
    return rng.standard_normal(SHAPES[name]).astype(np.float32)


def load(folder: Path, shards: list[FlatShard], kinds: tuple[str, ...] = KINDS) -> None:
    """store.load of a model that has the tensors of these shards and no others."""
    shapes = {piece.name: piece.whole for shard in shards for piece in shard.pieces}
    store.load(folder, shards, shapes, kinds)


def _rows(name: str, first: int, stop: int, copies: int = 1, copy: int = 0) -> Piece | None:
    whole = SHAPES[name]
    stop = min(stop, whole[0])
    if first >= stop:
        return None
    return Piece(name, whole, (first, *[0] * (len(whole) - 1)), (stop - first, *whole[1:]), 0, copies, copy)


def _columns(name: str, first: int, stop: int) -> Piece:
    whole = SHAPES[name]
    return Piece(name, whole, (0, first, *[0] * (len(whole) - 2)), (whole[0], stop - first, *whole[2:]))


def buckets(tp: int, rank: int) -> dict[str, list[tuple[Piece | None, int]]]:
    """Pieces of one tp rank, in the order they lie, each with the elements of its storage (padding behind it)."""
    rows = -(-VOCAB // (4 * tp)) * 4  # vocabulary padded to a multiple of 4 * tp
    q = HEADS * HEAD_DIM // tp
    copies = max(tp // KV_HEADS, 1)
    kv = max(KV_HEADS // tp, 1) * HEAD_DIM
    at = rank // copies * kv
    matrices = [
        (_rows("model.embed_tokens.weight", rank * rows, (rank + 1) * rows), rows * D),
        (_rows("model.q_proj.weight", rank * q, (rank + 1) * q), q * D),
        (_rows("model.k_proj.weight", at, at + kv, copies, rank % copies), kv * D),
        (_rows("model.v_proj.weight", at, at + kv, copies, rank % copies), kv * D),
        (_columns("model.o_proj.weight", rank * q, (rank + 1) * q), q * D),
        (_columns("model.conv.weight", rank * 8 // tp, (rank + 1) * 8 // tp), 120 // tp),
    ]
    norms = [(_rows(name, 0, SHAPES[name][0], tp, rank), SHAPES[name][0]) for name in list(SHAPES)[-2:]]
    return {"decay": matrices, "plain": norms}


def make_shards(
    tp: int, tp_rank: int, dp: int, dp_rank: int, *, filled: bool, kinds: tuple[str, ...] = KINDS
) -> list[FlatShard]:
    """What one rank owns: real values with 7 in the padding when `filled`, NaN everywhere otherwise."""
    shards = []
    for bucket, storages in buckets(tp, tp_rank).items():
        pieces, offset = [], 0
        for piece, size in storages:
            if piece is not None:
                pieces.append(piece.moved(offset))
            offset += size
        per_rank = -(-offset // dp)
        lo, hi = dp_rank * per_rank, (dp_rank + 1) * per_rank
        tensors = {}
        for kind in kinds:
            flat = np.full(per_rank * dp, 7.0 if filled else np.nan, np.float32)
            if filled:
                for piece in pieces:
                    box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
                    flat[piece.offset : piece.offset + piece.numel] = whole_tensor(piece.name, kind)[box].ravel()
            tensors[kind] = torch.from_numpy(flat[lo:hi].copy())
        shards.append(FlatShard(bucket, tuple(pieces), per_rank * dp, lo, hi, tensors))
    return shards


def expected(shard: FlatShard, kind: str, padding: float = 0.0) -> np.ndarray:
    """What the shard must hold, from the whole tensors."""
    flat = np.full(shard.size, padding, np.float32)
    for piece in shard.pieces:
        box = tuple(slice(a, a + n) for a, n in zip(piece.start, piece.shape, strict=True))
        flat[piece.offset : piece.offset + piece.numel] = whole_tensor(piece.name, kind)[box].ravel()
    return flat[shard.lo : shard.hi]


def lone_rank(tp: int = 1, tp_rank: int = 0, dp: int = 1, dp_rank: int = 0) -> Any:
    """The context of a rank that talks to nobody."""
    one = Axis("one")
    rank = dp_rank * tp + tp_rank
    return SimpleNamespace(
        world=Axis("world", rank, tp * dp),
        tp=Axis("tp", tp_rank, tp),
        pp=one,
        cp=one,
        dp=Axis("dp", dp_rank, dp),
        data=Axis("data", dp_rank, dp),
        kv=one,
        ends=one,
    )
