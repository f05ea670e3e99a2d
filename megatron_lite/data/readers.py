"""Inputs of a corpus as blocks of about a megabyte: JSON lines (plain, .gz, .zst) or parquet, in order.

A block keeps where it was read, so that an error can be found again. Taking a block apart into documents is left to
whoever encodes it (data/encode.py), on as many processes as there are; so is reading a plain file.
A shard K of N reads the K-th share of the bytes of all inputs: a plain .jsonl file may be cut between lines, any other
file belongs to the shard in which it begins. Shards in order hold what one run over everything holds.
"""

from __future__ import annotations

import glob
import gzip
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

import numpy as np
import zstandard

from megatron_lite.errors import DataError, require

BLOCK = 1 << 20  # bytes, of text or of ids, that are handled together
COUNTED = 10 << 30  # bytes of a file that are read again to tell the number of a bad line
SUFFIXES = (".jsonl", ".json", ".jsonl.gz", ".json.gz", ".jsonl.zst", ".json.zst", ".parquet")


@dataclass(frozen=True)
class Input:
    """One file, or a share of the lines of one."""

    path: Path
    begin: int = 0  # first byte: lines (of plain files) that begin in [begin, end)
    end: int | None = None  # None: to the end


@dataclass(frozen=True)
class Block:
    """Consecutive documents of one input, as they lie in it: `lines` (perhaps to be loaded), `texts`, or `ids`."""

    file: str
    input: int  # number of the input, from 0
    consumed: int  # bytes of the file that were read for it
    number: int | None  # of its first line or row, from 1, where it is known
    first: bool = False  # of its input
    offset: int = 0  # bytes of (decompressed) text before it
    end: int | None = None  # of a plain file: the lines that begin in [offset, end), left to be read by `loaded`
    lines: bytes | None = None
    texts: Sequence[str | None] | None = None
    ids: np.ndarray | None = None  # [sum of lengths]
    lengths: np.ndarray | None = None

    def loaded(self) -> Block:
        """The block with its documents."""
        if self.end is None:
            return self
        lines, skipped = _read_lines(Path(self.file), self.offset, self.end)
        return replace(self, lines=lines, offset=self.offset + skipped, end=None)

    def where(self, index: int, inside: int = 0) -> str:
        """The place of a document in words: `index` lines or rows into the block, `inside` = bytes from its start."""
        if self.lines is None:
            return self.file if self.number is None else f"{self.file}, row {self.number + index}"
        number = self.number
        if number is None and self.offset <= COUNTED:
            number = 1 + _newlines(Path(self.file), self.offset)
        line = "" if number is None else f", line {number + index}"
        return f"{self.file}{line}, byte {self.offset + inside}"


@dataclass(frozen=True)
class Columns:
    """What of each record is used."""

    text: str | None  # the text is here
    ids: str | None = None  # or ready token ids are here
    where: tuple[str, str] | None = None  # only records whose column has this value


def find_inputs(patterns: Sequence[str | Path]) -> list[Path]:
    """Files, folders (every input in them, by name) and glob patterns, as files. DataError: something is not there."""
    require(bool(patterns), "no input files", DataError)
    found: list[Path] = []
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file() and p.name.endswith(SUFFIXES))
            require(bool(inside), f"the folder {path} holds no input; {', '.join(SUFFIXES)} are read", DataError)
            found += inside
        elif path.is_file():
            found.append(path)
        else:
            matches = sorted(Path(name) for name in glob.glob(str(pattern), recursive=True) if Path(name).is_file())
            require(bool(matches), f"the input {pattern} does not exist or is not a file", DataError)
            found += matches
    return found


def shares(paths: Sequence[Path], shard: tuple[int, int] = (0, 1)) -> list[Input]:
    """The inputs of shard K of N (K = 0 … N-1)."""
    at, count = shard
    require(0 <= at < count, f"shard {at}/{count}: shards of {count} are 0/{count} to {count - 1}/{count}", DataError)
    sizes = [path.stat().st_size for path in paths]
    low, high = sum(sizes) * at // count, sum(sizes) * (at + 1) // count
    mine, start = [], 0
    for path, size in zip(paths, sizes, strict=True):
        if _is_plain(path):
            begin, end = max(low - start, 0), min(high - start, size)
            if begin < end:
                mine.append(Input(path, begin, None if end == size else end))
        elif low <= start < high:
            mine.append(Input(path))
        start += size
    return mine


def blocks(inputs: Sequence[Input], columns: Columns, first: int = 0) -> Iterator[Block]:
    """The blocks of inputs `first` … in order."""
    for number, share in enumerate(inputs[first:], first):
        if share.path.suffix == ".parquet":
            yield from _parquet_blocks(share.path, number, columns)
        else:
            yield from _line_blocks(share, number)


def _is_plain(path: Path) -> bool:
    return path.suffix not in (".gz", ".zst", ".parquet")


# ---- lines


def _line_blocks(share: Input, number: int) -> Iterator[Block]:
    if _is_plain(share.path):
        stop = share.path.stat().st_size if share.end is None else share.end
        for begin in range(share.begin, stop, BLOCK):
            end = min(begin + BLOCK, stop)
            first = begin == share.begin
            yield Block(str(share.path), number, end - begin, 1 if begin == 0 else None, first, begin, end)
        return
    line, offset = 1, 0
    for lines, consumed in _whole_lines(_decompressed(share.path)):
        yield Block(str(share.path), number, consumed, line, offset == 0, offset, lines=lines)
        offset += len(lines)
        line += lines.count(b"\n")


