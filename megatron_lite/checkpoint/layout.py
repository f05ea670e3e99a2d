"""From tables of pieces to copies: which runs of which saved files fill which part of a wanted shard.

A saved file holds one flat range of a bucket, and a wanted shard is another flat range of another bucket; the range
of a piece is a few boxes of a whole tensor, and where two boxes meet, a strided copy moves the elements. Only the
first copy of a replicated piece is ever a source.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from megatron_lite.checkpoint.boxes import Box, flat_boxes, intersect, strides
from megatron_lite.errors import CheckpointError, require
from megatron_lite.parallel.shard import FlatShard, Piece

Coordinate = tuple[int, int]  # (pp rank, tp rank): ranks that share it have the same buckets and pieces


@dataclass(frozen=True)
class Strided:
    """A rectangle inside a flat array, in elements."""

    offset: int
    strides: tuple[int, ...]


@dataclass(frozen=True)
class Copy:
    """`shape` elements from a bucket of a saved file to a part of a wanted shard."""

    file: str
    bucket: str
    shape: tuple[int, ...]
    source: Strided  # in the range of the bucket that the file holds
    target: Strided  # in the part

    @property
    def source_stop(self) -> int:
        """One past the last element read."""
        return self.source.offset + sum((n - 1) * s for n, s in zip(self.shape, self.source.strides, strict=True)) + 1


@dataclass(frozen=True)
class Part:
    """What a shard holds of one piece: elements [first, stop) of the shard."""

    piece: Piece
    first: int
    stop: int


@dataclass(frozen=True)
class Range:
    """Elements [lo, hi) of a bucket lie in `file`."""

    lo: int
    hi: int
    file: str


def parts(pieces: Sequence[Piece], lo: int, hi: int) -> list[Part]:
    """The pieces that meet [lo, hi) of their bucket; positions count from lo."""
    found = []
    for piece in pieces:
        first, stop = max(piece.offset, lo), min(piece.offset + piece.numel, hi)
        if first < stop:
            found.append(Part(piece, first - lo, stop - lo))
    return found


def gaps(pieces: Sequence[Piece], lo: int, hi: int) -> list[tuple[int, int]]:
    """The padding in [lo, hi): ranges no piece covers, counted from lo."""
    empty, at = [], 0
    for part in sorted(parts(pieces, lo, hi), key=lambda part: part.first):
        if at < part.first:
            empty.append((at, part.first))
        at = max(at, part.stop)
    if at < hi - lo:
        empty.append((at, hi - lo))
    return empty


def owns(shard: FlatShard) -> bool:
    """Whether the shard holds anything that is to be saved: an element of a first copy."""
    return any(part.piece.copy == 0 for part in parts(shard.pieces, shard.lo, shard.hi))


def table(shards: Sequence[FlatShard]) -> dict[str, Any]:
    """The buckets of one layout coordinate with their pieces, as the manifest stores them."""
    return {
        shard.bucket: {
            "size": shard.size,
            "pieces": [[p.name, p.whole, p.start, p.shape, p.offset, p.copies, p.copy] for p in shard.pieces],
        }
        for shard in shards
    }


def pieces_of(bucket: dict[str, Any]) -> list[Piece]:
    """The pieces of one bucket of a stored table."""
    return [
        Piece(name, tuple(whole), tuple(start), tuple(shape), offset, copies, copy)
        for name, whole, start, shape, offset, copies, copy in bucket["pieces"]
    ]


class Saved:
    """Where every element of a checkpoint lies, from its manifest."""

    def __init__(self, coordinates: Sequence[dict[str, Any]], files: Sequence[dict[str, Any]]):
        self._holders: dict[str, list[tuple[Coordinate, str, Piece]]] = {}
        self._ranges: dict[tuple[Coordinate, str], list[Range]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}  # name -> whole shape, in the order of the buckets
        for entry in coordinates:
            coordinate = (entry["pp"], entry["tp"])
            for bucket, stored in entry["buckets"].items():
                for piece in pieces_of(stored):
                    self.shapes.setdefault(piece.name, piece.whole)
                    if piece.copy == 0:
                        self._holders.setdefault(piece.name, []).append((coordinate, bucket, piece))
        for entry in files:
            coordinate = (entry["pp"], entry["tp"])
            for bucket, (lo, hi) in entry["ranges"].items():
                self._ranges.setdefault((coordinate, bucket), []).append(Range(lo, hi, entry["name"]))
        for ranges in self._ranges.values():
            ranges.sort(key=lambda r: r.lo)

    def copies(self, part: Part, lo: int) -> list[Copy]:
        """Copies that fill `part` of a shard that starts at `lo` of its bucket; targets count from the part's first."""
        piece = part.piece
        first = lo + part.first  # in the wanted bucket
        wanted = [
            box.moved(piece.start)
            for box in flat_boxes(piece.shape, first - piece.offset, lo + part.stop - piece.offset)
        ]
        found = []
        for coordinate, bucket, source in self._holders.get(piece.name, ()):
            if intersect(Box(piece.start, piece.shape), Box(source.start, source.shape)) is None:
                continue
            for held in self._overlapping(coordinate, bucket, source):
                a, b = max(held.lo, source.offset), min(held.hi, source.offset + source.numel)
                for box in flat_boxes(source.shape, a - source.offset, b - source.offset):
                    for shared in (intersect(box.moved(source.start), want) for want in wanted):
                        if shared is not None:
                            found.append(
                                Copy(
                                    held.file,
                                    bucket,
                                    shared.shape,
                                    _place(shared, source, held.lo),
                                    _place(shared, piece, first),
                                )
                            )
        return found

    def _overlapping(self, coordinate: Coordinate, bucket: str, piece: Piece) -> Iterator[Range]:
        ranges = self._ranges.get((coordinate, bucket), [])
        for held in ranges[max(bisect_right(ranges, piece.offset, key=lambda r: r.lo) - 1, 0) :]:
            if held.lo >= piece.offset + piece.numel:
                return
            if held.hi > piece.offset:
                yield held


def _place(box: Box, piece: Piece, origin: int) -> Strided:
    """Where a box of the whole tensor lies in a flat array that starts at `origin` of the piece's bucket."""
    steps = strides(piece.shape)
    inside = sum((b - s) * step for b, s, step in zip(box.start, piece.start, steps, strict=True))
    return Strided(piece.offset + inside - origin, steps)


def plan(shard: FlatShard, saved: Saved) -> Iterator[tuple[Part, list[Copy]]]:
    """Every part of the shard with the copies that fill all of it.

    CheckpointError: an element is in no saved file.
    """
    for part in parts(shard.pieces, shard.lo, shard.hi):
        copies = saved.copies(part, shard.lo)
        filled = sum(prod(copy.shape) for copy in copies)
        require(
            filled == part.stop - part.first,
            f"{part.piece.name}: the checkpoint holds {filled} of the {part.stop - part.first} elements wanted here",
            CheckpointError,
        )
        yield part, copies


def compare_names(wanted: Mapping[str, tuple[int, ...]], saved: Mapping[str, tuple[int, ...]]) -> list[str]:
    """One line for every tensor that is missing, unexpected, or has another shape."""
    wrong = [f"{name} {list(shape)} is not in the checkpoint" for name, shape in wanted.items() if name not in saved]
    wrong += [f"{name} {list(shape)} is not in this model" for name, shape in saved.items() if name not in wanted]
    wrong += [
        f"{name} is {list(saved[name])} in the checkpoint and {list(shape)} here"
        for name, shape in wanted.items()
        if name in saved and saved[name] != shape
    ]
    return wrong
