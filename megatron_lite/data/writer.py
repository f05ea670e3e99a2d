"""Writes a pair PREFIX.bin and PREFIX.idx, and PREFIX.json beside it.

Everything is written under PREFIX.partial.*, checked, and renamed, the index last. A point that `record` made durable
can be gone on from after any interruption; without one, an error leaves nothing.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
import orjson

from megatron_lite.data.indexed import (
    CHUNK,
    CODES,
    DTYPES,
    HEADER,
    MAGIC,
    IndexedDataset,
    atomic_file,
    bin_path,
    idx_path,
    manifest_path,
    naming,
    remove_stale,
    sync,
    sync_folder,
)
from megatron_lite.errors import DataError, require


class IndexedWriter:
    """Writes a pair; a context manager. Leaving it normally publishes the pair.

    Leaving it by an error leaves nothing, unless `record` made a point durable: then what was written is kept, and a
    writer opened with `resume` begins at that point with `recorded` set to what was given then.
    `manifest`, when set before leaving, is published as PREFIX.json together with the counts kept here.
    """

    def __init__(self, prefix: str | Path, dtype: np.dtype[Any] | type, *, resume: bool = False):
        """`dtype` is one of DTYPES; `token_dtype` chooses it from the size of a vocabulary."""
        self.prefix, self.dtype = str(prefix), np.dtype(dtype).newbyteorder("<")
        require(self.dtype in CODES, f"tokens cannot be stored as {self.dtype}; known are {DTYPES}", DataError)
        self.partial = f"{prefix}.partial"
        self.num_documents, self.num_tokens, self.max_id = 0, 0, -1
        self.manifest: dict[str, Any] | None = None
        self.resume = resume
        self.recorded: dict[str, Any] | None = None

    def __enter__(self) -> Self:
        folder = bin_path(self.prefix).parent
        require(folder.is_dir(), f"the folder {folder} for {self.prefix}.bin does not exist", DataError)
        with naming(bin_path(self.partial)):
            self._tokens = open(bin_path(self.partial), "ab")
        try:
            _lock(self._tokens)
            self._lengths = open(f"{self.partial}.lengths", "ab")
            self._begin()
        except BaseException:
            self._tokens.close()
            raise
        return self

    def _begin(self) -> None:
        """Go on from the recorded point, or from nothing."""
        point = manifest_path(self.partial)
        for path in (point, manifest_path(self.prefix)):
            remove_stale(path)
        if point.is_file():
            counts = orjson.loads(point.read_bytes())
            require(
                self.resume,
                f"an interrupted preparation of {self.prefix} with {counts['documents']} documents is there; go on "
                f"from it with --resume, or remove {self.partial}.* to begin again",
                DataError,
            )
            require(
                counts["dtype"] == self.dtype.name,
                f"{self.partial}.bin holds {counts['dtype']}, but this preparation writes {self.dtype.name}",
                DataError,
            )
            self.num_documents, self.num_tokens, self.max_id = counts["documents"], counts["tokens"], counts["max_id"]
            self.recorded = counts["recorded"]
        for file, size in (
            (self._tokens, self.num_tokens * self.dtype.itemsize),
            (self._lengths, 4 * self.num_documents),
        ):
            have = os.fstat(file.fileno()).st_size
            require(have >= size, f"{file.name} has {have} bytes of {size}; remove {self.partial}.*", DataError)
            file.truncate(size)

    def record(self, progress: dict[str, Any]) -> None:
        """Make what was written so far durable, with what the caller needs to go on from here."""
        sync(self._tokens)
        sync(self._lengths)
        self.recorded = progress
        with atomic_file(manifest_path(self.partial)) as file:
            file.write(orjson.dumps(self._counts() | {"recorded": progress}))

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
            idx_path(self.partial).unlink(missing_ok=True)
            if kind is None or self.recorded is None:
                for path in (manifest_path(self.partial), bin_path(self.partial), Path(self._lengths.name)):
                    path.unlink(missing_ok=True)

    def _publish(self) -> None:
        """Index, self-check, then names: an old index goes first and the new one comes last."""
        require(self.num_tokens > 0, f"there is nothing to write to {self.prefix}: no documents with tokens", DataError)
        sync(self._tokens)
        with open(idx_path(self.partial), "wb") as file:
            self._write_index(file)
            sync(file)
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
        with atomic_file(path) as file:
            file.write(orjson.dumps(self.manifest | self._counts(), option=orjson.OPT_INDENT_2) + b"\n")

    def _counts(self) -> dict[str, Any]:
        return {
            "documents": self.num_documents,
            "tokens": self.num_tokens,
            "max_id": self.max_id,
            "dtype": self.dtype.name,
            "bin_bytes": self.num_tokens * self.dtype.itemsize,
        }


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
