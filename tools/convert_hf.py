"""Hugging Face weights to a checkpoint and back.

    python tools/convert_hf.py import --hf smollm2-135m --checkpoint checkpoints/smollm2
    python tools/convert_hf.py export --checkpoint runs/a/stage-3 --hf exported --dtype bf16

An import is what a recipe's `init_from` names to go on training, and what tools/generate.py continues prompts with.
StableLM, Qwen3 and Llama; whatever is not understood is refused by name.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from tqdm import tqdm

from megatron_lite.checkpoint.store import find
from megatron_lite.config import toml
from megatron_lite.config.model import ModelConfig
from megatron_lite.errors import ConfigError, MegatronLiteError
from megatron_lite.hf.config import DTYPE_NAMES, FAMILIES
from megatron_lite.hf.convert import SHARD_BYTES, Converted, Progress, export_folder, import_folder

UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("action", choices=("import", "export"))
    flags.add_argument("--hf", type=Path, required=True, metavar="DIR", help="config.json, safetensors, tokenizer")
    flags.add_argument(
        "--checkpoint", type=Path, required=True, metavar="DIR",
        help="import: the folder to write; export: a checkpoint, or a stage's folder (its newest one)",
    )  # fmt: skip
    flags.add_argument("--family", choices=list(FAMILIES), help="import: refuse a model that is not of this family")
    flags.add_argument(
        "--dtype", choices=list(DTYPE_NAMES), help="export: default: what was imported, or the precision of the run"
    )
    flags.add_argument("--tokenizer", metavar="PATH", help="export: default: the checkpoint's; none leaves it out")
    flags.add_argument("--shard-size", default=None, metavar="SIZE", help="export: of a file, at most (default: 5GB)")
    return flags


def main(arguments: list[str] | None = None) -> int:
    """Run; 0 when all is written, 1 with one line about what is wrong."""
    args = parser().parse_args(arguments)
    try:
        with tqdm(unit=" parameters", unit_scale=True, disable=None) as bar:

            def progress(done: int, total: int) -> None:
                bar.total = total
                bar.update(done)

            converted = convert(args, progress)
    except MegatronLiteError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    for line in converted.notes:
        print(line)
    if args.action == "import":
        print(f"written to {args.checkpoint}; to go on training:\n")
        print(recipe(args.checkpoint, converted))
    else:
        print(f"written to {args.hf}")
    return 0


def convert(args: argparse.Namespace, progress: Progress) -> Converted:
    """Import or export, as the flags say."""
    other = ("dtype", "tokenizer", "shard_size") if args.action == "import" else ("family",)
    for name in other:
        if getattr(args, name) is not None:
            raise ConfigError(f"--{name.replace('_', '-')} has no meaning for {args.action}")
    if args.action == "import":
        return import_folder(args.hf, args.checkpoint, args.family, progress)
    size = SHARD_BYTES if args.shard_size is None else num_bytes(args.shard_size)
    source = find(args.checkpoint, "--checkpoint")
    return export_folder(
        source, args.hf, dtype=args.dtype, tokenizer=args.tokenizer, shard_bytes=size, progress=progress
    )


def num_bytes(text: str) -> int:
    """5GB, 500MB or a number of bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|)", text.strip(), re.IGNORECASE)
    size = int(float(found[1]) * UNITS[found[2].upper()]) if found else 0
    if size <= 0:
        raise ConfigError(f"--shard-size {text} is not a size; write 5GB, 500MB or a number of bytes")
    return size


def recipe(checkpoint: Path, converted: Converted) -> str:
    """The lines of a recipe that start from an import."""
    defaults = {name: field.default for name, field in ModelConfig.model_fields.items()}
    model = {k: v for k, v in converted.model.config.model_dump().items() if defaults[k] != v}
    top: dict[str, object] = {"init_from": str(checkpoint), "model": model}
    if converted.model.tokenizer is not None:
        top["tokenizer"] = {"path": converted.model.tokenizer}
    return toml.write(top)


if __name__ == "__main__":
    sys.exit(main())
