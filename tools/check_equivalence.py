"""Does a layout compute what one process computes? Trains a recipe's model, made small, in each layout, and compares.

  python tools/check_equivalence.py --recipe examples/qwen3_1p7b/recipe.toml --layouts dp2 tp2-sp pp2-v2 cp2-ring

A layout is parts joined by "-": tpN, ppN, cpN, dpN; vN (parts of the model on each pipeline rank), sp (sequence
parallelism), gather, ring or heads (attention over cp), selective or full (recompute), zero0 (ZeRO off). Each runs in
fp32 on synthetic rows, `--steps` steps at a learning rate of 1e-3 with 10 warm-up steps and 12 rows a step, or as many
as the layouts need. Run it before a long job, on the machines of the job. Exit code 1 if a layout fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import lcm
from pathlib import Path
from typing import Any, Literal

from megatron_lite.checkpoint import store
from megatron_lite.config.load import load_recipe
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Optimizer, Parallel, Recipe
from megatron_lite.config.stages import for_stage, stage_index
from megatron_lite.errors import MegatronLiteError, require
from megatron_lite.parallel.grid import Grid, kv_replicas
from megatron_lite.runtime.launch import process_groups, read_launch
from megatron_lite.train.trial import Run, build_run, train_built

LOSS, GRAD_NORM, WEIGHTS = 1e-5, 1e-4, 1e-4  # absolute; relative; of each tensor's largest value


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Compare layouts with one process.")
    p.add_argument("--recipe", type=Path, required=True)
    p.add_argument("--stage", default="1", help="number or name (default: the first)")
    p.add_argument("--layouts", nargs="+", required=True, metavar="tp2-sp|dp2|…")
    p.add_argument("--steps", type=int, default=20)
    p.add_argument("--full-size", action="store_true", help="the recipe's own widths and depth")
    p.add_argument(
        "--measure", nargs=2, metavar=("LAYOUT", "FOLDER"), help="be one rank of a layout, write to a folder"
    )
    return p


@dataclass(frozen=True)
class Layout:
    """What a layout's name says."""

    name: str
    dp: int = 1
    parallel: Parallel = field(default_factory=Parallel)
    zero: Literal[0, 1] = 1

    @property
    def world(self) -> int:
        """Ranks it needs."""
        return self.dp * self.parallel.tp * self.parallel.pp * self.parallel.cp


SIZES = {"tp": "tp", "pp": "pp", "cp": "cp", "v": "virtual_stages", "dp": "dp"}
WORDS: dict[str, dict[str, Any]] = {
    "one": {}, "zero0": {"zero": 0}, "sp": {"sequence_parallel": True},
    **{word: {"cp_attention": word} for word in ("gather", "ring", "heads")},
    **{word: {"recompute": word} for word in ("selective", "full")},
}  # fmt: skip


def parse(name: str) -> Layout:
    """tp2-dp2-sp -> Layout. ConfigError for a part that is not known."""
    found: dict[str, Any] = {}
    for part in name.split("-"):
        axis, number = part.rstrip("0123456789"), part[len(part.rstrip("0123456789")) :]
        if axis in SIZES and number and int(number) > 0:
            found[SIZES[axis]] = int(number)
        else:
            known = ", ".join([*(f"{size}N" for size in SIZES), *WORDS])
            require(part in WORDS, f"layout {name!r}: {part!r} is none of {known}")
            found |= WORDS[part]
    dp, zero = found.pop("dp", 1), found.pop("zero", 1)
    require(found.get("virtual_stages", 1) == 1 or found.get("pp", 1) > 1, f"layout {name!r}: vN needs ppN above 1")
    return Layout(name, dp, Parallel(**found), zero)


