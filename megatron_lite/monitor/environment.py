"""What a run ran on: versions, commit, devices."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import orjson
import torch

PACKAGES = ("torch", "numpy", "pydantic", "safetensors", "tokenizers", "sentencepiece", "triton", "flash-attn")


def describe_environment(device: torch.device, world_size: int) -> dict[str, Any]:
    """Versions, the commit of this source tree if it has one, the device of this rank and the number of ranks."""
    found: dict[str, Any] = {"python": sys.version.split()[0], "platform": platform.platform()}
    found |= {"host": socket.gethostname(), "world_size": world_size, "commit": _commit(Path(__file__).parent)}
    found["device"] = torch.cuda.get_device_name(device) if device.type == "cuda" else _cpu()
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    found["packages"] = {name: number for name in PACKAGES if (number := _version(name)) is not None}
    return found


def write_environment(path: Path, device: torch.device, world_size: int) -> None:
    """Write `describe_environment` to `path` as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(orjson.dumps(describe_environment(device, world_size), option=orjson.OPT_INDENT_2))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu() -> str:
    """Name and number of the processors this process may use."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{(names or [platform.processor() or platform.machine()])[0]}, {os.cpu_count()} cores"


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
