"""Looks at corpora: is a pair whole, how long are its documents, what do they say, what does a recipe make of them.

python tools/inspect_data.py check PREFIX… [--vocab-size N | --tokenizer PATH]
python tools/inspect_data.py stats PREFIX… [--png FILE]
python tools/inspect_data.py show PREFIX [--tokenizer PATH] [--first K] [--count N] [--width CHARACTERS]
python tools/inspect_data.py show --recipe R --stage N --row K [--count N] [--width CHARACTERS] [--set a.b=c …]
python tools/inspect_data.py plan --recipe R [--stage N] [--set a.b=c …]
python tools/inspect_data.py merge PREFIX… --output PREFIX

`plan` builds every index that training will read, on a machine without accelerators, and says what a stage takes from
each source; training then finds them.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from tqdm import tqdm

from megatron_lite.config.load import load_recipe
from megatron_lite.config.schema import Recipe
from megatron_lite.config.stages import for_stage, stage_index
from megatron_lite.data import lengths
from megatron_lite.data import merge as merging
from megatron_lite.data.corpus import document_at, first_with, other_tokenizer, read_manifest, token_range
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.loader import (
    cache_folder,
    check_tokenizer,
    count_indexes,
    ended,
    open_training,
    open_validation,
)
from megatron_lite.data.source import TrainingRows
from megatron_lite.data.tokenizer import Tokenizer, load_tokenizer
from megatron_lite.errors import ConfigError, DataError, MegatronLiteError, require


def parser() -> argparse.ArgumentParser:
    """The subcommands and their flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = flags.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="read everything; name what is broken")
    check.add_argument("prefix", nargs="+")
    vocabulary = check.add_mutually_exclusive_group()
    vocabulary.add_argument("--vocab-size", type=int, metavar="N", help="ids must be below this")
    vocabulary.add_argument("--tokenizer", metavar="PATH", help="what is said to have written the corpus")
    check.set_defaults(run=check_corpora)
    stats = commands.add_parser("stats", help="how long documents are, and how many tokens each corpus holds")
    stats.add_argument("prefix", nargs="+")
    stats.add_argument("--png", type=Path, metavar="FILE", help="a picture too (.png, .svg, .pdf)")
    stats.set_defaults(run=describe_lengths)
    show = commands.add_parser("show", help="documents, or the rows of a stage, as text")
    show.add_argument("prefix", nargs="?")
    show.add_argument("--recipe", type=Path, help="show packed rows of one of its stages instead of documents")
    show.add_argument("--stage", metavar="N", help="number or name of the stage (default: 1)")
    show.add_argument("--row", type=int, metavar="K", help="number of the first row of the stage, from 0")
    show.add_argument("--tokenizer", metavar="PATH", help="what wrote the corpus; default: the recipe's, else ids")
    show.add_argument("--first", type=int, metavar="K", help="number of the first document (default: 0)")
    show.add_argument("--count", type=int, metavar="N", help="how many documents or rows (default: 3 or 1)")
    show.add_argument("--width", type=int, default=400, metavar="W", help="characters, or ids, of each (default: 400)")
    show.set_defaults(run=show_documents_or_rows)
    plan = commands.add_parser("plan", help="build the indexes of a recipe's stages and say what they read")
    plan.add_argument("--recipe", type=Path, required=True)
    plan.add_argument("--stage", metavar="N", help="number or name of one stage (default: all)")
    plan.set_defaults(run=plan_stages)
    merge = commands.add_parser(
        "merge", help="one pair out of several, in the order given; shards give one run's bytes"
    )
    merge.add_argument("prefix", nargs="+")
    merge.add_argument("--output", required=True, metavar="P", help="prefix of the new pair")
    merge.set_defaults(run=merge_corpora)
    for command in (show, plan):
        command.add_argument("--set", action="append", default=[], metavar="A.B=C", help="override a recipe's value")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when all is well, 1 with one line about what is wrong."""
    args = parser().parse_args(arguments)
    try:
        for line in args.run(args):
            print(line)
    except MegatronLiteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    return 0


def check_corpora(args: argparse.Namespace) -> Iterator[str]:
    """One line for each corpus that is whole; then DataError with one line for each that is not."""
    tokenizer = load_tokenizer(args.tokenizer) if args.tokenizer else None
    broken = []
    for prefix in args.prefix:
        try:
            yield check_corpus(prefix, tokenizer.vocab_size if tokenizer else args.vocab_size, tokenizer)
        except DataError as error:
            broken.append(str(error))
    require(not broken, "\n".join(broken), DataError)


def check_corpus(prefix: str, vocab_size: int | None, tokenizer: Tokenizer | None = None) -> str:
    """Read index, tokens and manifest whole; a line about them if nothing is wrong, else DataError."""
    dataset = IndexedDataset(prefix)
    dataset.check()
    with tqdm(total=dataset.bin_bytes, unit="B", unit_scale=True, desc=prefix, leave=False, disable=None) as bar:
        low, high = token_range(dataset, lambda tokens: bar.update(tokens * dataset.dtype.itemsize))
    if vocab_size is not None and high >= vocab_size:
        document = first_with(dataset, vocab_size)
        raise DataError(
            f"{prefix}: document {document} holds an id that is not below {vocab_size}; the largest is {high}"
        )
    manifest = read_manifest(prefix)
    if manifest is not None:
        counts = {"documents": dataset.num_documents, "tokens": dataset.num_tokens, "max_id": high}
        for key, value in {**counts, "dtype": dataset.dtype.name}.items():
            require(
                manifest.get(key) == value,
                f"{prefix}.json says {key}={manifest.get(key)}, but the corpus has {value}",
                DataError,
            )
        if tokenizer is not None:
            other = other_tokenizer(manifest, tokenizer.fingerprint)
            require(
                other is None, f"{prefix} was written with the tokenizer {other}, not with {tokenizer.name}", DataError
            )
    return (
        f"{prefix}: whole; {dataset.num_documents:,} documents, {dataset.num_tokens:,} tokens of {dataset.dtype.name}, "
        f"ids {low} to {high}, {'manifest agrees' if manifest else 'no manifest'}"
    )


def describe_lengths(args: argparse.Namespace) -> Iterator[str]:
    """A table of each corpus, then what each holds of all tokens, and the picture."""
    if args.png:
        lengths.check_matplotlib()
    tables = {}
    for prefix in args.prefix:
        tables[prefix] = lengths.count_lengths(IndexedDataset(prefix))
        yield from lengths.describe(prefix, tables[prefix])
    if len(tables) > 1:
        whole = lengths.together(list(tables.values()))
        yield from lengths.describe(f"all {len(tables)} corpora", whole)
        yield from lengths.describe_sources(tables)
    if args.png:
        lengths.draw(tables, args.png)
        yield f"{args.png}: written"


def show_documents_or_rows(args: argparse.Namespace) -> Iterator[str]:
    """Documents of a corpus, or rows of a recipe's stage."""
    require((args.prefix is None) != (args.recipe is None), "show takes either a PREFIX or a --recipe", ConfigError)
    require((args.recipe is None) == (args.row is None), "--recipe and --row go together", ConfigError)
    if args.recipe is None:
        require(args.stage is None and not args.set, "--stage and --set go with --recipe", ConfigError)
        yield from show_documents(args.prefix, args.tokenizer, args.first or 0, args.count or 3, args.width)
        return
    require(args.first is None, "--first goes with a PREFIX; the first row is --row", ConfigError)
    recipe = load_recipe(args.recipe, args.set, launched=True)
    index = stage_index(recipe, args.stage or "1")
    recipe = for_stage(recipe, index)
    rows = open_training(recipe, index, cache_folder(recipe))
    stage = ended(recipe, index, rows).stages[index]
    total = stage.rows_after(stage.num_steps)
    require(
        0 <= args.row < total,
        f"there is no row {args.row}; stage {index + 1} ({stage.name}) has rows 0 to {total - 1}",
        DataError,
    )
    tokenizer = load_tokenizer(args.tokenizer or recipe.tokenizer.path)
    for number in range(args.row, min(args.row + (args.count or 1), total)):
        yield from show_row(rows, number, tokenizer, args.width)


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
    yield from _other_tokenizer(prefix, tokenizer)
    for number in range(first, min(first + count, dataset.num_documents)):
        ids = dataset.document(number)
        yield f"--- document {number}, {len(ids):,} tokens"
        yield _text(ids, tokenizer, width)


