"""ZeRO-1: gradients accumulate in flat fp32 buckets, each data-parallel rank updates its share, weights are gathered.

One step, as train/step.py drives it:
  expect(last)   before each backward; as a parameter's gradient appears it is added to its bucket and freed
                 (a post-accumulate hook, which fires once per backward after all uses of the parameter, also when
                 a module added the gradient to its `sink`, the parameter's place in the bucket, by itself)
  during the last backward of each parameter, a bucket whose parameters are all done starts its reduce-scatter (SUM,
                 asynchronous), in one fixed order on every rank, last layers first; a tied matrix on two pipeline
                 ranks waits for reduce(), since either end may be far behind the other
  reduce()       starts what is left, waits, returns this rank's share of the squared gradient norm
  update(lr)     fp32 AdamW on this rank's range of every bucket, then an all-gather into the weights' own storage,
                 first layers first; a module waits for its weights when it is first called (a forward hook)

With zero=0 every rank keeps and updates the whole bucket (all-reduce, no gather): the same numbers to the bit. So are
those without overlap, when every reduction starts in reduce() and every gather ends in update().
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_lite.config.schema import Optimizer
from megatron_lite.ops import Ops
from megatron_lite.optim.buffers import ALIGN, Bucket, FlatWeights
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import Axis, ParallelContext
from megatron_lite.parallel.shard import FlatShard, Piece

BUCKET_ELEMENTS = 40_000_000  # large enough for full bandwidth, small enough to start early


@dataclass
class _State:
    """Training state of one bucket: a gradient as long as the bucket, optimizer tensors over [lo, hi)."""

    bucket: Bucket
    own: slice  # this rank's 1/data share
    held: slice  # what this rank keeps optimizer state of: its share, or with zero=0 everything
    grad: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    partial_sums: list[tuple[slice, Axis]]  # gradients to be summed over the ranks that share a parameter
    counted: list[slice]  # parts of `own` that this rank answers for in the gradient norm
    pending: int = 0  # parameters whose last gradient of the step is still to come
    gather: dist.Work | None = None  # of fresh weights

    def shard(self, span: slice) -> FlatShard:
        inside = slice(span.start - self.held.start, span.stop - self.held.start)
        tensors = {"master": self.master, "exp_avg": self.exp_avg, "exp_avg_sq": self.exp_avg_sq}
        return FlatShard(
            self.bucket.name, self.bucket.pieces, self.bucket.base.numel(), span.start, span.stop,
            {kind: tensor[inside] for kind, tensor in tensors.items()},
        )  # fmt: skip


class Zero1:
    """Owns the memory of a model built on meta: weights, gradients, optimizer state.

    `table` is models.transformer.named_pieces(model). `updates` counts optimizer updates, for bias correction.
    """

    def __init__(self, model: nn.Module, table: dict[str, tuple[Piece, ...]], ctx: ParallelContext, config: Optimizer,
                 ops: Ops, *, bucket_elements: int = BUCKET_ELEMENTS, overlap_gradients: bool = True,
                 overlap_weights: bool = True):  # fmt: skip
        self.ctx, self.config, self.adamw, self.updates = ctx, config, ops.adamw, 0
        self.overlap_gradients, self.overlap_weights = overlap_gradients, overlap_weights
        self.weights = FlatWeights(
            model, table, ctx.device, bucket_elements=bucket_elements, multiple=ctx.data.size * ALIGN
        )
        self.states = [self._state(bucket) for bucket in self.weights.buckets]
        self._early = [state for state in self.states if state.bucket.held != "ends"]  # reduced during the backward
        self._late = [state for state in self.states if state.bucket.held == "ends"]
        self._last = False
        self._next = 0  # of _early: whose reduction starts next
        self._running: list[dist.Work] = []
        owners = {f"{name}.weight": module for name, module in model.named_modules() if hasattr(module, "sink")}
        for state in self.states:
            for slot in state.bucket.slots:
                parameter = self.weights.parameters[slot.parameter]
                view = state.grad[slot.offset : slot.offset + slot.numel].view(parameter.shape)
                parameter.register_post_accumulate_grad_hook(partial(self._accumulate, state, view))
                if slot.parameter in owners:
                    owners[slot.parameter].sink = view
        self._expect_all()
        for module, states in self._first_uses(model):
            module.register_forward_pre_hook(partial(self._ready, states))

    def _state(self, bucket: Bucket) -> _State:
        size = bucket.base.numel()
        share = size // self.ctx.data.size
        own = slice(self.ctx.data.rank * share, (self.ctx.data.rank + 1) * share)
        held = own if self.config.zero else slice(0, size)
        empty = bucket.base.new_zeros(held.stop - held.start, dtype=torch.float32)
        aliased = bucket.base.dtype == torch.float32  # fp32 weights are their own master
        return _State(
            bucket=bucket,
            own=own,
            held=held,
            grad=bucket.base.new_zeros(size, dtype=torch.float32),
            master=bucket.base[held] if aliased else empty,
            exp_avg=empty.clone(),
            exp_avg_sq=empty.clone(),
            partial_sums=_partial_sums(bucket.pieces, self.ctx),
            counted=_without(own, [_span(piece) for piece in bucket.pieces if piece.copy > 0]),
        )

    # ---- gradients

    def expect(self, last: bool) -> None:
        """Announce a backward pass; `last`: the parameters it reaches get no other gradient in this step, and buckets
        that are complete start their reduction while it runs."""
        self._last = last

    def _expect_all(self) -> None:
        self._next = 0
        for state in self.states:
            state.pending = len(state.bucket.slots)

    def _accumulate(self, state: _State, view: Tensor, parameter: Tensor) -> None:
        if parameter.grad is not None:
            view.add_(parameter.grad)
            parameter.grad = None
        if self._last and self.overlap_gradients:
            state.pending -= 1
            while self._next < len(self._early) and self._early[self._next].pending == 0:
                self._next += 1
                self._start_reduction(self._early[self._next - 1])

    @torch.no_grad()
    def _start_reduction(self, state: _State) -> None:
        for span, axis in state.partial_sums:
            comm.all_sum(state.grad[span], axis)
        if self.ctx.data.size > 1:
            # SUM, not AVG: the loss is already divided by the tokens of the whole step.
            if self.config.zero:
                work = comm.reduce_scatter_start(state.grad[state.own], state.grad, self.ctx.data)
            else:
                work = comm.all_reduce_start(state.grad, self.ctx.data)
            self._running.append(work)

    def reduce(self) -> Tensor:
        """Finish all reductions. Returns this rank's share of the squared gradient norm (fp64 scalar): the sum over
        the world is the exact square, since every element is counted by one rank."""
        for state in (*self._early[self._next :], *self._late):
            self._start_reduction(state)
        for work in self._running:
            work.wait()
        self._running.clear()
        self._expect_all()
        norms = [torch.linalg.vector_norm(state.grad[span]) for state in self.states for span in state.counted]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.ctx.device)
        return torch.stack(norms).double().square().sum()

    def zero_grad(self) -> None:
        """Forget the gradients of the step."""
        for state in self.states:
            state.grad.zero_()

    # ---- weights

    @torch.no_grad()
    def update(self, lr: float, grad_scale: float = 1.0) -> None:
        """One AdamW update of everything with gradients times `grad_scale`, then fresh weights on every rank."""
        self.updates += 1
        for state in reversed(self.states):
            grad = state.grad[state.held]
            if grad_scale != 1.0:
                grad.mul_(grad_scale)
            self.adamw(
                state.master, grad, state.exp_avg, state.exp_avg_sq, step=self.updates, lr=lr,
                betas=self.config.betas, eps=self.config.eps,
                weight_decay=self.config.weight_decay if state.bucket.decay else 0.0,
            )  # fmt: skip
            self._publish(state)
        if not self.overlap_weights:
            self.wait()

    def publish(self) -> None:
        """Set every rank's weights from the masters, e.g. after a checkpoint was loaded into shards()."""
        for state in reversed(self.states):
            self._publish(state)
        self.wait()

    @torch.no_grad()
    def _publish(self, state: _State) -> None:
        base = state.bucket.base
        # The fused update and the gather write unseen by autograd: a graph that still needs the old weights must fail.
        torch.autograd.graph.increment_version(base)
        if base.dtype != torch.float32:
            base[state.held].copy_(state.master)
        if self.config.zero and self.ctx.data.size > 1:
            state.gather = comm.all_gather_start(base, base[state.own], self.ctx.data)

    def wait(self) -> None:
        """Until all weights are there. Forwards see to it by themselves; who reads weights another way calls this."""
        self._ready(self.states)

    def _ready(self, states: Sequence[_State], *_: object) -> None:
        for state in states:
            if state.gather is not None:
                state.gather.wait()
                state.gather = None

    def _first_uses(self, model: nn.Module) -> Iterator[tuple[nn.Module, list[_State]]]:
        """(module, the buckets its forward reads). A matrix whose module is never called, the head's, is waited for
        with the module before it."""
        of_parameter = {slot.parameter: state for state in self.states for slot in state.bucket.slots}
        caller = model
        for name, module in model.named_modules():
            states = [of_parameter[f"{name}.{own}"] for own, _ in module.named_parameters(recurse=False)]
            if states:
                caller = caller if type(module).forward is nn.Module.forward else module
                yield caller, states

    @torch.no_grad()
    def fill(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Set weights and masters from whole named tensors (fp32), as many as are given."""
        for name, whole in tensors:
            self.weights.fill(name, whole)
            for i, piece, values in self.weights.cut(name, whole):
                held, master = self.states[i].held, self.states[i].master
                lo, hi = max(piece.offset, held.start), min(piece.offset + piece.numel, held.stop)
                if lo < hi:
                    master[lo - held.start : hi - held.start] = values[lo - piece.offset : hi - piece.offset].to(master)

    def reset_moments(self) -> None:
        """Start the optimizer's averages and its bias correction afresh."""
        self.updates = 0
        for state in self.states:
            state.exp_avg.zero_()
            state.exp_avg_sq.zero_()

    # ---- what checkpoints read and write

    def shards(self) -> list[FlatShard]:
        """All optimizer state this rank keeps."""
        return [state.shard(state.held) for state in self.states]

    def owned(self) -> list[FlatShard]:
        """The part of it that this rank saves: its 1/data share, with zero=0 too."""
        return [state.shard(state.own) for state in self.states]

    def undecayed(self) -> list[str]:
        """Names of the parameters without weight decay."""
        return sorted({p.name for s in self.states if not s.bucket.decay for p in s.bucket.pieces})


def _span(piece: Piece) -> slice:
    return slice(piece.offset, piece.offset + piece.numel)


def _partial_sums(pieces: tuple[Piece, ...], ctx: ParallelContext) -> list[tuple[slice, Axis]]:
    """Ranges whose gradient is a share, with the axis of the ranks that share it; neighbours joined."""
    sums: list[tuple[slice, Axis]] = []
    for piece in sorted(pieces, key=lambda p: p.offset):
        if not piece.partial_grad:
            continue
        axis: Axis = getattr(ctx, piece.axis)
        span = _span(piece)
        if sums and sums[-1][1] is axis and sums[-1][0].stop + ALIGN > span.start:  # only padding between them
            span = slice(sums.pop()[0].start, span.stop)
        sums.append((span, axis))
    return sums


def _without(span: slice, holes: list[slice]) -> list[slice]:
    """`span` less the holes, in order."""
    left, start = [], span.start
    for hole in sorted(holes, key=lambda h: h.start):
        if hole.start > start:
            left.append(slice(start, min(hole.start, span.stop)))
        start = max(start, hole.stop)
        if start >= span.stop:
            break
    if start < span.stop:
        left.append(slice(start, span.stop))
    return [s for s in left if s.start < s.stop]