def small(model: ModelConfig, layouts: Sequence[Layout]) -> ModelConfig:
    """The same kind of model with as few heads, blocks and words as the layouts can be made of; kv heads keep their
    ratio to the query heads."""
    group = model.num_attention_heads // model.num_key_value_heads
    heads = lcm(4, *(layout.parallel.tp * layout.parallel.cp for layout in layouts))
    blocks = max(2, *(layout.parallel.pp * layout.parallel.virtual_stages for layout in layouts))
    return model.model_copy(
        update={
            "vocab_size": 101, "vocab_multiple": 8, "hidden_size": 16 * heads, "intermediate_size": 32 * heads,
            "num_hidden_layers": blocks, "num_attention_heads": heads, "num_key_value_heads": max(1, heads // group),
            "head_dim": 16,
        }
    )  # fmt: skip


def trial(recipe: Recipe, index: int, layout: Layout, layouts: Sequence[Layout], args: argparse.Namespace) -> Run:
    """The run of one of the layouts: the same rows for all, in micro-batches of one, or whole where there is one
    process."""
    masked, optimizer = recipe.stages[index].mask_documents, recipe.optimizer
    rows = lcm(12, *(one.dp * one.parallel.pp for one in layouts))
    return Run(
        recipe.model if args.full_size else small(recipe.model, layouts), steps=args.steps, documents=masked,
        masked=True, rows=rows, seq_len=lcm(16, *(2 * one.parallel.cp * one.parallel.tp for one in layouts)),
        micro_batch=rows if layout.world == 1 else 1, parallel=layout.parallel,
        optimizer=Optimizer(betas=optimizer.betas, weight_decay=optimizer.weight_decay, clip=optimizer.clip,
                            zero=layout.zero),
    )  # fmt: skip


def measure(args: argparse.Namespace) -> None:
    """On every rank of a layout: train, write losses, norms and weights to the folder."""
    recipe = load_recipe(args.recipe, launched=True)
    index = stage_index(recipe, args.stage)
    recipe, launch, folder = for_stage(recipe, index), read_launch(), Path(args.measure[1])
    layout, layouts = parse(args.measure[0]), [parse(name) for name in args.layouts]
    run, p = trial(recipe, index, layout, layouts, args), layout.parallel
    grid = Grid(launch.world_size, p.tp, p.pp, p.cp, kv_replicas=kv_replicas(run.model.num_key_value_heads, p.tp))
    with process_groups(launch, grid, 600.0) as ctx:
        model, optimizer = build_run(run, ctx)
        results = train_built(run, ctx, model, optimizer)
        store.save(folder, args.steps, optimizer.owned(), ctx, {}, keep=1)
        optimizer.wait()
        if ctx.world.rank == 0:
            curve = [(result.loss, result.grad_norm) for result in results]
            (folder / "curve.json").write_text(json.dumps(curve))


def launch_layout(args: argparse.Namespace, layout: Layout, folder: Path) -> None:
    """Start the ranks of a layout on this machine and wait for them."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={layout.world}"]
    command = [
        sys.executable, *(launcher if layout.world > 1 else []), str(Path(__file__).resolve()),
        "--recipe", str(args.recipe), "--stage", args.stage, "--layouts", *args.layouts, "--steps", str(args.steps),
        "--measure", layout.name, str(folder), *(["--full-size"] if args.full_size else []),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    require(done.returncode == 0, f"layout {layout.name} did not run:\n{done.stderr[-2000:]}")


def differences(ours: Path, truth: Path, steps: int) -> Iterator[tuple[str, float, float]]:
    """(what, largest difference, tolerance)."""
    curves = [json.loads((folder / "curve.json").read_text()) for folder in (ours, truth)]
    pairs = list(zip(*curves, strict=True))
    yield "loss", max(abs(a[0] - b[0]) for a, b in pairs), LOSS
    yield "grad norm", max(abs(a[1] / b[1] - 1) for a, b in pairs), GRAD_NORM
    name = store.folder_name(steps)
    trained = dict(store.read_tensors(ours / name))
    yield (
        "weights",
        max(
            ((trained[key] - whole).abs().max() / whole.abs().max().clamp(min=1e-12)).item()
            for key, whole in store.read_tensors(truth / name)
        ),
        WEIGHTS,
    )


def main(args: argparse.Namespace) -> int:
    """Print a line for each layout; 1 if one fails."""
    recipe = load_recipe(args.recipe, launched=True)
    stage_index(recipe, args.stage)
    layouts = [parse(name) for name in args.layouts]
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        truth = Path(folder) / "one"
        launch_layout(args, parse("one"), truth)
        for layout in layouts:
            ours = Path(folder) / layout.name
            launch_layout(args, layout, ours)
            found = list(differences(ours, truth, args.steps))
            verdict = "PASS" if all(difference <= most for _, difference, most in found) else "FAIL"
            failed += verdict == "FAIL"
            shown = ", ".join(f"{what} {difference:.1e} (at most {most:.0e})" for what, difference, most in found)
            print(f"{verdict} {layout.name}: {shown}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    arguments = parser().parse_args()
    try:
        if arguments.measure is None:
            sys.exit(main(arguments))
        measure(arguments)
    except MegatronLiteError as error:
        sys.exit(f"{type(error).__name__}: {error}")
