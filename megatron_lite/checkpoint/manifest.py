"""The manifest of a checkpoint: what was saved, where it lies, and how to know that it is all there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from xxhash import xxh3_64_hexdigest

from megatron_lite.checkpoint.layout import Saved
from megatron_lite.errors import CheckpointError, require

FORMAT = "megatron_lite checkpoint"
VERSION = 1
NAME = "manifest.json"


@dataclass(frozen=True)
class Manifest:
    """Everything a reader needs to know of a checkpoint before it opens a tensor."""

    step: int
    kinds: list[str]  # "master", "exp_avg", "exp_avg_sq", or fewer
    layout: dict[str, int]  # sizes of the axes it was saved with; for people
    meta: dict[str, Any]  # the state of the run
    coordinates: list[dict[str, Any]]  # pp, tp, buckets: {name: {size, pieces}}
    files: list[dict[str, Any]]  # name, bytes, header, blocks, rank, pp, tp, ranges: {bucket: [lo, hi]}

    def saved(self) -> Saved:
        """Where every element lies."""
        return Saved(self.coordinates, self.files)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest of a finished folder and sync it. Raises OSError."""
    body = {"format": FORMAT, "version": VERSION, **vars(manifest)}
    body["checksum"] = xxh3_64_hexdigest(orjson.dumps(body))
    with (folder / NAME).open("wb") as file:
        file.write(orjson.dumps(body))
        file.flush()
        os.fsync(file.fileno())


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a checkpoint. CheckpointError: no such folder, no manifest in it, or a damaged one."""
    path = folder / NAME
    require(folder.is_dir(), f"there is no checkpoint folder {folder}", CheckpointError)
    require(path.is_file(), f"{folder} holds no {NAME}: it is not a checkpoint, or was not finished", CheckpointError)
    try:
        body = orjson.loads(path.read_bytes())
    except (OSError, orjson.JSONDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    require(isinstance(body, dict) and body.get("format") == FORMAT, f"{path} is not a {FORMAT}", CheckpointError)
    require(
        body.get("version") == VERSION,
        f"{path} has format version {body.get('version')}; this program reads version {VERSION}",
        CheckpointError,
    )
    checksum = body.pop("checksum", None)
    require(checksum == xxh3_64_hexdigest(orjson.dumps(body)), f"{path} is damaged: wrong checksum", CheckpointError)
    return Manifest(**{key: value for key, value in body.items() if key not in ("format", "version")})


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """CheckpointError unless every file is there with the size it was written with."""
    for entry in manifest.files:
        path = folder / entry["name"]
        require(path.is_file(), f"{path} is missing", CheckpointError)
        size = path.stat().st_size
        require(
            size == entry["bytes"], f"{path} has {size} bytes; {entry['bytes']} bytes were written", CheckpointError
        )
