"""How long a step takes, estimated from a device's numbers. Pure arithmetic; nothing is measured here.

One micro-batch on pp rank r, forward and backward:

  t_r = products + memory + tp + cp + ep
  products   FLOPs / (peak x efficiency): three times those of the forward, attention causal, and what is recomputed
  memory     bytes / (memory speed x reached): each activation of a block passes 3 times, 5 times if the block is
             recomputed, each logit 3 times in all its types, weights and gradients of this rank once
  axes       bytes of plan/traffic.py / bandwidth + calls x latency; of cp's ring only what attention does not hide

The step of m micro-batches, v chunks on each of pp ranks, is that of the rank for which this is largest:

  m t_r + sum of t_q of all other pp ranks q / v      (the bubble)
    + messages of m - 1 micro-batches + 2 (pp - 1) messages on the way in and out
    + reduce-scatter beyond the last backward + all-gather beyond the next forward + optimizer

With equal ranks the bubble is the share (pp - 1) / (pp - 1 + m v) that pipeline/schedule.py states. A message costs
what it takes beyond the task beside it; everything, where the overlap is switched off.

Bandwidth of an axis: tp ranks are neighbours, then cp, dp, pp (parallel/grid.py). Inside a node it is the node's link.
A ring that leaves the node with g of its ranks in each is as fast as their g shares of the network together (NCCL
issue 1250 shows it for g = 1, 2, 4), a message or an exchange as fast as one.

What is not modelled: smaller matrices are slower, experts get unequal loads, links are shared with others, and nobody
is late.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.schema import Parallel
from megatron_lite.parallel.grid import Grid
from megatron_lite.plan.devices import Device
from megatron_lite.plan.division import Division, PipelineRank, kinds, vocab_rows
from megatron_lite.plan.memory import activation_bytes
from megatron_lite.plan.traffic import Flow, flows


class StepTime(NamedTuple):
    """Seconds of a step by what they are spent on, on the pp rank that takes longest."""

    products: float
    memory: float
    tp: float
    cp: float
    ep: float
    pp: float  # messages
    bubble: float
    dp: float  # reductions and gathers that nothing hides
    optimizer: float

    @property
    def total(self) -> float:
        """All of them."""
        return sum(self)

    @property
    def waiting(self) -> float:
        """Share of the step in which nothing is computed."""
        return 1 - (self.products + self.memory + self.optimizer) / self.total


class _Micro(NamedTuple):
    """Seconds of one micro-batch on a rank."""

    products: float
    memory: float
    tp: float
    cp: float
    ep: float
    forward: float  # share of the products that is the forward

    @property
    def computing(self) -> float:
        return self.products + self.memory  # what transfers can hide behind

    @property
    def total(self) -> float:
        return self.computing + self.tp + self.cp + self.ep


def step_time(
    model: ModelConfig,
    parallel: Parallel,
    division: Division,
    ranks: Sequence[PipelineRank],
    grid: Grid,
    device: Device,
    *,
    seq_len: int,
    zero: int,
) -> StepTime:
    """The estimate for one step; `ranks` are plan.division.pipeline_ranks."""
    found = []
    each = kinds(ranks)
    micro = [_micro_batch(model, parallel, division, at, grid, device, seq_len, zero) for at, _ in each]
    everybody = sum(one.total * count for one, (_, count) in zip(micro, each, strict=True))
    for one, (at, _) in zip(micro, each, strict=True):
        found.append(_of_rank(model, parallel, division, at, grid, device, one, everybody, zero))
    return max(found, key=lambda time: time.total)


def bandwidth(axis: str, grid: Grid, device: Device) -> float:
    """Bytes/s one rank sends over an axis."""
    size, stride = {
        "tp": (grid.tp, 1),
        "cp": (grid.cp, grid.tp),
        "dp": (grid.cp * grid.dp, grid.tp),
        "ep": (grid.ep, 1),
        "edp": (grid.world // grid.pp // grid.ep, grid.ep),
        "pp": (grid.pp, grid.world // grid.pp),
        "ends": (grid.pp, grid.world // grid.pp),
    }[axis]
    inside = max(1, min(size, device.per_node // stride))
    if inside == size:
        return device.node_link * device.reached
    rings = inside if axis in ("tp", "cp", "dp", "edp") else 1
    return min(device.node_link, rings * device.network) * device.reached


def _seconds(flow: Flow, grid: Grid, device: Device) -> float:
    return flow.sent / bandwidth(flow.axis, grid, device) + flow.calls * device.latency


def _micro_batch(model: ModelConfig, parallel: Parallel, division: Division, at: PipelineRank, grid: Grid,
                 device: Device, seq_len: int, zero: int) -> _Micro:  # fmt: skip
    tokens, size, m = division.tokens, division.bytes_per_element, division.micro_batches
    speed, memory_speed = device.peak * device.efficiency, device.memory_speed * device.reached
    attention = 2 * tokens * seq_len * model.num_attention_heads * model.head_dim * at.blocks / parallel.tp
    forward = 2 * tokens * at.matrices / parallel.tp + attention
    width = model.num_experts_per_tok * model.moe_intermediate_size if model.num_experts else model.intermediate_size
    down = 2 * tokens * at.blocks * model.hidden_size * width / parallel.tp
    head = 2 * tokens * model.vocab_size * model.hidden_size / parallel.tp if at.last else 0
    # A block computed again stops before its last product, whose result nobody needs.
    again = {"none": 0.0, "selective": attention, "full": forward - head - down}[parallel.recompute]

    activations = sum(
        activation_bytes(
            model, tokens, tp=parallel.tp, sequence_parallel=parallel.sequence_parallel, bytes_per_element=size,
            layers=at.blocks,
        ).blocks.values()
    )  # fmt: skip
    logits = 3 * tokens * vocab_rows(model, parallel.tp) * (4 + 2 * size) if at.last else 0
    passed = activations * (5 if parallel.recompute == "full" else 3) + logits + at.parameters.total * (8 + 2 * size)

    axes = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for flow in flows(model, parallel, division, at, zero=zero):
        if flow.axis in axes:
            seconds = _seconds(flow, grid, device) / m
            if flow.behind == "attention":
                seconds -= device.hidden * min(seconds, 3 * attention / speed)
            axes[flow.axis] += seconds
    return _Micro(
        products=(3 * forward + again) / speed,
        memory=passed / memory_speed,
        forward=forward / (3 * forward + again),
        **axes,
    )


def _of_rank(model: ModelConfig, parallel: Parallel, division: Division, at: PipelineRank, grid: Grid, device: Device,
             one: _Micro, everybody: float, zero: int) -> StepTime:  # fmt: skip
    m, chunks = division.micro_batches, len(at.chunks)
    messages = gradients = 0.0
    for flow in flows(model, parallel, division, at, zero=zero):
        seconds = _seconds(flow, grid, device)
        if flow.axis == "pp":
            task = one.computing / (2 * chunks) if flow.behind == "task" else 0.0
            each = seconds / flow.calls
            steady = flow.calls * (m - 1) / m  # those of one micro-batch are on the way in and out
            messages = steady * (each - device.hidden * min(each, task)) + 2 * (parallel.pp - 1) * each
        elif flow.axis in ("dp", "edp", "ends"):
            seconds *= device.scatter if "reduce-scatter" in flow.what else 1.0
            beside = {"last backward": 1 - one.forward, "next forward": one.forward}.get(
                flow.behind, 0.0
            ) * one.computing
            gradients += seconds - device.hidden * min(seconds, beside)
    shares = (division.data_ranks, division.expert_data_ranks) if zero else (1, 1)
    held = at.parameters.dense / shares[0] + at.parameters.experts / shares[1]
    # AdamW reads master, moments and gradient and writes the first three; norm and zeroing pass over all gradients.
    update = held * (28 + division.bytes_per_element) + at.parameters.total * 8
    return StepTime(
        products=m * one.products,
        memory=m * one.memory,
        tp=m * one.tp,
        cp=m * one.cp,
        ep=m * one.ep,
        pp=messages,
        bubble=(everybody - one.total) / chunks,
        dp=gradients,
        optimizer=update / (device.memory_speed * device.reached),
    )
