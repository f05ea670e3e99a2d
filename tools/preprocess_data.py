"""Text to a corpus that training can read: PREFIX.bin, PREFIX.idx and a manifest, PREFIX.json.

    python tools/preprocess_data.py --input a.jsonl b.jsonl.gz c.jsonl.zst --output-prefix corpus \\
        --tokenizer tokenizer.json --append-eod --workers 8

Each line of the inputs is one document, a JSON object with its text under --key. The corpus is the same to the byte
for any number of workers. Documents without a token are left out and counted.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

from tqdm import tqdm

from megatron_lite.data.prepare import Encoded, Options, Summary, prepare
from megatron_lite.errors import MegatronLiteError


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--input", nargs="+", type=Path, required=True, metavar="FILE", help=".jsonl, .jsonl.gz, .zst")
    flags.add_argument("--output-prefix", required=True, metavar="P", help="writes P.bin, P.idx and P.json")
    flags.add_argument(
        "--tokenizer",
        required=True,
        metavar="PATH",
        help="'byte', a sentencepiece .model, a tokenizer.json or its folder",
    )
    flags.add_argument("--key", default="text", help="where the text is in each object (default: text)")
    flags.add_argument("--append-eod", action="store_true", help="end each document with the end-of-document id")
    flags.add_argument("--workers", type=int, default=1, metavar="N", help="processes (default: 1)")
    flags.add_argument(
        "--on-bad-line",
        choices=("stop", "skip"),
        default="stop",
        help="a line that is no document ends the work (default), or is left out and counted",
    )
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when the corpus is whole, 1 with one line about what is wrong."""
    args = parser().parse_args(arguments)
    compressed = any(path.suffix in (".gz", ".zst") for path in args.input)
    total = None if compressed else sum(path.stat().st_size for path in args.input if path.is_file())
    options = Options(args.tokenizer, args.key, args.append_eod, args.on_bad_line)
    start, tokens = time.monotonic(), 0
    try:
        with tqdm(total=total, unit="B", unit_scale=True, disable=None) as bar:

            def progress(batch: Encoded) -> None:
                nonlocal tokens
                tokens += len(batch.tokens)
                bar.update(batch.num_bytes)
                bar.set_postfix_str(f"{tokens / (time.monotonic() - start):,.0f} tokens/s", refresh=False)

            summary = prepare(args.input, args.output_prefix, options, args.workers, progress)
    except MegatronLiteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(report(summary, args.output_prefix, time.monotonic() - start))
    return 0


def report(summary: Summary, prefix: str, seconds: float) -> str:
    """What was written and what was left out."""
    bad = "".join(f"\n  {count} x {reason}" for reason, count in sorted(summary.bad.items()))
    return (
        f"{prefix}.bin, .idx, .json: documents={summary.documents} tokens={summary.tokens} empty={summary.empty} "
        f"bad={summary.bad.total()} in {seconds:.1f} s{bad}"
    )


if __name__ == "__main__":
    sys.exit(main())