def show_row(rows: TrainingRows, number: int, tokenizer: Tokenizer, width: int) -> Iterator[str]:
    """Row `number` of a stage: where it comes from, and each document in it between borders, cut after `width`."""
    name, epoch, at = rows.place(number)
    source = rows.sources[name]
    yield (
        f"=== row {number}: row {at} of {source.section} ({source.config.path}), epoch {epoch}; "
        f"{source.seq_len:,} inputs and the token after them"
    )
    yield from _other_tokenizer(str(source.dataset.prefix), tokenizer)
    tokens = source.row(at).tokens
    corner = "┌"
    for begin, end, place in source.pieces(at):
        if place is None:
            yield f"{corner}─ {end - begin:,} tokens of padding"
        else:
            document, first, last = document_at(source.dataset, place)
            yield (
                f"{corner}─ document {document}, tokens {place - first:,} to {place - first + end - begin - 1:,} "
                f"of {last - first:,}"
            )
            yield from (f"│ {line}" for line in _text(tokens[begin:end], tokenizer, width).splitlines())
        corner = "├"
    yield "└─"


def plan_stages(args: argparse.Namespace) -> Iterator[str]:
    """One stage, or every stage."""
    recipe = load_recipe(args.recipe, args.set, launched=True)
    stages = range(len(recipe.stages)) if args.stage is None else [stage_index(recipe, args.stage)]
    for index in stages:
        yield from plan_stage(for_stage(recipe, index), index)


