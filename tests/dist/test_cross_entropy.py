"""Head and loss in one, against F.cross_entropy of whole logits: values, gradients, precision and memory."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_lite.ops.select import default_ops
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ParallelContext, single_process
from megatron_lite.parallel.cross_entropy import linear_cross_entropy, logits
from megatron_lite.parallel.embedding import VocabRows
from tests.helpers.ranks import run_ranks

T, D, VOCAB = 63, 20, 101


def head_of(ctx: ParallelContext, weight: Tensor, multiple: int = 8) -> VocabRows:
    """This rank's rows of `weight`, padded rows full of what must not be seen."""
    vocab, d_model = weight.shape
    padded = -(-vocab // (multiple * ctx.tp.size)) * multiple * ctx.tp.size
    head = VocabRows(vocab, padded, d_model, ctx.tp).to(weight.dtype)
    head.weight.data.fill_(1e3)
    head.weight.data[: head.real] = weight[head.start : head.start + head.real]
    return head


def problem(vocab: int = VOCAB, ignored: float = 0.4) -> tuple[Tensor, Tensor, Tensor]:
    """x [T, D], W [vocab, D], labels [T] of which a share is ignored."""
    stream = torch.Generator().manual_seed(0)
    x, weight = torch.randn(T, D, generator=stream), torch.randn(vocab, D, generator=stream)
    labels = torch.randint(0, vocab, (T,), generator=stream)
    labels[torch.rand(T, generator=stream) < ignored] = -100
    return x, weight, labels


def plain(x: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Mean loss, dX, dW of the whole logits."""
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(x @ weight.t(), labels)
    return loss.detach(), *torch.autograd.grad(loss, (x, weight))


def ours(ctx: ParallelContext, x: Tensor, weight: Tensor, labels: Tensor, chunk: int) -> tuple[Tensor, Tensor, Tensor]:
    """The same with `chunk` tokens at a time; dW are this rank's rows that exist."""
    head, x = head_of(ctx, weight), x.clone().requires_grad_()
    total = linear_cross_entropy(comm.enter_region(x, ctx.tp), head, labels, default_ops(), chunk=chunk)
    loss = total / max(int((labels >= 0).sum()), 1)
    dx, dw = torch.autograd.grad(loss, (x, head.weight))
    assert dw[head.real :].eq(0).all()  # padding learns nothing
    return loss.detach(), dx, dw[: head.real]


def _compare(ctx: ParallelContext) -> None:
    for vocab in (VOCAB, 5):  # with 5 some ranks hold padding only
        x, weight, labels = problem(vocab)
        loss, dx, dw = plain(x, weight, labels)
        for chunk in (1, 8, 37, T, 1000):
            got, got_dx, got_dw = ours(ctx, x, weight, labels, chunk)
            assert abs(got / loss - 1) <= 1e-6, (got, loss)
            assert (got_dx - dx).abs().max() <= 1e-6
            rows = head_of(ctx, weight)
            torch.testing.assert_close(got_dw, dw[rows.start : rows.start + rows.real], rtol=0, atol=1e-6)


@pytest.mark.req("I07", "I08", "E11")
@pytest.mark.parametrize("tp", [1, 2, 4])
def test_loss_and_gradients_equal_those_of_whole_logits(tp):
    run_ranks(_compare, tp, tp=tp)


def _gathered(ctx: ParallelContext) -> None:
    """Under sequence parallelism the gradient of a rank's own tokens is summed by the gather."""
    x, weight, labels = problem()
    x, labels = x[:60], labels[:60]
    loss, dx, _ = plain(x, weight, labels)
    mine = x.chunk(ctx.tp.size)[ctx.tp.rank].clone().requires_grad_()
    total = linear_cross_entropy(comm.gather_rows(mine, ctx.tp), head_of(ctx, weight), labels, default_ops())
    (total / (labels >= 0).sum()).backward()
    torch.testing.assert_close(total.detach(), loss * (labels >= 0).sum(), rtol=1e-6, atol=0)
    torch.testing.assert_close(mine.grad, dx.chunk(ctx.tp.size)[ctx.tp.rank], rtol=0, atol=1e-6)


@pytest.mark.req("E02")
@pytest.mark.parametrize("tp", [2, 4])
def test_tokens_gathered_from_the_ranks_get_whole_gradients(tp):
    run_ranks(_gathered, tp, tp=tp)


def _whole_logits(ctx: ParallelContext) -> None:
    x, weight, _ = problem()
    found = logits(x, head_of(ctx, weight))
    assert found.shape == (T, VOCAB)
    torch.testing.assert_close(found, x @ weight.t())


@pytest.mark.parametrize("tp", [1, 2, 4])
def test_whole_logits_leave_the_padding_out(tp):
    run_ranks(_whole_logits, tp, tp=tp)


def test_a_case_worked_by_hand():
    x, weight = torch.tensor([[1.0, 0], [0, 1], [1, 1]]), torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 0]])
    loss, dx, dw = ours(single_process(), x, weight, torch.tensor([2, -100, 0]), chunk=2)
    assert loss.item() == pytest.approx(1.2486500094, abs=1e-7)
    expected_dx = [[-0.1275459914, -0.2267754484], [0, 0], [-0.1308993414, 0.3830423520]]
    expected_dw = [[-0.1972408931, -0.3969840454], [0.1764973539, 0.1030159546], [-0.0202304503, 0.2800263974],
                   [0.0409739895, 0.0139416934]]  # fmt: skip
    torch.testing.assert_close(dx, torch.tensor(expected_dx), rtol=0, atol=1e-7)
    torch.testing.assert_close(dw, torch.tensor(expected_dw), rtol=0, atol=1e-7)


