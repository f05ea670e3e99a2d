"""The local halves of a cross-entropy over this rank's part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def stats(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exp(logit - largest), and the label's logit (0 where labels is -1); each [C], fp32.

    A rank that holds only padding has no finite logit: it reports the smallest finite number and a sum of 0.
    """
    top = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    exps = (logits - top[:, None]).exp_().sum(-1)
    target = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    return top, exps, torch.where(labels >= 0, target, 0.0)


def grad(logits: Tensor, lse: Tensor, labels: Tensor, valid: Tensor) -> Tensor:
    """softmax - onehot in the logits' own memory, zero rows where not valid."""
    dz = logits.sub_(lse[:, None]).exp_()
    here = labels >= 0
    dz.scatter_add_(-1, labels.clamp(min=0)[:, None], -here.to(dz.dtype)[:, None])
    return dz.mul_(valid[:, None])
