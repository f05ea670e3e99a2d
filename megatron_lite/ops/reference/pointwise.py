"""Norms, rotation and activation in plain torch. Each saves only what its gradient needs and recomputes the rest.

The plain formula is in each docstring; tests compare values and gradients with it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x * rsqrt(mean(x^2) + eps) in fp32, cast to x's dtype, times weight. Saves x and one number per row."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.float()
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return (x32 * rstd).to(x.dtype) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        # with n = x rstd: dx = rstd (g w - n mean(g w n)), dw = sum over rows of g n
        x, weight, rstd = ctx.saved_tensors
        normed, grad32 = x.float() * rstd, grad.float()
        d_weight = (grad32 * normed.to(x.dtype)).flatten(0, -2).sum(0)
        d_normed = grad32 * weight
        dx = rstd * (d_normed - normed * (d_normed * normed).mean(-1, keepdim=True))
        return dx.to(x.dtype), d_weight.to(weight.dtype), None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """(x - mean) / sqrt(var + eps) * weight + bias over the last dim."""
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """y[i] = x[i] cos - x[i+r] sin,  y[i+r] = x[i+r] cos + x[i] sin,  i < r; dims from 2r on pass through.

    x [T, n, H]; cos, sin [T, r], which are what the gradient needs.
    """
    r = cos.shape[-1]
    first, second, rest = x[..., :r], x[..., r : 2 * r], x[..., 2 * r :]
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


def swiglu(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up = [gate | up]. Saves its input only."""
    return _SwiGLU.apply(gate_up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Tensor:
        ctx.save_for_backward(gate_up)
        gate, up = gate_up.chunk(2, -1)
        return F.silu(gate) * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (gate_up,) = ctx.saved_tensors
        gate, up = gate_up.chunk(2, -1)
        out = torch.empty_like(gate_up)
        d_gate, d_up = out.chunk(2, -1)
        torch.mul(grad, F.silu(gate), out=d_up)
        torch.ops.aten.silu_backward.grad_input(grad * up, gate, grad_input=d_gate)
        return out
