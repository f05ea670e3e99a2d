"""Text to a corpus that training can read: PREFIX.bin, PREFIX.idx and a manifest, PREFIX.json.

    python tools/preprocess_data.py --input a.jsonl b.jsonl.gz 'more/*.parquet' --output-prefix corpus \\
        --tokenizer tokenizer.json --append-eod --workers 8

Inputs are JSON lines (plain, .gz, .zst) or parquet: files, folders, or patterns. Each record is one document, its text
under --key, or its ready token ids under --ids-key. The corpus is the same to the byte for any number of workers.

A corpus too large for one machine: start the same command N times with --shard 0/N … N-1/N, for instance in a job
array. Shard K writes PREFIX-0000K-of-0000N; `inspect_data.py merge` joins them to the bytes of one run.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

from tqdm import tqdm

from megatron_lite.data.encode import Encoded, Options
from megatron_lite.data.prepare import Summary, prepare
from megatron_lite.data.readers import Columns, find_inputs, shares
from megatron_lite.errors import DataError, MegatronLiteError, require


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--input", nargs="+", required=True, metavar="PATH", help="files, folders, or quoted patterns")
    flags.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx and P.json")
    flags.add_argument("--tokenizer", required=True, metavar="PATH",
                       help="'byte', a sentencepiece .model, a tokenizer.json or its folder")  # fmt: skip
    what = flags.add_mutually_exclusive_group()
    what.add_argument("--key", default="text", help="where the text is in each record (default: text)")
    what.add_argument("--ids-key", metavar="KEY", help="where ready token ids are; the tokenizer gives only the eod id")
    flags.add_argument("--where", metavar="KEY=VALUE", help="only records whose KEY is VALUE, e.g. domain=book")
    flags.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id, once")
    flags.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    flags.add_argument("--on-bad-line", choices=("stop", "skip"), default="stop",
                       help="what is no document ends the work (default), or is skipped and counted")  # fmt: skip
    flags.add_argument("--shard", default="0/1", metavar="K/N", help="only the K-th of N shares of the input, from 0")
    flags.add_argument("--resume", action="store_true", help="go on after the last input that was done")
    flags.add_argument("--backend", choices=("auto", "reference"), default="auto",
                       help="gigatoken where it is installed and knows the tokenizer, checked against the tokenizer's "
                            "own library on a sample (default), or that library alone")  # fmt: skip
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when the corpus is whole, 1 with one line about what is wrong."""
    args = parser().parse_args(arguments)
    os.environ["RAYON_NUM_THREADS"] = "1"  # a worker is a process: the tokenizers library adds no threads to it
    try:
        where = tuple(args.where.split("=", 1)) if args.where else None
        require(where is None or len(where) == 2, f"--where {args.where} is not KEY=VALUE", DataError)
        columns = Columns(None if args.ids_key else args.key, args.ids_key, where)
        options = Options(args.tokenizer, columns, args.append_eod, args.on_bad_line, args.backend)
        shard = parse_shard(args.shard)
        prefix = args.output_prefix + ("" if shard == (0, 1) else f"-{shard[0]:05d}-of-{shard[1]:05d}")
        with Progress(args.input, shard) as progress:
            summary = prepare(args.input, prefix, options, args.workers, shard=shard, resume=args.resume,
                              progress=progress.show)  # fmt: skip
    except MegatronLiteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; the same command with --resume goes on after the last input that was done", file=sys.stderr)
        return 130
    print(report(summary, prefix, f"{time.monotonic() - progress.start:.1f} s{progress.speed()}"))
    return 0


def parse_shard(text: str) -> tuple[int, int]:
    """'3/16' -> (3, 16)."""
    at, _, count = text.partition("/")
    require(at.isdecimal() and count.isdecimal(), f"--shard {text} is not K/N, such as 0/4", DataError)
    return int(at), int(count)


class Progress:
    """A bar of the bytes of the inputs, with tokens a second, where somebody looks at a terminal."""

    def __init__(self, inputs: list[str], shard: tuple[int, int]):
        work = shares(find_inputs(inputs), shard)
        total = sum((share.path.stat().st_size if share.end is None else share.end) - share.begin for share in work)
        self.bar = tqdm(total=total, unit="B", unit_scale=True, disable=None)
        self.start, self.tokens = time.monotonic(), 0
        self.times: list[float] = []  # of the first and the latest block
        self.bytes = 0  # after the first block

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.close()

    def show(self, block: Encoded) -> None:
        """Count a block."""
        self.tokens += block.tokens.size
        self.bytes += block.consumed if self.times else 0
        self.times = [self.times[0] if self.times else time.monotonic(), time.monotonic()]
        self.bar.update(block.consumed)
        rate = self.tokens / (time.monotonic() - self.start)
        self.bar.set_postfix_str(f"{rate:,.0f} tokens/s", refresh=False)

    def speed(self) -> str:
        """Start-up, then input bytes a second from the first block to the last."""
        if len(self.times) < 2 or self.times[0] == self.times[1]:
            return ""
        rate = self.bytes / (self.times[1] - self.times[0]) / 1e6
        return f" ({self.times[0] - self.start:.1f} s to start, then {rate:.1f} MB/s)"


def report(summary: Summary, prefix: str, took: str) -> str:
    """What was written and what was left out."""
    bad = "".join(f"\n  {count} x {reason}" for reason, count in sorted(summary.bad.items()))
    more = f" filtered={summary.filtered}" if summary.filtered else ""
    more += f" checked={summary.checked}" if summary.checked else ""
    return (
        f"{prefix}.bin, .idx, .json: documents={summary.documents} tokens={summary.tokens} empty={summary.empty} "
        f"bad={summary.bad.total()}{more} in {took}{bad}"
    )


if __name__ == "__main__":
    sys.exit(main())
