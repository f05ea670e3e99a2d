"""A short training run on synthetic rows, the same in any layout: what equivalence is checked with.

Used by tools/check_equivalence.py and by the tests; trains with the same step, optimizer and batches as a real run.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Optimizer, Parallel, Schedule
from megatron_lite.data.batch import IGNORE, Batch
from megatron_lite.models.init import initial_tensors
from megatron_lite.models.transformer import Transformer, build_rank, named_pieces
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.schedule import learning_rate
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.step import StepResult, train_step


@dataclass(frozen=True)
class Run:
    """What a short training run is made of."""

    model: ModelConfig
    steps: int = 20
    rows: int = 12  # of one step, over all ranks
    seq_len: int = 16
    micro_batch: int = 2
    parallel: Parallel = field(default_factory=Parallel)  # but for the sizes of axes, which are the context's
    precision: torch.dtype = torch.float32
    masked: bool = False  # some labels ignored, a different number in each row
    documents: bool = False  # rows hold several documents that attention keeps apart
    optimizer: Optimizer = field(default_factory=Optimizer)
    bucket_elements: int = 20_000
    peak_lr: float = 1e-3


def row(run: Run, number: int) -> np.ndarray:
    """seq_len + 1 tokens that can be learned: each follows from the one before, with noise."""
    rng = np.random.default_rng(number)
    steps = np.where(rng.random(run.seq_len + 1) < 0.9, 7, rng.integers(0, 101, run.seq_len + 1))
    return (rng.integers(0, 101) + np.cumsum(steps)) % run.model.vocab_size


def make_batch(run: Run, numbers: list[int]) -> Batch:
    """The rows of these numbers as one micro-batch."""
    s = run.seq_len
    tokens = np.stack([row(run, n) for n in numbers])
    labels = tokens[:, 1:].copy()
    if run.masked:
        for i, n in enumerate(numbers):
            labels[i, : (5 * n) % (s + 1)] = IGNORE
    cuts = sorted(
        {0, len(numbers) * s}
        | {i * s + c for i, n in enumerate(numbers) for c in ((0, 1 + n % (s - 1)) if run.documents else (0,))}
    )
    lengths = np.diff(cuts)
    return Batch(
        input_ids=tokens[:, :-1].reshape(-1).astype(np.int64),
        labels=labels.reshape(-1).astype(np.int64),
        position_ids=np.concatenate([np.arange(n) for n in lengths]),
        cu_seqlens=np.array(cuts, dtype=np.int32),
        max_seqlen=int(lengths.max()),
        row_length=None if run.documents else s,
        valid_tokens=int((labels >= 0).sum()),
        samples=tuple(numbers),
        rows=len(numbers),
    )


def step_batches(run: Run, ctx: ParallelContext, step: int) -> list[Batch]:
    """This rank's micro-batches of a step counted from 0."""
    per_rank = run.rows // (run.micro_batch * ctx.dp.size)
    start = step * run.rows
    return [
        make_batch(run, [start + (m * ctx.dp.size + ctx.dp.rank) * run.micro_batch + b for b in range(run.micro_batch)])
        for m in range(per_rank)
    ]


def build_run(run: Run, ctx: ParallelContext, seed: int = 1) -> tuple[Transformer, Zero1]:
    """Model and optimizer with initial weights."""
    ops = default_ops(ctx.device.type, "bf16" if run.precision == torch.bfloat16 else "fp32")
    model = build_rank(run.model, ctx, ops, run.parallel, run.precision)
    optimizer = Zero1(
        model, named_pieces(model), ctx, run.optimizer, ops, bucket_elements=run.bucket_elements,
        overlap_gradients=run.parallel.overlap_gradients, overlap_weights=run.parallel.overlap_weights,
    )  # fmt: skip
    optimizer.fill(initial_tensors(run.model, seed))
    return model, optimizer


def train_built(run: Run, ctx: ParallelContext, model: Transformer, optimizer: Zero1) -> list[StepResult]:
    """Results of every step."""
    schedule = Schedule(peak=run.peak_lr, warmup_steps=min(10, run.steps))
    return [
        train_step(
            model, optimizer, step_batches(run, ctx, step), ctx,
            lr=learning_rate(schedule, step + 1, run.steps), clip=run.optimizer.clip,
            overlap=run.parallel.overlap_pipeline,
        )
        for step in range(run.steps)
    ]  # fmt: skip


def train(ctx: ParallelContext, run: Run) -> tuple[list[StepResult], dict[str, torch.Tensor]]:
    """Results of every step, and this rank's weights by piece ("name start shape" -> values) at the end."""
    model, optimizer = build_run(run, ctx)
    results = train_built(run, ctx, model, optimizer)
    optimizer.wait()
    weights = {
        f"{piece.name} {piece.start} {piece.shape}": bucket.base[piece.offset : piece.offset + piece.numel].clone()
        for bucket in optimizer.weights.buckets
        for piece in bucket.pieces
    }
    return results, weights
