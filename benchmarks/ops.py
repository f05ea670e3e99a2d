"""Which operations a training step of tools/benchmark.py spends its time in, on one process.

python -m benchmarks.ops --precision bf16 --save benchmarks/results.jsonl
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch
from torch.profiler import ProfilerActivity, profile

from tools import benchmark

KINDS = {
    "matrix products": ("mm", "bmm", "addmm_", "addmm", "baddbmm"),
    "copies and casts": ("copy_", "cat", "clone", "fill_", "zero_"),
    "exponentials": ("exp_", "exp", "silu", "silu_backward"),
    "AdamW": ("_fused_adamw_",),
}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Where the time of a step goes, by kind of operation.")
    p.add_argument("--precision", choices=["bf16", "fp32"], default="bf16")
    p.add_argument("--save", type=Path, metavar="FILE", help="append the JSON line, with date, commit and machine")
    return p


def shares(precision: str) -> dict[str, float]:
    """Kind of operation -> share of the time of three steps."""
    found: dict[str, float] = {}

    def profiled(step: Callable[[], object], steps: int) -> float:
        for _ in range(2):
            step()
        with profile(activities=[ProfilerActivity.CPU]) as record:
            for _ in range(3):
                step()
        for event in record.key_averages():
            name = event.key.removeprefix("aten::")
            kind = next((kind for kind, names in KINDS.items() if name in names), "elementwise, sums, everything else")
            found[kind] = found.get(kind, 0.0) + event.self_cpu_time_total
        return 1.0

    arguments = benchmark.parser().parse_args(["--precision", precision, "--threads", "1"])
    with mock.patch.object(benchmark, "timed", profiled):
        benchmark.measure_ours(arguments)
    total = sum(found.values())
    return {kind: round(time / total, 3) for kind, time in sorted(found.items(), key=lambda item: -item[1])}


if __name__ == "__main__":
    args = parser().parse_args()
    torch.set_num_threads(1)
    benchmark.report({"ops": shares(args.precision), "of": args.precision}, args.save)