def _all_ignored(ctx: ParallelContext) -> None:
    x, weight, labels = problem()
    loss, dx, dw = ours(ctx, x, weight, torch.full_like(labels, -100), 8)
    assert loss == 0 and dx.eq(0).all() and dw.eq(0).all()


@pytest.mark.req("I05", "I07")
@pytest.mark.parametrize("tp", [1, 2])
def test_nothing_to_predict_is_zero_loss_and_zero_gradients(tp):
    run_ranks(_all_ignored, tp, tp=tp)


def test_logits_of_a_thousand_do_not_overflow():
    x, weight, labels = problem()
    loss, dx, dw = ours(single_process(), x * 300, weight, labels, 8)
    expected, expected_dx, _ = plain(x * 300, weight, labels)
    assert torch.isfinite(dx).all() and torch.isfinite(dw).all()
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(dx, expected_dx, rtol=0, atol=1e-6)


def test_without_gradients_nothing_is_kept_and_the_loss_is_the_same():
    x, weight, labels = problem()
    head = head_of(single_process(), weight)
    with torch.no_grad():
        total = linear_cross_entropy(x, head, labels, default_ops())
    assert not total.requires_grad
    assert torch.equal(total, linear_cross_entropy(x, head, labels, default_ops()).detach())


@pytest.mark.req("I09")
@pytest.mark.parametrize("chunks", [1, 16])
def test_bf16_weight_gradients_are_accumulated_in_fp32(chunks):
    stream = torch.Generator().manual_seed(1)
    x = torch.randn(512, 64, generator=stream)
    weight, labels = torch.randn(300, 64, generator=stream) * 0.3, torch.randint(0, 300, (512,), generator=stream)
    half_x, half_weight = x.bfloat16(), weight.bfloat16()
    _, _, truth = plain(half_x.float(), half_weight.float(), labels)
    _, _, dw = ours(single_process(), half_x, half_weight, labels, 512 // chunks)
    assert (dw.float() - truth).norm() / truth.norm() < 1e-2


PEAK = """
import resource, sys, torch
import torch.nn.functional as F
from megatron_lite.ops.select import default_ops
from megatron_lite.parallel.context import single_process
from megatron_lite.parallel.cross_entropy import linear_cross_entropy
from megatron_lite.parallel.embedding import VocabRows

tokens, vocab, d_model = 2048, 151_936, 8
head = VocabRows(vocab, vocab, d_model, single_process().tp)
torch.nn.init.normal_(head.weight)
x = torch.randn(tokens, d_model, requires_grad=True)
labels = torch.randint(0, vocab, (tokens,))
linear_cross_entropy(x[:3], head, labels[:3], default_ops()).backward()  # what the libraries need at all
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
if sys.argv[1] == "plain":
    F.cross_entropy(x @ head.weight.t(), labels).backward()
else:
    (linear_cross_entropy(x, head, labels, default_ops(), chunk=256) / tokens).backward()
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.req("I10")
def test_peak_memory_is_under_a_third_of_the_plain_way():
    # KiB by which the peaks of two fresh processes, side by side, rise
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PEAK, way], stdout=subprocess.PIPE, text=True,
            cwd=Path(__file__).parents[2], env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for way in ("plain", "chunked")
    ]  # fmt: skip
    whole, chunked = (int(process.communicate(timeout=120)[0]) for process in processes)
    assert whole > 2048 * 151_936 * 4 / 1024  # the plain way does hold the logits
    assert chunked < whole / 3, (chunked, whole)
