"""Parallel layers equal the dense ones: outputs, input gradients, weight and bias gradients, in every mode."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from megatron_lite.errors import ConfigError
from megatron_lite.ops.reference.pointwise import swiglu
from megatron_lite.parallel.context import Axis, ParallelContext
from megatron_lite.parallel.embedding import VocabParallelEmbedding
from megatron_lite.parallel.grid import kv_replicas
from megatron_lite.parallel.linear import ColumnParallelLinear, Part, RowParallelLinear
from megatron_lite.parallel.shard import Piece
from tests.helpers.ranks import run_ranks

T, D = 12, 10
TOLERANCE = {"rtol": 1e-6, "atol": 2e-6}


def draw(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def region(piece: Piece) -> tuple[slice, ...]:
    return tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))


def place(module: nn.Module, wholes: dict[str, Tensor]) -> None:
    """Give a layer named "m.layer" its rectangles of the whole tensors; what no piece covers is zero."""
    for name, pieces in module.pieces("m.layer").items():
        flat = getattr(module, name).data.zero_().view(-1)
        for piece in pieces:
            flat[piece.offset : piece.offset + piece.numel] = wholes[piece.name][region(piece)].reshape(-1)


def check_gradients(module: nn.Module, dense: dict[str, Tensor], ctx: ParallelContext) -> None:
    """Each rectangle's gradient, summed over its copies where each has a share, is that of the dense tensor."""
    for name, pieces in module.pieces("m.layer").items():
        flat = getattr(module, name).grad.reshape(-1)
        for piece in pieces:
            mine = flat[piece.offset : piece.offset + piece.numel].clone()
            if piece.partial_grad:
                axis = ctx.tp if piece.copies == ctx.tp.size else ctx.kv
                assert axis.size == piece.copies
                dist.all_reduce(mine, group=axis.group)
            torch.testing.assert_close(mine.view(piece.shape), dense[piece.name].grad[region(piece)], **TOLERANCE)


