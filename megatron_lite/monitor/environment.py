"""What a run ran on: versions, commit, devices."""

from __future__ import annotations

import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from megatron_lite.parallel.context import ParallelContext

PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "sentencepiece", "triton", "flash-attn")


def environment(ctx: ParallelContext) -> dict[str, Any]:
    """Versions, the commit of this source tree if it has one, the device of this rank and the number of ranks."""
    return {
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "host": socket.gethostname(),
        "device": device_name(ctx.device),
        "cuda": torch.version.cuda,
        "world_size": ctx.world.size,
        "commit": _commit(Path(__file__).parent),
        "packages": {name: number for name in PACKAGES if (number := _version(name)) is not None},
    }


def device_name(device: torch.device) -> str:
    """What the driver calls a GPU; "cpu" otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(folder: Path) -> str | None:
    """The commit checked out around `folder`, with "+" when files differ from it; None outside a repository."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=40", "--exclude=*", "--dirty=+"],
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
