"""A pipeline in a run: what is kept, what is sent, what stays equal; imports, restarts and overlap on several ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron_lite.config.schema import Parallel
from megatron_lite.hf.convert import import_folder
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.pipeline.engine import run
from megatron_lite.pipeline.schedule import Task, live, timetable
from megatron_lite.train.inputs import Inputs
from megatron_lite.train.step import train_step, transfer
from tests.helpers import hf
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import curve, lines, tiny_recipe
from tests.helpers.tiny import Run, build_run, qwen3, stablelm, step_batches, train

DEEP = qwen3(num_hidden_layers=4)


@pytest.mark.parametrize("chunks, pp", [(1, 2), (2, 2), (1, 4)])
def test_as_many_forwards_are_alive_as_the_schedule_says(chunks: int, pp: int) -> None:
    plain = Run(DEEP, steps=2, micro_batch=1, rows=8, parallel=Parallel(virtual_stages=chunks))
    for rank, (results, _) in enumerate(run_ranks(train, pp, plain, pp=pp)):
        assert {result.live for result in results} == {live(pp, rank, chunks, 8)}
        assert all(result.waited_s > 0 for result in results)


SWITCHES = ["overlap_gradients", "overlap_weights", "overlap_pipeline"]


@pytest.mark.req("F11")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_overlap_changes_no_bit(precision: torch.dtype) -> None:
    plain = Run(DEEP, steps=4, micro_batch=1, rows=8, precision=precision, parallel=Parallel(virtual_stages=2))
    off = replace(plain, parallel=plain.parallel.model_copy(update=dict.fromkeys(SWITCHES, False)))
    for (kept, weights), (other, others) in zip(
        run_ranks(train, 4, plain, pp=2), run_ranks(train, 4, off, pp=2), strict=True
    ):
        assert kept == other
        assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.parametrize("switch", SWITCHES)
def test_each_switch_alone_changes_no_bit(switch: str) -> None:
    plain = Run(DEEP, steps=3, micro_batch=1, rows=8)
    off = replace(plain, parallel=Parallel(**{switch: False}))
    (kept, _), (other, _) = (run_ranks(train, 4, changed, pp=2)[0] for changed in (plain, off))
    assert kept == other


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recompute_in_a_pipeline_is_neutral_to_the_bit(mode: str) -> None:
    plain = Run(DEEP, steps=3, micro_batch=1, rows=8, documents=True, parallel=Parallel(virtual_stages=2))
    redone = replace(plain, parallel=plain.parallel.model_copy(update={"recompute": mode}))
    for (kept, weights), (other, others) in zip(
        run_ranks(train, 2, plain, pp=2), run_ranks(train, 2, redone, pp=2), strict=True
    ):
        assert kept == other
        assert all(torch.equal(weights[name], others[name]) for name in weights)


@pytest.mark.req("F01", "F03", "G05")
def test_both_ends_of_a_tied_model_stay_equal_to_the_bit() -> None:
    plain = Run(qwen3(num_hidden_layers=3), steps=10, micro_batch=1, masked=True)
    answers = run_ranks(train, 4, plain, pp=2)
    held = [weights for _, weights in answers]
    (name,) = {key for key in held[0] if "embed_tokens" in key}
    assert all(torch.equal(held[0][name], weights[name]) for weights in held)
    truth, _ = run_ranks(train, 1, replace(plain, micro_batch=12))[0]
    for ours, expected in zip(answers[0][0], truth, strict=True):
        assert ours.grad_norm == pytest.approx(expected.grad_norm, rel=1e-4)


@pytest.mark.req("D01", "G03")
@pytest.mark.parametrize("axes", [{"pp": 2}, {"pp": 2, "virtual_stages": 2}], ids=["1f1b", "interleaved"])
def test_stop_and_resume_in_a_pipeline_equals_never_stopped_to_the_bit(tmp_path: Path, axes: dict[str, int]) -> None:
    from tests.dist.test_runs import both

    changes = {"parallel": axes, "model": {"num_hidden_layers": 4}, "stage": {"micro_batch": 1}}
    straight = tiny_recipe(tmp_path, run=str(tmp_path / "straight"), **changes)
    broken = tiny_recipe(tmp_path, run=str(tmp_path / "broken"), **changes)
    for never, resumed in run_ranks(both, 2, straight, broken, 5, pp=2):
        assert never["weights"] == resumed["weights"]
    assert curve(straight) == curve(broken)
    assert lines(straight, 0, "evaluations") == lines(broken, 0, "evaluations")
    last = lines(straight, 0, "metrics")[-1]["pipeline"]
    assert 0 < last["waited"] < 1 and last["live"] == live(2, 0, axes.get("virtual_stages", 1), 12)


def _logits(ctx: ParallelContext, folder: Path, ids: torch.Tensor) -> torch.Tensor | None:
    """Logits of an imported model on the last rank of a pipeline."""
    from megatron_lite.checkpoint import store
    from megatron_lite.checkpoint.model import read_model
    from megatron_lite.hf.names import tensor_shapes

    config = read_model(folder).config
    plain = Run(config, rows=1, micro_batch=1, seq_len=len(ids))
    model, optimizer = build_run(plain, ctx)
    store.load(folder, optimizer.shards(), tensor_shapes(config), ("master",))
    optimizer.publish()
    batch = replace(step_batches(plain, ctx, 0)[0], input_ids=ids.numpy())
    inputs, found = Inputs([batch], ctx), []

    def forward(task: Task, x: torch.Tensor | None) -> torch.Tensor:
        ids_T, labels_T, doc = inputs[0]
        if model.chunks[task.chunk].last:
            found.append(model.logits(ids_T, doc, chunk=task.chunk, x=x))
            return found[0].sum()
        return model(ids_T, labels_T, doc, chunk=task.chunk, x=x)

    with torch.no_grad():
        ticks = timetable(ctx.pp.size, len(model.chunks), 1, training=False)[ctx.pp.rank]
        run(ticks, forward, lambda task: None, transfer(model, batch, ctx, overlap=True))
    return found[0] if found else None


@pytest.mark.req("G06")
@pytest.mark.parametrize("name", ["qwen3-tied", "stablelm", "llama-tied-kv1-biases"])
def test_a_hugging_face_model_has_its_logits_in_a_pipeline(tmp_path: Path, name: str) -> None:
    reference = hf.reference(hf.MODELS[name])
    import_folder(hf.save(reference, tmp_path / "theirs"), tmp_path / "ours")
    ids = torch.randint(0, 101, (33,), generator=torch.Generator().manual_seed(3))
    with torch.no_grad():
        expected = reference(ids[None]).logits[0]
    first, last = run_ranks(_logits, 2, tmp_path / "ours", ids, pp=2)
    assert first is None
    assert (last - expected).abs().max() <= 1e-5


@pytest.mark.parametrize("model", [DEEP, stablelm(num_hidden_layers=3)], ids=["tied", "untied"])
def test_a_micro_batch_without_labels_and_a_rank_without_any_loss_do_not_stop_a_step(model) -> None:
    answers = run_ranks(_skipping, 2, Run(model, steps=1, rows=4, micro_batch=1), pp=2)
    assert all(result.skipped and result.loss == 0.0 for result in answers)


def _skipping(ctx: ParallelContext, plain: Run):
    model, optimizer = build_run(plain, ctx)
    batches = step_batches(plain, ctx, 0)
    for batch in batches:
        batch.labels[:] = -100
    return train_step(
        model, optimizer, [replace(batch, valid_tokens=0) for batch in batches], ctx, lr=1e-3, clip=1.0
    )
