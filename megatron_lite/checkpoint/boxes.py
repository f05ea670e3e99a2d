"""Rectangles of a row-major array: which of them a flat range covers, and where two of them meet."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """The rectangle [start, start + shape) of an array."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements inside."""
        return prod(self.shape)

    def moved(self, by: tuple[int, ...]) -> Box:
        """The same extent, `by` further along every dim."""
        return Box(tuple(a + b for a, b in zip(self.start, by, strict=True)), self.shape)


def strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Elements between neighbours along each dim of a row-major array of `shape`."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> list[Box]:
    """Boxes that cover elements [start, stop) of a row-major array exactly, in ascending order of elements.

    There are at most 2 * ndim - 1: a partial first row, whole rows, a partial last row, and so on inside the rows.
    """
    assert 0 <= start <= stop <= prod(shape), f"[{start}, {stop}) is outside an array of shape {shape}"
    if start == stop:
        return []
    if not shape:
        return [Box((), ())]
    if len(shape) == 1:
        return [Box((start,), (stop - start,))]
    row = prod(shape[1:])
    first, last = start // row, (stop - 1) // row
    if first == last and stop - start < row:
        return _inside_row(shape, first, start - first * row, stop - first * row)
    boxes = []
    if start % row:
        boxes += _inside_row(shape, first, start % row, row)
        first += 1
    if first < stop // row:
        boxes.append(Box((first, *[0] * (len(shape) - 1)), (stop // row - first, *shape[1:])))
    if stop % row:
        boxes += _inside_row(shape, last, 0, stop % row)
    return boxes


def _inside_row(shape: tuple[int, ...], index: int, start: int, stop: int) -> list[Box]:
    inner = flat_boxes(shape[1:], start, stop)
    return [Box((index, *box.start), (1, *box.shape)) for box in inner]


def intersect(a: Box, b: Box) -> Box | None:
    """The rectangle that two boxes of the same array share, or None."""
    start = tuple(map(max, a.start, b.start))
    stop = tuple(min(i + n, j + m) for i, n, j, m in zip(a.start, a.shape, b.start, b.shape, strict=True))
    if any(i >= j for i, j in zip(start, stop, strict=True)):
        return None
    return Box(start, tuple(j - i for i, j in zip(start, stop, strict=True)))
