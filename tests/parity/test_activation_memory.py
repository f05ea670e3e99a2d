"""The planned bytes of activations are those that torch saves for backward."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Parallel
from megatron_lite.models.rope import rotary_tables
from megatron_lite.models.transformer import build
from megatron_lite.ops.documents import Documents
from megatron_lite.ops.select import default_ops
from megatron_lite.parallel.context import Axis, ParallelContext, single_process
from megatron_lite.plan.memory import activation_bytes, rank_parameters
from tests.helpers.ranks import run_ranks

ROWS, LENGTH = 3, 86  # odd on purpose, as far as two ranks allow


def _saved_bytes(model: torch.nn.Module, ids: torch.Tensor, doc: Documents) -> int:
    """Bytes of the distinct storages that a forward keeps for its backward, parameters excepted."""
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    saved = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(ids, ids, doc)
    assert loss.requires_grad
    return sum(storage.nbytes() for storage in saved.values())


def _measured(ctx: ParallelContext, config: ModelConfig, dtype: torch.dtype, sp: bool, recompute: str) -> int:
    ops = default_ops("cpu", "fp32" if dtype == torch.float32 else "bf16")
    model = build(config, ctx.tp, ops, dtype=dtype, sequence_parallel=sp, recompute_mode=recompute)
    model = model.to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    tokens = ROWS * LENGTH
    borders = torch.arange(0, tokens + 1, LENGTH, dtype=torch.int32)
    doc = Documents(borders, (LENGTH,) * ROWS, LENGTH, torch.arange(tokens) % LENGTH, LENGTH)
    # Checkpoints hold the position tables as arguments, which the hooks do not see.
    unseen = 0 if recompute == "none" else sum(table.nbytes for table in rotary_tables(config, doc.position_ids))
    return unseen + _saved_bytes(model, torch.randint(0, config.vocab_size, (tokens,)), doc)


def _config(preset: str) -> ModelConfig:
    # A small vocabulary: the head's gradient must not hide the blocks.
    return ModelConfig(**PRESETS[preset] | {"vocab_size": 250})


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("preset", ["tiny-stablelm", "tiny-qwen3"])
def test_planned_activations_are_within_2_percent_of_what_torch_saves(preset, dtype, recompute):
    measured = _measured(single_process(), _config(preset), dtype, False, recompute)
    planned = activation_bytes(_config(preset), ROWS * LENGTH, recompute=recompute, bytes_per_element=dtype.itemsize)
    assert planned.total == pytest.approx(measured, rel=0.02), planned


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sp", [False, True])
def test_planned_activations_are_within_2_percent_of_what_torch_saves_on_two_ranks(sp, recompute):
    config = _config("tiny-qwen3")
    measured = run_ranks(_measured, 2, config, torch.float32, sp, recompute, tp=2)
    planned = activation_bytes(
        config, ROWS * LENGTH, tp=2, sequence_parallel=sp, recompute=recompute, bytes_per_element=4
    )
    assert measured == [pytest.approx(planned.total, rel=0.02)] * 2, planned


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("preset", ["tiny-stablelm", "tiny-qwen3"])
def test_planned_parameters_of_a_rank_are_those_of_its_model(preset, tp):
    config = _config(preset)  # Qwen3 has two kv heads: at tp 4 each is held by two ranks
    for rank in range(tp):
        model = build(config, Axis("tp", rank, tp, tuple(range(tp)), None), default_ops(), dtype=torch.float32)
        assert sum(p.numel() for p in model.parameters()) == rank_parameters(config, Parallel(tp=tp)).total
