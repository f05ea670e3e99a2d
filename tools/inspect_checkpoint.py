"""Looks at a checkpoint: is it whole, what is in it, how are its tensors distributed.

python tools/inspect_checkpoint.py CHECKPOINT [--kind master] [--match TEXT] [--no-statistics]
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from megatron_lite.checkpoint.manifest import Manifest, read_manifest
from megatron_lite.checkpoint.store import find, read_tensors, verify
from megatron_lite.errors import CheckpointError, MegatronLiteError, require

RUN = 1 << 22  # elements that statistics convert to float64 at a time


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("checkpoint", type=Path, help="a checkpoint, or a folder of them (the newest complete one)")
    flags.add_argument("--kind", default="master", metavar="KIND", help="master, exp_avg or exp_avg_sq")
    flags.add_argument("--match", default="", metavar="TEXT", help="only tensors with TEXT in their name")
    flags.add_argument("--no-statistics", action="store_true", help="checksums and the summary only")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when all is well, 1 with one line for each thing that is wrong."""
    args = parser().parse_args(arguments)
    try:
        folder = find(args.checkpoint, "checkpoint")
        manifest = read_manifest(folder)
        for line in summary(folder, manifest):
            print(line)
        damage = verify(folder)
        for line in damage:
            print(line, file=sys.stderr)
        if damage:
            return 1
        print("every byte has the checksum it was written with")
        if not args.no_statistics:
            for line in statistics(folder, manifest, args.kind, args.match):
                print(line)
    except MegatronLiteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def summary(folder: Path, manifest: Manifest) -> Iterator[str]:
    """Step, layout, files, counters of the run."""
    layout = ", ".join(f"{axis} {size}" for axis, size in manifest.layout.items())
    size = sum(entry["bytes"] for entry in manifest.files)
    numbers = sum(math.prod(shape) for shape in manifest.saved().shapes.values())
    yield f"{folder}: step {manifest.step}"
    yield f"saved by: {layout}"
    yield f"holds {', '.join(manifest.kinds)} of {numbers:,} parameters: {size:,} bytes in {len(manifest.files)} files"
    if "imported" in manifest.meta:
        imported = manifest.meta["imported"]
        yield f"imported from Hugging Face weights in {imported['dtype']}: {imported['model']['model_type']}"
    state = manifest.meta.get("state", {})
    for key, value in state.items():
        if key != "recipe":
            yield f"  {key}: {value:,}" if type(value) is int else f"  {key}: {value}"


def statistics(folder: Path, manifest: Manifest, kind: str, match: str) -> Iterator[str]:
    """Name, shape, mean, standard deviation and largest magnitude of every tensor; one is in memory at a time."""
    names = [name for name in manifest.saved().shapes if match in name]
    require(bool(names), f"no tensor in {folder} has {match!r} in its name", CheckpointError)
    width = max(map(len, names))
    for name, tensor in read_tensors(folder, kind):
        if name in names:
            mean, deviation, largest = moments(tensor)
            shape = " x ".join(map(str, tensor.shape))
            yield f"{name:<{width}}  {shape:>16}  mean {mean:+.3e}  std {deviation:.3e}  largest {largest:.3e}"


def moments(tensor: Tensor) -> tuple[float, float, float]:
    """Mean, population standard deviation and largest magnitude, accumulated in float64; NaN shows in all of them."""
    total, largest = 0.0, 0.0
    runs = tensor.flatten().split(RUN)
    for run in runs:
        total += run.double().sum().item()
        largest = torch.maximum(torch.tensor(largest), run.abs().max()).item()
    mean = total / tensor.numel()
    squares = sum((run.double() - mean).square().sum().item() for run in runs)
    return mean, math.sqrt(squares / tensor.numel()), largest


if __name__ == "__main__":
    sys.exit(main())
