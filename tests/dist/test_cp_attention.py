"""Attention over context-parallel ranks equals attention on one: outputs and gradients, in every method."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_lite.errors import ConfigError
from megatron_lite.ops import AttentionParts, select, stand_in
from megatron_lite.ops.documents import Documents
from megatron_lite.ops.reference import attention
from megatron_lite.parallel import cp_attention
from megatron_lite.parallel.context import Axis, ParallelContext
from megatron_lite.parallel.cp_attention import attention_over
from megatron_lite.parallel.cp_heads import to_heads, to_tokens
from megatron_lite.parallel.cp_split import positions
from megatron_lite.parallel.recompute import policy
from tests.helpers.ranks import run_ranks

METHODS = ["gather", "ring", "heads"]
SCALE = 0.3


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def documents(rows: tuple[tuple[int, ...], ...]) -> Documents:
    """The documents of each row; one row-long document in each: as rows that are not masked apart."""
    lengths = tuple(n for row in rows for n in row)
    borders = torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32)
    whole = rows[0][0] if all(row == rows[0][:1] for row in rows) else None
    places = torch.cat([torch.arange(n) for n in lengths])
    return Documents(borders, lengths, max(lengths), places, whole, None if whole else len(rows))


def ours(x: Tensor, doc: Documents, cp: Axis) -> Tensor:
    """This rank's tokens of [T, …]."""
    return x[torch.from_numpy(positions(doc.num_rows, len(x) // doc.num_rows, cp.size, cp.rank))]


def inputs(tokens: int, heads: int, kv_heads: int, head_dim: int) -> list[Tensor]:
    """q, k, v and the gradient of the output."""
    return [draw(tokens, n, head_dim, seed=i) for i, n in enumerate((heads, kv_heads, kv_heads, heads))]


def _equals(ctx: ParallelContext, cases: list[tuple[Any, ...]], kernel: str, tolerance: float) -> None:
    ops = select.build(select.resolve({"attention": kernel}, "cpu", "fp32"))
    for method, rows, heads, kv_heads, head_dim in cases:
        doc = documents(rows)
        *qkv, grad = inputs(sum(doc.lengths), heads, kv_heads, head_dim)
        whole = [x.clone().requires_grad_() for x in qkv]
        expected = attention.naive(*whole, doc, SCALE)
        expected.backward(grad)
        mine = [ours(x, doc, ctx.cp).requires_grad_() for x in qkv]
        local = replace(doc, position_ids=ours(doc.position_ids, doc, ctx.cp))
        out = attention_over(ctx.cp, ops, method)(*mine, local, SCALE)
        out.backward(ours(grad, doc, ctx.cp))
        name = f"{method} {rows}"
        for got, want, what in (
            (out, expected, "out"), *((m.grad, w.grad, n) for m, w, n in zip(mine, whole, "qkv", strict=True))
        ):  # fmt: skip
            torch.testing.assert_close(
                got, ours(want.detach(), doc, ctx.cp), rtol=tolerance, atol=2 * tolerance,
                msg=lambda text, name=name, what=what: f"{name} {what}: {text}",
            )  # fmt: skip


ROWS = {
    2: [
        ((12,),),  # one document, chunks of 3
        ((1, 2, 2, 1, 4, 2),),  # shorter than a chunk
        ((5, 7),),  # over the borders of chunks and ranks
        ((4, 3, 13), (20,)),  # rows of their own documents, chunks of 5
        ((12,), (12,)),
        ((2,) * 6, (11, 1)),
    ],
    4: [
        ((24,),),
        ((1, 2, 2, 1, 4, 2, 3, 3, 5, 1),),
        ((11, 13),),
        ((7, 3, 30), (40,)),
        ((24,), (24,)),
        ((23, 1), (3,) * 8),
    ],
}


@pytest.mark.req("J01", "J03")
@pytest.mark.parametrize("cp", [2, 4])
@pytest.mark.parametrize("kernel", ["blocked", "naive"])
def test_context_parallel_attention_equals_that_of_one_process(cp, kernel):
    cases = [(m, rows, 8, 4, 5) for m in METHODS for rows in ROWS[cp]]
    run_ranks(_equals, cp, cases, kernel, 1e-6, cp=cp)


@pytest.mark.parametrize("cp", [2, 4])
def test_query_heads_may_share_few_or_many_kv_heads(cp):
    cases = [(m, ROWS[cp][3], 8, kv_heads, 7) for m in METHODS for kv_heads in (1, 2, 8)]
    run_ranks(_equals, cp, cases, "blocked", 1e-6, cp=cp)


@pytest.mark.parametrize("method", ["gather", "ring"])
def test_heads_need_not_divide_where_tokens_are_shared(method):
    run_ranks(_equals, 2, [(method, ((3, 9),), 3, 3, 5), (method, ((3, 9),), 9, 3, 5)], "blocked", 1e-6, cp=2)


def test_heads_work_with_any_kernel():
    run_ranks(_equals, 2, [("heads", rows, 6, 2, 5) for rows in ROWS[2]], "sdpa", 1e-6, cp=2)


def test_blocks_of_many_queries():
    rows = ((300, 20, 180), (500,))
    run_ranks(_equals, 2, [(m, rows, 4, 2, 6) for m in METHODS], "blocked", 2e-6, cp=2)


def test_one_rank_is_the_kernel_itself():
    ops = select.default_ops()
    assert all(attention_over(Axis("cp"), ops, m) is ops.attention for m in (*METHODS, "auto"))


def _moves(ctx: ParallelContext) -> None:
    x = draw(48, 8, 3).requires_grad_()
    doc = documents(((5, 19), (24,)))
    mine = ours(x, doc, ctx.cp)
    heads = to_heads(mine, ctx.cp, 2)
    n = 8 // ctx.cp.size
    assert torch.equal(heads, x[:, ctx.cp.rank * n : (ctx.cp.rank + 1) * n])
    back = to_tokens(heads, ctx.cp, 2)
    assert torch.equal(back, mine)
    (grad,) = torch.autograd.grad(back, x, mine.detach())
    assert torch.equal(ours(grad, doc, ctx.cp), mine)


@pytest.mark.parametrize("cp", [1, 2, 4])
def test_heads_for_tokens_and_back_is_the_identity(cp):
    run_ranks(_moves, cp, cp=cp)


# ---- documents


def _change(ctx: ParallelContext, method: str) -> None:
    doc = documents(((7, 17),))
    q, k, v, _ = inputs(24, 4, 4, 5)
    attend = attention_over(ctx.cp, select.default_ops(), method)
    outs = []
    for change in (0.0, 1.0):
        k_changed, v_changed = k.clone(), v.clone()
        k_changed[4] += change
        v_changed[4] += change
        outs.append(attend(*(ours(x, doc, ctx.cp) for x in (q, k_changed, v_changed)), doc, SCALE))
    places = ours(torch.arange(24), doc, ctx.cp)
    same = (outs[0] == outs[1]).flatten(1).all(1)
    assert same.tolist() == [not 4 <= place < 7 for place in places.tolist()]


@pytest.mark.req("J01")
@pytest.mark.parametrize("method", METHODS)
def test_a_changed_token_changes_what_follows_in_its_document_and_nothing_else(method):
    run_ranks(_change, 4, method, cp=4)


# ---- what is sent and what is held


def _watched(ctx: ParallelContext, method: str) -> tuple[Counter[str], int]:
    """Collectives by name in one forward and backward, and bytes sent in messages."""
    doc = documents(((24,),))
    *qkv, grad = (ours(x, doc, ctx.cp) for x in inputs(24, 8, 4, 5))
    mine = [x.requires_grad_() for x in qkv]
    calls: Counter[str] = Counter()
    sent = 0

    def watch(name: str) -> Any:
        real = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal sent
            calls[name] += 1
            if name == "batch_isend_irecv":
                sent += sum(op.tensor.nbytes for op in args[0] if op.op is dist.isend)
            return real(*args, **kwargs)

        return mock.patch.object(dist, name, call)

    names = ["all_reduce", "all_gather_single", "reduce_scatter_single", "all_to_all_single", "batch_isend_irecv",
             "broadcast", "all_gather", "reduce", "barrier"]  # fmt: skip
    patches = [watch(name) for name in names]
    for patch in patches:
        patch.start()
    attention_over(ctx.cp, select.default_ops(), method)(*mine, doc, SCALE).backward(grad)
    for patch in patches:
        patch.stop()
    return calls, sent


def test_each_method_calls_its_own_collectives_and_no_other():
    for cp in (2, 4):
        hops, block = cp - 1, 24 // cp * 2 * 4 * 5 * 4
        wanted = {
            "gather": (Counter(all_gather_single=1, reduce_scatter_single=1), 0),
            "ring": (Counter(batch_isend_irecv=3 * hops), 3 * hops * block),
            "heads": (Counter(all_to_all_single=4), 0),
        }
        for method in METHODS:
            assert run_ranks(_watched, cp, method, cp=cp) == [wanted[method]] * cp


def _held(ctx: ParallelContext) -> list[tuple[int, int]]:
    """The most blocks of keys and values (bf16), and of their gradients (fp32), alive together in each direction."""
    doc = documents(((48,),))
    *qkv, grad = (ours(x.bfloat16(), doc, ctx.cp) for x in inputs(48, 6, 2, 5))
    mine = [x.requires_grad_() for x in qkv]
    silent = AttentionParts(
        lambda q, k, v, segments, scale: (torch.zeros_like(q), q.new_zeros(q.shape[:2], dtype=torch.float32)),
        lambda grad, q, k, v, out, lse, segments, scale: tuple(torch.zeros_like(x) for x in (q, k, v)),
    )
    attend = attention_over(ctx.cp, replace(select.default_ops(), attention_parts=silent), "ring")
    numbers = 48 // ctx.cp.size * 2 * 2 * 5
    found = []
    with LiveStorages(2 * numbers) as blocks, LiveStorages(4 * numbers) as gradients:
        out = attend(*mine, doc, SCALE)
        found.append((blocks.most, gradients.most))
        out.backward(grad)
        found.append((blocks.most, gradients.most))
    return found


class LiveStorages(TorchDispatchMode):
    """Counts storages of `size` bytes that are alive together."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.most = size, 0
        self.alive: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for made in (*args, *(out if isinstance(out, tuple | list) else (out,))):
            if isinstance(made, Tensor) and made.untyped_storage().nbytes() == self.size:
                storage = made.untyped_storage()
                address = storage._cdata
                if address not in self.alive:
                    self.alive[address] = weakref.ref(storage, lambda _, address=address: self.alive.pop(address, None))
        self.most = max(self.most, len(self.alive))
        return out


def test_the_ring_holds_two_blocks_at_a_time():
    # gradients: of its own block, of the one at hand, and those that come and go
    assert run_ranks(_held, 4, cp=4) == [[(2, 0), (2, 4)]] * 4


def _order(ctx: ParallelContext) -> list[str]:
    """What a forward does, in order."""
    events = []
    kernel = select.default_ops().attention_parts
    assert kernel is not None

    def attend(*args: Any) -> tuple[Tensor, Tensor]:
        events.append("kernel")
        return kernel.forward(*args)

    class Hop(cp_attention._Hop):
        def __init__(self, *args: Any):
            events.append("begin")
            super().__init__(*args)

        def arrived(self) -> Tensor:
            events.append("wait")
            return super().arrived()

    ops = replace(select.default_ops(), attention_parts=AttentionParts(attend, kernel.backward))
    doc = documents(((48,),))
    with mock.patch.object(cp_attention, "_Hop", Hop):
        attention_over(ctx.cp, ops, "ring")(*(ours(x, doc, ctx.cp) for x in inputs(48, 2, 2, 4)[:3]), doc, SCALE)
    return events


def test_a_block_is_on_its_way_while_the_one_before_is_computed():
    assert run_ranks(_order, 4, cp=4) == [["begin", "kernel", "wait"] * 3 + ["kernel"]] * 4


def _again(ctx: ParallelContext, method: str) -> None:
    """The core computed again in the backward gives the same bits."""
    doc = documents(((5, 19), (24,)))
    *qkv, grad = (ours(x, doc, ctx.cp) for x in inputs(48, 8, 4, 5))
    attend = attention_over(ctx.cp, select.default_ops(), method)
    found = []
    for wrap in policy("selective"):
        mine = [x.clone().requires_grad_() for x in qkv]
        out = wrap(attend, *mine, doc, SCALE)
        found.append((out, *torch.autograd.grad(out, mine, grad)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("method", METHODS)
def test_recomputation_repeats_the_bits(method):
    run_ranks(_again, 2, method, cp=2)


@pytest.mark.parametrize("method", METHODS)
def test_a_rank_can_be_rehearsed_alone_on_tensors_without_numbers(method):
    ops = replace(select.default_ops(), attention=stand_in.flash_attention, attention_parts=stand_in.flash_parts())
    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    try:
        cp = Axis("cp", 1, 4, (4, 5, 6, 7), dist.new_group([4, 5, 6, 7]))
        with FakeTensorMode():
            doc = documents(((9, 39), (48,)))
            mine = [torch.empty(24, n, 8, dtype=torch.bfloat16, requires_grad=True) for n in (8, 4, 4)]
            out = attention_over(cp, ops, method)(*mine, doc, SCALE)
            assert out.shape == (24, 8, 8)
            assert [x.shape for x in torch.autograd.grad(out.sum(), mine)] == [x.shape for x in mine]
    finally:
        dist.destroy_process_group()


# ---- choices


def test_a_kernel_without_log_sum_exp_is_refused_in_words():
    ops = select.build(select.resolve({"attention": "sdpa"}, "cpu", "fp32"))
    with pytest.raises(ConfigError, match=r"cp_attention='ring' .* kernels.attention .* blocked, naive .* 'heads'"):
        attention_over(Axis("cp", size=2), ops, "ring")


def test_documents_of_masked_rows_have_to_say_how_many_rows():
    doc = documents(((3, 9), (12,)))
    assert (doc.num_rows, documents(((12,), (12,))).num_rows) == (2, 2)
    with pytest.raises(AssertionError, match="in how many rows"):
        replace(doc, rows=None).num_rows  # noqa: B018


def _auto(ctx: ParallelContext, limit: int) -> Counter[str]:
    with mock.patch("megatron_lite.parallel.cp_split.GATHER_BYTES", limit):
        return _watched(ctx, "auto")[0]


def test_auto_gathers_below_a_size_and_goes_round_above():
    size = 24 * 2 * 4 * 5 * 4
    assert all("all_gather_single" in calls for calls in run_ranks(_auto, 2, size, cp=2))
    assert all(set(calls) == {"batch_isend_irecv"} for calls in run_ranks(_auto, 2, size - 1, cp=2))


def _half(ctx: ParallelContext, method: str) -> None:
    """bf16: no further from the truth than one process is."""
    doc = documents(((5, 43),))
    *qkv, grad = (x.bfloat16() for x in inputs(48, 4, 2, 8))
    exact = [x.double().requires_grad_() for x in qkv]
    k, v = (x.repeat_interleave(2, 1) for x in exact[1:])
    mask = torch.block_diag(*(torch.ones(n, n).tril() for n in doc.lengths)).bool()
    scores = (torch.einsum("qnh,knh->nqk", exact[0], k) * SCALE).masked_fill(~mask, -torch.inf)
    truth = torch.einsum("nqk,knh->qnh", scores.softmax(-1), v)
    truths = [truth, *torch.autograd.grad(truth, exact, grad.double())]
    alone = [x.clone().requires_grad_() for x in qkv]
    out = select.default_ops().attention(*alone, doc, SCALE)
    errors = [(a.double() - t).abs().max() for a, t in
              zip([out, *torch.autograd.grad(out, alone, grad)], truths, strict=True)]  # fmt: skip
    mine = [ours(x, doc, ctx.cp).requires_grad_() for x in qkv]
    out = attention_over(ctx.cp, select.default_ops(), method)(*mine, doc, SCALE)
    assert out.dtype == torch.bfloat16
    got = [out, *torch.autograd.grad(out, mine, ours(grad, doc, ctx.cp))]
    for x, want, error in zip(got, truths, errors, strict=True):
        assert (x.double() - ours(want, doc, ctx.cp)).abs().max() <= 2 * error + 1e-3 * want.abs().max()


@pytest.mark.parametrize("method", METHODS)
def test_bf16_is_as_close_to_the_truth_as_on_one_process(method):
    run_ranks(_half, 2, method, cp=2)
