"""What is known of a pair of files before training reads it, found once and kept in a cache folder.

Cache entries are named after content (sizes, times of change, a hash of samples of both files) and after every option
that matters, never after a path. They are written under names of their own and renamed, so that simultaneous starts
write the same bytes twice and never read half of them.
"""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from megatron_lite.data import packing
from megatron_lite.data.indexed import IndexedDataset, atomic_file, manifest_path, naming
from megatron_lite.errors import DataError, require

VERSION = 1  # of everything in the cache; part of every name
CHUNK = 1 << 24  # tokens, or bytes, read at a time
SAMPLES, SAMPLE_BYTES = 32, 4096  # blocks of each file that are hashed


@dataclass(frozen=True)
class Survey:
    """Facts about the tokens of a pair."""

    content: str  # hash of the whole index and of samples of the tokens; the same for copies of the files
    max_id: int


@dataclass(frozen=True)
class Stream:
    """What rows are cut from: pieces of documents, laid end to end."""

    starts: (
        np.ndarray
    )  # int64 [pieces + 1], where each starts in the stream (the first may start anywhere), and the end
    places: np.ndarray | None  # int64 [pieces], where each starts in PREFIX.bin, or packing.PADDING; None: at `starts`


def survey(dataset: IndexedDataset, cache: Path) -> Survey:
    """Check the whole index and find the largest id, unless the cache knows; reads all tokens without a manifest."""
    path = _entry(cache, "survey", identity(dataset), ".json")
    if path.is_file():
        return Survey(**orjson.loads(path.read_bytes()))
    dataset.check()
    digest = hashlib.sha256(f"{dataset.dtype.str} {dataset.num_tokens}".encode())
    with open(dataset.idx, "rb") as file:
        while block := file.read(CHUNK):
            digest.update(block)
    digest.update(_samples(dataset.bin))
    found = Survey(digest.hexdigest(), _max_id(dataset))
    with atomic_file(path) as file:
        file.write(orjson.dumps(asdict(found)))
    return found


def documents(
    dataset: IndexedDataset, span: tuple[int, int], min_length: int, max_length: int | None, cache: Path
) -> Stream:
    """The documents span[0] … span[1] - 1 with min_length <= length <= max_length tokens, from the cache or put there.

    Each is one piece, in the order of the corpus.
    """
    path = _entry(cache, "documents", _selection(dataset, span, min_length, max_length), ".npy")
    if not path.is_file():
        edges = dataset.document_starts()[span[0] : span[1] + 1]
        lengths = np.diff(edges)
        kept = packing.kept_documents(lengths, min_length, max_length)
        require(
            kept.size > 0,
            f"none of the {len(lengths)} documents of {dataset.prefix} has between min_length={min_length} "
            f"and max_length={max_length} tokens; the longest has {int(lengths.max())}",
            DataError,
        )
        whole = int(lengths[kept].sum()) == int(edges[-1] - edges[0])
        starts = packing.stream_starts(lengths[kept], int(edges[0]) if whole else 0)
        _save(path, starts if whole else np.stack([starts, np.append(edges[kept], 0)]))
    return _load(path, dataset)


def packed(
    dataset: IndexedDataset,
    span: tuple[int, int],
    min_length: int,
    max_length: int | None,
    seq_len: int,
    cache: Path,
) -> Stream:
    """The same documents packed by best fit into rows of seq_len + 1 tokens, from the cache or put there."""
    path = _entry(cache, "rows", f"{_selection(dataset, span, min_length, max_length)} {seq_len}", ".npy")
    if not path.is_file():
        kept = documents(dataset, span, min_length, max_length, cache)
        starts, places = packing.pack(
            np.diff(kept.starts), kept.starts[:-1] if kept.places is None else kept.places, seq_len
        )
        _save(path, np.stack([starts, np.append(places, 0)]))
    return _load(path, dataset)


def identity(dataset: IndexedDataset) -> str:
    """What tells these files from any others, read in a moment: sizes, times of change, samples."""
    stats = [path.stat() for path in (dataset.idx, dataset.bin)]
    facts = [(stat.st_size, stat.st_mtime_ns) for stat in stats]
    samples = _samples(dataset.idx) + _samples(dataset.bin)
    return hashlib.sha256(repr(facts).encode() + samples).hexdigest()


def token_range(dataset: IndexedDataset) -> tuple[int, int]:
    """The smallest and the largest id, by reading all tokens."""
    low, high = 2**63, -1
    for start in range(0, dataset.num_tokens, CHUNK):
        tokens = dataset.read(start, min(CHUNK, dataset.num_tokens - start))
        low, high = min(low, int(tokens.min())), max(high, int(tokens.max()))
    require(low >= 0, f"{dataset.bin} holds the id {low}; ids are not negative", DataError)
    return low, high


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


def _save(path: Path, table: np.ndarray) -> None:
    with atomic_file(path) as file:
        np.save(file, table)


def _load(path: Path, dataset: IndexedDataset) -> Stream:
    table = np.load(path, mmap_mode="r" if dataset.mmap else None)
    return Stream(table, None) if table.ndim == 1 else Stream(table[0], table[1, :-1])


def _entry(cache: Path, kind: str, key: str, suffix: str) -> Path:
    with naming(cache):
        cache.mkdir(parents=True, exist_ok=True)
    name = hashlib.sha256(f"{VERSION} {kind} {key}".encode()).hexdigest()[:32]
    return cache / f"{kind}-{name}{suffix}"
