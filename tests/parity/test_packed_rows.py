"""Packing changes nothing: a row of several documents trains as each of them in a row of its own."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_lite.config.schema import Source as Section
from megatron_lite.data.batch import Batch, Row, make_batch
from megatron_lite.data.source import Source
from megatron_lite.models.transformer import Transformer
from megatron_lite.ops import select
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import single_process
from megatron_lite.train.inputs import to_device
from tests.helpers.corpora import write_corpus
from tests.helpers.tiny import Run, build_run, qwen3, stablelm

LENGTHS = (13, 1, 29, 8)  # of documents that one row of SEQ_LEN holds, with 2 inputs to spare
SEQ_LEN = 53


def _model(config, backend: str) -> tuple[Transformer, Zero1]:
    model, optimizer = build_run(Run(config), single_process())
    for block in model.model.layers.values():
        block.self_attn.attention = select.build(select.resolve({"attention": backend}, "cpu", "fp32")).attention
    return model, optimizer


def _train(config, backend: str, batches: list[Batch]) -> tuple[float, list[torch.Tensor], int]:
    """Loss per valid token, gradient buckets, valid tokens of micro-batches of one step."""
    model, optimizer = _model(config, backend)
    valid, total = sum(batch.valid_tokens for batch in batches), 0.0
    for i, batch in enumerate(batches):
        optimizer.expect(last=i == len(batches) - 1)
        loss = model(*to_device(batch, single_process())) / valid
        loss.backward()
        total += loss.item()
    optimizer.reduce()
    return total, [state.grad.clone() for state in optimizer.states], valid


def _alone(document: np.ndarray) -> Batch:
    none = np.empty(0, dtype=np.int64)
    return make_batch([Row(document.astype(np.int64), none)], [0], mask_documents=False)


@pytest.fixture
def documents() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(0, 101, n) for n in LENGTHS]


@pytest.mark.req("J01", "J03", "J06", "J07")
@pytest.mark.parametrize("backend", [name for name, b in select.TABLE["attention"].items() if "cpu" in b.devices])
@pytest.mark.parametrize("config", [stablelm(), qwen3()], ids=lambda c: c.model_type)
def test_a_packed_row_has_the_loss_and_gradients_of_its_documents_in_rows_of_their_own(
    config, backend, documents, tmp_path
):
    write_corpus(tmp_path / "c", documents)
    section = Section(path=str(tmp_path / "c"))
    source = Source("sources.c", section, SEQ_LEN, 101, tmp_path / "cache", True, best_fit=True)
    assert source.num_rows == 1 and source.padding() == 2
    packed = make_batch([source.row(0)], [0], mask_documents=True)
    assert packed.cu_seqlens.tolist() == [0, 13, 14, 43, 51, 53]
    apart = [_alone(document) for document in documents if len(document) > 1]  # one token has nothing to predict
    loss, gradients, valid = _train(config, backend, [packed])
    truth, expected, labels = _train(config, backend, apart)
    assert valid == labels == sum(LENGTHS) - len(LENGTHS)
    assert loss == pytest.approx(truth, abs=1e-6)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert (ours - theirs).abs().max() <= 1e-6 * max(1.0, float(theirs.abs().max()))
    together = make_batch([source.row(0)], [0], mask_documents=False)
    assert abs(_train(config, backend, [together])[0] - truth) > 1e-4, "without borders it is another loss"
