"""Training steps per second against others, on the same work, in turn: ours, theirs, ours, theirs, …

  python tools/benchmark.py --precision fp32 --threads 2 --peer transformers
  python tools/benchmark.py --ranks 2 --peer "litgpt=/envs/litgpt/bin/python step_litgpt.py --dtype bf16 --threads 1"

A peer is "transformers" (measured here) or NAME=COMMAND; a command prints a JSON line with its tokens per second as
"tok_s". Every figure comes from a fresh process. What is compared is the median of the ratios within a round, since a
machine drifts more between rounds than within one. The work: a Qwen3 of 58M parameters, 4 rows of 512 tokens a step,
forward, backward, clipping and AdamW.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Optimizer
from megatron_lite.data.batch import Batch
from megatron_lite.errors import MegatronLiteError, require
from megatron_lite.models.init import initial_tensors
from megatron_lite.models.transformer import build, named_pieces
from megatron_lite.monitor.environment import describe_environment
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.grid import Grid
from megatron_lite.runtime.launch import process_groups, read_launch
from megatron_lite.train.step import train_step

SHAPE: dict[str, Any] = {
    "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 4096,
}  # fmt: skip
ROWS, SEQ_LEN = 4, 512
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Time training steps against others, in turn.")
    p.add_argument("--precision", choices=DTYPES, default="fp32")
    p.add_argument("--ranks", type=int, default=1)
    p.add_argument("--tp", type=int, default=1)
    p.add_argument("--threads", type=int, default=1, help="of each rank")
    p.add_argument("--rounds", type=int, default=5)
    p.add_argument("--steps", type=int, default=6, help="timed steps of each process")
    p.add_argument("--peer", action="append", default=[], metavar="transformers|NAME=COMMAND")
    p.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set for every process")
    p.add_argument("--save", type=Path, metavar="FILE", help="append the JSON lines, with date, commit and machine")
    p.add_argument("--measure", choices=["ours", "transformers"], help="run one side here and print its JSON line")
    return p


def timed(step: Callable[[], object], steps: int) -> float:
    """Median seconds of a step, after two that do not count."""
    seconds = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - begin)
    return median(seconds[2:])


def random_batch(rows: int, seed: int) -> Batch:
    """Equal rows of random ids that predict themselves, as the peers' scripts have them."""
    ids = np.random.default_rng(seed).integers(0, SHAPE["vocab_size"], rows * SEQ_LEN)
    return Batch(
        input_ids=ids, labels=ids, position_ids=np.tile(np.arange(SEQ_LEN), rows),
        cu_seqlens=np.arange(0, rows * SEQ_LEN + 1, SEQ_LEN, dtype=np.int32), max_seqlen=SEQ_LEN, row_length=SEQ_LEN,
        valid_tokens=rows * SEQ_LEN, samples=tuple(range(rows)), rows=rows,
    )  # fmt: skip


