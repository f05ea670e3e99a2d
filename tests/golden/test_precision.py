"""bf16 weights with fp32 masters follow the fp32 curve within the band that docs/numerics.md states."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from megatron_lite.parallel.context import single_process
from tests.helpers.tiny import Run, qwen3, stablelm, train

STEP, MEAN = 0.01, 0.001  # largest difference of one step's loss, and of the mean over all steps


@pytest.mark.req("F14")
@pytest.mark.parametrize("model", [qwen3(), stablelm()], ids=["qwen3", "stablelm"])
def test_bf16_follows_fp32_over_200_steps(model):
    run = Run(model, steps=200, micro_batch=12)
    fp32, bf16 = (
        np.array([result.loss for result in train(single_process(), replace(run, precision=precision))[0]])
        for precision in (torch.float32, torch.bfloat16)
    )
    assert fp32[-20:].mean() < fp32[:20].mean() - 0.5  # it does learn
    assert np.abs(bf16 - fp32).max() <= STEP
    assert abs((bf16 - fp32).mean()) <= MEAN
    assert np.abs(bf16 - fp32).max() > 0  # and bf16 is bf16
