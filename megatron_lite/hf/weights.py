"""Weights in safetensors files, one or many with an index: read and written in blocks, so that memory stays small.

The format: 8 bytes of length, a JSON header with dtype, shape and byte range of every tensor, then the bytes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import torch
from torch import Tensor

from megatron_lite.checkpoint.files import BLOCK
from megatron_lite.errors import CheckpointError, require

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LARGEST_HEADER = 100_000_000  # bytes; the safetensors library refuses longer ones too
CODES = {"F32": "fp32", "BF16": "bf16", "F16": "fp16"}  # in the files -> ours
_READ_AS: dict[str, np.dtype[Any]] = {"fp32": np.dtype("<f4"), "bf16": np.dtype("<u2"), "fp16": np.dtype("<f2")}
_TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def width(dtype: str) -> int:
    """Bytes of one element."""
    return _READ_AS[dtype].itemsize


@dataclass(frozen=True)
class StoredTensor:
    """One tensor in a file."""

    file: Path
    name: str
    dtype: str  # fp32, bf16 or fp16
    shape: tuple[int, ...]
    offset: int  # first byte in the file

    def blocks(self) -> Iterator[np.ndarray]:
        """The elements in order as fp32, exactly, BLOCK of them at a time. CheckpointError: they cannot be read."""
        left = prod(self.shape)
        try:
            with self.file.open("rb") as file:
                file.seek(self.offset)
                while left:
                    size = min(BLOCK, left)
                    raw = np.fromfile(file, _READ_AS[self.dtype], size)
                    require(len(raw) == size, f"{self.file} ends within {self.name}", CheckpointError)
                    left -= size
                    yield (raw.astype("<u4") << 16).view("<f4") if self.dtype == "bf16" else raw.astype("<f4")
        except OSError as error:
            raise CheckpointError(f"cannot read {self.file}: {error.strerror} (errno {error.errno})") from error


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Name -> where it lies, from the headers of model.safetensors or of the files its index names.

    CheckpointError: no such files, an index that does not fit them, a damaged or truncated file, another dtype.
    """
    single, index = folder / SINGLE, folder / INDEX
    require(folder.is_dir(), f"there is no folder {folder}", CheckpointError)
    require(not (single.exists() and index.exists()), f"{folder} holds both {SINGLE} and {INDEX}; remove the one "
                                                      "that is not meant", CheckpointError)  # fmt: skip
    if single.exists():
        return {tensor.name: tensor for tensor in _read_header(single)}
    others = sorted(path.name for path in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.safetensors"))
    require(index.exists(), f"{folder} holds neither {SINGLE} nor {INDEX}" + (f", only {', '.join(others[:4])}" if
            others else "") + "; save the model with safe_serialization", CheckpointError)  # fmt: skip
    listed = read_json(index).get("weight_map")
    require(
        isinstance(listed, dict) and all(isinstance(file, str) and Path(file).name == file for file in listed.values()),
        f"{index} holds no weight_map from tensors to files of its folder",
        CheckpointError,
    )
    assert isinstance(listed, dict)
    found: dict[str, StoredTensor] = {}
    wrong = []
    for name in sorted(set(listed.values())):
        for tensor in _read_header(folder / name):
            if listed.get(tensor.name) == name:
                found[tensor.name] = tensor
            else:
                wrong.append(f"{name} holds {tensor.name}, which the index looks for in {listed.get(tensor.name)}")
    wrong += [f"{name} is not in {file}" for name, file in listed.items() if name not in found]
    require(not wrong, f"{index} does not fit its files: " + "; ".join(wrong[:8]), CheckpointError)
    return found


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. CheckpointError: not there, or not one."""
    try:
        value = orjson.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror} (errno {error.errno})") from error
    except orjson.JSONDecodeError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from error
    require(isinstance(value, dict), f"{path} is not a JSON object", CheckpointError)
    return value


def _read_header(path: Path) -> list[StoredTensor]:
    """The tensors of a file, checked to fill it exactly."""
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            text = file.read(length) if length <= _LARGEST_HEADER else b""
            size = file.seek(0, 2)
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror} (errno {error.errno})") from error
    damaged = f"{path} is not a safetensors file, or is damaged"
    require(len(text) == length > 0, f"{damaged}: {size} bytes, a header of {length}", CheckpointError)
    try:
        header = orjson.loads(text)
        tensors = [
            (name, entry["dtype"], tuple(map(int, entry["shape"])), *map(int, entry["data_offsets"]))
            for name, entry in header.items()
            if name != "__metadata__"
        ]
    except (orjson.JSONDecodeError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{damaged}: its header cannot be read ({error})") from error
    start, at, found = 8 + length, 0, []
    for name, code, shape, begin, end in sorted(tensors, key=lambda tensor: tensor[3:]):
        require(code in CODES, f"{path}: {name} is {code}; only {', '.join(CODES)} are read: save the weights without "
                               "quantization", CheckpointError)  # fmt: skip
        fits = begin == at and end - begin == prod(shape) * width(CODES[code])
        require(fits, f"{damaged}: {name} {list(shape)} in {code} has bytes {begin} to {end}", CheckpointError)
        found.append(StoredTensor(path, name, CODES[code], shape, start + begin))
        at = end
    require(start + at == size, f"{damaged}: it has {size} bytes, its header speaks of {start + at}", CheckpointError)
    return found


def plan_files(shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str], limit: int) -> list[list[str]]:
    """Names of the tensors of every file, in the order they are written: files of at most `limit` bytes in the order
    given, a larger tensor in a file of its own; inside a file the wider dtype first, which keeps elements aligned."""
    files: list[list[str]] = []
    room = 0
    for name, shape in shapes.items():
        size = prod(shape) * width(dtypes[name])
        if not files or size > room:
            files.append([])
            room = limit
        files[-1].append(name)
        room -= size
    return [sorted(names, key=lambda name: -width(dtypes[name])) for names in files]


def write_weights(folder: Path, files: list[list[str]], shapes: Mapping[str, tuple[int, ...]],
                  dtypes: Mapping[str, str], tensors: Iterable[tuple[str, Tensor]]) -> None:  # fmt: skip
    """Write fp32 `tensors`, which come in the order of `files` (see plan_files), in their `dtypes`.

    Several files have an index. Raises OSError; CheckpointError for a value that its dtype cannot hold.
    """
    stream, total = iter(tensors), 0
    listed: dict[str, str] = {}
    for number, names in enumerate(files, 1):
        path = folder / (SINGLE if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors")
        with path.open("wb") as file:
            head, size = _header(names, shapes, dtypes)
            file.write(head)
            for name in names:
                given, tensor = next(stream)
                assert given == name and tuple(tensor.shape) == shapes[name]
                for block in tensor.reshape(-1).split(BLOCK):
                    file.write(_converted(name, block, dtypes[name]).numpy().data)
        listed |= dict.fromkeys(names, path.name)
        total += size
    if len(files) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(listed.items()))}
        (folder / INDEX).write_bytes(orjson.dumps(index, option=orjson.OPT_INDENT_2))


def _header(names: Iterable[str], shapes: Mapping[str, tuple[int, ...]],
            dtypes: Mapping[str, str]) -> tuple[bytes, int]:  # fmt: skip
    """The header of a file, and the bytes that follow it."""
    codes = {ours: code for code, ours in CODES.items()}
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    at = 0
    for name in names:
        end = at + prod(shapes[name]) * width(dtypes[name])
        entries[name] = {"dtype": codes[dtypes[name]], "shape": shapes[name], "data_offsets": [at, end]}
        at = end
    text = orjson.dumps(entries)
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text, at


def _converted(name: str, block: Tensor, dtype: str) -> Tensor:
    """A block rounded to nearest, as bytes."""
    narrow = block.to(_TORCH[dtype])
    lost = narrow.isinf() & block.isfinite()
    if bool(lost.any()):
        raise CheckpointError(
            f"{name} holds {block[lost][0].item():g}, which {dtype} cannot hold; choose another dtype"
        )
    return narrow.contiguous().view(torch.uint8)