class Clock:
    """Seconds spent inside calls, by name."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}

    def watch(self, owner: Any, method: str, name: str) -> None:
        """Time every call of a method from now on."""
        plain = getattr(owner, method)

        def call(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            result = plain(*args, **kwargs)
            self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - begin
            return result

        setattr(owner, method, call)


def measure_ours(args: argparse.Namespace) -> dict[str, Any] | None:
    """One JSON line's content; None on all ranks but the first."""
    torch.set_num_threads(args.threads)
    config = ModelConfig.model_validate(SHAPE | {"model_type": "qwen3", "qk_norm": True, "rope_theta": 1e6})
    launch = read_launch()
    with process_groups(launch, Grid(launch.world_size, tp=args.tp), timeout_s=600.0) as ctx:
        ops = default_ops(ctx.device.type, args.precision)
        model = build(config, ctx.tp, ops, dtype=DTYPES[args.precision])
        optimizer = Zero1(model, named_pieces(model), ctx, Optimizer(), ops)
        optimizer.fill(initial_tensors(config, seed=0))
        batch = random_batch(ROWS // ctx.data.size, seed=ctx.data.rank)
        clock = Clock()
        clock.watch(model, "forward", "forward")
        clock.watch(optimizer, "reduce", "communication")  # what of it did not hide behind the backward, and the norm
        clock.watch(optimizer, "update", "optimizer")
        seconds = timed(lambda: train_step(model, optimizer, [batch], ctx, lr=1e-4, clip=1.0), args.steps)
        if ctx.world.rank > 0:
            return None
    parts = {name: total / (args.steps + 2) for name, total in clock.seconds.items()}
    parts["backward"] = seconds - sum(parts.values())
    share = {name: round(part / seconds, 3) for name, part in parts.items()}
    return {"bench": "megatron_lite", "tok_s": ROWS * SEQ_LEN / seconds, "ms": seconds * 1e3, "share": share}


def measure_transformers(args: argparse.Namespace) -> dict[str, Any]:
    """The plain loop people write: model, loss, backward, clip_grad_norm_, fused AdamW, all in one dtype."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    require(args.ranks == 1, "transformers is measured on one rank; give a command of yours for more")
    torch.set_num_threads(args.threads)
    config = Qwen3Config(**SHAPE, tie_word_embeddings=False, use_cache=False)
    config._attn_implementation = "sdpa"
    model = Qwen3ForCausalLM(config).train()
    model.to(dtype=DTYPES[args.precision])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    ids = torch.from_numpy(random_batch(ROWS, seed=0).input_ids).view(ROWS, SEQ_LEN)

    def step() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    seconds = timed(step, args.steps)
    return {"bench": "transformers", "tok_s": ROWS * SEQ_LEN / seconds, "ms": seconds * 1e3}


def run(command: list[str], settings: Sequence[str] = ()) -> dict[str, Any]:
    """The last JSON line a command prints, with NAME=VALUE settings in its environment."""
    done = subprocess.run(["env", *settings, *command], capture_output=True, text=True)
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    require(done.returncode == 0 and bool(lines), f"{shlex.join(command)} gave no figure:\n{done.stderr[-2000:]}")
    return json.loads(lines[-1])


def commands(args: argparse.Namespace) -> tuple[list[str], dict[str, list[str]]]:
    """How to start ours, and each peer."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={args.ranks}"]
    settings = ["--precision", args.precision, "--threads", str(args.threads), "--steps", str(args.steps)]
    settings += ["--ranks", str(args.ranks), "--tp", str(args.tp)]
    here = [str(Path(__file__).resolve()), *settings]
    ours = [sys.executable, *(launcher if args.ranks > 1 else []), *here, "--measure", "ours"]
    peers = {}
    for peer in args.peer or ["transformers"]:
        name, _, command = peer.partition("=")
        require(bool(command) or name == "transformers", f"--peer {peer!r} is neither transformers nor NAME=COMMAND")
        peers[name] = shlex.split(command) if command else [sys.executable, *here, "--measure", "transformers"]
    return ours, peers


def main(args: argparse.Namespace) -> None:
    """Print one line for each round, and at the end one JSON line for each peer."""
    ours, peers = commands(args)
    rounds: list[dict[str, float]] = []
    share: dict[str, float] = {}
    settings = [f"OMP_NUM_THREADS={args.threads}", *args.env]
    for number in range(args.rounds):
        mine = run(ours, settings)
        share = mine["share"]
        rounds.append({"ours": mine["tok_s"]} | {name: run(peers[name], settings)["tok_s"] for name in peers})
        print(f"round {number + 1}: " + "  ".join(f"{name} {x:,.0f}" for name, x in rounds[-1].items()), flush=True)
    for name in peers:
        ratios = [r["ours"] / r[name] for r in rounds]
        result = {
            "peer": name, "precision": args.precision, "ranks": args.ranks, "tp": args.tp, "threads": args.threads,
            "env": args.env, "rounds": args.rounds, "ours_tok_s": round(median(r["ours"] for r in rounds)),
            "peer_tok_s": round(median(r[name] for r in rounds)), "ratio": round(median(ratios), 3),
            "ratio_min": round(min(ratios), 3), "ratio_max": round(max(ratios), 3), "share": share,
        }  # fmt: skip
        report(result, args.save)


def report(result: dict[str, Any], save: Path | None) -> None:
    """Print a JSON line, and append it to `save` with date, commit and machine."""
    print(json.dumps(result), flush=True)
    if save is not None:
        with save.open("a") as file:
            print(json.dumps(result | where()), file=file)


def where() -> dict[str, Any]:
    """What a figure is worth nothing without: the day, the code and the machine."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    environment = describe_environment(device, 1)
    return {
        "date": date.today().isoformat(), "commit": environment["commit"], "device": environment["device"],
        "torch": torch.__version__,
    }  # fmt: skip


if __name__ == "__main__":
    arguments = parser().parse_args()
    try:
        if arguments.measure is None:
            main(arguments)
        else:
            line = measure_ours(arguments) if arguments.measure == "ours" else measure_transformers(arguments)
            if line is not None:
                print(json.dumps(line), flush=True)
    except MegatronLiteError as error:
        sys.exit(f"{type(error).__name__}: {error}")
