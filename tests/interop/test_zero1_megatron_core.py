"""megatron-core's distributed optimizer as an oracle for ours: three steps from the same weights on two gloo ranks.

The model is ours on both sides; theirs is a wrapper and an optimizer made for CUDA, kept on the CPU by `OnCPU`.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megatron_lite.config.schema import Optimizer
from megatron_lite.models.init import initial_tensors
from megatron_lite.models.transformer import build, named_pieces
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.buffers import FlatWeights
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.train.inputs import to_device
from megatron_lite.train.step import train_step
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Run, build_run, qwen3, stablelm, step_batches

pytest.importorskip("megatron.core.optimizer", reason="megatron-core is not installed")

STEPS, LR, CLIP = 3, 1e-3, 1.0


class OnCPU(TorchFunctionMode):
    """Tensors asked for on CUDA are made on the CPU, and say that they are on CUDA when asked for their type."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        result = func(*args, **kwargs)
        asked = func is torch.Tensor.type and isinstance(result, str)
        return result.replace("torch.", "torch.cuda.") if asked else result


def _their_optimizer(model: torch.nn.Module) -> tuple[Any, Any]:
    """Their data-parallel wrapper and distributed optimizer around a model on the CPU."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    parallel_state.initialize_model_parallel(create_gloo_process_groups=True)
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment]
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=True, grad_reduce_in_fp32=True, bucket_size=20_000
    )
    config = TransformerConfig(num_layers=1, hidden_size=64, num_attention_heads=4, use_cpu_initialization=True)
    wrapped = DistributedDataParallel(config, settings, model)
    ours = Optimizer()
    hyper = OptimizerConfig(
        optimizer="adam", lr=LR, weight_decay=ours.weight_decay, adam_beta1=ours.betas[0], adam_beta2=ours.betas[1],
        adam_eps=ours.eps, clip_grad=CLIP, use_distributed_optimizer=True,
    )  # fmt: skip
    optimizer = get_megatron_optimizer(hyper, [wrapped])
    for group in optimizer.param_groups:  # as their scheduler does before each step
        group["weight_decay"] = hyper.weight_decay * group["wd_mult"]
    return wrapped, optimizer


def _train_theirs(ctx: ParallelContext, run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Gradient norm of every step, and every parameter at the end."""
    ops = default_ops("cpu", "fp32")
    model = build(run.model, ctx.tp, ops, dtype=torch.float32)
    weights = FlatWeights(model, named_pieces(model), ctx.device, bucket_elements=run.bucket_elements)
    for name, whole in initial_tensors(run.model, seed=1):
        weights.fill(name, whole)
    norms = []
    with OnCPU():
        wrapped, optimizer = _their_optimizer(model)
        for step in range(run.steps):
            batches = step_batches(run, ctx, step)
            tokens = torch.tensor(float(sum(batch.valid_tokens for batch in batches)))
            torch.distributed.all_reduce(tokens)
            wrapped.zero_grad_buffer()
            optimizer.zero_grad()
            for batch in batches:
                # They average over data-parallel ranks; the mean over the global batch is a sum.
                (wrapped(*to_device(batch, ctx)) / tokens * ctx.data.size).backward()
            wrapped.finish_grad_sync()
            _, norm, _ = optimizer.step()
            norms.append(float(norm))
    return norms, {name: p.detach().clone() for name, p in model.named_parameters()}


def _both(ctx: ParallelContext, run: Run) -> None:
    norms, theirs = _train_theirs(ctx, run)
    model, optimizer = build_run(run, ctx)
    for step, norm in enumerate(norms):
        result = train_step(model, optimizer, step_batches(run, ctx, step), ctx, lr=LR, clip=CLIP)
        assert result.grad_norm == pytest.approx(norm, rel=1e-6)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), theirs[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize("model", [qwen3(), stablelm(num_key_value_heads=2)], ids=["qwen3", "stablelm"])
def test_three_steps_equal_theirs_on_two_ranks(model):
    run_ranks(_both, 2, Run(model, steps=STEPS, rows=8))
