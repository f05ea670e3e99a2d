"""AdamW on one flat slice: by the formula, and by torch's fused kernel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim.adamw import adamw as _torch_adamw


def formula(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *,
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """With m = b1 m + (1-b1) g and v = b2 v + (1-b2) g^2: w = w (1 - lr wd) - lr m' / (sqrt(v') + eps), where
    m' = m / (1-b1^step) and v' = v / (1-b2^step)."""
    exp_avg.lerp_(grad, 1 - betas[0])
    exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    master.mul_(1 - lr * weight_decay)
    denominator = (exp_avg_sq / (1 - betas[1] ** step)).sqrt_().add_(eps)
    master.addcdiv_(exp_avg, denominator, value=-lr / (1 - betas[0] ** step))


def fused(
    master: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, *,
    step: int, lr: float, betas: tuple[float, float], eps: float, weight_decay: float,
) -> None:  # fmt: skip
    """The same in one pass over memory; the kernel counts steps itself, from step - 1."""
    steps = torch.tensor(float(step - 1), device=master.device)
    _torch_adamw(
        [master], [grad], [exp_avg], [exp_avg_sq], [], [steps], fused=True, amsgrad=False, maximize=False,
        lr=lr, beta1=betas[0], beta2=betas[1], eps=eps, weight_decay=weight_decay,
    )  # fmt: skip