def leaves(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    return {
        f"m.{name.replace('__', '.')}": draw(*shape, seed=i).requires_grad_()
        for i, (name, shape) in enumerate(shapes.items())
    }


def rows_of(x: Tensor, tp: Axis, sequence_parallel: bool) -> Tensor:
    """What a rank holds of [T, …] outside the parallel region."""
    return x.chunk(tp.size)[tp.rank] if sequence_parallel else x


def _column(ctx: ParallelContext, sequence_parallel: bool, bias: bool, kv_heads: int) -> None:
    tp, heads, head_dim = ctx.tp, 4, 3
    parts = {"q_proj": heads, "k_proj": kv_heads, "v_proj": kv_heads}
    kinds = {"weight": (D,)} | ({"bias": ()} if bias else {})
    dense = leaves(**{
        f"{part}__{kind}": (n * head_dim, *rest) for part, n in parts.items() for kind, rest in kinds.items()
    })  # fmt: skip
    layer = ColumnParallelLinear(
        D, tuple(Part(name, n * head_dim, n) for name, n in parts.items()), tp,
        bias=bias, sequence_parallel=sequence_parallel,
    )  # fmt: skip
    place(layer, dense)
    x = draw(T, D, seed=20).requires_grad_()
    mine = rows_of(x.detach(), tp, sequence_parallel).clone().requires_grad_()
    outputs = layer(mine).split(layer.widths, -1)
    loss = torch.zeros(())
    for i, (part, y, s) in enumerate(zip(parts, outputs, layer.slices, strict=True)):
        expected = F.linear(x, dense[f"m.{part}.weight"], dense.get(f"m.{part}.bias"))
        dy = draw(*expected.shape, seed=30 + i)
        expected.backward(dy, retain_graph=True)
        span = slice(s.start, s.start + s.rows)
        torch.testing.assert_close(y, expected[:, span], **TOLERANCE)
        share = (s.copy + 1) / (s.copies * (s.copies + 1) / 2)  # copies of a head meet different queries
        loss = loss + (y * dy[:, span] * share).sum()
    loss.backward()
    torch.testing.assert_close(mine.grad, rows_of(x.grad, tp, sequence_parallel), rtol=1e-6, atol=1e-5)
    check_gradients(layer, dense, ctx)


@pytest.mark.req("E02")
@pytest.mark.parametrize("tp, kv_heads", [(1, 2), (2, 2), (4, 2), (4, 1)])
def test_a_merged_column_parallel_layer_equals_dense_ones(tp, kv_heads):
    replicas = kv_replicas(kv_heads, tp)
    run_ranks(_column_modes, tp, kv_heads, tp=tp, kv_replicas=replicas)


def _column_modes(ctx: ParallelContext, kv_heads: int) -> None:
    for sequence_parallel in (False, True):
        for bias in (False, True):
            _column(ctx, sequence_parallel, bias, kv_heads)


def _row(ctx: ParallelContext, sequence_parallel: bool, bias: bool) -> None:
    tp, d_in = ctx.tp, 20
    dense = leaves(layer__weight=(D, d_in), **({"layer__bias": (D,)} if bias else {}))
    layer = RowParallelLinear(d_in, D, tp, bias=bias, sequence_parallel=sequence_parallel)
    place(layer, dense)
    x, dy = draw(T, d_in, seed=20).requires_grad_(), draw(T, D, seed=21)
    expected = F.linear(x, dense["m.layer.weight"], dense.get("m.layer.bias"))
    expected.backward(dy)
    mine = x.detach().chunk(tp.size, 1)[tp.rank].clone().requires_grad_()
    y = layer(mine)
    torch.testing.assert_close(y, rows_of(expected, tp, sequence_parallel), rtol=1e-6, atol=5e-6)
    y.backward(rows_of(dy, tp, sequence_parallel))
    torch.testing.assert_close(mine.grad, x.grad.chunk(tp.size, 1)[tp.rank], **TOLERANCE)
    check_gradients(layer, dense, ctx)
    if bias:
        with torch.no_grad():
            layer.weight.zero_()
            assert torch.equal(layer(mine), layer.bias.expand(y.shape))  # once, not once per rank


def _row_modes(ctx: ParallelContext) -> None:
    for sequence_parallel in (False, True):
        for bias in (False, True):
            _row(ctx, sequence_parallel, bias)


@pytest.mark.req("E01", "E02")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_row_parallel_layer_equals_a_dense_one_and_adds_its_bias_once(tp):
    run_ranks(_row_modes, tp, tp=tp)


def _feed_forward(ctx: ParallelContext) -> None:
    tp, ffn = ctx.tp, 28
    wholes = {"m.gate_proj.weight": draw(ffn, D, seed=1), "m.up_proj.weight": draw(ffn, D, seed=2),
              "m.layer.weight": draw(D, ffn, seed=3)}  # fmt: skip
    x, dy = draw(T, D, seed=4), draw(T, D, seed=5)
    for sequence_parallel in (False, True):
        dense = {name: whole.clone().requires_grad_() for name, whole in wholes.items()}
        whole_x = x.clone().requires_grad_()
        hidden = F.silu(F.linear(whole_x, dense["m.gate_proj.weight"])) * F.linear(whole_x, dense["m.up_proj.weight"])
        expected = F.linear(hidden, dense["m.layer.weight"])
        expected.backward(dy)
        up = ColumnParallelLinear(
            D, (Part("gate_proj", ffn), Part("up_proj", ffn)), tp, sequence_parallel=sequence_parallel
        )
        down = RowParallelLinear(ffn, D, tp, sequence_parallel=sequence_parallel)
        place(up, dense)
        place(down, dense)
        mine = rows_of(x, tp, sequence_parallel).clone().requires_grad_()
        y = down(swiglu(up(mine)))
        torch.testing.assert_close(y, rows_of(expected, tp, sequence_parallel), rtol=1e-5, atol=2e-5)
        y.backward(rows_of(dy, tp, sequence_parallel))
        torch.testing.assert_close(mine.grad, rows_of(whole_x.grad, tp, sequence_parallel), rtol=1e-5, atol=1e-4)
        for layer in (up, down):
            for name, pieces in layer.pieces("m.layer").items():
                for piece in pieces:
                    flat = getattr(layer, name).grad.reshape(-1)[piece.offset : piece.offset + piece.numel]
                    whole = dense[piece.name].grad[region(piece)]
                    torch.testing.assert_close(flat.view(piece.shape), whole, rtol=1e-5, atol=1e-4)


@pytest.mark.req("E06")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_gate_and_up_are_each_divided_by_themselves(tp):
    run_ranks(_feed_forward, tp, tp=tp)


def _embedding(ctx: ParallelContext, vocab_size: int) -> None:
    tp = ctx.tp
    padded = -(-vocab_size // (8 * tp.size)) * 8 * tp.size
    dense = leaves(layer__weight=(vocab_size, D))
    ids = torch.randint(0, vocab_size, (T,), generator=torch.Generator().manual_seed(3))
    ids[0], ids[5], ids[6] = vocab_size - 1, 0, 0
    dy = draw(T, D, seed=4)
    F.embedding(ids, dense["m.layer.weight"]).backward(dy)
    for sequence_parallel in (False, True):
        layer = VocabParallelEmbedding(vocab_size, padded, D, tp, sequence_parallel=sequence_parallel)
        place(layer, dense)
        x = layer(ids)
        assert torch.equal(x, rows_of(dense["m.layer.weight"][ids], tp, sequence_parallel))
        x.backward(rows_of(dy, tp, sequence_parallel))
        check_gradients(layer, dense, ctx)
        assert layer.weight.grad[layer.real :].eq(0).all()


def _embeddings(ctx: ParallelContext) -> None:
    _embedding(ctx, 101)
    _embedding(ctx, 5)  # at tp 2 and more, some ranks hold padding only


@pytest.mark.req("E02", "E11")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_a_padded_vocabulary_divided_over_ranks_embeds_as_a_whole_one(tp):
    run_ranks(_embeddings, tp, tp=tp)


@pytest.mark.req("E07")
def test_what_does_not_divide_is_refused_with_the_numbers():
    two, four = Axis("tp", 0, 2, (0, 1)), Axis("tp", 0, 4, (0, 1, 2, 3))
    with pytest.raises(ConfigError, match="127 features of gate_proj are not divisible by tp=2"):
        ColumnParallelLinear(8, (Part("gate_proj", 127), Part("up_proj", 127)), two)
    with pytest.raises(ConfigError, match="127 input features are not divisible by tp=2"):
        RowParallelLinear(127, 8, two)
    with pytest.raises(ConfigError, match="3 heads of q_proj are not divisible by tp=2"):
        ColumnParallelLinear(8, (Part("q_proj", 24, 3),), two)
    with pytest.raises(ConfigError, match="tp=4 is not a multiple of the 3 heads of k_proj"):
        ColumnParallelLinear(8, (Part("k_proj", 24, 3),), four)
