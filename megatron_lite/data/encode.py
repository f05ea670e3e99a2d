"""A block of documents to tokens laid end to end: what each worker of a preparation does.

With a fast backend, a sample of the documents also goes through the tokenizer's own library: any difference ends the
work. The sample is the first documents of each input's first block and a seeded share of all others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import orjson

from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.readers import Block, Columns
from megatron_lite.data.tokenizer import Tokenizer, end_to_end, fast_backend
from megatron_lite.errors import DataError

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
CHECKED_SHARE, CHECKED_BYTES = 0.01, 2_000_000  # of the documents, at most about this much text in all
CHECKED_FIRST = 20_000  # bytes of an input's first block
CHECKED_DOCUMENT = 1_000_000  # longer documents would take the reference too long


@dataclass(frozen=True)
class Options:
    """What makes a corpus out of text; all of it is in the manifest."""

    tokenizer: str
    columns: Columns = Columns("text")
    append_eod: bool = False
    on_bad_line: Literal["stop", "skip"] = "stop"
    backend: Literal["auto", "reference"] = "auto"
    checked_share: float = CHECKED_SHARE  # of the documents that a fast backend encoded


@dataclass
class Encoded:
    """One block of documents, laid end to end."""

    tokens: np.ndarray  # [sum of lengths], in the dtype of the corpus
    lengths: np.ndarray  # int64 [documents]
    input: int  # number of the input it came from
    consumed: int  # bytes of that file
    empty: int = 0  # documents without a token
    filtered: int = 0  # records whose column has another value
    checked: int = 0  # documents that went through the reference too
    bad: Counter[str] = field(default_factory=Counter)  # records left out, by reason
    error: str | None = None  # the first bad record, when they are not to be skipped; or a wrong backend


class BadRecord(DataError):
    """A record that holds no document; `reason` is what it is counted under."""

    def __init__(self, reason: str, detail: str = "", inside: int = 0):
        super().__init__(f"{reason}{detail and f' ({detail})'}")
        self.reason, self.inside = reason, inside


class Encoder:
    """Turns blocks into tokens."""

    def __init__(self, tokenizer: Tokenizer, options: Options):
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.eod = tokenizer.eod_id if options.append_eod else None
        wanted = options.backend == "auto" and options.columns.ids is None
        self.fast = fast_backend(tokenizer) if wanted else None

    def __call__(self, block: Block) -> Encoded:
        """The documents of a block in order; bad records are counted, or the first one is the error."""
        block = block.loaded()
        result = Encoded(np.empty(0, self.dtype), np.empty(0, np.int64), block.input, block.consumed)
        try:
            if block.ids is not None and block.lengths is not None:
                tokens, lengths = self._ready(block, block.ids, block.lengths, result)
            elif self.options.columns.ids is not None:
                tokens, lengths = end_to_end(list(self._records(block, result)), np.int64)
                tokens, lengths = self._ready(block, tokens, lengths, result)
            else:
                texts = list(self._records(block, result))
                tokens, lengths = (self.fast or self.tokenizer).encode(texts)
                if self.fast is not None:
                    self._check(block, texts, tokens, lengths, result)
        except DataError as error:
            result.error = str(error)
            return result
        kept = lengths > 0
        result.empty = int(np.count_nonzero(~kept))
        result.tokens, result.lengths = self._close(tokens, lengths[kept])
        return result

    def _close(self, tokens: np.ndarray, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """In the dtype of the corpus, each document ended by the end-of-document id once."""
        if self.eod is None or not lengths.size:
            return tokens.astype(self.dtype), lengths
        lacking = tokens[np.cumsum(lengths) - 1] != self.eod
        closed = lengths + lacking
        ends = np.cumsum(closed)[lacking] - 1
        out = np.empty(int(closed.sum()), self.dtype)
        inside = np.ones(out.size, dtype=bool)
        inside[ends] = False
        out[inside], out[ends] = tokens, self.eod
        return out, closed

    # ---- records

    def _records(self, block: Block, result: Encoded) -> Iterator[Any]:
        """The text, or the ids, of each record that is kept."""
        if block.texts is not None:
            for index, text in enumerate(block.texts):
                if text is None:
                    self._bad(block, index, 0, BadRecord("no text"), result)
                else:
                    yield text
            return
        assert block.lines is not None
        raws = block.lines.split(b"\n")
        for index, raw in enumerate(raws):
            if not raw or raw.isspace():
                continue
            start = raw.startswith(BYTE_ORDER_MARK) and block.offset == 0 and index == 0
            try:
                value = parse(raw.removeprefix(BYTE_ORDER_MARK) if start else raw, self.options.columns)
            except BadRecord as bad:
                bad.inside += len(BYTE_ORDER_MARK) if start else 0
                self._bad(block, index, sum(len(r) + 1 for r in raws[:index]), bad, result)
                continue
            if value is None:
                result.filtered += 1
            else:
                yield value

    def _bad(self, block: Block, index: int, before: int, bad: BadRecord, result: Encoded) -> None:
        if self.options.on_bad_line == "stop":
            raise DataError(f"{block.where(index, before + bad.inside)}: {bad}")
        result.bad[bad.reason] += 1

    def _ready(
        self, block: Block, ids: np.ndarray, lengths: np.ndarray, result: Encoded
    ) -> tuple[np.ndarray, np.ndarray]:
        """Ids that were tokenized already, less the documents that have none or wrong ones."""
        absent = lengths < 0
        lengths = np.where(absent, 0, lengths)
        ends = np.cumsum(lengths)
        wrong = np.unique(
            np.searchsorted(ends, np.flatnonzero((ids < 0) | (ids >= self.tokenizer.vocab_size)), "right")
        )
        for index in np.union1d(np.flatnonzero(absent), wrong).tolist():
            own = ids[ends[index] - lengths[index] : ends[index]]
            limit = self.tokenizer.vocab_size
            detail = "" if absent[index] else f"ids {own.min()} to {own.max()}, but the tokenizer has 0 to {limit - 1}"
            self._bad(
                block, index, 0, BadRecord("no ids" if absent[index] else "ids beyond the tokenizer", detail), result
            )
        good = ~absent
        good[wrong] = False
        return (ids if not wrong.size else ids[np.repeat(good, lengths)]), lengths[good]

    # ---- the sample that is checked

    def _check(self, block: Block, texts: list[str], tokens: np.ndarray, lengths: np.ndarray, result: Encoded) -> None:
        ends = np.cumsum(lengths)
        sample = self._sample(block, texts)
        expected, sizes = self.tokenizer.encode([texts[i] for i in sample])
        start = 0
        for index, size in zip(sample, sizes.tolist(), strict=True):
            ours, theirs = tokens[ends[index] - lengths[index] : ends[index]], expected[start : start + size]
            start += size
            if not np.array_equal(ours, theirs):
                shorter = min(ours.size, theirs.size)
                at = int(np.append(np.flatnonzero(ours[:shorter] != theirs[:shorter]), shorter)[0])
                raise DataError(
                    f"{block.where(0)}, document {index} after it: {self.fast and self.fast.name} gives "
                    f"{ours[at : at + 4].tolist()} from token {at} on, {self.tokenizer.name} gives "
                    f"{theirs[at : at + 4].tolist()}; prepare with --backend reference"
                )
        result.checked = len(sample)

    def _sample(self, block: Block, texts: Sequence[str]) -> list[int]:
        """Numbers of the documents to check: those a seed draws, and the first of an input."""
        drawn = np.random.default_rng([block.input, block.offset, block.number or 0]).random(len(texts))
        chosen = set(np.flatnonzero(drawn < self.options.checked_share).tolist())
        if block.first:
            sizes = np.cumsum([len(text) for text in texts])
            chosen |= set(range(int(np.searchsorted(sizes, CHECKED_FIRST))))
        return sorted(index for index in chosen if len(texts[index]) <= CHECKED_DOCUMENT)


def parse(raw: bytes, columns: Columns) -> str | list[int] | None:
    """The text or the ids of one JSON line; None when it is not wanted. BadRecord: it holds no document."""
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as invalid:
            raise BadRecord("not valid UTF-8", invalid.reason, invalid.start) from error
        raise BadRecord("not valid JSON", error.msg, error.pos) from error
    if not isinstance(record, dict):
        raise BadRecord("not a JSON object")
    if columns.where is not None and str(record.get(columns.where[0])) != columns.where[1]:
        return None
    key = columns.ids or columns.text
    if key not in record:
        raise BadRecord(f"no key {key!r}", f"its keys are {sorted(record)}")
    value = record[key]
    if columns.ids is None:
        if not isinstance(value, str):
            raise BadRecord(f"the value of {key!r} is not a string")
        return value
    if not isinstance(value, list) or not all(type(i) is int and -(2**63) <= i < 2**63 for i in value):
        raise BadRecord(f"the value of {key!r} is not a list of integers")
    return value
