"""Which layout of ranks would be fastest? Estimates all of them, without running any; needs neither torch nor a GPU.

  python tools/plan_layout.py --recipe examples/stablelm_3b/recipe.toml --world-size 256 --device A100-40

Lists the fastest layouts that fit, why the others do not, and the [parallel] section of the first. What the estimate is
made of stands in megatron_lite/plan/speed.py, the numbers of the devices in megatron_lite/plan/devices.py. Measure the
first few before a long run: what is closer than a tenth is not told apart.
"""

from __future__ import annotations

import argparse
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from megatron_lite.config import toml
from megatron_lite.config.check import not_built
from megatron_lite.config.load import load_recipe
from megatron_lite.config.schema import Parallel, Recipe
from megatron_lite.config.stages import stage_index
from megatron_lite.errors import MegatronLiteError, require
from megatron_lite.plan.devices import DEVICES, Device
from megatron_lite.plan.layout import Layout, Rejected, recipe_with, search

COLUMNS = (
    f"{'tokens/s':>10} {'per rank':>9} {'MFU full':>8} {'causal':>6} {'s/step':>7} {'memory':>9} {'bubble':>7} "
    f"{'waiting':>8} {'dp':>5} {'tp':>3} {'pp':>3} {'virtual':>7} {'cp':>3} {'ep':>3} {'micro-batch':>11} recompute"
)


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Estimate every layout of a stage and list the fastest.")
    p.add_argument("--recipe", type=Path, required=True)
    p.add_argument("--stage", default="1", help="number or name (default: the first)")
    p.add_argument("--world-size", type=int, help="ranks (default: what the recipe is meant for)")
    p.add_argument("--device", choices=DEVICES, required=True)
    p.add_argument(
        "--efficiency", type=float, help="of matrix products, as a share of the peak (default: the device's)"
    )
    p.add_argument("--top", type=int, default=10, help="layouts to list")
    p.add_argument("--rejected", action="store_true", help="list every layout that cannot run, with its reason")
    p.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a value of the recipe")
    return p


def main(args: argparse.Namespace) -> int:
    """Print the lists; 1 if no layout fits."""
    recipe = load_recipe(args.recipe, args.set, launched=True)
    index = stage_index(recipe, args.stage)
    world = args.world_size or recipe.parallel.world_size or 1
    device = DEVICES[args.device]
    if args.efficiency is not None:
        require(0 < args.efficiency <= 1, f"--efficiency {args.efficiency} is not in 0 … 1")
        device = device._replace(efficiency=args.efficiency)
    layouts, rejected = search(recipe, index, world, device)
    heading = f"stage {index + 1}, {recipe.stages[index].name}: {world:,} x {args.device} ({device.source}), "
    print(f"{heading}matrix products at {device.efficiency:.0%} of {device.peak / 1e12:,.4g} TFLOP/s")
    for line in report(layouts, rejected, args.top):
        print(line)
    for line in reasons(rejected, args.rejected):
        print(line)
    if layouts:
        print("\n" + section(recipe, index, layouts[0], world, device))
    return 0 if layouts else 1


def report(layouts: Sequence[Layout], rejected: Sequence[Rejected], top: int) -> Iterator[str]:
    """The fastest ones as a table."""
    yield f"{len(layouts):,} layouts can run, {len(rejected):,} cannot"
    if layouts:
        yield COLUMNS
    for layout in layouts[:top]:
        p, speed = layout.parallel, layout.tokens_per_s
        together = " + sequence parallel" if p.sequence_parallel else ""
        yield (
            f"{speed:>10,.0f} {speed / layout.grid.world:>9,.0f} {layout.mfu[0]:>8.1%} {layout.mfu[1]:>6.1%} "
            f"{layout.time.total:>7.3g} {layout.memory.total / 1e9:>6,.1f} GB {layout.bubble:>7.1%} "
            f"{layout.time.waiting:>8.1%} {layout.grid.dp:>5} {p.tp:>3} {p.pp:>3} {p.virtual_stages:>7} {p.cp:>3} "
            f"{p.ep:>3} {layout.micro_batch:>11} {p.recompute}{together}"
        )


def reasons(rejected: Sequence[Rejected], every: bool) -> Iterator[str]:
    """Why layouts cannot run: how many for each reason and the one that is closest, or all of them."""
    groups: dict[str, list[Rejected]] = defaultdict(list)
    for one in rejected:
        groups[one.reason].append(one)
    for reason, members in sorted(groups.items(), key=lambda group: -len(group[1])):
        yield f"\n{len(members):,} cannot run: {reason}" if every else f"{len(members):>10,} cannot run: {reason}"
        for one in members if every else [min(members, key=lambda one: one.over)]:
            yield f"{'':>10} {name(one.parallel, one.micro_batch)}: {one.message}"


def name(parallel: Parallel, micro_batch: int) -> str:
    """A layout in a few words."""
    axes = [f"{axis} {getattr(parallel, axis)}" for axis in ("tp", "pp", "cp", "ep") if getattr(parallel, axis) > 1]
    axes += [f"virtual_stages {parallel.virtual_stages}"] if parallel.virtual_stages > 1 else []
    axes += ["sequence parallel"] if parallel.sequence_parallel else []
    return ", ".join([*(axes or ["tp 1"]), f"micro-batch {micro_batch}", f"recompute {parallel.recompute}"])


def section(recipe: Recipe, index: int, layout: Layout, world: int, device: Device) -> str:
    """What to write into the recipe for a layout."""
    chosen = recipe_with(recipe, index, layout, world)
    default = Parallel().model_dump()
    said = {key: value for key, value in chosen.parallel.model_dump().items() if value != default[key]}
    lines = [
        f"# {layout.tokens_per_s:,.0f} tokens/s estimated; needs {layout.memory.total / 1e9:.1f} of "
        f"{device.memory / 1e9:.0f} GB. In stage '{recipe.stages[index].name}': micro_batch = {layout.micro_batch}",
        *(f"# {violation.message}" for violation in not_built(chosen, index)),
        toml.write({"parallel": said}).strip(),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    arguments = parser().parse_args()
    try:
        sys.exit(main(arguments))
    except MegatronLiteError as error:
        sys.exit(f"{type(error).__name__}: {error}")
