"""Megabytes of text prepared per second against others, in turn, on the same file: ours, theirs, ours, theirs, …

  python -m benchmarks.prepare --input corpus.jsonl --tokenizer tokenizer.json --workers 2 \\
      --peer "bare encode_batch_fast=/envs/peer/bin/python peer.py --limit-only --workers 2"

A peer's command is given --input, --tokenizer and --output-prefix as well and prints a JSON line with "MB_per_s". Ours
is timed from the first block to the last, start-up apart. Figures come from fresh processes; ratios are taken within a
round. `--verify` compares every id of the corpus with the tokenizers library first.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import os
import shlex
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import orjson

from megatron_lite.data.encode import Encoded, Options
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.prepare import prepare
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.errors import require
from tools.benchmark import report, run

# what of a function's name says which part it is
PARTS = {
    "'encode_batch' of": "gigatoken", "encode_batch_fast": "the tokenizers library, on the sample",
    "loads": "parsing JSON", "load_hf_json": "loading gigatoken's tables", "from_file": "loading the tokenizer",
    "get_vocab": "loading the tokenizer", "'write' of": "writing", "fsync": "writing", "replace' of": "writing",
    "'read' of": "reading", "'readline' of": "reading", "'split' of": "cutting lines",
}  # fmt: skip


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Time the preparation of a corpus against others, in turn.")
    p.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSON lines")
    p.add_argument("--tokenizer", required=True)
    p.add_argument("--workers", type=int, default=2)
    p.add_argument("--backend", choices=["auto", "reference"], default="auto")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--peer", action="append", default=[], metavar="NAME=COMMAND")
    p.add_argument("--save", type=Path, metavar="FILE", help="append the JSON lines, with date, commit and machine")
    p.add_argument("--verify", action="store_true", help="compare every id with the tokenizers library")
    p.add_argument("--profile", action="store_true", help="where the time of one worker goes")
    p.add_argument("--measure", action="store_true", help="run ours here and print its JSON line")
    return p


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Prepare the input once."""
    os.environ["RAYON_NUM_THREADS"] = "1"  # as tools/preprocess_data.py does
    times: list[tuple[float, int]] = []

    def note(block: Encoded) -> None:
        times.append((time.perf_counter(), block.consumed))

    with tempfile.TemporaryDirectory(dir=args.input.parent) as folder:
        begin = time.perf_counter()
        options = Options(args.tokenizer, append_eod=True, backend=args.backend)
        summary = prepare([args.input], f"{folder}/out", options, args.workers, progress=note)
    seconds = times[-1][0] - times[0][0]
    read = sum(consumed for _, consumed in times[1:])
    return {
        "MB_per_s": read / seconds / 1e6, "tokens": summary.tokens, "start_s": times[0][0] - begin,
        "checked": summary.checked,
    }  # fmt: skip


def profile(args: argparse.Namespace) -> dict[str, Any]:
    """Shares of the time of one worker, loading included; `verify` and peers have no part in it."""
    profiler = cProfile.Profile()
    profiler.enable()
    measure(args)
    profiler.disable()
    seconds: dict[str, float] = {}
    total = 0.0
    for entry in profiler.getstats():
        function = entry.code if isinstance(entry.code, str) else entry.code.co_name
        total += entry.inlinetime
        for word, name in PARTS.items():
            if word in function:
                seconds[name] = seconds.get(name, 0.0) + entry.inlinetime
    share = {name: round(own / total, 3) for name, own in sorted(seconds.items(), key=lambda item: -item[1])}
    return {"profile": share | {"everything else": round(1 - sum(share.values()), 3)}, "seconds": round(total, 2)}


def verify(args: argparse.Namespace) -> int:
    """The number of documents, after each one's ids were found to be those of the tokenizers library."""
    tokenizer, documents = load_tokenizer(args.tokenizer), 0
    with tempfile.TemporaryDirectory(dir=args.input.parent) as folder:
        prepare([args.input], f"{folder}/out", Options(args.tokenizer), args.workers)
        dataset = IndexedDataset(f"{folder}/out")
        with args.input.open("rb") as file:
            for line in file:
                ids, _ = tokenizer.encode([orjson.loads(line)["text"]])
                if ids.size:
                    same = np.array_equal(dataset.document(documents), ids)
                    require(same, f"document {documents} differs")
                    documents += 1
    assert documents == dataset.num_documents
    return documents


def main(args: argparse.Namespace) -> None:
    """A line for each round, then a JSON line for each peer."""
    if args.verify:
        print(f"{verify(args):,} documents, every id equal", flush=True)
    work = ["--input", str(args.input), "--tokenizer", args.tokenizer]
    here = [sys.executable, "-m", "benchmarks.prepare", *work, "--measure"]
    ours = [*here, "--workers", str(args.workers), "--backend", args.backend]
    peers = dict(peer.split("=", 1) for peer in args.peer)
    rounds = []
    for number in range(args.rounds):
        mine = run(ours)
        rates = {"ours": mine["MB_per_s"]}
        with tempfile.TemporaryDirectory(dir=args.input.parent) as folder:
            for name, command in peers.items():
                rates[name] = run([*shlex.split(command), *work, "--output-prefix", f"{folder}/out"])["MB_per_s"]
        rounds.append(rates)
        print(f"round {number + 1}: " + "  ".join(f"{name} {rate:.1f}" for name, rate in rates.items()), flush=True)
    for name in peers:
        ratios = [rates["ours"] / rates[name] for rates in rounds]
        result = {
            "peer": name, "tokenizer": Path(args.tokenizer).parent.name, "backend": args.backend,
            "workers": args.workers, "MB": args.input.stat().st_size / 1e6, "rounds": args.rounds,
            "ours_MB_per_s": round(median(rates["ours"] for rates in rounds), 1),
            "peer_MB_per_s": round(median(rates[name] for rates in rounds), 2),
            "ratio": round(median(ratios), 2), "ratio_min": round(min(ratios), 2), "ratio_max": round(max(ratios), 2),
            "start_s": round(mine["start_s"], 1), "checked": mine["checked"],
        }  # fmt: skip
        report(result, args.save)


if __name__ == "__main__":
    arguments = parser().parse_args()
    if arguments.profile:
        arguments.workers = 1
        report(profile(arguments) | {"tokenizer": Path(arguments.tokenizer).parent.name}, arguments.save)
    elif arguments.measure:
        print(json.dumps(measure(arguments)), flush=True)
    else:
        main(arguments)
