"""Where numbers go besides the metrics file: TensorBoard and Weights & Biases, if a recipe asks for them.

A package that is asked for and missing is an error before training; a sink that fails later is reported once and
gets nothing more, for no picture is worth a run. Only rank 0 opens sinks: one run, however many ranks there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from megatron_lite.config.schema import Logging
from megatron_lite.errors import ConfigError, require

# What foreign code may raise without ending a run; a sink adds its own.
FAILURES = (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError)


class Writer(Protocol):
    """Where numbers end up."""

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Flush and close."""


class Sink:
    """A writer that may fail: the first failure is printed, and from then on nothing is done."""

    def __init__(self, name: str, open_writer: Callable[[], Writer], failures: tuple[type[Exception], ...] = FAILURES):
        self.name, self._failures = name, failures
        self._writer: Writer | None = None
        self._guarded(lambda: setattr(self, "_writer", open_writer()))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """Send the numbers of a step."""
        writer = self._writer
        if writer is not None:
            self._guarded(lambda: writer.write(step, numbers))

    def close(self) -> None:
        """Flush and close."""
        writer = self._writer
        if writer is not None:
            self._guarded(writer.close)
        self._writer = None

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            action()
        except self._failures as error:
            self._writer = None
            print(f"{self.name} failed and gets nothing more from this run: {error!r}", file=sys.stderr, flush=True)


class TensorBoard:
    """Event files in a folder."""

    def __init__(self, folder: Path):
        self._writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder))

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One scalar per number."""
        for key, number in numbers.items():
            self._writer.add_scalar(key, number, step)

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


class WandB:
    """One Weights & Biases run, offline unless WANDB_MODE says otherwise."""

    def __init__(self, folder: Path, name: str, config: dict[str, Any]):
        mode = os.environ.get("WANDB_MODE", "offline")
        wandb = import_module("wandb")
        self._run = wandb.init(project="megatron_lite", name=name, dir=str(folder), config=config, mode=mode)

    def write(self, step: int, numbers: dict[str, float]) -> None:
        """One row of the run; what is sent twice for a step is merged."""
        self._run.log(numbers, step=step)

    def close(self) -> None:
        """Mark the run finished."""
        self._run.finish()


def require_sinks(logging: Logging) -> None:
    """ConfigError unless the packages of all selected sinks are installed."""
    missing = [name for name in ("tensorboard", "wandb") if getattr(logging, name) and find_spec(name) is None]
    require(
        not missing,
        f"{' and '.join('logging.' + name for name in missing)} need packages that are not installed; "
        f"pip install 'megatron_lite[{','.join(missing)}]', or set them to false",
        ConfigError,
    )


def open_sinks(logging: Logging, folder: Path, name: str, config: dict[str, Any]) -> list[Sink]:
    """The selected sinks, writing under `folder`; `name` and `config` describe the run. ConfigError as above."""
    require_sinks(logging)
    sinks = []
    if logging.tensorboard:
        sinks.append(Sink("tensorboard", lambda: TensorBoard(folder / "tensorboard")))
    if logging.wandb:
        failures = (*FAILURES, import_module("wandb").errors.Error)
        sinks.append(Sink("wandb", lambda: WandB(folder, name, config), failures))
    return sinks
