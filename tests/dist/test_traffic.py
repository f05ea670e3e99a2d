"""The planned bytes of tensor parallelism are those that a forward and a backward really send."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Parallel
from megatron_lite.models.transformer import build
from megatron_lite.ops.documents import Documents
from megatron_lite.ops.select import default_ops
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.plan.traffic import bytes_per_step
from tests.helpers.ranks import run_ranks

ROWS, LENGTH = 3, 86
CONFIG = ModelConfig(**PRESETS["tiny-qwen3"])


def _sent(ctx: ParallelContext, sequence_parallel: bool, recompute: Any) -> int:
    """Bytes a rank sends in one forward and backward: of a whole tensor of B bytes, B/2 per pass over two ranks."""
    model = build(CONFIG, ctx.tp, default_ops(), dtype=torch.float32, sequence_parallel=sequence_parallel,
                  recompute_mode=recompute).to_empty(device="cpu")  # fmt: skip
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = ROWS * LENGTH
    borders = torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32)
    doc = Documents(borders, (LENGTH,) * ROWS, LENGTH, torch.arange(tokens) % LENGTH, LENGTH)
    ids = torch.randint(0, CONFIG.vocab_size, (tokens,))
    with (
        mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as reduced,
        mock.patch.object(dist, "all_gather_single", wraps=dist.all_gather_single) as gathered,
        mock.patch.object(dist, "reduce_scatter_single", wraps=dist.reduce_scatter_single) as scattered,
    ):
        model(ids, ids, doc).backward()
    whole = [2 * call.args[0].nbytes for call in reduced.call_args_list]
    whole += [call.args[0].nbytes for call in gathered.call_args_list]
    whole += [call.args[1].nbytes for call in scattered.call_args_list]
    return sum(whole) // 2


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_ranks_send_what_is_planned_to_the_byte(sequence_parallel, recompute):
    parallel = Parallel(tp=2, sequence_parallel=sequence_parallel, recompute=recompute)
    planned = bytes_per_step(
        CONFIG, parallel, zero=1, tokens=ROWS * LENGTH, micro_batches=1, data_ranks=1, expert_data_ranks=1,
        bytes_per_element=4,
    )  # fmt: skip
    assert run_ranks(_sent, 2, sequence_parallel, recompute, tp=2) == [sum(planned.values())] * 2
