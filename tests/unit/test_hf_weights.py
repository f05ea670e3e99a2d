"""safetensors files, written and read a block at a time: damage, truncation and stray tensors are named."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from megatron_lite.errors import CheckpointError
from megatron_lite.hf import weights
from megatron_lite.hf.weights import INDEX, SINGLE, open_weights, plan_files, write_weights

SHAPES = {"a": (5, 7), "b": (3,), "c": (2, 2, 9), "d": (1,)}
DTYPES = {"a": "fp32", "b": "bf16", "c": "fp16", "d": "fp32"}
TORCH = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(weights, "BLOCK", 4)


def _tensors() -> dict[str, torch.Tensor]:
    stream = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=stream) for name, shape in SHAPES.items()}


def _write(folder, limit=10**9):
    tensors = _tensors()
    plan = plan_files(SHAPES, DTYPES, limit)
    write_weights(folder, plan, SHAPES, DTYPES, ((name, tensors[name]) for names in plan for name in names))
    return tensors


def _said(folder) -> str:
    with pytest.raises(CheckpointError) as caught:
        open_weights(folder)
    return str(caught.value)


@pytest.mark.parametrize("limit", [10**9, 120, 1])
def test_what_is_written_the_safetensors_library_reads(limit, tmp_path):
    tensors = _write(tmp_path, limit)
    found = {name: t for path in tmp_path.glob("*.safetensors") for name, t in load_file(path).items()}
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor.to(TORCH[DTYPES[name]]))
    assert (tmp_path / INDEX).exists() == (limit < 10**9)


def test_what_the_library_writes_is_read_exactly(tmp_path):
    tensors = {n: t.to(TORCH[DTYPES[n]]) for n, t in _tensors().items()}
    tensors["c"][0, 0, 0] = 6e-8  # smallest fp16
    tensors["b"][1] = float("-inf")
    save_file(tensors, tmp_path / SINGLE)
    for name, stored in open_weights(tmp_path).items():
        assert (stored.dtype, stored.shape) == (DTYPES[name], SHAPES[name])
        read = torch.cat([torch.from_numpy(block) for block in stored.blocks()])
        assert read.dtype == torch.float32 and torch.equal(read.view(SHAPES[name]), tensors[name].float())


def test_files_keep_the_limit_and_the_order_and_every_tensor_once():
    for limit in range(1, 400):
        plan = plan_files(SHAPES, DTYPES, limit)
        assert sorted(name for names in plan for name in names) == sorted(SHAPES)
        for names in plan:
            size = sum(torch.Size(SHAPES[n]).numel() * weights.width(DTYPES[n]) for n in names)
            assert size <= limit or len(names) == 1
            widths = [weights.width(DTYPES[n]) for n in names]
            assert widths == sorted(widths, reverse=True)


def test_a_value_that_the_dtype_cannot_hold_is_named(tmp_path):
    tensor = torch.tensor([1.0, 70_000.0])
    with pytest.raises(CheckpointError, match="x holds 70000, which fp16 cannot hold"):
        write_weights(tmp_path, [["x"]], {"x": (2,)}, {"x": "fp16"}, [("x", tensor)])
    write_weights(tmp_path, [["x"]], {"x": (2,)}, {"x": "fp16"}, [("x", torch.tensor([1.0, float("inf")]))])


@pytest.mark.req("B09")
@pytest.mark.parametrize("cut", [-1, -100, 1, 7])
def test_a_file_of_another_length_is_named(cut, tmp_path):
    _write(tmp_path)
    path = tmp_path / SINGLE
    data = path.read_bytes()
    path.write_bytes(data[:cut] if cut < 0 else data + b"x" * cut)
    text = _said(tmp_path)
    assert str(path) in text and str(len(data) + cut) in text


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda h: h["a"].update(dtype="F64"), "a is F64; only F32, BF16, F16 are read"),
        (lambda h: h["a"].update(dtype="I8"), "a is I8"),
        (lambda h: h["a"].update(shape=[5, 8]), "a [5, 8] in F32 has bytes 0 to 140"),
        (lambda h: h["d"].update(data_offsets=[4, 8]), "has bytes"),
        (lambda h: h["a"].pop("shape"), "its header cannot be read"),
        (lambda h: h["a"].update(data_offsets=["x", 8]), "its header cannot be read"),
        (lambda h: h.update(a=3), "its header cannot be read"),
    ],
)
def test_a_header_that_does_not_fit_its_bytes_is_refused(change, said, tmp_path):
    _write(tmp_path)
    path = tmp_path / SINGLE
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    assert said in _said(tmp_path)


@pytest.mark.parametrize("content", [b"", b"\0" * 8, b"\xff" * 40, b"version https://git-lfs.github.com/spec/v1\n" * 3])
def test_what_is_no_safetensors_file_is_refused(content, tmp_path):
    (tmp_path / SINGLE).write_bytes(content)
    assert "is not a safetensors file, or is damaged" in _said(tmp_path)


def test_an_index_has_to_fit_its_files(tmp_path):
    _write(tmp_path, 120)
    path = tmp_path / INDEX
    index = json.loads(path.read_text())
    listed = index["weight_map"]

    def with_map(**changes):
        path.write_text(json.dumps({"weight_map": {k: v for k, v in (listed | changes).items() if v}}))
        return _said(tmp_path)

    assert listed["a"] != listed["b"]
    assert f"holds b, which the index looks for in {listed['a']}" in with_map(b=listed["a"])
    assert f"{listed['b']} holds b, which the index looks for in None" in with_map(b=None)
    assert "e is not in " + listed["a"] in with_map(e=listed["a"])
    assert "cannot read" in with_map(e="model-9.safetensors")
    assert "holds no weight_map from tensors to files of its folder" in with_map(b="../b.safetensors")
    path.write_text("[]")
    assert "is not a JSON object" in _said(tmp_path)
    path.write_text("{")
    assert "is not JSON" in _said(tmp_path)
    path.write_text("{}")
    assert "holds no weight_map" in _said(tmp_path)


def test_which_files_are_meant_has_to_be_clear(tmp_path):
    assert "there is no folder" in _said(tmp_path / "nowhere")
    (tmp_path / "pytorch_model.bin").touch()
    assert "holds neither model.safetensors nor model.safetensors.index.json, only pytorch_model.bin" in _said(tmp_path)
    (tmp_path / SINGLE).touch()
    (tmp_path / INDEX).touch()
    assert "holds both" in _said(tmp_path)
