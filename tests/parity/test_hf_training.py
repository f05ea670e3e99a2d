"""Training goes on from an import: the losses are those of a plain torch loop over the `transformers` model."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.model import read_model
from megatron_lite.config.schema import Recipe
from megatron_lite.errors import CheckpointError
from megatron_lite.hf.convert import export_folder, import_folder
from megatron_lite.parallel.context import ParallelContext, single_process
from tests.helpers import hf
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import curve, run_stages, tiny_recipe

STEPS = 20


def _recipe(folder: Path, **sections) -> Recipe:
    """20 steps that start from the import in `folder`."""
    model = read_model(folder / "checkpoint").config
    stage = {"steps": STEPS, "mask_documents": False, "lr": {"peak": 1e-3, "warmup_steps": 10}}
    recipe = tiny_recipe(folder, stage=stage, evaluation={"rows": 2}, checkpoint={"every": 10}, **sections)
    return recipe.model_copy(update={"init_from": str(folder / "checkpoint"), "model": model})


def _import(name: str, folder: Path) -> torch.nn.Module:
    model = hf.reference(hf.MODELS[name])
    import_folder(hf.save(model, folder / "hf"), folder / "checkpoint")
    return model.train()


def _run(ctx: ParallelContext, recipe: Recipe, **how) -> list[str]:
    return run_stages(ctx, recipe, 0, **how)["origin"]


@pytest.mark.req("N08")
@pytest.mark.parametrize(
    ("name", "world", "tp"),
    [("llama-tied-kv1-biases", 1, 1), ("qwen3-tied", 1, 1), ("stablelm-tied-qkv-biases", 4, 2), ("llama", 2, 2)],
)
def test_twenty_steps_from_an_import_have_the_losses_of_a_plain_loop(name, world, tp, tmp_path):
    model = _import(name, tmp_path)
    recipe = _recipe(tmp_path)
    for origin in run_ranks(_run, world, recipe, tp=tp):
        assert origin[0] == f"weights of {tmp_path / 'checkpoint'}"
        assert "imported weights: optimizer moments start at zero" in origin
    plain = hf.plain_losses(model, recipe)
    for (step, loss, norm, _), (their_loss, their_norm) in zip(curve(recipe), plain, strict=True):
        assert loss == pytest.approx(their_loss, abs=1e-5), step
        assert norm == pytest.approx(their_norm, rel=1e-4), step
    assert plain[-1][0] < plain[0][0] - 0.3  # it learned

    export_folder(Path(recipe.run) / "stage-1/checkpoints/step-00000020", tmp_path / "trained", tokenizer="none")
    trained = hf.tensors(tmp_path / "trained")
    assert trained.keys() == hf.tensors(tmp_path / "hf").keys()
    for name, parameter in model.named_parameters():
        if name.endswith("k_proj.bias"):
            continue  # softmax does not see it where positions do not rotate: AdamW follows the rounding there
        largest = parameter.abs().max().item()
        torch.testing.assert_close(trained[name], parameter.detach(), rtol=0, atol=1e-4 * largest)


def test_a_run_whose_last_rank_holds_only_padding_of_the_vocabulary_stops_and_goes_on(tmp_path):
    _import("qwen3-tied", tmp_path)
    recipe = _recipe(tmp_path)
    assert recipe.model.padded_vocab_size(2) == 256 and recipe.model.vocab_size == 101
    whole = _recipe(tmp_path, run=str(tmp_path / "whole"))
    run_ranks(_run, 2, whole, tp=2)
    run_ranks(_stopped, 2, recipe, tp=2)
    run_ranks(_run, 2, recipe, tp=2)
    assert curve(recipe) == curve(whole)


def _stopped(ctx: ParallelContext, recipe: Recipe) -> None:
    run_stages(ctx, recipe, 0, stop_after=7)


@pytest.mark.req("L04")
def test_an_import_never_had_moments_but_a_run_whose_moments_are_gone_is_refused(tmp_path):
    _import("llama", tmp_path)
    recipe = _recipe(tmp_path)
    with pytest.raises(CheckpointError, match="was imported and is no run to go on with; name it in `init_from`"):
        run_stages(single_process(), recipe, 0, resume=str(tmp_path / "checkpoint"))
    run_stages(single_process(), recipe, 0)
    weights_only = tmp_path / "weights-only"
    meta = store.read_meta(Path(recipe.run) / "stage-1/checkpoints/step-00000020")
    _drop_moments(tmp_path / "checkpoint", weights_only, meta)
    for start in (
        {"init_from": str(weights_only), "run": str(tmp_path / "b")},
        {"stages": (recipe.stages[0].model_copy(update={"start": str(weights_only)}),), "init_from": None},
    ):
        second = recipe.model_copy(update={"run": str(tmp_path / "c")} | start)
        with pytest.raises(CheckpointError, match="holds master but not exp_avg"):
            run_stages(single_process(), second, 0)
    asked = second.model_copy(
        update={"checkpoint": recipe.checkpoint.model_copy(update={"on_missing_optimizer": "reset"})}
    )
    origin = run_stages(single_process(), asked, 0)["origin"]
    assert "the checkpoint has no optimizer moments: they start at zero" in origin


def _drop_moments(source: Path, target: Path, meta: dict) -> None:
    """A checkpoint of a run that holds weights alone."""
    shards = []
    for name, tensor in store.read_tensors(source):
        piece = store.Piece(name, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
        flat = {"master": tensor.flatten()}
        shards.append(store.FlatShard(name, (piece,), tensor.numel(), 0, tensor.numel(), flat))
    store.save(target, 20, shards, single_process(), meta, keep=1)


@pytest.mark.req("N04")
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"norm_eps": 1e-3}, ["model.norm_eps: 1e-05 in the checkpoint, 0.001 now"]),
        ({"num_attention_heads": 8, "head_dim": 8}, ["num_attention_heads: 4 in the", "head_dim: 16 in the"]),
        ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor: 0.25 in the checkpoint, 0.5 now"]),
        (
            {"model_type": "qwen3", "norm": "rmsnorm", "qk_norm": True, "partial_rotary_factor": 1.0},
            ["model_type: 'stablelm' in the checkpoint, 'qwen3' now", "model.norm: 'layernorm'", "qk_norm: False"],
        ),
    ],
)
def test_weights_of_another_model_are_refused_even_where_every_shape_fits(changes, said, tmp_path):
    _import("stablelm", tmp_path)
    recipe = _recipe(tmp_path)
    recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update=changes)})
    with pytest.raises(CheckpointError) as caught:
        run_stages(single_process(), recipe, 0)
    assert "the weights are of another model" in str(caught.value)
    assert all(text in str(caught.value) for text in said), caught.value


def test_a_stretched_context_is_accepted_said_and_exported(tmp_path):
    _import("qwen3-tied", tmp_path)
    recipe = _recipe(tmp_path)
    longer = recipe.stages[0].model_copy(update={"rope_theta": 1e6, "steps": 10, "seq_len": 192, "batch_tokens": 384})
    recipe = recipe.model_copy(update={"stages": (longer,), "validation": {}})
    origin = run_stages(single_process(), recipe, 0)["origin"]
    assert "model.rope_theta: 10000.0 in the checkpoint, 1000000.0 now" in origin
    export_folder(Path(recipe.run) / "stage-1/checkpoints/step-00000010", tmp_path / "trained", tokenizer="none")
    import_folder(tmp_path / "trained", tmp_path / "again")
    model = read_model(tmp_path / "again").config
    assert (model.rope_theta, model.max_position_embeddings) == (1e6, 192)
