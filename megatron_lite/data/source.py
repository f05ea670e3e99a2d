"""Rows by number: of one source in corpus order, of a validation set, of a training stage.

A row is a pure function of (corpora, seed, stage, row number). Nothing else enters: not the number of ranks, nor the
batch size, nor how far the run will go; so the loader's whole state is one integer.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_lite.config import schema
from megatron_lite.data import corpus, packing, split
from megatron_lite.data.batch import Row
from megatron_lite.data.blend import Blend, Permutation, exactly
from megatron_lite.data.cache import Cache
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError, require


class Rows(Protocol):
    """What the loader reads."""

    fingerprint: str  # of corpora and options that decide rows; equal fingerprints give equal rows
    num_rows: int | None  # how many there are; None: endless

    def row(self, index: int) -> Row:
        """Row `index`, counted from 0."""

    def describe(self, num_rows: int) -> list[str]:
        """One line per source about the first `num_rows` rows."""


class Source:
    """One corpus as rows of `seq_len` tokens, in corpus order."""

    def __init__(
        self,
        section: str,
        config: schema.Source,
        seq_len: int,
        vocab_size: int,
        cache: Path,
        mmap: bool,
        best_fit: bool = False,
    ):
        """`section` is the recipe's table, which errors name, such as "sources.code"; `best_fit` else concat."""
        self.section, self.config, self.seq_len, self.best_fit = section, config, seq_len, best_fit
        self.cache = Cache(cache)
        try:
            self.dataset = IndexedDataset(Path(config.path).expanduser(), mmap)
            facts = corpus.survey(self.dataset, self.cache)
            span = _span(config, self.dataset.num_documents)
            selection = (self.dataset, span, config.min_length, config.max_length)
            documents = corpus.documents(*selection, self.cache)
            self.stream = corpus.packed(*selection, seq_len, self.cache) if best_fit else documents
        except DataError as error:
            raise DataError(f"[{section}] {error}") from error
        self.content = f"{facts.content} {config.min_length} {config.max_length}"
        if config.split is not None:
            self.content += f" documents {span[0]} to {span[1]}"
        if best_fit:
            self.content += " best_fit"
        self.num_tokens = int(documents.starts[-1] - documents.starts[0])
        self.num_documents = len(documents.starts) - 1
        self.left_out = span[1] - span[0] - self.num_documents  # empty or filtered out
        self.stride = seq_len + 1 if best_fit else seq_len
        self.num_rows = (
            int(self.stream.starts[-1]) // self.stride if best_fit else packing.num_rows(self.num_tokens, seq_len)
        )
        require(
            self.num_rows > 0,
            f"[{section}] {config.path} has {self.num_tokens} tokens in {self.num_documents} documents, but one row of "
            f"seq_len={seq_len} needs at least {seq_len + 1}",
            DataError,
        )
        require(
            facts.max_id < vocab_size,
            f"[{section}] {config.path} holds the id {facts.max_id}, but model.vocab_size={vocab_size} ends at "
            f"{vocab_size - 1}; raise it, or prepare the corpus with this model's tokenizer",
            DataError,
        )

    def row(self, index: int) -> Row:
        """Row `index` < num_rows in corpus order."""
        starts, places = self.stream.starts, self.stream.places
        begin, count = int(starts[0]) + index * self.stride, self.seq_len + 1
        first, last, borders = packing.row_pieces(starts, begin, self.seq_len)
        if places is None:
            return Row(self.dataset.read(begin, count).astype(np.int64), borders)
        tokens = np.zeros(count, dtype=np.int64)  # padding is the id 0
        num_labels = None
        for lo, hi, place in self._pieces(begin, first, last, borders):
            if place is None:
                num_labels = lo - 1
            else:
                tokens[lo:hi] = self.dataset.read(place, hi - lo)
        return Row(tokens, borders, num_labels)

    def pieces(self, index: int) -> list[tuple[int, int, int | None]]:
        """What row `index` holds: (begin, end, token of PREFIX.bin at `begin`, None for padding) along the row."""
        begin = int(self.stream.starts[0]) + index * self.stride
        return list(self._pieces(begin, *packing.row_pieces(self.stream.starts, begin, self.seq_len)))

    def _pieces(self, begin: int, first: int, last: int, borders: np.ndarray) -> Iterator[tuple[int, int, int | None]]:
        starts, places = self.stream.starts, self.stream.places
        edges = [0, *borders.tolist(), self.seq_len + 1]
        for piece, lo, hi in zip(range(first, last), edges[:-1], edges[1:], strict=True):
            place = begin + lo
            if places is not None:
                place += int(places[piece]) - int(starts[piece])
            yield lo, hi, None if places is not None and places[piece] == packing.PADDING else place

    def padding(self) -> int:
        """Inputs, over all rows, that are no tokens of documents."""
        starts, places = self.stream.starts, self.stream.places
        if not self.best_fit or places is None:
            return 0
        fills = np.flatnonzero(places == packing.PADDING)
        return int((starts[fills + 1] - starts[fills] - 1).sum())  # the last place of a row is only a label

    def size(self) -> str:
        """The corpus in words, with what is never read."""
        if self.best_fit:
            padding = self.padding() / (self.num_rows * self.seq_len)
            rest = f"packed by best fit with {padding:.2%} padding"
        else:
            rest = f"{packing.left_out(self.num_tokens, self.seq_len):,} tokens at the end fill no row"
        return (
            f"{self.num_rows:,} rows of {self.num_tokens:,} tokens in {self.num_documents:,} documents"
            f"{f', {self.left_out:,} empty or filtered out' if self.left_out else ''}, {rest}"
        )