def plan_stage(recipe: Recipe, index: int) -> Iterator[str]:
    """Build the indexes of stage `index`; what it reads of each source and validation set."""
    cache = cache_folder(recipe)
    rows = open_training(recipe, index, cache)
    recipe = ended(recipe, index, rows)
    stage = recipe.stages[index]
    validation = open_validation(recipe, index, cache)
    check_tokenizer(recipe, index)
    total = stage.rows_after(stage.num_steps)
    num_indexes, built = count_indexes(rows, validation)
    yield (
        f"stage {index + 1} ({stage.name}): {stage.num_steps:,} steps, {total:,} rows of {stage.seq_len:,} = "
        f"{total * stage.seq_len:,} tokens, packing {stage.packing}"
    )
    yield from (f"  {line}" for line in rows.describe(total))
    for held in validation.values():
        yield from (f"  {line}" for line in held.describe(held.num_rows or 0))
    yield f"  indexes: {num_indexes} in {cache}, {built or 'none'} built now"
    yield f"  data fingerprint {rows.fingerprint[:16]}"


def merge_corpora(args: argparse.Namespace) -> Iterator[str]:
    """Join pairs; one line about the result."""
    prefixes: list[str] = args.prefix
    total = sum(IndexedDataset(prefix, mmap=False).num_tokens for prefix in prefixes)
    with tqdm(total=total, unit="token", unit_scale=True, disable=None) as bar:
        written = merging.merge(prefixes, args.output, bar.update)
    parts = f"{len(prefixes)} part{'s' if len(prefixes) > 1 else ''}"
    yield f"{args.output}: {written.num_documents:,} documents, {written.num_tokens:,} tokens from {parts}"


def _text(ids: np.ndarray, tokenizer: Tokenizer | None, width: int) -> str:
    """The text of ids, or the ids themselves, cut after `width` characters or ids."""
    if tokenizer is None:
        return " ".join(map(str, ids[:width].tolist())) + (" …" if len(ids) > width else "")
    text = tokenizer.decode(ids.tolist())
    return text[:width] + (" …" if len(text) > width else "")


def _other_tokenizer(prefix: str, tokenizer: Tokenizer | None) -> Iterator[str]:
    """A note if the corpus says that another tokenizer wrote it."""
    other = None if tokenizer is None else other_tokenizer(read_manifest(prefix), tokenizer.fingerprint)
    if other is not None:
        yield f"note: {prefix} was written with another tokenizer, {other}"


if __name__ == "__main__":
    sys.exit(main())
