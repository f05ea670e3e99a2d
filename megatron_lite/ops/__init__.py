"""Local tensor maths: plain torch truths, vendor kernels, and one table (select.py) that chooses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from megatron_lite.ops.documents import Documents, Segments


@dataclass(frozen=True)
class CrossEntropy:
    """The two local halves of a cross-entropy whose vocabulary may be divided over ranks.

    stats(logits [C, v] fp32, labels [C], -1 where the label is not among these v)
        -> (largest logit [C], sum of exp(logit - largest) [C], logit of the label or 0 [C]); -inf logits add nothing;
        the logits' memory holds exp(logit - largest) afterwards
    grad(exps [C, v] as stats left them, scale [C], labels [C]) -> exps * scale - onehot(labels) in the same memory;
        with scale = exp(largest - lse over all ranks), 0 where a label is ignored, the gradient of the logits
    """

    stats: Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
    grad: Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class AttentionParts:
    """Attention of some queries to some keys, to be merged with what the same queries make of other keys.

    forward(q [Tq, n, H], k [Tk, g, H], v [Tk, g, H], segments, scale) -> (out [Tq, n, H] in q's type, lse [Tq, n] fp32)
        lse is the log of the sum of the exponentials that out was divided by
    backward(grad [Tq, n, H], q, k, v, out, lse, segments, scale) -> (dq, dk, dv), in fp32 or the type of q;
        out and lse are those over all keys a query sees, of which k are some
    """

    forward: Callable[[Tensor, Tensor, Tensor, Segments, float], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True)
class Ops:
    """Every kernel a model or the optimizer calls. Backends of one op agree on shapes, dtypes and gradients.

    attention(q [T, n, H], k [T, g, H], v [T, g, H], doc, scale) -> [T, n, H]; causal, inside each segment of doc;
        query head i reads kv head i // (n / g); softmax in fp32
    attention_parts: the same kernel on some of the keys, or None if it does not tell its log-sum-exp
    rms_norm(x [..., D], weight [D], eps) -> x / sqrt(mean(x^2) + eps) * weight; computed in fp32
    layer_norm(x [..., D], weight [D], bias [D], eps); computed in fp32
    rope(x [T, n, H], cos [T, r], sin [T, r]) -> x with its first 2r dims rotated, dim i paired with dim i + r
    swiglu(gate_up [T, 2f]) -> silu(gate) * up  [T, f]
    adamw(master, grad, exp_avg, exp_avg_sq: flat fp32; step, lr, betas, eps, weight_decay) updates in place
    """

    attention: Callable[[Tensor, Tensor, Tensor, Documents, float], Tensor]
    attention_parts: AttentionParts | None
    rms_norm: Callable[[Tensor, Tensor, float], Tensor]
    layer_norm: Callable[[Tensor, Tensor, Tensor, float], Tensor]
    rope: Callable[[Tensor, Tensor, Tensor], Tensor]
    swiglu: Callable[[Tensor], Tensor]
    cross_entropy: CrossEntropy
    adamw: Callable[..., None]
