"""The learning rate of update i = 1 … N. Pure arithmetic.

  warm-up   i <= W : peak * i / W, so that the first update is never wasted on a rate of 0
  cosine    i >  W : final + (peak - final) / 2 * (1 + cos(pi * (i - W) / (N - W)))
  linear    i >  W : peak - (peak - final) * (i - W) / (N - W)
  wsd       peak until N - D, then linear to final over the last D updates
  constant  peak

Conventions that count updates from 0 and warm up from a rate of 0 give update i the value that stands here for i - 1.
"""

from __future__ import annotations

from math import cos, pi

from megatron_lite.config.schema import Schedule


def learning_rate(s: Schedule, step: int, num_steps: int) -> float:
    """Rate of update `step`, counted from 1, of a stage of `num_steps`, with lengths in steps (Stage.lr_in_steps)."""
    assert 1 <= step <= num_steps, f"update {step} of {num_steps}"
    assert s.warmup_tokens is None and s.decay_tokens is None
    warmup = s.warmup_steps or 0
    if step <= warmup:
        return s.peak * step / warmup
    if s.shape == "constant":
        return s.peak
    start = num_steps - (s.decay_steps or 0) if s.shape == "wsd" else warmup
    if step <= start:
        return s.peak
    progress = (step - start) / (num_steps - start)
    if s.shape == "cosine":
        return s.final + (s.peak - s.final) / 2 * (1 + cos(pi * progress))
    return s.peak - (s.peak - s.final) * progress
