"""Did the run learn? An error unless the validation losses fell by as much as the recipe is known to reach.

    python examples/tiny/check_run.py quickstart/run

Read from the evaluations of the same rows at each stage's start and end: over stage 1 `prose` and `code` must fall by
2 nats, over stage 3 `long` must fall. Training loss is no criterion: it moves with the blend when a stage begins.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

REQUIRED = (  # stage, validation set, nats it must fall by, more than
    (1, "prose", 2.0),
    (1, "code", 2.0),
    (3, "long", 0.0),
)


def first_and_last(run: Path, stage: int) -> tuple[dict[str, float], dict[str, float]]:
    """Losses by validation set at the first and at the last evaluation of a stage."""
    path = run / f"stage-{stage}" / "evaluations.jsonl"
    if not path.is_file():
        sys.exit(f"error: {path} does not exist; was stage {stage} run?")
    lines = sorted((json.loads(line) for line in path.read_text().splitlines()), key=lambda line: line["step"])
    if len(lines) < 2 or lines[0]["step"] == lines[-1]["step"]:
        sys.exit(f"error: {path} holds {len(lines)} evaluations; one at the start and one at the end are needed")
    return lines[0]["losses"], lines[-1]["losses"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="the recipe's `run` folder")
    run = parser.parse_args().run

    failed = []
    for stage, name, nats in REQUIRED:
        start, end = first_and_last(run, stage)
        if name not in start or name not in end:
            sys.exit(f"error: stage {stage} evaluates {sorted(start)}, not {name!r}; see [validation] in the recipe")
        fell = start[name] - end[name]
        ok = fell > nats  # also false for NaN
        print(f"stage {stage}, {name:5}: {start[name]:.3f} -> {end[name]:.3f}, fell by {fell:.3f}, "
              f"more than {nats:g} needed: {'yes' if ok else 'NO'}")  # fmt: skip
        if not ok:
            failed.append(f"{name} over stage {stage}")
    if failed:
        sys.exit(f"error: the loss did not fall enough: {', '.join(failed)}")


if __name__ == "__main__":
    main()
