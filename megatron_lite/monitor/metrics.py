"""Numbers of a run: one JSON object per step in a file, and the arithmetic of speed."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path
from typing import Any

import orjson
import torch

# Dense bf16 FLOP/s of one device, from the vendor's data sheets. The first entry whose words are all in the name of the
# device counts, so variants stand before what they are variants of.
PEAKS: tuple[tuple[frozenset[str], float], ...] = (
    (frozenset({"A100"}), 312e12),
    (frozenset({"H100", "PCIE"}), 756e12),
    (frozenset({"H100", "NVL"}), 835e12),
    (frozenset({"H100"}), 989e12),
    (frozenset({"H200", "NVL"}), 835e12),
    (frozenset({"H200"}), 989e12),
)


def peak_flops(device_name: str) -> float | None:
    """Dense bf16 FLOP/s of a device by the name its driver gives; None when we do not know it."""
    words = set(re.findall("[A-Z0-9]+", device_name.upper()))
    return next((peak for needed, peak in PEAKS if needed <= words), None)


def tflops(flops: float, seconds: float, num_devices: int) -> float:
    """TFLOP/s (1e12 per second) of each device that shared `flops` over `seconds`."""
    return flops / seconds / num_devices / 1e12


def mfu(flops: float, seconds: float, num_devices: int, peak: float | None) -> float | None:
    """Model FLOPs utilisation, 0 to 1, in the convention `flops` was counted in; None without a known peak (FLOP/s)."""
    return None if peak is None else flops / seconds / num_devices / peak


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory this process has held: allocated on the GPU, or resident when it runs on CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024  # Linux counts KiB


class MetricsFile:
    """Appends one JSON object per line; what is written survives the process.

    On a start from step `resume_step`, lines of later steps are dropped (they will be written again), and so is a last
    line that a kill cut short; None starts an empty file. NaN and infinity are written as null: JSON has neither.
    """

    def __init__(self, path: Path, resume_step: int | None):
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = b"" if resume_step is None else b"".join(_lines_until(path, resume_step))
        if not path.exists() or path.read_bytes() != kept:
            _replace(path, kept)
        self._file = path.open("ab", buffering=0)

    def write(self, record: dict[str, Any]) -> None:
        """Append a line; `record` has a `step`."""
        assert "step" in record
        self._file.write(orjson.dumps(record, option=orjson.OPT_APPEND_NEWLINE | orjson.OPT_SERIALIZE_NUMPY))

    def close(self) -> None:
        """Make everything durable and close the file."""
        os.fsync(self._file.fileno())
        self._file.close()


def _lines_until(path: Path, step: int) -> list[bytes]:
    """The lines of a file that are whole, say their step, and are not of a later one."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True) if path.exists() else []:
        try:
            record = orjson.loads(line)
        except orjson.JSONDecodeError:
            continue
        if line.endswith(b"\n") and isinstance(record, dict) and record.get("step", step + 1) <= step:
            kept.append(line)
    return kept


def _replace(path: Path, content: bytes) -> None:
    """Write a file that is whole or absent."""
    temporary = path.with_name(path.name + ".partial")
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
