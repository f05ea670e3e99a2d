"""What is known of a pair of files before training reads it, found once and kept in a cache folder.

Cache entries are named after content (sizes, times of change, a hash of samples of both files) and after every option
that matters, never after a path.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import xxhash

from megatron_lite.data import packing
from megatron_lite.data.cache import Cache
from megatron_lite.data.indexed import IndexedDataset, manifest_path
from megatron_lite.errors import DataError, require

CHUNK = 1 << 24  # tokens read at a time
BLOCK = 1 << 18  # bytes of an index hashed at a time, few enough for a cache
DOCUMENTS = 1 << 16  # looked at at a time, for the same reason
SAMPLES, SAMPLE_BYTES = 32, 4096  # blocks of each file that are hashed


@dataclass(frozen=True)
class Survey:
    """Facts about the tokens of a pair."""

    content: str  # hash of the whole index and of samples of the tokens; the same for copies of the files
    max_id: int


@dataclass(frozen=True)
class Stream:
    """What rows are cut from: pieces of documents, laid end to end."""

    starts: np.ndarray  # int64 [pieces + 1], where each starts in the stream, the first anywhere, and the end
    places: np.ndarray | None  # int64 [pieces], where each starts in PREFIX.bin, or packing.PADDING; None: at `starts`


def survey(dataset: IndexedDataset, cache: Cache) -> Survey:
    """Check the whole index and find the largest id, unless the cache knows; reads all tokens without a manifest."""

    def build() -> bytes:
        dataset.check()
        digest = xxhash.xxh3_128(f"{dataset.dtype.str} {dataset.num_tokens}".encode())
        with open(dataset.idx, "rb") as index:
            while block := index.read(BLOCK):
                digest.update(block)
        digest.update(_samples(dataset.bin))
        return orjson.dumps(asdict(Survey(digest.hexdigest(), _max_id(dataset))))

    path = cache.entry("survey", identity(dataset), ".json", build)
    with _reading(path):
        return Survey(**orjson.loads(path.read_bytes()))


def documents(
    dataset: IndexedDataset, span: tuple[int, int], min_length: int, max_length: int | None, cache: Cache
) -> Stream:
    """The documents span[0] … span[1] - 1 with min_length <= length <= max_length tokens, from the cache or put there.

    Each is one piece, in the order of the corpus.
    """

    def build() -> np.ndarray:
        table = np.empty((2, span[1] - span[0] + 1), dtype=np.int64)
        starts, places = table
        kept = tokens = everything = longest = 0
        for edges in document_edges(dataset, span):
            lengths = np.diff(edges)
            numbers = packing.kept_documents(lengths, min_length, max_length)
            starts[kept : kept + len(numbers) + 1] = packing.stream_starts(lengths[numbers], tokens)
            places[kept : kept + len(numbers)] = edges[numbers]
            kept += len(numbers)
            tokens = int(starts[kept])
            everything, longest = everything + int(edges[-1] - edges[0]), max(longest, int(lengths.max()))
        require(
            kept > 0,
            f"none of the {span[1] - span[0]} documents of {dataset.prefix} has between min_length={min_length} "
            f"and max_length={max_length} tokens; the longest has {longest}",
            DataError,
        )
        if tokens < everything:
            places[kept] = 0
            return table[:, : kept + 1]
        places[kept] = places[0] + tokens  # the stream is a part of the file
        return places[: kept + 1]

    selection = _selection(dataset, span, min_length, max_length)
    return _load(cache.entry("documents", selection, ".npy", build), dataset)


def packed(
    dataset: IndexedDataset,
    span: tuple[int, int],
    min_length: int,
    max_length: int | None,
    seq_len: int,
    cache: Cache,
) -> Stream:
    """The same documents packed by best fit into rows of seq_len + 1 tokens, from the cache or put there."""

    def build() -> np.ndarray:
        kept = documents(dataset, span, min_length, max_length, cache)
        places = kept.starts[:-1] if kept.places is None else kept.places
        starts, places = packing.pack(np.diff(kept.starts), places, seq_len)
        return np.stack([starts, np.append(places, 0)])

    selection = _selection(dataset, span, min_length, max_length)
    return _load(cache.entry("rows", f"{selection} {seq_len}", ".npy", build), dataset)


def document_edges(dataset: IndexedDataset, span: tuple[int, int]) -> Iterator[np.ndarray]:
    """For DOCUMENTS of the documents span[0] … span[1] - 1 at a time: int64, the first token of each in PREFIX.bin, and
    the end of the last. Needs `dataset.check()` to hold.
    """
    for first in range(*span, DOCUMENTS):
        sequences = np.asarray(dataset.document_index[first : min(first + DOCUMENTS, span[1]) + 1])
        edges = np.full(len(sequences), dataset.bin_bytes, dtype=np.int64)
        inside = sequences < dataset.num_sequences
        edges[inside] = dataset.pointers[sequences[inside]]
        yield edges // dataset.dtype.itemsize


def identity(dataset: IndexedDataset) -> str:
    """What tells these files from any others, read in a moment: sizes, times of change, samples."""
    stats = [path.stat() for path in (dataset.idx, dataset.bin)]
    facts = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    samples = _samples(dataset.idx) + _samples(dataset.bin)
    return hashlib.sha256(repr(facts).encode() + samples).hexdigest()


def token_range(dataset: IndexedDataset, progress: Callable[[int], object] = lambda tokens: None) -> tuple[int, int]:
    """The smallest and the largest id, by reading all tokens; `progress` is told how many at a time."""
    low, high = 2**63, -1
    for start in range(0, dataset.num_tokens, CHUNK):
        tokens = dataset.read(start, min(CHUNK, dataset.num_tokens - start))
        low, high = min(low, int(tokens.min())), max(high, int(tokens.max()))
        if low < 0:
            document = document_at(dataset, start + int(tokens.argmin()))[0]
            raise DataError(f"{dataset.bin}: document {document} holds the id {low}; ids are not negative")
        progress(len(tokens))
    return low, high


def first_with(dataset: IndexedDataset, least: int) -> int | None:
    """Number of the first document that holds an id of at least `least`."""
    for start in range(0, dataset.num_tokens, CHUNK):
        found = dataset.read(start, min(CHUNK, dataset.num_tokens - start)) >= least
        if found.any():
            return document_at(dataset, start + int(np.argmax(found)))[0]
    return None


def document_at(dataset: IndexedDataset, token: int) -> tuple[int, int, int]:
    """Which document holds token `token` of PREFIX.bin: its number, its first token there, and one past its last."""
    sequence = bisect_right(dataset.pointers, token * dataset.dtype.itemsize) - 1
    number = bisect_right(dataset.document_index, sequence) - 1
    ends = (int(dataset.document_index[number]), int(dataset.document_index[number + 1]))
    begin, end = (
        (int(dataset.pointers[at]) if at < dataset.num_sequences else dataset.bin_bytes) // dataset.dtype.itemsize
        for at in ends
    )
    return number, begin, end


def read_manifest(prefix: str | Path) -> dict[str, Any] | None:
    """What our preparation wrote beside a pair, if it did."""
    path = manifest_path(prefix)
    if not path.is_file():
        return None
    try:
        manifest = orjson.loads(path.read_bytes())
    except orjson.JSONDecodeError as error:
        raise DataError(f"{path} is not valid JSON ({error}); remove it or prepare the corpus again") from error
    require(
        isinstance(manifest, dict), f"{path} does not hold a table; remove it or prepare the corpus again", DataError
    )
    return dict(manifest)


def other_tokenizer(manifest: dict[str, Any] | None, fingerprint: str) -> str | None:
    """Name of the tokenizer that wrote a pair, if it is known and not the one with this fingerprint."""
    wrote = (manifest or {}).get("tokenizer") or {}
    return None if wrote.get("fingerprint") in (None, fingerprint) else str(wrote.get("name"))


def _max_id(dataset: IndexedDataset) -> int:
    manifest = read_manifest(dataset.prefix) or {}
    described = (manifest.get("documents"), manifest.get("tokens"), manifest.get("dtype"))
    max_id = manifest.get("max_id")
    if described == (dataset.num_documents, dataset.num_tokens, dataset.dtype.name) and isinstance(max_id, int):
        return max_id
    return token_range(dataset)[1]


def _samples(path: Path) -> bytes:
    """A hash of blocks spread evenly over a file, the first and the last included."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        last = max(0, path.stat().st_size - SAMPLE_BYTES)
        for i in range(SAMPLES):
            file.seek(last * i // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))
    return digest.digest()


def _selection(dataset: IndexedDataset, span: tuple[int, int], min_length: int, max_length: int | None) -> str:
    """What decides which documents are read."""
    return f"{identity(dataset)} {span[0]} {span[1]} {min_length} {max_length}"


def _load(path: Path, dataset: IndexedDataset) -> Stream:
    with _reading(path):
        table = np.asarray(np.load(path, mmap_mode="r" if dataset.mmap else None))  # a plain array is read faster
    return Stream(table, None) if table.ndim == 1 else Stream(table[0], table[1, :-1])


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Name the entry that somebody has changed."""
    try:
        yield
    except (ValueError, TypeError, EOFError) as error:
        raise DataError(f"{path} is damaged ({error}); remove it and start again") from error
