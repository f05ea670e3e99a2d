"""Documents out of JSON lines, plain, .gz or .zst, as a stream: one JSON object per line, the text under one key.

Every line keeps its file, number and byte offset (of the decompressed text), so that an error can be found again.
Blank lines are no documents. A compressed file that ends too early is an error, whatever the policy for bad lines.
"""

from __future__ import annotations

import gzip
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import orjson
import zstandard

from megatron_lite.errors import DataError, require

CHUNK = 1 << 20  # bytes read at a time
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Line:
    """One line of an input file, not parsed yet."""

    file: str
    number: int  # from 1
    offset: int  # bytes before it
    raw: bytes

    def where(self, inside: int = 0) -> str:
        """The place in words; `inside` = bytes from the start of the line."""
        return f"{self.file}, line {self.number}, byte {self.offset + inside}"


class BadLine(DataError):
    """A line that holds no document; `reason` is what it is counted under."""

    def __init__(self, line: Line, reason: str, detail: str = "", inside: int = 0):
        super().__init__(f"{line.where(inside)}: {reason}{detail and f' ({detail})'}")
        self.reason = reason


def check_inputs(paths: list[Path]) -> None:
    """DataError unless there is something to read and every file exists."""
    require(bool(paths), "no input files", DataError)
    for path in paths:
        require(path.is_file(), f"the input {path} does not exist or is not a file", DataError)


def read_lines(path: Path) -> Iterator[Line]:
    """The lines of one file that are not blank, in order."""
    number, offset, rest = 0, 0, b""
    for chunk in _chunks(path):
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop()
        for raw in lines:
            number += 1
            if raw and not raw.isspace():
                yield Line(str(path), number, offset, raw)
            offset += len(raw) + 1
    if rest and not rest.isspace():
        yield Line(str(path), number + 1, offset, rest)


def parse(line: Line, key: str) -> str:
    """The text of a line, or BadLine with the reason."""
    raw = line.raw
    if line.offset == 0:
        raw = raw.removeprefix(BYTE_ORDER_MARK)
    try:
        record = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        try:
            raw.decode("utf-8")
        except UnicodeDecodeError as invalid:
            inside = invalid.start + len(line.raw) - len(raw)
            raise BadLine(line, "not valid UTF-8", invalid.reason, inside) from error
        raise BadLine(line, "not valid JSON", error.msg, error.pos) from error
    if not isinstance(record, dict):
        raise BadLine(line, "not a JSON object")
    if key not in record:
        raise BadLine(line, f"no key {key!r}", f"its keys are {sorted(record)}")
    text = record[key]
    if not isinstance(text, str):
        raise BadLine(line, f"the value of {key!r} is not a string")
    return text


def _chunks(path: Path) -> Iterator[bytes]:
    """The decompressed bytes of a file."""
    if path.suffix == ".gz":
        try:
            with gzip.open(path, "rb") as file:
                while chunk := file.read(CHUNK):
                    yield chunk
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise DataError(f"{path} is damaged or incomplete: {error}") from error
    elif path.suffix == ".zst":
        yield from _zstd_chunks(path)
    else:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                yield chunk


def _zstd_chunks(path: Path) -> Iterator[bytes]:
    """Frame by frame: the library's stream reader would take a truncated frame for a finished one."""
    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    with open(path, "rb") as file:
        while data := file.read(CHUNK):
            while data:
                try:
                    yield frame.decompress(data)
                except zstandard.ZstdError as error:
                    raise DataError(f"{path} is damaged: {error}") from error
                begun, data = True, b""
                if frame.eof:
                    data = frame.unused_data
                    frame, begun = zstandard.ZstdDecompressor().decompressobj(), False
    require(not begun, f"{path} is incomplete: it ends within a compressed frame", DataError)
