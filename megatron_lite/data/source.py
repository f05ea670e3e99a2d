"""Rows by number: of one source in corpus order, of a validation set, of a training stage.

A row is a pure function of (corpora, seed, stage, row number). Nothing else enters: not the number of ranks, nor the
batch size, nor how far the run will go; so the loader's whole state is one integer.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Protocol

import numpy as np

from megatron_lite.config import schema
from megatron_lite.data import corpus, packing
from megatron_lite.data.batch import Row
from megatron_lite.data.blend import Blend, Permutation
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.errors import DataError, require


class Rows(Protocol):
    """What the loader reads."""

    fingerprint: str  # of corpora and options that decide rows; equal fingerprints give equal rows
    num_rows: int | None  # None: endless

    def row(self, index: int) -> Row:
        """Row `index`, counted from 0."""

    def describe(self, num_rows: int) -> list[str]:
        """One line per source about the first `num_rows` rows."""


class Source:
    """One corpus cut into rows of `seq_len` tokens, in corpus order."""

    def __init__(self, section: str, config: schema.Source, seq_len: int, vocab_size: int, cache: Path, mmap: bool):
        """`section` is the recipe's table, which errors name, such as "sources.code"."""
        self.section, self.config, self.seq_len = section, config, seq_len
        try:
            self.dataset = IndexedDataset(Path(config.path).expanduser(), mmap)
            facts = corpus.survey(self.dataset, cache)
            self.documents = corpus.documents(self.dataset, config.min_length, config.max_length, cache)
        except DataError as error:
            raise DataError(f"[{section}] {error}") from error
        self.content = f"{facts.content} {config.min_length} {config.max_length}"
        self.num_tokens = int(self.documents.starts[-1])
        self.num_documents = len(self.documents.starts) - 1
        self.num_rows = packing.num_rows(self.num_tokens, seq_len)
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
        starts, places = self.documents.starts, self.documents.places
        first, last, borders = packing.row_documents(starts, index, self.seq_len)
        begin, count = index * self.seq_len, self.seq_len + 1
        if places is None:
            tokens = self.dataset.read(begin, count)
        else:
            edges = [begin, *(borders + begin).tolist(), begin + count]
            tokens = np.concatenate(
                [
                    self.dataset.read(int(places[doc]) + lo - int(starts[doc]), hi - lo)
                    for doc, lo, hi in zip(range(first, last), edges[:-1], edges[1:], strict=True)
                ]
            )
        return Row(tokens.astype(np.int64), np.asarray(borders))

    def size(self) -> str:
        """The corpus in words, with what is never read."""
        empty_or_filtered = self.dataset.num_documents - self.num_documents
        return (
            f"{self.num_rows:,} rows of {self.num_tokens:,} tokens in {self.num_documents:,} documents"
            f"{f', {empty_or_filtered:,} empty or filtered out' if empty_or_filtered else ''}"
            f", {packing.left_out(self.num_tokens, self.seq_len):,} tokens at the end fill no row"
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
    """The endless rows of a stage: dealt to sources by weight, each epoch of a source in an order of its own."""

    num_rows: int | None = None

    def __init__(self, sources: dict[str, Source], blend: Blend, seed: int, stage: int):
        """`stage` counts from 0; seed and stage choose the order."""
        self.sources, self.blend, self.seed, self.stage = sources, blend, seed, stage
        self._orders: dict[str, tuple[int, Permutation]] = {}  # source -> (epoch, its order): the last one used
        contents = [(name, weight, sources[name].content) for name, weight in blend.weights.items() if weight]
        self.fingerprint = _hash(seed, stage, {source.seq_len for source in sources.values()}, contents)

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
        lines = []
        for name, count in self.blend.counts(num_rows).items():
            source = self.sources[name]
            share = count / max(num_rows, 1)
            lines.append(
                f"{source.section}: {count:,} rows = {count * source.seq_len:,} tokens ({share:.2%}), "
                f"{count / source.num_rows:.2f} epochs of {source.size()}"
            )
        return lines

    def check_epochs(self, num_rows: int) -> None:
        """DataError if the first `num_rows` rows need more of a source than its max_epochs."""
        for name, count in self.blend.counts(num_rows).items():
            source = self.sources[name]
            most = source.config.max_epochs
            if most is not None and count > most * source.num_rows:
                raise DataError(
                    f"[{source.section}] the stage takes {count} rows of {source.config.path}, which has "
                    f"{source.num_rows}: {count / source.num_rows:.2f} epochs, but max_epochs={most}; lower its weight "
                    f"in the blend, shorten the stage, add data, or raise max_epochs"
                )


def _hash(*facts: object) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()
