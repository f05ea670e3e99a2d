"""One rank's file: safetensors, written by hand so that bytes stream, sums are taken and errors keep their errno.

The header and every block of `BLOCK` elements have a checksum of their own, so that a reader proves what it reads and
need not read more. Nothing in a file is ever executed.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from megatron_lite.checkpoint.layout import Strided
from megatron_lite.errors import CheckpointError, require

BLOCK = 1 << 22  # elements behind one checksum: 16 MiB
WIDTH = 4  # bytes of an fp32
PARTIAL = ".partial"  # ends the name of a folder that is not complete yet


def host_blocks(tensor: Tensor, block: int = BLOCK) -> Iterator[np.ndarray]:
    """A flat fp32 tensor as numpy arrays of at most `block` elements; from a GPU, one block at a time is copied."""
    assert tensor.dtype == torch.float32 and tensor.dim() == 1
    for start in range(0, tensor.numel(), block):
        yield tensor.detach()[start : start + block].cpu().contiguous().numpy()


def write_file(path: Path, tensors: dict[str, Tensor]) -> dict[str, Any]:
    """Write flat fp32 tensors to `path` and sync it; returns what the manifest says of the file. Raises OSError."""
    return write_blocks(path, {name: t.numel() for name, t in tensors.items()}, lambda name: host_blocks(tensors[name]))


def write_blocks(path: Path, sizes: Mapping[str, int], blocks: Callable[[str], Iterable[np.ndarray]]) -> dict[str, Any]:
    """The same from blocks that are made when their turn comes: `sizes` are the elements of every tensor, and all of
    its `blocks` but the last have BLOCK elements."""
    header, at = {}, 0
    for name, elements in sizes.items():
        size = elements * WIDTH
        header[name] = {"dtype": "F32", "shape": [elements], "data_offsets": [at, at + size]}
        at += size
    text = orjson.dumps(header)
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    sums: dict[str, list[str]] = {}
    with path.open("wb") as file:
        file.write(head)
        for name, elements in sizes.items():
            sums[name] = []
            left = elements
            for block in blocks(name):
                assert block.dtype == np.float32 and block.size == min(left, BLOCK)
                left -= block.size
                data = block.data.cast("B")
                sums[name].append(xxh3_64_hexdigest(data))
                file.write(data)
            assert left == 0
        file.flush()
        os.fsync(file.fileno())
    return {"name": path.name, "bytes": len(head) + at, "header": xxh3_64_hexdigest(head), "blocks": sums}


@contextmanager
def whole_folder(final: Path) -> Iterator[Path]:
    """Give a folder to write in that gets its name only once the block is done and everything in it is durable.

    If the block fails nothing is left. CheckpointError: `final` is there already and not empty, or cannot be written.
    """
    free = not final.exists() or (final.is_dir() and not any(final.iterdir()))
    require(free, f"{final} exists already; remove it, or name another folder", CheckpointError)
    partial = final.with_name(final.name + PARTIAL)
    try:
        shutil.rmtree(partial, ignore_errors=True)  # of an attempt that was killed
        partial.mkdir(parents=True)
        yield partial
        for path in sorted(partial.rglob("*")):
            sync_folder(path)  # files too
        sync_folder(partial)
        partial.rename(final)
        sync_folder(final.parent)
    except OSError as error:
        where = error.filename or partial
        raise CheckpointError(f"cannot write {where}: {error.strerror} (errno {error.errno})") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder, or the bytes of a file, durable. Raises OSError."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


class SavedFile:
    """A saved file, opened for reading: memory-mapped a run at a time, and every block proven before it is used."""

    def __init__(self, folder: Path, entry: dict[str, Any]):
        self.path, self._entry = folder / entry["name"], entry
        self._proven: set[tuple[str, int]] = set()
        try:
            with self.path.open("rb") as file:
                size = file.read(8)
                text = file.read(min(int.from_bytes(size, "little"), entry["bytes"]))
        except OSError as error:
            raise CheckpointError(f"cannot read {self.path}: {error.strerror} (errno {error.errno})") from error
        require(
            xxh3_64_hexdigest(size + text) == entry["header"],
            f"{self.path} is damaged: the checksum of its header is not the one in the manifest",
            CheckpointError,
        )
        self._data = 8 + len(text)
        self._header = orjson.loads(text)

    @property
    def sizes(self) -> dict[str, int]:
        """Elements of every tensor in the file."""
        return {name: facts["shape"][0] for name, facts in self._header.items()}

    def read(self, tensor: str, start: int, stop: int) -> np.ndarray:
        """Elements [start, stop) of a tensor, as a read-only view of the file.

        CheckpointError: the bytes are not those that were written.
        """
        size = self._header[tensor]["shape"][0]
        assert 0 <= start < stop <= size, f"[{start}, {stop}) of {tensor} with {size} elements in {self.path}"
        first, last = start // BLOCK, (stop - 1) // BLOCK
        base = first * BLOCK
        offset = self._data + self._header[tensor]["data_offsets"][0] + base * WIDTH
        try:
            run = np.memmap(self.path, "<f4", "r", offset, (min((last + 1) * BLOCK, size) - base,))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"cannot read {tensor} in {self.path}: {error}") from error
        for block in range(first, last + 1):
            if (tensor, block) not in self._proven:
                data = run[block * BLOCK - base : (block + 1) * BLOCK - base].data.cast("B")
                require(
                    xxh3_64_hexdigest(data) == self._entry["blocks"][tensor][block],
                    f"{self.path} is damaged: elements {block * BLOCK} to {min((block + 1) * BLOCK, size) - 1} of "
                    f"{tensor} do not have the checksum in the manifest; start from an older checkpoint",
                    CheckpointError,
                )
                self._proven.add((tensor, block))
        return run[start - base : stop - base]


def strided(flat: np.ndarray, place: Strided, shape: tuple[int, ...]) -> np.ndarray:
    """The rectangle at `place` of a flat array, as a view."""
    steps = tuple(step * flat.itemsize for step in place.strides)
    end = place.offset + sum((n - 1) * step for n, step in zip(shape, place.strides, strict=True))
    assert 0 <= place.offset <= end < flat.size
    return np.lib.stride_tricks.as_strided(flat[place.offset :], shape, steps)
