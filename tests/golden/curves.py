"""Recorded training curves: 50 steps of two tiny models, and how to record them again.

    python -m tests.golden.curves          # prints how far the new curves are from the old, then writes them

Renew them only on purpose: when the mathematics of training changed (an op, the optimizer, the initial weights, the
order of the rows), or when torch is upgraded and the new curves stay within the tolerance. The commit that renews them
says which it was. A refactor does not renew them: that they stay as they are is its proof.

The rule: where CPU and torch are those of the recording, one process repeats it to the bit. On another CPU type torch
takes other kernels, which round otherwise; there, and in every other layout, loss and gradient norm of each step are
within a relative 1e-5.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from megatron_lite.parallel.context import single_process
from megatron_lite.train.step import StepResult
from tests.helpers.tiny import Run, qwen3, stablelm, train

FOLDER = Path(__file__).parent
STEPS = 50
TOLERANCE = 1e-5  # relative, of loss and gradient norm; two layouts differ by 2e-7 and 1.5e-6 over these steps
RUNS = {"qwen3": Run(qwen3(), steps=STEPS), "stablelm": Run(stablelm(), steps=STEPS)}


def machine() -> dict[str, str]:
    """What the last bits depend on: the version of torch and the type of CPU."""
    cpu = f"{platform.machine()} {platform.processor()}".strip()
    if os.path.exists("/proc/cpuinfo"):
        lines = (line.split(":") for line in Path("/proc/cpuinfo").read_text().splitlines() if line.count(":") == 1)
        facts = {key.strip(): value.strip() for key, value in lines}
        wanted = ("vendor_id", "cpu family", "model", "stepping")
        cpu = " ".join(facts[key] for key in wanted if key in facts) or cpu
    return {"torch": torch.__version__, "cpu": f"{cpu} {torch.backends.cpu.get_cpu_capability()}"}


@contextmanager
def one_thread() -> Iterator[None]:
    """Sums are cut by threads, so their last bits depend on how many there are."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def as_curve(results: list[StepResult]) -> dict[str, list[float]]:
    """Loss and gradient norm of each step."""
    return {"loss": [r.loss for r in results], "grad_norm": [r.grad_norm for r in results]}


def curve(name: str) -> dict[str, list[float]]:
    """The run in one process, now."""
    with one_thread():
        return as_curve(train(single_process(), RUNS[name])[0])


def settings(name: str) -> dict[str, object]:
    """What the run is made of; a recording of another run is no recording of this one."""
    run = RUNS[name]
    return {
        "model": run.model.model_dump(mode="json", exclude_defaults=True),
        "optimizer": run.optimizer.model_dump(mode="json", exclude_defaults=True),
        "steps": run.steps, "rows": run.rows, "seq_len": run.seq_len, "peak_lr": run.peak_lr,
    }  # fmt: skip


def file_of(name: str) -> Path:
    """Where a curve is kept."""
    return FOLDER / f"{name}.json"


def recorded(name: str) -> dict:
    """The recording: settings, machine, loss, grad_norm. Numbers are written with every digit that fp64 has."""
    return json.loads(file_of(name).read_text())


def largest_difference(ours: dict[str, list[float]], theirs: dict[str, list[float]]) -> float:
    """Largest relative difference of loss and gradient norm over all steps."""
    return max(abs(a / b - 1) for key in ("loss", "grad_norm") for a, b in zip(ours[key], theirs[key], strict=True))


def main() -> None:
    for name in RUNS:
        new = curve(name)
        if file_of(name).exists():
            difference = largest_difference(new, recorded(name))
            print(f"{name}: the largest relative difference from the old curve is {difference:.2e}")
        text = json.dumps({"settings": settings(name), "machine": machine(), **new}, indent=1)
        file_of(name).write_text(text + "\n")


if __name__ == "__main__":
    main()
