"""Where numbers go besides the metrics file: TensorBoard and Weights & Biases, if a recipe asks for them.

A package that is asked for and missing is an error before training; a sink that fails later is reported once and
dropped, for no picture is worth a run. Only rank 0 has sinks, so there is one run however many ranks there are.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from megatron_lite.config.schema import Logging
from megatron_lite.errors import ConfigError, require


@dataclass(frozen=True)
class Sink:
    """One open sink."""

    name: str
    write: Callable[[int, dict[str, float]], object]  # (step, numbers)
    close: Callable[[], object]
    errors: tuple[type[Exception], ...]  # what it may raise


class Sinks:
    """The sinks of one stage. Without any, every method does nothing."""

    def __init__(self, logging: Logging, folder: Path, run: str, config: dict[str, Any]):
        """Open what `logging` selects, under `folder`. `config` is shown beside the run.

        ConfigError: a selected package is not installed.
        """
        check_packages(logging)
        self._sinks: list[Sink] = []
        openers = {"tensorboard": _open_tensorboard, "wandb": _open_wandb}
        for name, opener in openers.items():
            if getattr(logging, name):
                self._open(name, opener, folder, run, config)

    def write(self, step: int, record: dict[str, Any]) -> None:
        """Send the numbers of a record; anything else in it is left out."""
        numbers = {
            key: float(value)
            for key, value in record.items()
            if isinstance(value, int | float) and not isinstance(value, bool) and key != "step"
        }
        for sink in list(self._sinks):
            try:
                sink.write(step, numbers)
            except sink.errors as error:
                self._drop(sink, error)

    def close(self) -> None:
        """Flush and close."""
        for sink in list(self._sinks):
            try:
                sink.close()
            except sink.errors as error:
                self._drop(sink, error)
        self._sinks.clear()

    def _open(self, name: str, opener: Callable[..., Sink], folder: Path, run: str, config: dict[str, Any]) -> None:
        errors = _errors(name)
        try:
            self._sinks.append(opener(folder, run, config, errors))
        except errors as error:
            print(f"{name} could not be started and is left out: {error}", file=sys.stderr, flush=True)

    def _drop(self, sink: Sink, error: Exception) -> None:
        print(f"{sink.name} failed and gets nothing more from this run: {error}", file=sys.stderr, flush=True)
        self._sinks.remove(sink)


def check_packages(logging: Logging) -> None:
    """ConfigError unless the packages of all selected sinks are installed; a cheap check for all ranks."""
    missing = [name for name in ("tensorboard", "wandb") if getattr(logging, name) and find_spec(name) is None]
    require(
        not missing,
        f"logging.{' and logging.'.join(missing)} need packages that are not installed; "
        f"pip install 'megatron_lite[{','.join(missing)}]', or turn them off",
        ConfigError,
    )


def _errors(name: str) -> tuple[type[Exception], ...]:
    common = (OSError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, ImportError, AssertionError)
    return (*common, import_module("wandb").errors.Error) if name == "wandb" else common


def _open_tensorboard(folder: Path, run: str, config: dict[str, Any], errors: tuple[type[Exception], ...]) -> Sink:
    writer = import_module("torch.utils.tensorboard").SummaryWriter(str(folder / "tensorboard"))
    writer.add_text("recipe", f"{run}\n\n    " + "\n    ".join(f"{key}: {value}" for key, value in config.items()))

    def write(step: int, numbers: dict[str, float]) -> None:
        for key, value in numbers.items():
            writer.add_scalar(key, value, step)

    return Sink("tensorboard", write, writer.close, errors)


def _open_wandb(folder: Path, run: str, config: dict[str, Any], errors: tuple[type[Exception], ...]) -> Sink:
    mode = os.environ.get("WANDB_MODE", "offline")
    started = import_module("wandb").init(project="megatron_lite", name=run, dir=str(folder), config=config, mode=mode)
    return Sink("wandb", lambda step, numbers: started.log(numbers, step=step), started.finish, errors)
