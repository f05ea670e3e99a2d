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

A pair is written under `PREFIX.partial.*`, checked, and renamed, the index last: where an index lies, the pair is
whole.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import orjson

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


class IndexedWriter:
    """Writes a pair; a context manager. Leaving it normally publishes the pair, leaving it by an error leaves nothing.

    `manifest`, when set before leaving, is published as PREFIX.json together with the counts kept here.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type):
        """`dtype` is one of DTYPES; `token_dtype` chooses it from the size of a vocabulary."""
        self.prefix, self.dtype = str(prefix), np.dtype(dtype).newbyteorder("<")
        require(self.dtype in CODES, f"tokens cannot be stored as {self.dtype}; known are {DTYPES}", DataError)
        self.partial = f"{prefix}.partial"
        self.num_documents, self.num_tokens, self.max_id = 0, 0, -1
        self.manifest: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        folder = bin_path(self.prefix).parent
        require(folder.is_dir(), f"the folder {folder} for {self.prefix}.bin does not exist", DataError)
        with naming(bin_path(self.partial)):
            self._tokens = open(bin_path(self.partial), "ab")
        try:
            _lock(self._tokens)
            self._tokens.truncate(0)
            self._lengths = open(f"{self.partial}.lengths", "w+b")
        except BaseException:
            self._tokens.close()
            raise
        return self

    def add_document(self, tokens: np.ndarray | Sequence[int]) -> None:
        """Append one document, a sequence of ids."""
        array = np.asarray(tokens)
        self.add_documents(array if array.size else array.astype(self.dtype), np.array([array.size], dtype=np.int64))

    def add_documents(self, tokens: np.ndarray, lengths: np.ndarray) -> None:
        """Append documents laid end to end: `tokens` [sum of lengths], `lengths` [documents]."""
        require(tokens.dtype.kind in "ui", f"ids are integers, not {tokens.dtype}", DataError)
        assert tokens.ndim == 1 and int(lengths.sum(dtype=np.int64)) == tokens.size
        if lengths.size and int(lengths.max()) >= 2**31:
            raise DataError(f"a document of {int(lengths.max())} tokens cannot be stored; at most 2**31 - 1")
        if tokens.size:
            low, high, limit = int(tokens.min()), int(tokens.max()), int(np.iinfo(self.dtype).max)
            require(
                low >= 0 and high <= limit,
                f"ids from {low} to {high} do not fit {self.dtype}, which holds 0 to {limit}",
                DataError,
            )
            self.max_id = max(self.max_id, high)
        with naming(self._tokens.name):
            self._tokens.write(np.ascontiguousarray(tokens, dtype=self.dtype).data)
            self._lengths.write(np.ascontiguousarray(lengths, dtype="<i4").data)
        self.num_documents += lengths.size
        self.num_tokens += tokens.size

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with naming(self.partial):
                    self._publish()
        finally:
            self._tokens.close()
            self._lengths.close()
            for path in (bin_path(self.partial), idx_path(self.partial), Path(self._lengths.name)):
                path.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Index, self-check, then names: an old index goes first and the new one comes last."""
        require(self.num_tokens > 0, f"there is nothing to write to {self.prefix}: no documents with tokens", DataError)
        _sync(self._tokens)
        with open(idx_path(self.partial), "wb") as file:
            self._write_index(file)
            _sync(file)
        written = IndexedDataset(self.partial, mmap=False)
        written.check()
        assert (written.num_documents, written.num_tokens) == (self.num_documents, self.num_tokens)
        idx_path(self.prefix).unlink(missing_ok=True)
        os.replace(bin_path(self.partial), bin_path(self.prefix))
        self._publish_manifest()
        os.replace(idx_path(self.partial), idx_path(self.prefix))
        sync_folder(idx_path(self.prefix).parent)

    def _write_index(self, file: IO[bytes]) -> None:
        file.write(HEADER.pack(MAGIC, 1, CODES[self.dtype], self.num_documents, self.num_documents + 1))
        self._lengths.flush()
        chunks = range(0, self.num_documents, CHUNK)
        for at in chunks:
            file.write(self._lengths_from(at).data)
        end = 0
        for at in chunks:
            ends = end + np.cumsum(self._lengths_from(at), dtype=np.int64) * self.dtype.itemsize
            file.write(np.concatenate([[end], ends[:-1]]).astype("<i8").data)
            end = int(ends[-1])
        for at in range(0, self.num_documents + 1, CHUNK):
            file.write(np.arange(at, min(at + CHUNK, self.num_documents + 1), dtype="<i8").data)

    def _lengths_from(self, at: int) -> np.ndarray:
        return np.fromfile(self._lengths.name, dtype="<i4", count=min(CHUNK, self.num_documents - at), offset=4 * at)

    def _publish_manifest(self) -> None:
        path = manifest_path(self.prefix)
        if self.manifest is None:
            path.unlink(missing_ok=True)  # one from an earlier preparation would describe other tokens
            return
        counts = {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "max_id": self.max_id,
            "dtype": self.dtype.name,
            "bin_bytes": self.num_tokens * self.dtype.itemsize,
        }
        with atomic_file(path) as file:
            file.write(orjson.dumps(self.manifest | counts, option=orjson.OPT_INDENT_2) + b"\n")


@contextmanager
def atomic_file(path: Path) -> Iterator[IO[bytes]]:
    """A file to write under a name of its own; on leaving it is flushed to disk and renamed over `path`, or removed."""
    partial = path.with_name(f"{path.name}.partial-{secrets.token_hex(8)}")
    try:
        with naming(path), open(partial, "wb") as file:
            yield file
            _sync(file)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


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


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def _lock(file: IO[bytes]) -> None:
    """Refuse a second writer of the same pair, where the file system has locks."""
    try:
        fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise DataError(f"another process is writing {file.name}") from error
    path = Path(file.name)  # the other writer may have published between our open and our lock
    require(
        path.exists() and path.stat().st_ino == os.fstat(file.fileno()).st_ino,
        f"another process has just written {file.name}",
        DataError,
    )
