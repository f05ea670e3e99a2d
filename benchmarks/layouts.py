"""Steps of layouts on this machine's CPU beside what megatron_lite/plan/speed.py says they take.

  python -m benchmarks.layouts --layouts dp=1 dp=2 tp=2 pp=2 cp=2 --save benchmarks/results.jsonl

A layout is made of dp and keys of [parallel]: pp=2,virtual_stages=2. All processes first measure together what the
estimate needs of the machine (products of this model's matrices, elementwise passes over memory, gloo's messages), then
train the Qwen3 of tools/benchmark.py. Each layout runs in fresh processes, all of them in turn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import Grid, kv_replicas
from megatron_lite.plan.devices import Device
from megatron_lite.plan.division import Division, pipeline_ranks, vocab_rows
from megatron_lite.plan.speed import StepTime, step_time
from megatron_lite.runtime.launch import process_groups, read_launch
from megatron_lite.train.step import train_step
from megatron_lite.train.trial import Run, build_run, step_batches
from tools.benchmark import DTYPES, ROWS, SEQ_LEN, SHAPE, Clock, report, run, timed


def parser() -> argparse.ArgumentParser:
    """The flags."""
    p = argparse.ArgumentParser(description="Compare estimated and measured steps of layouts on the CPU.")
    p.add_argument("--layouts", nargs="+", default=["dp=1", "dp=2", "tp=2"], metavar="KEY=N[,KEY=N]")
    p.add_argument("--precision", choices=DTYPES, default="fp32")
    p.add_argument("--rounds", type=int, default=3)
    p.add_argument("--steps", type=int, default=4, help="timed steps of each process")
    p.add_argument("--env", action="append", default=[], metavar="NAME=VALUE", help="set for every process")
    p.add_argument("--save", type=Path, metavar="FILE", help="append the JSON lines, with date, commit and machine")
    p.add_argument("--measure", metavar="LAYOUT", help="be one rank of this layout and print its JSON line")
    return p


def parse(layout: str) -> tuple[Parallel, int]:
    """The [parallel] section and the number of ranks of pp=2,virtual_stages=2,dp=2."""
    said = dict(part.split("=") for part in layout.split(","))
    dp = int(said.pop("dp", "1"))
    words = {"true": True, "false": False}
    parallel = Parallel.model_validate({k: int(v) if v.isdigit() else words.get(v, v) for k, v in said.items()})
    return parallel, dp * parallel.tp * parallel.pp * parallel.cp


def seconds_of(work: Callable[[], object], repeats: int) -> float:
    """Median seconds of a call, after one that does not count."""
    work()
    found = []
    for _ in range(repeats):
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        work()
        found.append(time.perf_counter() - begin)
    return median(found)


def products(model: ModelConfig, tp: int, tokens: int, dtype: torch.dtype) -> float:
    """FLOP/s of the products of all blocks and the head with weights of their own, forward and backward."""
    D, H = model.hidden_size, model.head_dim
    qkv = (model.num_attention_heads + 2 * model.num_key_value_heads) * H
    block = [(D, qkv // tp), (model.num_attention_heads * H // tp, D), (D, 2 * model.intermediate_size // tp),
             (model.intermediate_size // tp, D)]  # fmt: skip
    shapes = block * model.num_hidden_layers + [(D, vocab_rows(model, tp))]
    weights = [torch.randn(d_out, d_in, dtype=dtype) for d_in, d_out in shapes]

    def work() -> None:
        for weight in weights:
            x = torch.ones(tokens, weight.shape[1], dtype=dtype)
            y = x @ weight.t()
            y @ weight
            y.t() @ x

    return 6 * tokens * sum(weight.numel() for weight in weights) / seconds_of(work, 3)


def passes(dtype: torch.dtype) -> float:
    """Bytes/s of elementwise operations: silu(a) * b reads three tensors and writes two."""
    a, b = (torch.ones(SEQ_LEN, 3 * SHAPE["intermediate_size"], dtype=dtype) for _ in range(2))
    return 5 * a.nbytes / seconds_of(lambda: torch.nn.functional.silu(a) * b, 20)


def exchange(size: int) -> float:
    """Seconds of summing `size` bytes over all ranks."""
    x: Tensor = torch.zeros(size // 4)
    return seconds_of(lambda: dist.all_reduce(x), 10)


def calibrate(model: ModelConfig, parallel: Parallel, dtype: torch.dtype, tokens: int) -> Device:
    """This machine as a row of plan/devices.py, with as many ranks at work as there are."""
    small, large = 4096, 32 * 2**20
    latency, link = 0.0, 1e12
    if dist.is_initialized():
        ranks = dist.get_world_size()
        latency = exchange(small)
        link = 2 * large * (ranks - 1) / ranks / (exchange(large) - latency)
    return Device(
        peak=products(model, parallel.tp, tokens, dtype), memory=8e9, memory_speed=passes(dtype), node_link=link,
        network=link, per_node=64, source="measured here", efficiency=1.0, reached=1.0, latency=latency, scatter=2.0,
        hidden=0.0,
    )  # fmt: skip


def estimate(run_: Run, parallel: Parallel, grid: Grid, device: Device) -> StepTime:
    """What the plan says of this run."""
    division = Division(
        tokens=run_.micro_batch * run_.seq_len // parallel.cp, micro_batches=run_.rows // run_.micro_batch // grid.dp,
        data_ranks=grid.dp * grid.cp, expert_data_ranks=grid.dp * grid.cp * grid.tp,
        bytes_per_element=run_.precision.itemsize,
    )  # fmt: skip
    ranks = pipeline_ranks(run_.model, parallel)
    return step_time(run_.model, parallel, division, ranks, grid, device, seq_len=run_.seq_len, zero=1)


def measure(args: argparse.Namespace) -> dict[str, Any] | None:
    """Calibrate, estimate and train; a JSON line's content, None on all ranks but the first."""
    torch.set_num_threads(1)
    parallel, world = parse(args.measure)
    model = ModelConfig.model_validate(SHAPE | {"model_type": "qwen3", "qk_norm": True, "rope_theta": 1e6})
    dtype = DTYPES[args.precision]
    short = Run(model, rows=ROWS, seq_len=SEQ_LEN, micro_batch=1, parallel=parallel, precision=dtype,
                bucket_elements=40_000_000)  # fmt: skip
    replicas = kv_replicas(model.num_key_value_heads, parallel.tp)
    grid = Grid(world, tp=parallel.tp, pp=parallel.pp, cp=parallel.cp, kv_replicas=replicas)
    with process_groups(read_launch(), grid, timeout_s=600.0) as ctx:
        device = calibrate(model, parallel, dtype, SEQ_LEN // parallel.cp)
        time_ = estimate(short, parallel, grid, device)
        seconds, waiting = train(short, ctx, args.steps)
        if ctx.world.rank > 0:
            return None
    return {
        "layout": args.measure, "precision": args.precision, "seconds": seconds, "estimated": time_.total,
        "waiting": waiting, "estimated_waiting": time_.waiting, "parts": time_._asdict(), "device": device._asdict(),
    }  # fmt: skip


def train(run_: Run, ctx: ParallelContext, steps: int) -> tuple[float, float]:
    """Median seconds of a step, and the share of all steps spent waiting for messages on this rank."""
    model, optimizer = build_run(run_, ctx)
    batches = step_batches(run_, ctx, 0)
    clock = Clock()
    clock.watch(dist.Work, "wait", "waiting")
    begin = time.perf_counter()
    seconds = timed(
        lambda: train_step(model, optimizer, batches, ctx, lr=1e-4, clip=1.0, overlap=run_.parallel.overlap_pipeline),
        steps,
    )
    return seconds, clock.seconds.get("waiting", 0.0) / (time.perf_counter() - begin)


def main(args: argparse.Namespace) -> None:
    """Print one line for each round and layout, and at the end one JSON line for each layout: medians."""
    found: dict[str, list[dict[str, Any]]] = {layout: [] for layout in args.layouts}
    here = ["-m", "benchmarks.layouts", "--precision", args.precision, "--steps", str(args.steps)]
    for number in range(args.rounds):
        for layout, lines in found.items():
            _, world = parse(layout)
            launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={world}"]
            command = [sys.executable, *(launcher if world > 1 else []), *here, "--measure", layout]
            lines.append(run(command, ["OMP_NUM_THREADS=1", *args.env]))
            seconds, estimated = lines[-1]["seconds"], lines[-1]["estimated"]
            print(f"round {number + 1}: {layout} {seconds:.2f} s, estimated {estimated:.2f} s", flush=True)
    for layout, lines in found.items():
        figures = {key: round(median(line[key] for line in lines), 4)
                   for key in ("seconds", "estimated", "waiting", "estimated_waiting")}  # fmt: skip
        ratio = round(median(line["estimated"] / line["seconds"] for line in lines), 3)
        parts = {key: round(median(line["parts"][key] for line in lines), 4) for key in StepTime._fields}
        speed = {key: float(f"{median(line['device'][key] for line in lines):.3g}")
                 for key in ("peak", "memory_speed", "node_link", "latency")}  # fmt: skip
        result = {"layouts": layout, "of": args.precision, "rounds": args.rounds} | figures
        report(result | {"estimated_over_measured": ratio, "parts": parts, "machine": speed}, args.save)


if __name__ == "__main__":
    arguments = parser().parse_args()
    if arguments.measure is not None:
        line = measure(arguments)
        if line is not None:
            print(json.dumps(line), flush=True)
    else:
        main(arguments)
