"""How long the documents of a corpus are, counted exactly in memory that does not grow with their number.

T tokens have at most sqrt(2 T) different lengths of documents, 1.4 million for a trillion: the table of lengths and how
often each occurs is all that is kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.data.corpus import document_edges
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError, require

LONG = (4096, 8192, 16384, 32768, 65536)  # tokens; lengths at which long documents are usually counted
# Okabe and Ito's palette, which colour-blind readers can tell apart too.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a")
ALL = "#3b3f46"


@dataclass(frozen=True)
class Lengths:
    """How many documents have which length."""

    values: np.ndarray  # int64, tokens, strictly increasing
    counts: np.ndarray  # int64, documents

    @property
    def documents(self) -> int:
        """All of them."""
        return int(self.counts.sum())

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return int((self.values * self.counts).sum())

    @property
    def longest(self) -> int:
        """Tokens of the longest document."""
        return int(self.values[-1])

    def at_least(self, length: int) -> Lengths:
        """The documents of at least `length` tokens."""
        first = int(np.searchsorted(self.values, length))
        return Lengths(self.values[first:], self.counts[first:])

    def below(self, length: int) -> Lengths:
        """The documents of fewer than `length` tokens."""
        last = int(np.searchsorted(self.values, length))
        return Lengths(self.values[:last], self.counts[:last])

    def quantile(self, share: float) -> int:
        """The smallest length such that `share` of the documents, or more, are at most that long."""
        upto = np.cumsum(self.counts)
        return int(self.values[np.searchsorted(upto, share * upto[-1])])

    def octaves(self) -> Iterator[tuple[int, int, Lengths]]:
        """(low, high, the documents of low … high - 1 tokens) with low = 0, 1, 2, 4, 8, … up to the longest."""
        low = 0
        while low <= self.longest:
            high = max(2 * low, 1)
            yield low, high, self.at_least(low).below(high)
            low = high


def count_lengths(dataset: IndexedDataset) -> Lengths:
    """Of all documents, empty ones included. Checks the whole index before."""
    dataset.check()
    table = Lengths(np.empty(0, np.int64), np.empty(0, np.int64))
    for edges in document_edges(dataset, (0, dataset.num_documents)):
        table = together([table, Lengths(*np.unique(np.diff(edges), return_counts=True))])
    return table


def together(tables: list[Lengths]) -> Lengths:
    """The documents of all tables."""

    def add(one: Lengths, other: Lengths) -> Lengths:
        values, places = np.unique(np.concatenate([one.values, other.values]), return_inverse=True)
        counts = np.zeros(len(values), np.int64)
        np.add.at(counts, places, np.concatenate([one.counts, other.counts]))
        return Lengths(values, counts)

    return reduce(add, tables)


def describe(name: str, table: Lengths) -> Iterator[str]:
    """Documents and tokens by length, in powers of two, and the share of tokens in long documents."""
    total = table.tokens
    yield f"{name}: {table.documents:,} documents, {total:,} tokens"
    yield (
        f"  tokens per document: mean {total / table.documents:,.1f}, median {table.quantile(0.5):,}, "
        f"99 % up to {table.quantile(0.99):,}, longest {table.longest:,}"
    )
    yield f"  {'length':>23} {'documents':>14} {'share':>7} {'tokens':>19} {'share':>7}"
    for low, high, inside in table.octaves():
        if inside.documents:
            yield (
                f"  {f'{low:,} to {high - 1:,}':>23} {inside.documents:>14,} "
                f"{inside.documents / table.documents:>7.2%} {inside.tokens:>19,} {inside.tokens / total:>7.2%}"
            )
    shares = ", ".join(f"{limit // 1024}K {table.at_least(limit).tokens / total:.1%}" for limit in LONG)
    yield f"  share of tokens in documents of at least: {shares}"


def describe_sources(tables: Mapping[str, Lengths]) -> Iterator[str]:
    """What each source holds of all tokens."""
    whole = together(list(tables.values()))
    yield f"  {'tokens by source':<32} {'documents':>14} {'share':>7} {'tokens':>19} {'share':>7}"
    for name, table in (*tables.items(), ("all", whole)):
        yield (
            f"  {name:<32} {table.documents:>14,} {table.documents / whole.documents:>7.2%} {table.tokens:>19,} "
            f"{table.tokens / whole.tokens:>7.2%}"
        )


def check_matplotlib() -> None:
    """DataError if it is not there to draw with."""
    require(
        find_spec("matplotlib") is not None,
        "a picture needs matplotlib, which is not installed: pip install 'megatron-lite[plot]'",
        DataError,
    )


def draw(tables: Mapping[str, Lengths], output: Path) -> None:
    """Write a picture: tokens by length of document, and the share of tokens in documents of at least any length.

    DataError: matplotlib is not installed, or does not know the ending of `output`.
    """
    check_matplotlib()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.8), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = [(name, table, COLOURS[i % len(COLOURS)]) for i, (name, table) in enumerate(tables.items())]
    whole = together(list(tables.values()))
    if len(tables) > 1:
        curves.append(("all", whole, ALL))
    for name, table, colour in curves:
        bars = [(low, high, inside.tokens / table.tokens) for low, high, inside in table.octaves() if low]
        edges = [bars[0][0], *(high for _, high, _ in bars)]
        label = f"{name}: {table.tokens:,} tokens in {table.documents:,} documents"
        left.stairs([share for _, _, share in bars], edges, color=colour, linewidth=1.8, label=label)
        lengths, shares = _share_at_least(table)
        right.plot(lengths, shares, color=colour, linewidth=1.8, drawstyle="steps-pre")
    shown = [limit for limit in LONG if limit <= whole.longest]
    at_least = [whole.at_least(limit).tokens / whole.tokens for limit in shown]
    right.plot(shown, at_least, "o", color=curves[-1][2], markersize=4.5)
    for limit, share in zip(shown, at_least, strict=True):
        right.annotate(
            f"{share:.{0 if share >= 0.0095 else 1}%}",
            (limit, share),
            xytext=(4, 4),
            textcoords="offset points",
            fontsize=8.5,
        )
    left.set_title("tokens by length of their document", loc="left", fontsize=11)
    right.set_title("tokens in documents of at least that length", loc="left", fontsize=11)
    left.set_ylabel("share of the source's tokens")
    top = max(2 ** (whole.longest.bit_length()), 2 * LONG[0])
    for axes in (left, right):
        _finish(axes, top)
    left.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1.08), fontsize=9.5, borderaxespad=0)
    output.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(output, dpi=150)
    except (ValueError, OSError) as error:
        raise DataError(f"cannot write the picture {output}: {error}") from error


def _share_at_least(table: Lengths) -> tuple[np.ndarray, np.ndarray]:
    """Every length there is, and the share of tokens in documents at least so long; it ends at 0."""
    tokens = table.values * table.counts
    shares = np.cumsum(tokens[::-1])[::-1] / tokens.sum()
    return np.append(table.values, table.longest + 1), np.append(shares, 0.0)


def _finish(axes: Any, top: int) -> None:
    """What both halves share: powers of two below, percent at the side."""
    from matplotlib.ticker import FuncFormatter, PercentFormatter

    axes.set_xscale("log", base=2)
    axes.set_xlim(16, top)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _binary(x)))
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("tokens in the document")
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _binary(number: float) -> str:
    """A power of two as people say it: 512, 4K, 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if number >= size:
            return f"{number / size:.0f}{unit}"
    return f"{number:.0f}"
