"""Corpora on disk: the MMIDIDX pair, `PREFIX.bin` (raw tokens) beside `PREFIX.idx` (where documents begin and end).

Layout of the index, little-endian, without padding:
  9 bytes  MMIDIDX\\0\\0      magic
  u64      1                 version
  u8       dtype code        see DTYPES
  u64      S                 sequences
  u64      D                 entries of the document index = documents + 1
  S x i32                    tokens of each sequence
  S x i64                    byte offset of each sequence in PREFIX.bin
  D x i64                    first sequence of each document; starts with 0, ends with S

data/writer.py writes pairs, index last: where an index lies, the pair is whole.
"""

from __future__ import annotations

import glob
import os
import secrets
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import IO, Any

import numpy as np

from megatron_lite.errors import DataError, require

MAGIC = b"MMIDIDX\x00\x00"
OLDER_MAGIC = b"TNTIDX"
HEADER = struct.Struct("<9sQBQQ")
DTYPES: dict[int, np.dtype[Any]] = {
    1: np.dtype("u1"),
    2: np.dtype("i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    8: np.dtype("<u2"),
}
FLOAT_CODES = (6, 7)  # two families of tools disagree which of them is f32
CODES = {dtype: code for code, dtype in DTYPES.items()}
CHUNK = 1 << 16  # entries handled at a time when an index is written or checked


def bin_path(prefix: str | Path) -> Path:
    """The file of tokens of a pair."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file of lengths and offsets of a pair."""
    return Path(f"{prefix}.idx")


def manifest_path(prefix: str | Path) -> Path:
    """What our own preparation writes beside a pair; corpora from elsewhere have none."""
    return Path(f"{prefix}.json")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest type for ids below `vocab_size`: uint16 up to 65,536 ids, int32 beyond."""
    require(0 < vocab_size <= 2**31, f"a vocabulary of {vocab_size} ids cannot be stored; at most 2**31", DataError)
    return np.dtype("<u2") if vocab_size <= 65536 else np.dtype("<i4")


class IndexedDataset:
    """Reads a pair. Arrays it returns are copies or keep their file mapped, so they may outlive it.

    lengths [S] int32, pointers [S] int64 (bytes), document_index [documents + 1] int64: read when first asked for.
    """

    def __init__(self, prefix: str | Path, mmap: bool = True):
        """Open and check sizes; `mmap=False` reads with plain calls and holds no file open."""
        self.prefix, self.mmap = str(prefix), mmap
        self.bin, self.idx = bin_path(prefix), idx_path(prefix)
        for path in (self.idx, self.bin):
            require(path.is_file(), f"{path} does not exist; a corpus is a pair PREFIX.bin and PREFIX.idx", DataError)
        self.dtype, self.num_sequences, num_entries = self._read_header()
        self.num_documents = num_entries - 1
        pointers_at = HEADER.size + 4 * self.num_sequences
        self._parts: dict[str, tuple[np.dtype[Any], int, int]] = {  # dtype, entries, byte in the index
            "lengths": (np.dtype("<i4"), self.num_sequences, HEADER.size),
            "pointers": (np.dtype("<i8"), self.num_sequences, pointers_at),
            "document_index": (np.dtype("<i8"), num_entries, pointers_at + 8 * self.num_sequences),
        }
        self.bin_bytes = self.bin.stat().st_size
        self.num_tokens = self.bin_bytes // self.dtype.itemsize
        self._check_ends()
        self._tokens = np.memmap(self.bin, dtype=self.dtype, mode="r", shape=(self.num_tokens,)) if mmap else None

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of each sequence."""
        return self._whole("lengths")

    @cached_property
    def pointers(self) -> np.ndarray:
        """Byte offset of each sequence in PREFIX.bin."""
        return self._whole("pointers")

    @cached_property
    def document_index(self) -> np.ndarray:
        """First sequence of each document, and the number of sequences."""
        return self._whole("document_index")

    def _read_header(self) -> tuple[np.dtype[Any], int, int]:
        with open(self.idx, "rb") as file:
            raw = file.read(HEADER.size)
            size = os.fstat(file.fileno()).st_size
        require(
            not raw.startswith(OLDER_MAGIC),
            f"{self.idx} has the older magic TNTIDX; only MMIDIDX is read: prepare the corpus again",
            DataError,
        )
        require(raw.startswith(MAGIC), f"{self.idx} does not begin with MMIDIDX: not an index of tokens", DataError)
        require(len(raw) == HEADER.size, f"{self.idx} ends within its header ({len(raw)} bytes)", DataError)
        _, version, code, num_sequences, num_entries = HEADER.unpack(raw)
        require(version == 1, f"{self.idx} has version {version}; only version 1 is read", DataError)
        require(
            code not in FLOAT_CODES,
            f"{self.idx} has dtype code {code}, a floating-point type; tokens are integers",
            DataError,
        )
        require(code in DTYPES, f"{self.idx} has dtype code {code}; known are {sorted(DTYPES)}", DataError)
        expected = HEADER.size + 12 * num_sequences + 8 * num_entries
        require(
            size == expected,
            f"{self.idx} has {size} bytes, but its header announces {num_sequences} sequences and {num_entries} "
            f"entries in the document index, which take {expected}",
            DataError,
        )
        require(
            num_sequences > 0 and num_entries > 1,
            f"{self.prefix} holds no documents: {num_sequences} sequences, {num_entries} entries in the document index",
            DataError,
        )
        return DTYPES[code], num_sequences, num_entries

    def _whole(self, name: str) -> np.ndarray:
        dtype, count, offset = self._parts[name]
        if self.mmap:
            return np.memmap(self.idx, dtype=dtype, mode="r", offset=offset, shape=(count,))
        return np.fromfile(self.idx, dtype=dtype, count=count, offset=offset)

    def _part(self, name: str, start: int, count: int) -> np.ndarray:
        """Up to `count` entries from `start`, read without holding the rest."""
        dtype, entries, offset = self._parts[name]
        count = min(count, entries - start)
        return np.fromfile(self.idx, dtype=dtype, count=count, offset=offset + start * dtype.itemsize)

    def _check_ends(self) -> None:
        first = int(self._part("document_index", 0, 1)[0])
        last = int(self._part("document_index", self.num_documents, 1)[0])
        require(first == 0, f"{self.idx}: the document index starts with {first} instead of 0", DataError)
        require(
            last == self.num_sequences,
            f"{self.idx}: the document index ends with {last}, but there are {self.num_sequences} sequences",
            DataError,
        )
        pointer, length = (int(self._part(name, self.num_sequences - 1, 1)[0]) for name in ("pointers", "lengths"))
        end = pointer + length * self.dtype.itemsize
        require(
            end == self.bin_bytes,
            f"{self.bin} has {self.bin_bytes} bytes, but its index ends at byte {end}: one of the two is truncated or "
            f"belongs to another corpus",
            DataError,
        )
        require(
            self.bin_bytes > 0,
            f"{self.prefix} holds no tokens: all {self.num_documents} documents are empty",
            DataError,
        )

    def read(self, start: int, count: int) -> np.ndarray:
        """`count` tokens from token `start` of PREFIX.bin, in the dtype of the file, as a copy."""
        if self._tokens is not None:
            tokens = np.array(self._tokens[start : start + count])
        else:
            tokens = np.fromfile(self.bin, dtype=self.dtype, count=count, offset=start * self.dtype.itemsize)
        require(
            len(tokens) == count,
            f"{self.bin}: {len(tokens)} of {count} tokens from token {start} could be read; the file has changed",
            DataError,
        )
        return tokens

    def document_starts(self) -> np.ndarray:
        """int64 [documents + 1]: first token of each document in PREFIX.bin, and the end. Needs `check()` to hold."""
        starts = np.append(self.pointers, np.int64(self.bin_bytes)) // self.dtype.itemsize
        return np.asarray(starts[self.document_index], dtype=np.int64)

    def document(self, number: int) -> np.ndarray:
        """The tokens of one document, counted from 0."""
        first, last = (int(i) for i in self.document_index[number : number + 2])
        if first == last:
            return np.empty(0, self.dtype)
        start = int(self.pointers[first]) // self.dtype.itemsize
        return self.read(start, int(self.lengths[first:last].sum(dtype=np.int64)))

    def check(self) -> None:
        """Read the whole index: lengths, pointers without gaps, document index in order. Errors name the document."""
        end = 0
        for at in range(0, self.num_sequences, CHUNK):
            lengths = self._part("lengths", at, CHUNK).astype(np.int64)
            pointers = self._part("pointers", at, CHUNK)
            if (lengths < 0).any():
                bad = int(np.argmax(lengths < 0))
                raise DataError(f"{self.idx}: document {self._document_of(at + bad)} has length {lengths[bad]}")
            ends = end + np.cumsum(lengths) * self.dtype.itemsize
            expected = np.concatenate([[end], ends[:-1]])
            if not np.array_equal(pointers, expected):
                bad = int(np.argmax(pointers != expected))
                raise DataError(
                    f"{self.idx}: document {self._document_of(at + bad)} (sequence {at + bad}) points to byte "
                    f"{int(pointers[bad])}, but the one before it ends at byte {int(expected[bad])}"
                )
            end = int(ends[-1])
        for at in range(0, self.num_documents, CHUNK):
            part = self._part("document_index", at, CHUNK + 1)
            falls = np.diff(part) < 0
            if falls.any():
                bad = int(np.argmax(falls))
                raise DataError(
                    f"{self.idx}: the document index falls from {int(part[bad])} to {int(part[bad + 1])} "
                    f"after document {at + bad}"
                )

    def _document_of(self, sequence: int) -> int:
        return int(np.searchsorted(self.document_index, sequence, side="right")) - 1


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write under a name of its own; on leaving it is flushed to disk and renamed over `path`, or removed."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with naming(path), open(partial, "wb") as file:
            yield file
            sync(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def remove_stale(path: Path) -> None:
    """Remove what killed writers of `path` left; only for who knows that nobody else writes it now."""
    for left in path.parent.glob(f"{glob.escape(path.name)}.partial-*"):
        left.unlink(missing_ok=True)


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Turn the operating system's refusals to write (a full disk, a missing right) into a DataError with the path."""
    try:
        yield
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror} (errno {error.errno})") from error


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())
