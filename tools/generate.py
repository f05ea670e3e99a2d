"""Continue prompts with the model of a checkpoint.

python tools/generate.py --checkpoint RUN/stage-1 --prompt "def add(" --temperature 0.7 --top-p 0.9
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.model import read_model
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.errors import MegatronLiteError, require
from megatron_lite.models.generate import generate
from megatron_lite.models.transformer import Transformer, build, named_pieces
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.buffers import FlatWeights
from megatron_lite.parallel.context import single_process


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Continue prompts with the model of a checkpoint.")
    p.add_argument("--checkpoint", type=Path, required=True, help="a checkpoint, or a stage's folder (its newest one)")
    p.add_argument("--prompt", action="append", required=True, help="may be given several times")
    p.add_argument("--tokenizer", help="default: the one the checkpoint was trained with")
    p.add_argument("--max-new-tokens", type=int, default=128)
    p.add_argument("--temperature", type=float, default=1.0, help="0 takes the likeliest token each time")
    p.add_argument("--top-p", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    return p


def load_model(folder: Path, device: torch.device) -> tuple[Transformer, str | None]:
    """The model of a checkpoint in its own precision, and the path of its tokenizer if it has one."""
    saved = read_model(folder)
    precision = "bf16" if saved.dtype == "bf16" else "fp32"  # fp16 weights fit into fp32 alone
    ctx, ops = single_process(device), default_ops(device.type, precision)
    model = build(saved.config, ctx.tp, ops, dtype=torch.bfloat16 if precision == "bf16" else torch.float32)
    weights = FlatWeights(model, named_pieces(model), device, bucket_elements=1)
    for name, whole in store.read_tensors(folder):
        weights.fill(name, whole)
    return model.eval(), saved.tokenizer


def run(args: argparse.Namespace) -> None:
    """Print each prompt with its continuation."""
    require(args.max_new_tokens > 0, f"--max-new-tokens {args.max_new_tokens} is not positive")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model, tokenizer_path = load_model(store.find(args.checkpoint, "--checkpoint"), device)
    path = args.tokenizer or tokenizer_path
    require(path is not None, f"{args.checkpoint} was imported without a tokenizer; name one with --tokenizer")
    tokenizer = load_tokenizer(str(path))
    prompts = [list(map(int, ids)) for ids in tokenizer.encode(args.prompt)]
    outputs = generate(
        model, prompts, max_new_tokens=args.max_new_tokens, temperature=args.temperature, top_p=args.top_p,
        stop_id=tokenizer.eod_id, seed=args.seed,
    )  # fmt: skip
    for prompt, output in zip(prompts, outputs, strict=True):
        print(tokenizer.decode([*prompt, *output]))


if __name__ == "__main__":
    try:
        run(parser().parse_args())
    except MegatronLiteError as error:
        sys.exit(f"{type(error).__name__}: {error}")
