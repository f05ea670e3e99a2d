"""Which source a row comes from, and in which order a source is read. Pure integer arithmetic.

Blend: rows are dealt to sources so that after any number n of rows, each source has had within one row of weight * n.
The k-th row of a source with weight w (k = 1, 2, …) may be dealt from slot floor((k - 1) / w) on and must be dealt
before slot ceil(k / w); dealing the earliest deadline first meets all of them (the "pfair" windows of Baruah et al.
1996, for one processor). With rational weights the deal repeats after the sum of the integer weights.

Permutation: each epoch of a source is a bijection of its rows, computed per row and stored nowhere: a Feistel network
over the smallest fitting even power of two (at least 64: over fewer values it would prefer some orders), applied again
while its result falls outside.
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import TypeVar

import numpy as np

from megatron_lite.errors import require

MASK = (1 << 64) - 1
ROUNDS = 8
N = TypeVar("N", int, np.ndarray)  # one index, or a uint64 array of them


def integer_weights(weights: Mapping[str, float | Fraction]) -> dict[str, int]:
    """Weights as written (0.1 is 1/10), as the smallest integers in the same proportion, sorted by name."""
    for name, weight in weights.items():
        require(math.isfinite(weight) and weight >= 0, f"weight {weight} of {name} is not a number >= 0")
    exact = {name: exactly(weights[name]) for name in sorted(weights)}
    require(sum(exact.values()) > 0, f"no source has a weight over 0 in the blend {dict(weights)}")
    common = math.lcm(*(weight.denominator for weight in exact.values()))
    scaled = {name: int(weight * common) for name, weight in exact.items()}
    divisor = math.gcd(*scaled.values())
    return {name: weight // divisor for name, weight in scaled.items()}


def exactly(number: float | Fraction) -> Fraction:
    """A number as it is written: 0.1 is 1/10."""
    return number if isinstance(number, Fraction) else Fraction(repr(number))


def deal(weights: list[int]) -> Iterator[int]:
    """The endless sequence of sources (indices into `weights`), earliest deadline first."""
    total = sum(weights)
    ready: list[tuple[int, int, int]] = [(-(-total // w), i, 1) for i, w in enumerate(weights) if w]
    heapq.heapify(ready)  # (deadline, source, k): the k-th row of a source, which may be dealt now
    waiting: list[tuple[int, int, int]] = []  # (first slot, source, k)
    slot = 0
    while True:
        while waiting and waiting[0][0] <= slot:
            _, i, k = heapq.heappop(waiting)
            heapq.heappush(ready, (-(-k * total // weights[i]), i, k))
        _, i, k = heapq.heappop(ready)
        heapq.heappush(waiting, (k * total // weights[i], i, k + 1))
        yield i
        slot += 1


class Blend:
    """row -> (source, number of the row within its source), for endless rows.

    One period of the deal is kept, or as much of it as was asked for: 10 bytes per row.
    """

    def __init__(self, weights: Mapping[str, float | Fraction]):
        """`weights` need not sum to 1. A source with weight 0 is never dealt."""
        self.weights = integer_weights(weights)
        self.names = list(self.weights)
        self._integers = list(self.weights.values())
        self.period = sum(self._integers)
        self._deal = deal(self._integers)
        self._source = np.empty(0, dtype=np.uint16)
        self._number = np.empty(0, dtype=np.int64)
        self._dealt = [0] * len(self.names)
        require(len(self.names) < 2**16, f"a blend of {len(self.names)} sources; at most 65,535")

    def __call__(self, row: int) -> tuple[str, int]:
        """Name of the source of a row, and which of that source's rows it is (0, 1, … over all epochs)."""
        rounds, at = divmod(row, self.period)
        self._build(at + 1)
        source = int(self._source[at])
        return self.names[source], int(self._number[at]) + rounds * self._integers[source]

    def counts(self, num_rows: int) -> dict[str, int]:
        """Rows dealt to each source among the first `num_rows`."""
        rounds, rest = divmod(num_rows, self.period)
        self._build(rest)
        part = np.bincount(self._source[:rest], minlength=len(self.names)).tolist()
        return {name: rounds * w + n for name, w, n in zip(self.names, self._integers, part, strict=True)}

    def _build(self, length: int) -> None:
        built = len(self._source)
        if length <= built:
            return
        extra = min(self.period, max(length, 2 * built, 1024)) - built
        source = np.fromiter(self._deal, dtype=np.uint16, count=extra)
        number = np.empty(extra, dtype=np.int64)
        for i in np.unique(source).tolist():
            places = np.flatnonzero(source == i)
            number[places] = np.arange(self._dealt[i], self._dealt[i] + len(places))
            self._dealt[i] += len(places)
        self._source = np.concatenate([self._source, source])
        self._number = np.concatenate([self._number, number])


class Permutation:
    """A bijection of range(size) chosen by a key; equal keys give equal orders on every machine and at any size."""

    def __init__(self, size: int, *key: int | str):
        """`key` names what is shuffled, e.g. (seed, stage, source, epoch)."""
        assert 0 < size < 2**62
        self.size = size
        self._half = max(3, ((size - 1).bit_length() + 1) // 2)
        digest = hashlib.blake2b(repr(key).encode(), digest_size=8 * ROUNDS).digest()
        self._keys = [int.from_bytes(digest[i : i + 8], "little") for i in range(0, len(digest), 8)]

    def __call__(self, index: int) -> int:
        """Where the index-th of `size` things is found."""
        index = self._network(index)
        while index >= self.size:
            index = self._network(index)
        return index

    def many(self, indices: np.ndarray) -> np.ndarray:
        """The same for an int64 array."""
        result = self._network(indices.astype(np.uint64))
        outside = np.flatnonzero(result >= self.size)
        while outside.size:
            result[outside] = self._network(result[outside])
            outside = outside[result[outside] >= self.size]
        return result.astype(np.int64)

    def _network(self, x: N) -> N:
        half, mask = self._half, (1 << self._half) - 1
        left, right = x >> half, x & mask
        for key in self._keys:
            left, right = right, left ^ (_mix(right, key) & mask)
        return (left << half) | right


def _mix(x: N, key: int) -> N:
    """A hash of 64 bits into the low 32 (the steps of splitmix64); Python integers and uint64 arrays agree."""
    x = ((x ^ key) * 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    return x >> 32
