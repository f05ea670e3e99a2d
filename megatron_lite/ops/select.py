"""THE table: op -> backends in order of preference, each with where it runs and how it is loaded.

"auto" takes the first whose device fits and whose package is there. A backend asked for by name and missing is an
error that lists what there is, never a silent fallback. Resolved once per stage, printed, saved with the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from megatron_lite.errors import require
from megatron_lite.ops import CrossEntropy, Ops
from megatron_lite.ops.reference import adamw, attention, attention_parts, cross_entropy, pointwise
from megatron_lite.ops.vendor import flash_attention


@dataclass(frozen=True)
class Backend:
    """One way to do an op."""

    load: Callable[[], Any]
    devices: tuple[str, ...] = ("cpu", "cuda")
    package: str | None = None  # must be importable
    half_only: bool = False  # runs in bf16 only

    def missing(self, device: str, precision: str) -> str | None:
        """Why it cannot run here, or None."""
        if device not in self.devices:
            return f"needs {' or '.join(self.devices)}, this is {device}"
        if self.half_only and precision != "bf16":
            return f"needs bf16, this run is {precision}"
        if self.package is not None and find_spec(self.package) is None:
            return f"package {self.package} is not installed"
        return None


# Loaders of attention give the kernel and its parts, those of norm give both norms.
TABLE: Mapping[str, Mapping[str, Backend]] = {
    "attention": {
        "flash_attn": Backend(flash_attention, devices=("cuda",), package="flash_attn", half_only=True),
        "blocked": Backend(lambda: (attention.blocked, attention_parts.blocked()), devices=("cpu",)),
        "sdpa": Backend(lambda: (attention.sdpa, None)),
        "naive": Backend(lambda: (attention.naive, attention_parts.naive())),
    },
    "norm": {"torch": Backend(lambda: (pointwise.rms_norm, pointwise.layer_norm))},
    "rope": {"torch": Backend(lambda: pointwise.rope)},
    "swiglu": {"torch": Backend(lambda: pointwise.swiglu)},
    "cross_entropy": {"torch": Backend(lambda: CrossEntropy(cross_entropy.stats, cross_entropy.grad))},
    "adamw": {"fused": Backend(lambda: adamw.fused), "formula": Backend(lambda: adamw.formula)},
}

WITH_PARTS = ("flash_attn", "blocked", "naive")  # attention kernels whose load gives their parts too


def resolve(wanted: Mapping[str, str], device: str, precision: str) -> dict[str, str]:
    """op -> backend for every op of the table; `wanted` maps ops to a backend's name or "auto" (the default).

    Errors: ConfigError for an unknown op or backend, or one that cannot run here, with the reasons of all others.
    """
    unknown = sorted(set(wanted) - set(TABLE))
    require(not unknown, f"[kernels] has no op {', '.join(unknown)}; there are {', '.join(TABLE)}")
    chosen = {}
    for op, backends in TABLE.items():
        reasons = {name: backend.missing(device, precision) for name, backend in backends.items()}
        able = [name for name, reason in reasons.items() if reason is None]
        name = wanted.get(op, "auto")
        if name == "auto":
            name = able[0]
        listing = "; ".join(f"{n}: {r or 'available'}" for n, r in reasons.items())
        require(name in able, f"[kernels] {op} = {name!r} cannot be used here ({listing})")
        chosen[op] = name
    return chosen


def build(chosen: Mapping[str, str]) -> Ops:
    """Load the backends that `resolve` chose."""
    loaded = {op: TABLE[op][name].load() for op, name in chosen.items()}
    attend, parts = loaded.pop("attention")
    rms_norm, layer_norm = loaded.pop("norm")
    return Ops(attention=attend, attention_parts=parts, rms_norm=rms_norm, layer_norm=layer_norm, **loaded)


def default_ops(device: str = "cpu", precision: str = "fp32") -> Ops:
    """What "auto" gives for every op."""
    return build(resolve({}, device, precision))