class ValidationRows:
    """The first rows of one source, the same at every evaluation."""

    def __init__(self, source: Source, most: int):
        """At most `most` rows."""
        self.source = source
        self.num_rows: int | None = min(most, source.num_rows)
        self.fingerprint = _hash(source.seq_len, self.num_rows, source.content)

    def row(self, index: int) -> Row:
        """Row `index` in corpus order."""
        assert self.num_rows is not None and 0 <= index < self.num_rows
        return self.source.row(index)

    def describe(self, num_rows: int) -> list[str]:
        """One line: how many rows, of how many."""
        return [f"{self.source.section}: {num_rows:,} rows, the first of {self.source.size()}"]


class TrainingRows:
    """The rows of a stage: dealt to sources in proportion, each epoch of a source in an order of its own."""

    def __init__(
        self,
        sources: dict[str, Source],
        seed: int,
        stage: int,
        *,
        blend: Mapping[str, float] | None = None,
        fractions: Mapping[str, float] | None = None,
    ):
        """`stage` counts from 0; seed and stage choose the order.

        blend: source -> share of the rows; or fractions: source -> share of its own rows that it gives to each round.
        """
        self.sources, self.seed, self.stage, self.fractions = sources, seed, stage, fractions or {}
        self.blend = Blend(blend or {name: exactly(f) * sources[name].num_rows for name, f in self.fractions.items()})
        self.num_rows: int | None = None  # endless until `end` finds that a source runs dry
        self.ending = ""
        self._orders: dict[str, tuple[int, Permutation]] = {}  # source -> (epoch, its order): the last one used
        contents = [(name, weight, sources[name].content) for name, weight in self.blend.weights.items() if weight]
        self.fingerprint = _hash(seed, stage, {source.seq_len for source in sources.values()}, contents)

    @property
    def names(self) -> list[str]:
        """The sources, in the order of `source_of`."""
        return self.blend.names

    def source_of(self, index: int) -> int:
        """Number of the source of row `index`."""
        return self.names.index(self.blend(index)[0])

    def place(self, index: int) -> tuple[str, int, int]:
        """Where row `index` comes from: source, epoch, row of the source in corpus order."""
        name, number = self.blend(index)
        size = self.sources[name].num_rows
        epoch, at = divmod(number, size)
        known, order = self._orders.get(name, (-1, None))
        if order is None or known != epoch:
            order = Permutation(size, self.seed, self.stage, name, epoch)
            self._orders[name] = (epoch, order)
        return name, epoch, order(at)

    def row(self, index: int) -> Row:
        """Row `index` of the stage."""
        name, _, at = self.place(index)
        return self.sources[name].row(at)

    def describe(self, num_rows: int) -> list[str]:
        """Rows, tokens and epochs each source gives to the first `num_rows` rows."""
        lines = [self.ending] if self.ending else []
        for name, count in self.blend.counts(num_rows).items():
            source = self.sources[name]
            share = count / max(num_rows, 1)
            fraction = f" (fraction {self.fractions[name]:g})" if self.fractions else ""
            lines.append(
                f"{source.section}: {count:,} rows = {count * source.seq_len:,} tokens ({share:.2%}), "
                f"{count / source.num_rows:.2f} epochs{fraction} of {source.size()}"
            )
        return lines

    def end(self, num_steps: int, rows_after: Callable[[int], int]) -> int:
        """Steps of a stage of `num_steps`: as many whole ones as there are before a source that stops it runs dry.

        DataError if there is none, or if the stage needs more of another source than its max_epochs.
        """
        total = rows_after(num_steps)
        steps = num_steps
        for name, most in self._limits("stop"):
            if self.blend.counts(total)[name] > most:
                lasts = bisect_right(range(total), most, key=partial(self._given, name)) - 1
                whole = bisect_right(range(1, num_steps + 1), lasts, key=rows_after)
                if whole < steps:
                    steps, source = whole, self.sources[name]
                    self.num_rows = rows_after(steps)
                    self.ending = (
                        f"the stage ends after {steps:,} of {num_steps:,} steps: {source.section} has rows for "
                        f"max_epochs={source.config.max_epochs:g} and when_exhausted = 'stop'"
                    )
        require(steps > 0, f"{self.ending}; that is less than one step of {rows_after(1)} rows", DataError)
        counts = self.blend.counts(rows_after(steps))
        for name, most in self._limits("error"):
            source, count = self.sources[name], counts[name]
            require(
                count <= most,
                f"[{source.section}] the stage takes {count} rows of {source.config.path}, which has "
                f"{source.num_rows}: {count / source.num_rows:.2f} epochs, but max_epochs={source.config.max_epochs}; "
                "lower its weight in the blend, shorten the stage, add data, raise max_epochs, or set "
                "when_exhausted = 'stop'",
                DataError,
            )
        return steps

    def _given(self, name: str, num_rows: int) -> int:
        return self.blend.counts(num_rows)[name]

    def _limits(self, when_exhausted: str) -> Iterator[tuple[str, int]]:
        """Sources with that rule and a limit, and how many rows they give."""
        for name, source in self.sources.items():
            if source.config.max_epochs is not None and source.config.when_exhausted == when_exhausted:
                yield name, int(exactly(source.config.max_epochs) * source.num_rows)


def _span(config: schema.Source, num_documents: int) -> tuple[int, int]:
    """The documents a section reads of its corpus: the first, and one past the last."""
    if config.split is None or config.part is None:
        return 0, num_documents
    return split.parts(num_documents, config.split)[config.part]


def _hash(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
