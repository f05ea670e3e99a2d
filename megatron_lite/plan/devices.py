"""What a step's time is estimated from: one row for each device. Peaks are dense bf16, links count one direction."""

from __future__ import annotations

from typing import NamedTuple


class Device(NamedTuple):
    """One GPU with its share of its node's links, as its data sheet has it, and what of that is reached."""

    peak: float  # FLOP/s of matrix products
    memory: float  # bytes
    memory_speed: float  # bytes/s
    node_link: float  # bytes/s of one GPU to others in its node
    network: float  # bytes/s of one GPU's share of what leaves the node
    per_node: int  # GPUs
    source: str
    efficiency: float = 0.55  # of matrix products, as a share of `peak`
    reached: float = 0.8  # of memory_speed and links
    latency: float = 25e-6  # seconds of a collective or message, whatever its size
    scatter: float = 1.0  # time of a reduce-scatter of gradients, in those of what it has to send
    hidden: float = 1.0  # share of the time of a transfer beside computation that costs nothing


# efficiency: MPT-3B trains on A100-40 at 8,777 tokens/s, 56 % MFU with attention counted in full (llm-foundry). Its
# causal FLOPs alone would take 0.51 of that time at the peak; what passes over memory, counted here by itself, leaves
# 0.55 for the products. On H100 the same leaves 0.42 (20,964 tokens/s), Megatron-LM's 7B at 47 % MFU about 0.5.
# reached: NCCL moves 370 of 450 GB/s (its maintainers in nccl-tests issue 212); copies reach as much of HBM.
# latency: what NCCL itself expects of an all-reduce of few bytes (25 us on H100, its issue 1453).
DEVICES: dict[str, Device] = {
    "A100-40": Device(
        312e12, 40e9, 1.555e12, 300e9, 6.25e9, 8,
        "A100 SXM 40 GB data sheet; AWS p4d.24xlarge: 400 Gbit/s for 8 GPUs, what StableLM-3B-4E1T was trained on",
    ),
    "A100-80": Device(
        312e12, 80e9, 2.039e12, 300e9, 25e9, 8, "A100 SXM 80 GB data sheet; DGX A100: 200 Gbit/s for each GPU"
    ),
    "H100": Device(989e12, 80e9, 3.35e12, 450e9, 50e9, 8,
        "H100 SXM data sheet; DGX H100: 400 Gbit/s for each GPU", efficiency=0.45,
    ),
    "H200": Device(989e12, 141e9, 4.8e12, 450e9, 50e9, 8,
        "H200 SXM data sheet; DGX H200: 400 Gbit/s for each GPU", efficiency=0.45,
    ),
    "cpu": Device(
        90e9, 8e9, 35e9, 1.4e9, 1.4e9, 2,
        "fp32 on one core of an AMD EPYC, half of 16 GB, gloo: python -m benchmarks.layouts --layouts dp=2",
        efficiency=1.0, reached=1.0, latency=300e-6,
        scatter=2.0,  # with gloo a whole all-reduce (parallel/comm.py)
        hidden=0.0,  # gloo sums and copies on the cores that compute
    ),
}  # fmt: skip
