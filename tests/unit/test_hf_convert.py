"""Converting is strict, leaves nothing half-written, says one line when it fails, and needs little memory."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.model import read_model
from megatron_lite.errors import CheckpointError, DataError
from megatron_lite.hf.convert import export_folder, import_folder
from megatron_lite.hf.names import HEAD
from megatron_lite.parallel.context import single_process
from megatron_lite.runtime.guard import Stop
from megatron_lite.train.loop import run_here
from tests.helpers import hf
from tests.helpers.big import write_random
from tests.helpers.runs import MODEL, tiny_recipe
from tools import convert_hf, generate, inspect_checkpoint

Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A folder of every family, made once."""
    root = tmp_path_factory.mktemp("hf")
    for name in ("llama", "qwen3-tied", "stablelm"):
        hf.save(hf.reference(hf.MODELS[name]), root / name)
    return root


@pytest.fixture
def folder(saved, tmp_path):
    """Copies a folder to where a test may change it."""
    return lambda name: Path(shutil.copytree(saved / name, tmp_path / "hf"))


def tokenizer_into(path: Path) -> Path:
    """A tokenizer.json of a few words."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    vocab = {"<|endoftext|>": 0, "[UNK]": 1, "one": 2, "two": 3, "three": 4}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return path


def _refused(source: Path, target: Path, kind=CheckpointError, **how) -> str:
    with pytest.raises(kind) as caught:
        import_folder(source, target, **how)
    assert not target.exists() and not target.with_name(target.name + ".partial").exists()
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.req("N04")
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("llama", {Q: None}, [f"{Q} [48, 60] is missing"]),
        ("llama", {HEAD: None}, [f"{HEAD} [101, 60] is missing", "tie_word_embeddings = false"]),
        ("llama", {Q: torch.zeros(48, 61)}, [f"{Q} is [48, 61], but config.json makes it [48, 60]"]),
        ("llama", {Q: torch.zeros(60, 48)}, [f"{Q} is [60, 48]"]),
        ("llama", {"model.norm.bias": torch.zeros(60)}, ["model.norm.bias [60] is not a tensor of a llama model"]),
        ("qwen3-tied", {"score.weight": torch.zeros(2, 60)}, ["score.weight [2, 60] is not a tensor of a qwen3"]),
        ("stablelm", {"model.norm.bias": None}, ["model.norm.bias [64] is missing"]),
    ],
)
def test_tensors_that_are_missing_misshapen_or_too_many_are_named(name, change, said, folder, tmp_path):
    source = folder(name)
    hf.rewrite(source, change)
    text = _refused(source, tmp_path / "checkpoint")
    assert all(part in text for part in said), text


@pytest.mark.req("N04")
def test_weights_of_another_family_are_refused_and_the_norms_named(folder, tmp_path):
    source = folder("stablelm")
    text = _refused(source, tmp_path / "checkpoint", Exception, family="qwen3")
    assert "a stablelm model (the norms are LayerNorm" in text and "not qwen3" in text
    hf.set_config(source, model_type="qwen3", rms_norm_eps=1e-6, head_dim=16, rope_parameters={"rope_theta": 1e4})
    text = _refused(source, tmp_path / "checkpoint", Exception)  # somebody made it look like one
    assert "architectures = ['StableLmForCausalLM'] is not supported; only ['Qwen3ForCausalLM'] is" in text
    hf.set_config(source, architectures=["Qwen3ForCausalLM"], layer_norm_eps=None)
    text = _refused(source, tmp_path / "checkpoint")
    assert "self_attn.q_norm.weight [16] is missing" in text and "more" in text


@pytest.mark.req("N07")
def test_a_tied_model_may_bring_its_head_only_as_a_copy(folder, tmp_path):
    source = folder("qwen3-tied")
    tensors = hf.tensors(source)
    assert HEAD not in tensors
    copy = tensors["model.embed_tokens.weight"].clone()
    hf.rewrite(source, {HEAD: copy})
    converted = import_folder(source, tmp_path / "checkpoint")
    assert f"{HEAD} was left out: it equals the embedding" in converted.notes
    assert HEAD not in dict(store.read_tensors(tmp_path / "checkpoint"))
    copy[77, 5] += 1e-7
    hf.rewrite(source, {HEAD: copy})
    text = _refused(source, tmp_path / "other")
    assert f"{HEAD} is not model.embed_tokens.weight: they differ first at row 77" in text


def test_rotary_frequencies_of_older_files_are_left_out(folder, tmp_path):
    source = folder("llama")
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    hf.rewrite(source, {name: torch.ones(6)})
    assert f"{name} was left out: it follows from config.json" in import_folder(source, tmp_path / "a").notes
    hf.rewrite(source, {name: torch.ones(7)})
    assert f"{name} is [7], but config.json makes it [6]" in _refused(source, tmp_path / "b")


def test_what_is_there_already_is_never_overwritten(folder, tmp_path):
    source = folder("llama")
    (tmp_path / "checkpoint").mkdir()
    import_folder(source, tmp_path / "checkpoint")  # an empty folder is no loss
    for action in (
        lambda: import_folder(source, tmp_path / "checkpoint"),
        lambda: export_folder(tmp_path / "checkpoint", source),
    ):
        with pytest.raises(CheckpointError, match="exists already; remove it, or name another folder"):
            action()
    assert (source / "model.safetensors").is_file() and not list(tmp_path.glob("*.partial"))


def test_a_failure_midway_leaves_nothing(folder, tmp_path, monkeypatch):
    source = folder("llama")

    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_folder(source, tmp_path / "checkpoint", progress=stop)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]
    import_folder(source, tmp_path / "checkpoint")
    with pytest.raises(KeyboardInterrupt):
        export_folder(tmp_path / "checkpoint", tmp_path / "again", progress=stop)
    assert {p.name for p in tmp_path.iterdir()} == {"hf", "checkpoint"}


@pytest.mark.req("M03", "M06")
def test_a_killed_import_looks_like_nothing_and_is_in_nobodys_way(folder, tmp_path):
    source, target = folder("llama"), tmp_path / "checkpoint"
    code = (
        "import os, signal, sys; from pathlib import Path; from megatron_lite.hf.convert import import_folder\n"
        "import_folder(Path(sys.argv[1]), Path(sys.argv[2]), progress=lambda *_: os.kill(os.getpid(), signal.SIGKILL))"
    )
    done = subprocess.run([sys.executable, "-c", code, source, target], timeout=60)
    assert done.returncode == -signal.SIGKILL
    assert not target.exists() and target.with_name("checkpoint.partial").exists()
    with pytest.raises(CheckpointError, match="there is no folder"):
        store.find(target, "init_from")
    import_folder(source, target)
    assert store.verify(target) == [] and not target.with_name("checkpoint.partial").exists()


@pytest.mark.req("M03")
def test_a_full_disk_is_one_line_with_path_and_errno(folder, tmp_path):
    source = folder("llama")
    command = f"ulimit -f 100; exec {sys.executable} tools/convert_hf.py import --hf {source} --checkpoint {tmp_path}/c"
    done = subprocess.run(["bash", "-c", f"trap '' XFSZ; {command}"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and done.stdout == ""
    assert re.fullmatch(r"CheckpointError: cannot write \S+/c\.partial: File too large \(errno 27\)\n", done.stderr)
    assert [p.name for p in tmp_path.iterdir()] == ["hf"]


def test_damage_to_a_checkpoint_stops_its_export(folder, tmp_path):
    import_folder(folder("llama"), tmp_path / "checkpoint")
    path = tmp_path / "checkpoint/weights-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match=f"{path} is damaged.*it holds {HEAD}"):
        export_folder(tmp_path / "checkpoint", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_large_imports_are_divided_among_files(folder, tmp_path, monkeypatch):
    source = folder("llama")
    monkeypatch.setattr("megatron_lite.checkpoint.model.FILE_BYTES", 30_000)
    import_folder(source, tmp_path / "checkpoint")
    files = sorted((tmp_path / "checkpoint").glob("weights-*.safetensors"))
    assert len(files) > 5 and all(f.stat().st_size < 40_000 for f in files)
    export_folder(tmp_path / "checkpoint", tmp_path / "again")
    hf.same_bits(hf.tensors(source), hf.tensors(tmp_path / "again"))


# --- tokenizers and generation ---


def test_the_tokenizer_and_the_end_of_text_go_along_both_ways(folder, tmp_path):
    source = folder("llama")
    tokenizer_into(source / "tokenizer.json")
    (source / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (source / "generation_config.json").write_text(json.dumps({"eos_token_id": [0, 2]}))
    (source / "README.md").write_text("not a tokenizer")
    hf.set_config(source, bos_token_id=1, eos_token_id=0, pad_token_id=3)
    converted = import_folder(source, tmp_path / "checkpoint")
    assert converted.model.tokenizer == str(tmp_path / "checkpoint/tokenizer")
    export_folder(tmp_path / "checkpoint", tmp_path / "again")
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (tmp_path / "again" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "again/README.md").exists()
    config = json.loads((tmp_path / "again/config.json").read_text())
    assert [config[f"{which}_token_id"] for which in ("bos", "eos", "pad")] == [1, 0, 3]
    moved = (tmp_path / "checkpoint").rename(tmp_path / "moved")
    assert read_model(moved).tokenizer == str(moved / "tokenizer")


def _trained(folder: Path, tokenizer: str, **sections) -> Path:
    stage = {"steps": 2, "lr": {"peak": 1e-3}}
    recipe = tiny_recipe(folder, tokenizer={"path": tokenizer}, stage=stage, **sections)
    run_here(recipe, 0, single_process(), Stop(None))
    return store.find(folder / "run/stage-1", "test")


@pytest.mark.parametrize("given", ["file", "folder"])
def test_a_run_is_exported_with_the_tokenizer_it_was_trained_with(given, tmp_path):
    path = tokenizer_into(tmp_path / "words/tokenizer.json")
    checkpoint = _trained(tmp_path, str(path if given == "file" else path.parent))
    export_folder(checkpoint, tmp_path / "hf")
    assert json.loads((tmp_path / "hf/config.json").read_text())["eos_token_id"] == 0
    assert json.loads((tmp_path / "hf/generation_config.json").read_text()) == {"eos_token_id": 0}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert tokenizer("two three")["input_ids"] == [3, 4] and tokenizer.eos_token_id == 0
    path.unlink()
    with pytest.raises(DataError, match="--tokenizer PATH names another|neither tokenizer.json"):
        export_folder(checkpoint, tmp_path / "other")
    export_folder(checkpoint, tmp_path / "other", tokenizer="none")
    hf.same_bits(hf.tensors(tmp_path / "hf"), hf.tensors(tmp_path / "other"))


def test_a_run_is_exported_in_its_own_precision_unless_asked(tmp_path):
    checkpoint = _trained(tmp_path, "byte", precision="bf16", model=MODEL | {"vocab_size": 300})
    notes = export_folder(checkpoint, tmp_path / "hf").notes
    assert any("the byte tokenizer has no files" in note for note in notes)
    masters = dict(store.read_tensors(checkpoint))
    hf.same_bits(hf.tensors(tmp_path / "hf"), {n: t.bfloat16() for n, t in masters.items()})
    export_folder(checkpoint, tmp_path / "full", dtype="fp32")
    hf.same_bits(hf.tensors(tmp_path / "full"), masters)
    assert json.loads((tmp_path / "full/config.json").read_text())["torch_dtype"] == "float32"


# --- the tools ---


def test_the_tools_import_continue_a_prompt_and_export(folder, tmp_path, capsys):
    source, checkpoint = folder("llama"), tmp_path / "checkpoint"
    assert convert_hf.main(["import", "--hf", str(source), "--checkpoint", str(checkpoint)]) == 0
    told, proposed = capsys.readouterr().out.split("to go on training:\n")
    assert "the folder holds no tokenizer" in told
    recipe = tomllib.loads(proposed)
    assert recipe["init_from"] == str(checkpoint)
    assert recipe["model"] | {"norm_eps": 1e-5} == recipe["model"] and "tokenizer" not in recipe
    arguments = ["--checkpoint", str(checkpoint), "--prompt", "one two", "--max-new-tokens", "3", "--temperature", "0"]
    with pytest.raises(Exception, match="was imported without a tokenizer; name one with --tokenizer"):
        generate.run(generate.parser().parse_args(arguments))
    words = tokenizer_into(tmp_path / "words/tokenizer.json")
    generate.run(generate.parser().parse_args([*arguments, "--tokenizer", str(words)]))
    assert capsys.readouterr().out.startswith("one two")
    assert inspect_checkpoint.main([str(checkpoint)]) == 0
    assert "imported from Hugging Face weights in fp32: llama" in capsys.readouterr().out
    flags = [
        "--hf",
        str(tmp_path / "out"),
        "--checkpoint",
        str(checkpoint),
        "--shard-size",
        "0.05MB",
        "--dtype",
        "bf16",
    ]
    assert convert_hf.main(["export", *flags]) == 0
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 3
    assert {t.dtype for t in hf.tensors(tmp_path / "out").values()} == {torch.bfloat16}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["import", "--dtype", "bf16"], "ConfigError: --dtype has no meaning for import"),
        (["export", "--family", "llama"], "ConfigError: --family has no meaning for export"),
        (["export", "--shard-size", "big"], "ConfigError: --shard-size big is not a size; write 5GB"),
        (["export"], "CheckpointError: --checkpoint: there is no folder"),
        (["import"], "CheckpointError: cannot read"),
    ],
)
def test_a_wrong_call_is_one_line(arguments, said, tmp_path, capsys):
    folders = ["--hf", str(tmp_path / "hf"), "--checkpoint", str(tmp_path / "checkpoint")]
    assert convert_hf.main([*arguments, *folders]) == 1
    error = capsys.readouterr().err
    assert error.startswith(said) and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_was_not_imported_is_recognised(folder):
    with pytest.raises(CheckpointError, match="a Hugging Face folder is imported first, with tools/convert_hf.py"):
        store.find(folder("llama"), "init_from")


def test_an_import_of_another_version_is_refused(folder, tmp_path, monkeypatch):
    import_folder(folder("llama"), tmp_path / "checkpoint")
    monkeypatch.setattr("megatron_lite.checkpoint.model.VERSION", 2)
    with pytest.raises(CheckpointError, match="was imported by another version"):
        read_model(tmp_path / "checkpoint")


# --- memory ---


def _peak_mb(function: str, *arguments: object) -> float:
    """Largest resident memory of a process that converts. VmHWM: ru_maxrss begins with what the parent held."""
    code = (
        f"import sys; from pathlib import Path; from megatron_lite.hf.convert import {function} as convert\n"
        "convert(Path(sys.argv[1]), Path(sys.argv[2]), **dict(zip(sys.argv[3::2], map(int, sys.argv[4::2]))))\n"
        "print(Path('/proc/self/status').read_text().split('VmHWM:')[1].split()[0])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)], capture_output=True, text=True, timeout=280
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout) / 1024


@pytest.mark.slow
def test_importing_a_gigabyte_takes_less_than_twice_its_largest_tensor_and_300_mb(tmp_path):
    source, checkpoint, again = (tmp_path / name for name in ("hf", "checkpoint", "again"))
    largest = write_random(source, 700_000_000) / 2**20
    assert sum(path.stat().st_size for path in source.glob("*.safetensors")) > 1e9
    assert _peak_mb("import_folder", source, checkpoint) < 2 * largest + 300
    # Export holds one whole fp32 tensor, and maps as much of the checkpoint.
    peak = _peak_mb("export_folder", checkpoint, again, "shard_bytes", 700_000_000)
    assert peak < 2 * (2 * largest) + 400
    for path in source.glob("*.safetensors"):
        assert filecmp.cmp(path, again / path.name, shallow=False)
