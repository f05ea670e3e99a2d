"""Draw the losses of a run over all its stages.

    python tools/plot_run.py RUN [--output loss.png]

One axis of tokens seen since the first stage, stages marked; training loss of every step (faint) and smoothed within
its stage; validation loss of every set where it was evaluated. Reads stage-N/metrics.jsonl, stage-N/evaluations.jsonl
and, for the names of stages, stage-N/recipe.toml. Default output: RUN/loss.png.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from megatron_lite.errors import DataError, MegatronLiteError, require

TRAINING = "#3b3f46"
# Okabe and Ito's palette, which colour-blind readers can tell apart too.
VALIDATION = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c510a")
MARKERS = "osD^vP*"


@dataclass
class StageCurves:
    """What one stage wrote; tokens count from the first stage's start."""

    number: int
    name: str
    tokens: np.ndarray  # float64 [steps]
    loss: np.ndarray  # float64 [steps], NaN where a step was skipped
    validation: dict[str, list[tuple[float, float]]] = field(default_factory=dict)  # set -> (tokens, loss) in order


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file, one a line; a half-written last line is left out; a missing file has none."""
    if not path.is_file():
        return []
    whole, _, _ = path.read_text(encoding="utf-8").rpartition("\n")
    lines = []
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number} is not JSON: {error}") from error
    return lines


def read_run(run: Path) -> list[StageCurves]:
    """The stages of a run that hold at least one step or evaluation, in order. Raises DataError if there is none."""
    require(run.is_dir(), f"{run} is not a folder; give the `run` folder of a recipe", DataError)
    numbers = sorted(int(p.name[6:]) for p in run.glob("stage-*") if p.name[6:].isdigit())
    stages = []
    for number in numbers:
        folder = run / f"stage-{number}"
        steps, evaluations = read_lines(folder / "metrics.jsonl"), read_lines(folder / "evaluations.jsonl")
        if not steps and not evaluations:
            continue
        tokens = np.array([line["total_tokens"] for line in steps], dtype=np.float64)
        # JSON has no NaN: the loss of a step that was skipped is null.
        loss = np.array([np.nan if line["loss"] is None else line["loss"] for line in steps], dtype=np.float64)
        stage = StageCurves(number, _stage_name(folder, number), tokens, loss)
        for line in sorted(evaluations, key=lambda line: line["step"]):
            for name, value in line["losses"].items():
                if value is not None:
                    stage.validation.setdefault(name, []).append((float(line["total_tokens"]), float(value)))
        stages.append(stage)
    require(
        bool(stages), f"{run} holds no losses yet: no line in any stage-N/metrics.jsonl or evaluations.jsonl", DataError
    )
    return stages


def _stage_name(folder: Path, number: int) -> str:
    path = folder / "recipe.toml"
    if not path.is_file():
        return f"stage {number}"
    stages = tomllib.loads(path.read_text(encoding="utf-8")).get("stages", [])
    return f"{number} {stages[number - 1]['name']}" if len(stages) >= number else f"stage {number}"


def smooth(values: np.ndarray, width: int) -> np.ndarray:
    """Mean over `width` steps to either side, nearer ones weighing more; NaN values count nothing. [n] -> [n]."""
    half = max(1, width)
    window = np.hanning(2 * half + 1 + 2)[1:-1]
    known = np.isfinite(values)
    total = np.convolve(np.pad(np.where(known, values, 0.0), half), window, "valid")
    count = np.convolve(np.pad(known.astype(np.float64), half), window, "valid")
    return np.divide(total, count, out=np.full(len(values), np.nan), where=count > 0)


def plot(stages: list[StageCurves], output: Path, title: str) -> None:
    """Write the picture; its format follows the ending of `output`."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter

    figure = Figure(figsize=(10, 5.5), layout="constrained")
    axes = figure.subplots()
    names = list(dict.fromkeys(name for stage in stages for name in stage.validation))
    width = sum(len(stage.loss) for stage in stages) // 40
    for index, stage in enumerate(stages):
        first = index == 0
        if len(stage.tokens):
            axes.plot(stage.tokens, stage.loss, color=TRAINING, alpha=0.25, linewidth=0.8)
            smoothed = smooth(stage.loss, width)
            axes.plot(stage.tokens, smoothed, color=TRAINING, linewidth=1.8, label="training" if first else None)
        for order, name in enumerate(names):
            points = np.array(stage.validation.get(name, [])).reshape(-1, 2)
            axes.plot(
                *points.T,
                color=VALIDATION[order % len(VALIDATION)],
                marker=MARKERS[order % len(MARKERS)],
                markersize=5.5,
                markeredgecolor="white",
                markeredgewidth=0.7,
                linewidth=1.4,
                label=f"validation: {name}" if name not in _labels(axes, "validation: ") else None,
            )
    _mark_stages(axes, stages)
    axes.set_xlabel("tokens seen, all stages")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title, loc="left", fontsize=11, pad=22)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(axis="y", color="#e4e6ea", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(x=0.015)
    axes.legend(frameon=False, loc="upper right")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output, dpi=150)


def _labels(axes: Any, prefix: str) -> set[str]:
    """What the legend names already, without the prefix."""
    return {str(line.get_label()).removeprefix(prefix) for line in axes.get_lines()}


def _mark_stages(axes: Any, stages: list[StageCurves]) -> None:
    """A line where each stage begins, its name above the plot."""
    for index, stage in enumerate(stages):
        points = [tokens for values in stage.validation.values() for tokens, _ in values]
        start = 0.0 if index == 0 else min([*stage.tokens, *points])
        if index:
            axes.axvline(start, color="#9aa1ab", linewidth=0.9, linestyle=(0, (4, 3)), zorder=0)
        axes.annotate(
            stage.name,
            (start, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(3, 5),
            textcoords="offset points",
            color="#5b626c",
            fontsize=9.5,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the recipe's `run` folder")
    parser.add_argument("--output", type=Path, help="picture to write (.png, .svg, .pdf); default RUN/loss.png")
    args = parser.parse_args()
    output = args.output or args.run / "loss.png"
    try:
        stages = read_run(args.run)
    except MegatronLiteError as error:
        sys.exit(f"error: {error}")
    plot(stages, output, title=str(args.run))
    steps = sum(len(stage.tokens) for stage in stages)
    print(f"{output}: {len(stages)} stages, {steps:,} steps")


if __name__ == "__main__":
    main()
