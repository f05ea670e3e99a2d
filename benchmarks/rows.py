"""Index building and random rows per second on a synthetic corpus of 500M tokens, against others in turn.

  python -m benchmarks.rows --peer "NAME=COMMAND" --save benchmarks/results.jsonl

A peer's command is given the pair's prefix and a row length, and prints a JSON line with "build_s" and "rows_per_s".
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from megatron_lite.config.schema import Source as SourceSection
from megatron_lite.data.source import Source, TrainingRows
from megatron_lite.data.writer import IndexedWriter
from tools.benchmark import report, run

TOKENS, MEAN = 500_000_000, 1000
READ = 4000  # rows


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Time indexes and random rows against others, in turn.")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    p.add_argument("--save", type=Path, metavar="FILE", help="append the JSON lines, with date, commit and machine")
    p.add_argument("--measure", nargs=2, metavar=("PREFIX", "SEQ_LEN"), help="run ours here and print its JSON line")
    return p


def write_corpus(prefix: Path) -> None:
    """Documents of exponentially distributed lengths."""
    rng = np.random.default_rng(0)
    with IndexedWriter(prefix, np.dtype("<u2")) as writer:
        writer.manifest = {"format": 2}
        while writer.num_tokens < TOKENS:
            lengths = np.maximum(rng.exponential(MEAN, 20_000), 1).astype(np.int64)
            writer.add_documents(rng.integers(0, 50_000, int(lengths.sum()), dtype=np.uint16), lengths)


def measure(prefix: str, seq_len: int) -> dict[str, Any]:
    """Open with an empty cache, then read random rows of a stage."""
    with tempfile.TemporaryDirectory() as cache:
        begin = time.perf_counter()
        source = Source("sources.a", SourceSection(path=prefix), seq_len, 50_304, Path(cache), mmap=True)
        rows = TrainingRows({"a": source}, seed=1, stage=0, blend={"a": 1.0})
        build = time.perf_counter() - begin
        wanted = np.random.default_rng(0).integers(0, source.num_rows, READ).tolist()
        for index in wanted[:200]:
            rows.row(index)
        begin = time.perf_counter()
        for index in wanted:
            rows.row(index)
        seconds = time.perf_counter() - begin
    return {"build_s": build, "rows_per_s": READ / seconds}


def main(args: argparse.Namespace) -> None:
    """One JSON line for each peer and row length."""
    peers = dict(peer.split("=", 1) for peer in args.peer)
    with tempfile.TemporaryDirectory() as folder:
        prefix = f"{folder}/corpus"
        write_corpus(Path(prefix))
        for seq_len in (2048, 4096):
            work = [prefix, str(seq_len)]
            ours = [sys.executable, "-m", "benchmarks.rows", "--measure", *work]
            rounds = [
                {"ours": run(ours)} | {name: run([*shlex.split(command), *work]) for name, command in peers.items()}
                for _ in range(args.rounds)
            ]
            for name in peers:
                result: dict[str, Any] = {"peer": name, "seq_len": seq_len, "tokens": TOKENS, "rounds": args.rounds}
                for what in ("build_s", "rows_per_s"):
                    result |= {f"ours_{what}": median(r["ours"][what] for r in rounds)}
                    result |= {f"peer_{what}": median(r[name][what] for r in rounds)}
                    result |= {f"ratio_{what}": median(r["ours"][what] / r[name][what] for r in rounds)}
                report(result, args.save)


if __name__ == "__main__":
    arguments = parser().parse_args()
    if arguments.measure:
        print(json.dumps(measure(arguments.measure[0], int(arguments.measure[1]))), flush=True)
    else:
        main(arguments)
