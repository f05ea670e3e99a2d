"""Imported models compute what `transformers` computes, and export gives back what was imported, from any layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.model import read_model
from megatron_lite.config.schema import Optimizer
from megatron_lite.hf.convert import export_folder, import_folder
from megatron_lite.hf.names import tensor_shapes
from megatron_lite.models.generate import pack
from megatron_lite.models.transformer import build, named_pieces
from megatron_lite.ops.select import default_ops
from megatron_lite.optim.zero1 import Zero1
from megatron_lite.parallel.context import ParallelContext
from megatron_lite.parallel.grid import kv_replicas
from tests.helpers import hf
from tests.helpers.ranks import run_ranks

TOLERANCE = 1e-5


def _load(ctx: ParallelContext, folder: Path) -> tuple[torch.nn.Module, Zero1]:
    config, ops = read_model(folder).config, default_ops()
    model = build(config, ctx.tp, ops, dtype=torch.float32)
    optimizer = Zero1(model, named_pieces(model), ctx, Optimizer(), ops, bucket_elements=10_000)
    store.load(folder, optimizer.shards(), tensor_shapes(config), ("master",))
    optimizer.publish()
    return model, optimizer


def _logits(ctx: ParallelContext, folder: Path, ids: torch.Tensor) -> torch.Tensor:
    model, _ = _load(ctx, folder)
    flat, doc = pack(ids.tolist(), ctx.device)
    with torch.no_grad():
        return model.logits(flat, doc).view(*ids.shape, -1).numpy()


def _truth(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=ids).logits


@pytest.fixture(scope="module", params=hf.MODELS)
def imported(request, tmp_path_factory):
    """(their model, its folder, the checkpoint of its import)"""
    folder = tmp_path_factory.mktemp(request.param)
    model = hf.reference(hf.MODELS[request.param])
    import_folder(hf.save(model, folder / "hf"), folder / "checkpoint")
    return model, folder / "hf", folder / "checkpoint"


@pytest.mark.req("E01", "E05", "E06", "K03", "K05", "N01", "N07", "N08")
@pytest.mark.parametrize("tp", [1, 2])
def test_imported_models_have_the_logits_of_transformers(imported, tp):
    model, _, checkpoint = imported
    yarn = model.config.rope_parameters["rope_type"] == "yarn"
    rows, length = (2, 71) if yarn else (4, 15)  # yarn: beyond the original 32 positions
    ids = torch.randint(0, 101, (rows, length), generator=torch.Generator().manual_seed(3))
    heads = read_model(checkpoint).config.num_key_value_heads
    for logits in run_ranks(_logits, tp, checkpoint, ids, tp=tp, kv_replicas=kv_replicas(heads, tp)):
        assert (torch.from_numpy(logits) - _truth(model, ids)).abs().max() <= TOLERANCE


@pytest.mark.req("N01", "N07")
def test_export_gives_back_what_was_imported_to_the_bit(imported, tmp_path):
    model, folder, checkpoint = imported
    export_folder(checkpoint, tmp_path / "hf")
    hf.same_bits(hf.tensors(folder), hf.tensors(tmp_path / "hf"))
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", attn_implementation="eager").eval()
    ids = torch.arange(44).view(4, 11) * 7 % 101
    assert again.dtype == torch.float32
    assert torch.equal(_truth(again, ids), _truth(model, ids))
    before, after = model.config.to_dict(), again.config.to_dict()
    meaningless = {"_name_or_path", "use_cache", "max_window_layers", "dtype", "output_attentions"}
    changed = {k for k in before | after if before.get(k) != after.get(k)}
    assert changed <= meaningless, {k: (before.get(k), after.get(k)) for k in changed - meaningless}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shard", [10**9, 30_000, 1])
def test_half_precision_weights_in_any_number_of_files_come_back_to_the_bit(dtype, shard, tmp_path):
    model = hf.reference(hf.MODELS["llama-tied-kv1-biases"], dtype)
    model.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    assert (tmp_path / "hf/model.safetensors.index.json").exists()
    converted = import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    assert converted.model.dtype == {torch.bfloat16: "bf16", torch.float16: "fp16"}[dtype]
    export_folder(tmp_path / "checkpoint", tmp_path / "again", shard_bytes=shard)
    files = list((tmp_path / "again").glob("*.safetensors"))
    assert (len(files) == 1) == (shard == 10**9)
    hf.same_bits(hf.tensors(tmp_path / "hf"), hf.tensors(tmp_path / "again"))
    before, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype="auto", attn_implementation="eager")
        for folder in ("hf", "again")
    )
    assert again.dtype == dtype
    ids = torch.arange(13)[None]
    assert torch.equal(_truth(again, ids), _truth(before, ids))


def test_tensors_in_several_dtypes_keep_their_own(tmp_path):
    model = hf.reference(hf.MODELS["qwen3-tied"], torch.bfloat16)
    hf.save(model, tmp_path / "hf")
    norms = {n: t.float() + 1e-4 for n, t in hf.tensors(tmp_path / "hf").items() if n.endswith("norm.weight")}
    hf.rewrite(tmp_path / "hf", norms)
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "again", shard_bytes=40_000)
    hf.same_bits(hf.tensors(tmp_path / "hf"), hf.tensors(tmp_path / "again"))
    export_folder(tmp_path / "checkpoint", tmp_path / "one", dtype="bf16")
    assert {t.dtype for t in hf.tensors(tmp_path / "one").values()} == {torch.bfloat16}


def _save(ctx: ParallelContext, folder: Path, root: Path, meta: dict) -> None:
    _, optimizer = _load(ctx, folder)
    store.save(root, 1, optimizer.owned(), ctx, meta, keep=1)


@pytest.mark.req("N01", "N08")
@pytest.mark.parametrize(
    ("world", "tp"),
    [(4, 2), pytest.param(3, 1, marks=pytest.mark.slow), pytest.param(4, 4, marks=pytest.mark.slow)],
)
def test_every_layout_exports_the_same_bytes(world, tp, tmp_path):
    hf.save(hf.reference(hf.MODELS["qwen3-kv1-biases"]), tmp_path / "hf")
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "one", shard_bytes=50_000)
    meta = store.read_meta(tmp_path / "checkpoint")
    run_ranks(_save, world, tmp_path / "checkpoint", tmp_path / "saved", meta, tp=tp, kv_replicas=kv_replicas(1, tp))
    export_folder(tmp_path / "saved/step-00000001", tmp_path / "other", shard_bytes=50_000)
    one, other = ({p.name: p.read_bytes() for p in (tmp_path / f).iterdir()} for f in ("one", "other"))
    assert one == other and len(one) > 5


@pytest.mark.req("K03")
@pytest.mark.parametrize("form", ["transformers 4", "transformers 5"])
@pytest.mark.parametrize(
    "yarn",
    [
        {"factor": 4.0, "original_max_position_embeddings": 32},
        {"factor": None, "original_max_position_embeddings": 32},  # then it is 128 / 32
        {"factor": 3, "original_max_position_embeddings": 32, "attention_factor": 1.25},
        {"factor": 4.0, "original_max_position_embeddings": 32, "mscale": 0.7, "mscale_all_dim": 1.1},
        {"factor": 2.0, "beta_fast": 16, "beta_slow": 2},  # the original length is then max_position_embeddings
    ],
)
def test_yarn_is_read_as_transformers_reads_it(yarn, form, tmp_path):
    hf.save(hf.reference(hf.qwen3()), tmp_path / "hf")
    if form == "transformers 4":
        hf.set_config(tmp_path / "hf", rope_parameters=None, rope_theta=2e4, rope_scaling={"rope_type": "yarn", **yarn})
    else:
        hf.set_config(tmp_path / "hf", rope_parameters={"rope_type": "yarn", "rope_theta": 2e4, **yarn})
    import_folder(tmp_path / "hf", tmp_path / "checkpoint")
    export_folder(tmp_path / "checkpoint", tmp_path / "again")
    ids = torch.randint(0, 101, (1, 101), generator=torch.Generator().manual_seed(5))
    (ours,) = run_ranks(_logits, 1, tmp_path / "checkpoint", ids)
    for folder in ("hf", "again"):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / folder, attn_implementation="eager")
        assert (torch.from_numpy(ours) - _truth(model, ids)).abs().max() <= TOLERANCE
    assert AutoConfig.from_pretrained(tmp_path / "again").rope_parameters["rope_theta"] == 2e4
