"""megatron-core as an oracle for the parallel layers: outputs and gradients of the same weights on two gloo ranks.

Skipped where that package is absent; `pip install --no-deps megatron-core einops` beside torch is enough for it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron_lite.models.rope import rotary_tables
from megatron_lite.ops.reference.pointwise import rope
from megatron_lite.ops.select import default_ops
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.cross_entropy import linear_cross_entropy
from megatron_lite.parallel.embedding import VocabParallelEmbedding, VocabRows
from megatron_lite.parallel.linear import ColumnParallelLinear, RowParallelLinear
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import stablelm

pytest.importorskip("megatron.core.tensor_parallel", reason="megatron-core is not installed")

T, D, F, V = 14, 12, 20, 48  # tokens, hidden, ffn, vocabulary


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed + sum(shape)))


def their_config() -> Any:
    """Two tensor-parallel ranks on the CPU."""
    from megatron.core import ModelParallelConfig, parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    return ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True, perform_initialization=False)


def mine(whole: torch.Tensor, ctx: ParallelContext, dim: int = 0) -> torch.Tensor:
    return whole.chunk(2, dim)[ctx.tp.rank].contiguous()


def same(ours: torch.Tensor | None, theirs: torch.Tensor | None) -> None:
    assert ours is not None and theirs is not None
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-6)


def _linear(ctx: ParallelContext) -> None:
    from megatron.core.tensor_parallel import layers

    config = their_config()
    up, up_bias, down, down_bias = draw(F, D), draw(F), draw(D, F), draw(D)
    ours = ColumnParallelLinear(D, F, ctx.tp, bias=True), RowParallelLinear(F, D, ctx.tp, bias=True)
    theirs = (
        layers.ColumnParallelLinear(D, F, config=config, init_method=torch.nn.init.zeros_, gather_output=False),
        layers.RowParallelLinear(
            F, D, config=config, init_method=torch.nn.init.zeros_, bias=True, input_is_parallel=True,
            skip_bias_add=False,
        ),
    )  # fmt: skip
    for column, row in (ours, theirs):
        column.weight.data, column.bias.data = mine(up, ctx), mine(up_bias, ctx)
        row.weight.data, row.bias.data = mine(down, ctx, 1), down_bias.clone()
    x_ours, x_theirs = (draw(T, D).requires_grad_() for _ in range(2))
    y_ours = ours[1](torch.nn.functional.gelu(ours[0](x_ours)))
    y_theirs = theirs[1](torch.nn.functional.gelu(theirs[0](x_theirs)[0]))[0]
    for y in (y_ours, y_theirs):
        (y * draw(T, D, seed=5)).sum().backward()
    same(y_ours, y_theirs)
    same(x_ours.grad, x_theirs.grad)
    for a, b in zip(ours, theirs, strict=True):
        same(a.weight.grad, b.weight.grad)
        same(a.bias.grad, b.bias.grad)


def _embedding(ctx: ParallelContext) -> None:
    from megatron.core.tensor_parallel import layers

    theirs = layers.VocabParallelEmbedding(V, D, init_method=torch.nn.init.zeros_, config=their_config())
    ours = VocabParallelEmbedding(V, V, D, ctx.tp)
    for layer in (ours, theirs):
        layer.weight.data = mine(draw(V, D), ctx)
    ids = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(3))
    out_ours, out_theirs = ours(ids), theirs(ids)
    for out in (out_ours, out_theirs):
        (out * draw(T, D, seed=5)).sum().backward()
    same(out_ours, out_theirs)
    same(ours.weight.grad, theirs.weight.grad)


def _cross_entropy(ctx: ParallelContext) -> None:
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    their_config()
    head = VocabRows(V, V, D, ctx.tp)
    head.weight.data = mine(draw(V, D), ctx)
    labels = torch.randint(0, V, (T,), generator=torch.Generator().manual_seed(3))
    x = draw(T, D).requires_grad_()
    loss = linear_cross_entropy(comm.enter_region(x, ctx.tp), head, labels, default_ops(), chunk=5)
    loss.backward()
    logits = (draw(T, D) @ mine(draw(V, D), ctx).t()).requires_grad_()
    expected = vocab_parallel_cross_entropy(logits[:, None].clone(), labels[:, None]).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=1e-5)
    assert logits.grad is not None
    same(head.weight.grad, logits.grad.t() @ draw(T, D))


@pytest.mark.parametrize("check", [_linear, _embedding, _cross_entropy])
def test_a_layer_equals_theirs_on_two_ranks(check):
    run_ranks(check, 2, tp=2)


def test_partial_rotation_equals_theirs():
    utils = pytest.importorskip("megatron.core.models.common.embeddings.rope_utils")
    config = stablelm()
    cos, sin = rotary_tables(config, torch.arange(T))
    x = draw(T, 3, config.head_dim)
    inverse = 1.0 / config.rope_theta ** (torch.arange(0, config.rotary_dim, 2).float() / config.rotary_dim)
    angles = torch.outer(torch.arange(T).float(), inverse)
    freqs = torch.cat((angles, angles), -1)[:, None, None]
    theirs = utils._apply_rotary_pos_emb_bshd(x[:, None], freqs, rotary_interleaved=False)[:, 0]
    same(rope(x, cos, sin), theirs)