def _read_lines(path: Path, begin: int, end: int) -> tuple[bytes, int]:
    """The lines that begin in [begin, end), and the bytes from `begin` to the first of them."""
    with open(path, "rb") as file:
        skipped = 0
        if begin:
            file.seek(begin - 1)
            skipped = len(file.readline()) - 1
        if begin + skipped >= end:
            return b"", skipped
        lines = file.read(end - begin - skipped)
        if not lines.endswith(b"\n"):
            lines += file.readline()
        return lines, skipped


def _newlines(path: Path, stop: int) -> int:
    """Ends of lines before byte `stop`."""
    found = 0
    with open(path, "rb") as file:
        while stop > 0 and (chunk := file.read(min(stop, 1 << 24))):
            found += chunk.count(b"\n")
            stop -= len(chunk)
    return found


def _whole_lines(chunks: Iterator[tuple[bytes, int]]) -> Iterator[tuple[bytes, int]]:
    """Cut a stream of bytes at ends of lines."""
    rest: list[bytes] = []
    consumed = 0
    for chunk, read in chunks:
        consumed += read
        cut = chunk.rfind(b"\n") + 1
        if cut:
            yield b"".join((*rest, chunk[:cut])), consumed
            rest, consumed = [], 0
        if chunk[cut:]:
            rest.append(chunk[cut:])
    if rest:
        yield b"".join(rest), consumed


def _decompressed(path: Path) -> Iterator[tuple[bytes, int]]:
    """(decompressed bytes, bytes of the file read for them)."""
    with open(path, "rb") as file:
        if path.suffix == ".zst":
            yield from _zstd(path, file)
            return
        before = 0
        try:
            stream = gzip.GzipFile(fileobj=file)
            while chunk := stream.read(BLOCK):
                yield chunk, file.tell() - before
                before = file.tell()
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is damaged or incomplete: {error}") from error


def _zstd(path: Path, file: IO[bytes]) -> Iterator[tuple[bytes, int]]:
    """Frame by frame: the library's stream reader would take a truncated frame for a finished one."""
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    while data := file.read(BLOCK // 4):
        read = len(data)
        while data:
            try:
                yield frame.decompress(data), read
            except zstandard.ZstdError as error:
                raise DataError(f"{path} is damaged: {error}") from error
            begun, data, read = True, b"", 0
            if frame.eof:
                data = frame.unused_data
                frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    require(not begun, f"{path} is incomplete: it ends within a compressed frame", DataError)


# ---- parquet


def _parquet_blocks(path: Path, number: int, columns: Columns) -> Iterator[Block]:
    require(
        find_spec("pyarrow") is not None,
        f"{path} is a parquet file, and pyarrow is not installed: pip install 'megatron-lite[parquet]'",
        DataError,
    )
    import pyarrow as pa
    import pyarrow.compute as pc
    import pyarrow.parquet as pq

    try:
        file = pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path} cannot be read as parquet: {error}") from error
    with file:
        key = columns.ids or columns.text
        wanted = [key, *([columns.where[0]] if columns.where else [])]
        names = file.schema_arrow.names
        missing = [name for name in wanted if name not in names]
        require(not missing, f"{path} has no column {missing and missing[0]!r}; its columns are {names}", DataError)
        kind = file.schema_arrow.field(key).type
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
        right = is_list and pa.types.is_integer(kind.value_type) if columns.ids else is_text
        expected = "lists of integers" if columns.ids else "strings"
        require(right, f"{path}: the column {key!r} holds {kind}, but {expected} are needed", DataError)
        size, rows, row = path.stat().st_size, file.metadata.num_rows, 1
        spent = 0
        try:
            for batch in file.iter_batches(_batch_rows(file), columns=wanted, use_threads=False):
                table = batch
                if columns.where:
                    table = batch.filter(pc.equal(batch.column(columns.where[0]).cast(pa.string()), columns.where[1]))
                done = size * (row + len(batch) - 1) // rows
                where: dict[str, Any] = {"file": str(path), "input": number, "consumed": done - spent}
                where |= {"number": None if columns.where else row, "first": row == 1}  # left-out rows are not counted
                values = table.column(key)
                if columns.ids:
                    lengths = pc.fill_null(pc.list_value_length(values), -1).to_numpy(zero_copy_only=False)
                    yield Block(**where, ids=values.flatten().to_numpy(), lengths=lengths.astype(np.int64))
                else:
                    yield Block(**where, texts=values.to_pylist())
                row, spent = row + len(batch), done
        except (pa.ArrowException, OSError) as error:
            raise DataError(f"{path} is damaged after row {row - 1}: {error}") from error


def _batch_rows(file: Any) -> int:
    """Rows that make about one block."""
    groups = [file.metadata.row_group(i) for i in range(file.metadata.num_row_groups)]
    size = max((group.total_byte_size / max(group.num_rows, 1) for group in groups), default=1.0)
    return max(1, int(BLOCK / max(size, 1.0)))
