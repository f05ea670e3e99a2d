"""The one entry point: read the recipe, run one stage of it.

python pretrain.py --stage 1                                    one process
torchrun --nproc_per_node 8 pretrain.py --recipe R --stage 1    as many as you have
python pretrain.py --recipe R --dry-run                         what it would cost; needs neither torch nor a GPU
python pretrain.py --recipe R --dry-run ranks                   its ranks do a step without numbers; needs no GPU
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from megatron_lite.errors import ConfigError, MegatronLiteError

TINY = Path(__file__).parent / "examples" / "tiny" / "recipe.toml"


def parser() -> argparse.ArgumentParser:
    """The flags; everything else is in the recipe."""
    p = argparse.ArgumentParser(description="Run one stage of a pretraining recipe.")
    p.add_argument("--recipe", type=Path, default=TINY, help="TOML file (default: the tiny example)")
    p.add_argument("--stage", help="number, counted from 1, or name of the stage to run")
    p.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a value of the recipe")
    p.add_argument(
        "--resume", default="auto", metavar="auto|none|PATH",
        help="auto: go on from the stage's newest complete checkpoint if there is one (default)",
    )  # fmt: skip
    p.add_argument(
        "--dry-run", nargs="?", const="plan", choices=["plan", "ranks", "all"],
        help="print what the run would cost; ranks: rehearse one rank of each kind without numbers; all: every rank",
    )  # fmt: skip
    p.add_argument("--world-size", type=int, help="ranks that --dry-run is for")
    return p


def main() -> None:
    """Exit code 0 when the stage is complete or stopped cleanly, 1 for an error a user can mend."""
    args = parser().parse_args()
    try:
        dry_run(args) if args.dry_run else train(args)
    except MegatronLiteError as error:
        if not args.dry_run and rank() != 0:
            sys.exit(1)  # rank 0 says it for all
        sys.exit(f"{type(error).__name__}: {error}")


def dry_run(args: argparse.Namespace) -> None:
    """Print the plan of one stage, or of every stage and their total; or what a rehearsal of the ranks finds."""
    from megatron_lite.config.load import load_recipe
    from megatron_lite.config.stages import stage_index

    recipe = load_recipe(args.recipe, args.set, launched=args.world_size is not None)
    stages = list(range(len(recipe.stages))) if args.stage is None else [stage_index(recipe, args.stage)]
    world_size = args.world_size or recipe.parallel.world_size or 1
    if args.dry_run == "plan":
        from megatron_lite.plan.run import describe

        print(describe(recipe, stages, world_size))
    else:
        from megatron_lite.train.rehearsal import report

        print(report(recipe, stages, world_size, every=args.dry_run == "all"))


def train(args: argparse.Namespace) -> None:
    """Run the stage."""
    from megatron_lite.config.load import load_recipe
    from megatron_lite.config.stages import stage_index
    from megatron_lite.train.loop import run_stage

    if args.world_size is not None:
        raise ConfigError("--world-size goes with --dry-run; a run has as many ranks as were launched")
    recipe = load_recipe(args.recipe, args.set, launched=True)
    if args.stage is None:
        names = ", ".join(f"{i} ({stage.name})" for i, stage in enumerate(recipe.stages, 1))
        raise ConfigError(f"which stage? --stage takes one of {names}")
    run_stage(recipe, stage_index(recipe, args.stage), args.resume)


def rank() -> int:
    """This process's rank."""
    from megatron_lite.runtime.launch import read_launch

    return read_launch().rank


if __name__ == "__main__":
    main()
