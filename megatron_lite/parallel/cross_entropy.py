"""Head and loss in one: cross-entropy over a vocabulary divided over tp, the [T, V] logits never whole.

Tokens go through in chunks sized by bytes. The forward computes each chunk's logits, its loss and at once its gradients
(the idea of fused linear cross-entropy; formulas in docs/design.md), so the backward only scales them:

  loss_t   = lse_t - z_t[label_t]             lse over all ranks' rows, rows beyond vocab_size excluded
  dz_t     = softmax(z_t) - onehot(label_t)   zero where the label is ignored
  dx_t     = dz_t W      dW = sum_t dz_t x_t^T   (accumulated in fp32)

Per chunk the ranks exchange three numbers per token: the largest logit, the sum of exponentials, the label's logit.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_lite.ops import Ops
from megatron_lite.parallel import comm
from megatron_lite.parallel.chunks import chunk_tokens
from megatron_lite.parallel.embedding import VocabRows


def linear_cross_entropy(x_TD: Tensor, head: VocabRows, labels_T: Tensor, ops: Ops, chunk: int | None = None,
                         losses_T: Tensor | None = None) -> Tensor:  # fmt: skip
    """Sum of the cross-entropies of all tokens whose label is not negative, fp32 scalar, equal on every tp rank.

    x_TD [T, D] is whole on each rank (gathered, or entered with comm.enter_region): its gradient here is this rank's
    share, which the conjugate of that collective sums. Divide by the valid tokens of the global batch for the mean.
    The head's gradient goes straight into head.sink where there is one. `chunk`: tokens at a time.
    `losses_T`: fp32 [T] that is told the cross-entropy of each token, 0 where ignored.
    """
    chunk = chunk or chunk_tokens(x_TD.shape[0], x_TD.shape[1], head.rows)
    needs_grad = torch.is_grad_enabled() and (x_TD.requires_grad or head.weight.requires_grad)
    return _LinearCrossEntropy.apply(x_TD, head.weight, labels_T, head, ops, chunk, needs_grad, losses_T)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, head: VocabRows, ops: Ops, chunk: int,
                needs_grad: bool, losses: Tensor | None) -> Tensor:  # fmt: skip
        total = x.new_zeros((), dtype=torch.float32)
        dx = torch.empty_like(x) if needs_grad else None
        dw = torch.zeros_like(weight, dtype=torch.float32) if needs_grad else None
        losses = torch.empty(len(x), dtype=torch.float32, device=x.device) if losses is None else losses
        for x_CD, labels_C, losses_C, dx_CD in zip(
            x.split(chunk),
            labels.split(chunk),
            losses.split(chunk),
            (x if dx is None else dx).split(chunk),
            strict=True,
        ):
            _chunk(x_CD, weight, labels_C, head, ops, losses_C, dx_CD, dw)
            total += losses_C.sum()
        if dx is not None and dw is not None:
            ctx.save_for_backward(dx, dw)
            ctx.sink = head.sink
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = ctx.saved_tensors
        if ctx.sink is not None:
            ctx.sink.addcmul_(dw, grad)
            dw = None
        else:
            dw = dw * grad
        return dx * grad, dw, None, None, None, None, None, None


def _chunk(x_CD: Tensor, weight: Tensor, labels_C: Tensor, head: VocabRows, ops: Ops, losses_C: Tensor, dx_CD: Tensor,
           dw: Tensor | None) -> None:  # fmt: skip
    """Write losses_C; with dw, write dx_CD and add to dw. The logits are gone before the next chunk has its own."""
    logits_Cv = (x_CD @ weight.t()).float()
    logits_Cv[:, head.real :] = -torch.inf
    valid_C = labels_C >= 0
    local_C = labels_C - head.start
    here_C = valid_C & (local_C >= 0) & (local_C < head.real)
    local_C = torch.where(here_C, local_C, -1)
    own_top_C, *sums = ops.cross_entropy.stats(logits_Cv, local_C)
    top, exps, target = comm.all_stack(torch.stack((own_top_C, *sums)), head.tp).unbind(1)
    top_C = top.amax(0)
    lse_C = top_C + (exps * (top - top_C).exp()).sum(0).log()
    torch.mul(lse_C - target.sum(0), valid_C, out=losses_C)
    if dw is None:
        return
    scale_C = (own_top_C - lse_C).exp() * valid_C
    dz_Cv = ops.cross_entropy.grad(logits_Cv, scale_C, local_C).to(x_CD.dtype)
    torch.mm(dz_Cv, weight, out=dx_CD)
    if dz_Cv.dtype == dw.dtype:
        dw.addmm_(dz_Cv.t(), x_CD)
    else:
        dw += dz_Cv.t() @ x_CD


def logits(x_TD: Tensor, head: VocabRows) -> Tensor:
    """Logits of every id of the vocabulary, [T, vocab_size] fp32 on each rank; for sampling and for comparisons."""
    local_Tv = (x_TD @ head.weight.t()).float()
    whole = comm.gather_rows(local_Tv.t().contiguous(), head.tp).t()
    return whole[:, : head.vocab_size]
