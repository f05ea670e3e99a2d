"""Looks at corpora: is a pair whole, how long are its documents, what do they say.

python tools/inspect_data.py check PREFIX… [--vocab-size N]
python tools/inspect_data.py stats PREFIX…
python tools/inspect_data.py show PREFIX [--tokenizer PATH] [--first K] [--count N] [--width CHARACTERS]
python tools/inspect_data.py merge PREFIX… --output PREFIX
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator

import numpy as np
from tqdm import tqdm

from megatron_lite.data import merge as merging
from megatron_lite.data.corpus import read_manifest, token_range
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.errors import DataError, MegatronLiteError, require

SHARES = (4096, 8192, 16384, 32768, 65536)  # tokens; lengths at which long documents are usually counted


def parser() -> argparse.ArgumentParser:
    """The subcommands and their flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="read everything; name what is broken")
    check.add_argument("prefix", nargs="+")
    check.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below this")
    stats = commands.add_parser("stats", help="a table of document lengths")
    stats.add_argument("prefix", nargs="+")
    show = commands.add_parser("show", help="documents as text")
    show.add_argument("prefix")
    show.add_argument("--tokenizer", metavar="PATH", help="what wrote the corpus; default: ids instead of text")
    show.add_argument("--first", type=int, default=0, metavar="K", help="number of the first document (default: 0)")
    show.add_argument("--count", type=int, default=3, metavar="N", help="how many documents (default: 3)")
    show.add_argument("--width", type=int, default=400, metavar="W", help="characters, or ids, of each (default: 400)")
    merge = commands.add_parser(
        "merge", help="one pair out of several, in the order given; shards give one run's bytes"
    )
    merge.add_argument("prefix", nargs="+")
    merge.add_argument("--output", required=True, metavar="P", help="prefix of the new pair")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when all is well, 1 with one line about what is wrong."""
    args = parser().parse_args(arguments)
    try:
        if args.command == "check":
            lines: Iterator[str] = (line for prefix in args.prefix for line in check_corpus(prefix, args.vocab_size))
        elif args.command == "stats":
            lines = (line for prefix in args.prefix for line in describe_lengths(prefix))
        elif args.command == "merge":
            lines = merge_corpora(args.prefix, args.output)
        else:
            lines = show_documents(args.prefix, args.tokenizer, args.first, args.count, args.width)
        for line in lines:
            print(line)
    except MegatronLiteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def check_corpus(prefix: str, vocab_size: int | None) -> Iterator[str]:
    """Read index and tokens whole; one line if nothing is wrong, else DataError."""
    dataset = IndexedDataset(prefix)
    dataset.check()
    low, high = token_range(dataset)
    if vocab_size is not None and high >= vocab_size:
        document = _document_with(dataset, vocab_size)
        raise DataError(
            f"{prefix}: document {document} holds an id that is not below {vocab_size}; the largest is {high}"
        )
    manifest = read_manifest(prefix)
    described = {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "max_id": high}
    for key, value in described.items():
        require(
            manifest is None or manifest.get(key) == value,
            f"{prefix}.json says {key}={(manifest or {}).get(key)}, but the corpus has {value}",
            DataError,
        )
    yield (
        f"{prefix}: whole; {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens of {dataset.dtype.name}, "
        f"ids {low} to {high}, {'manifest agrees' if manifest else 'no manifest'}"
    )


def describe_lengths(prefix: str) -> Iterator[str]:
    """Documents and tokens by length, in powers of two, and the share of tokens in long documents."""
    dataset = IndexedDataset(prefix)
    dataset.check()
    lengths = np.diff(dataset.document_starts())
    total = int(lengths.sum())
    middle, most = np.quantile(lengths, [0.5, 0.99])
    yield f"{prefix}: {len(lengths):,} documents, {total:,} tokens of {dataset.dtype.name}"
    yield (
        f"  tokens per document: mean {total / len(lengths):,.1f}, median {middle:,.0f}, 99 % up to {most:,.0f}, "
        f"longest {int(lengths.max()):,}"
    )
    yield f"  {'length':>23} {'documents':>12} {'share':>7} {'tokens':>16} {'share':>7}"
    low = 0
    while low <= int(lengths.max()):
        high = max(2 * low, 1)
        inside = lengths[(lengths >= low) & (lengths < high)]
        if inside.size:
            tokens = int(inside.sum())
            yield (
                f"  {f'{low:,} to {high - 1:,}':>23} {inside.size:>12,} {inside.size / len(lengths):>7.2%} "
                f"{tokens:>16,} {tokens / total:>7.2%}"
            )
        low = high
    shares = ", ".join(f"{limit // 1024}K {int(lengths[lengths >= limit].sum()) / total:.1%}" for limit in SHARES)
    yield f"  share of tokens in documents of at least: {shares}"


def merge_corpora(prefixes: list[str], output: str) -> Iterator[str]:
    """Join pairs; one line about the result."""
    total = sum(IndexedDataset(prefix, mmap=False).num_tokens for prefix in prefixes)
    with tqdm(total=total, unit="token", unit_scale=True, disable=None) as bar:
        written = merging.merge(prefixes, output, bar.update)
    parts = f"{len(prefixes)} part{'s' if len(prefixes) > 1 else ''}"
    yield f"{output}: {written.num_documents:,} documents, {written.num_tokens:,} tokens from {parts}"


def show_documents(prefix: str, tokenizer_path: str | None, first: int, count: int, width: int) -> Iterator[str]:
    """Documents first … first + count - 1, each under a line with its number and length, cut after `width`."""
    dataset = IndexedDataset(prefix)
    dataset.check()
    tokenizer = load_tokenizer(tokenizer_path) if tokenizer_path else None
    require(
        0 <= first < dataset.num_documents,
        f"there is no document {first}; {prefix} has documents 0 to {dataset.num_documents - 1}",
        DataError,
    )
    manifest = read_manifest(prefix)
    if tokenizer is not None and manifest is not None and manifest["tokenizer"]["fingerprint"] != tokenizer.fingerprint:
        yield f"note: {prefix} was written with another tokenizer, {manifest['tokenizer']['name']}"
    for number in range(first, min(first + count, dataset.num_documents)):
        ids = dataset.document(number).tolist()
        text = tokenizer.decode(ids) if tokenizer else " ".join(map(str, ids[:width]))
        shown = text[:width] if tokenizer else text
        cut = len(shown) < len(text) if tokenizer else len(ids) > width
        yield f"--- document {number}, {len(ids):,} tokens"
        yield shown + (" …" if cut else "")


def _document_with(dataset: IndexedDataset, least: int) -> int:
    """The first document that holds an id of at least `least`."""
    return next(i for i in range(dataset.num_documents) if (dataset.document(i) >= least).any())


if __name__ == "__main__":
    sys.exit(main())
