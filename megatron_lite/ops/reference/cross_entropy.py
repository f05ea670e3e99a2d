"""The local halves of a cross-entropy over this rank's part of the vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor


def stats(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Largest logit, sum of exp(logit - largest), and the label's logit (0 where labels is -1); each [C], fp32.

    Leaves exp(logit - largest) in the logits' memory. A rank that holds only padding has no finite logit: it reports
    the smallest finite number and a sum of 0.
    """
    top = logits.amax(-1).clamp(min=torch.finfo(logits.dtype).min)
    target = logits.gather(-1, labels.clamp(min=0)[:, None])[:, 0]
    exps = logits.sub_(top[:, None]).exp_().sum(-1)
    return top, exps, torch.where(labels >= 0, target, 0.0)


def grad(exps: Tensor, scale: Tensor, labels: Tensor) -> Tensor:
    """exps * scale - onehot, in the memory of exps."""
    dz = exps.mul_(scale[:, None])
    here = labels >= 0
    return dz.scatter_add_(-1, labels.clamp(min=0)[:, None], -here.to(dz.dtype)[:, None])
