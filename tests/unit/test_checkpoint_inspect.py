"""The tool that looks at checkpoints."""

import math

import pytest
import torch

from megatron_lite.checkpoint.state import TrainState
from megatron_lite.checkpoint.store import save
from tests.helpers.shards import SHAPES, lone_rank, make_shards, whole_tensor
from tools.inspect_checkpoint import RUN, main, moments


@pytest.fixture
def folder(tmp_path):
    state = TrainState(
        stage=1, stage_name="reasoning", step=10, num_steps=20, consumed_samples=120, consumed_tokens=3_840,
        total_tokens=123_840, optimizer_steps=99, skipped=1, consecutive_skips=0, complete=False, data="abc",
        recipe='run = "secret"\n',
    )  # fmt: skip
    return save(tmp_path, 10, make_shards(1, 0, 1, 0, filled=True), lone_rank(), state.to_meta(), 3)


def test_a_whole_checkpoint_is_described_tensor_by_tensor(folder, capsys):
    assert main([str(folder)]) == 0
    said, wrong = capsys.readouterr()
    assert wrong == "" and "secret" not in said
    for text in ("step 10", "tp 1", "stage_name: reasoning", "total_tokens: 123,840", "every byte has the checksum"):
        assert text in said
    assert f"of {sum(math.prod(shape) for shape in SHAPES.values()):,} parameters" in said
    values = whole_tensor("model.o_proj.weight", "master").astype("f8")
    line = next(line for line in said.splitlines() if line.startswith("model.o_proj.weight"))
    assert "10 x 12" in line and f"mean {values.mean():+.3e}" in line and f"std {values.std():.3e}" in line
    assert [line.split()[0] for line in said.splitlines() if " mean " in line] == list(SHAPES)


def test_a_folder_of_checkpoints_stands_for_its_newest_and_kinds_and_names_can_be_chosen(folder, capsys):
    assert main([str(folder.parent), "--kind", "exp_avg_sq", "--match", "norm"]) == 0
    said = capsys.readouterr().out
    assert f"std {whole_tensor('model.norm.weight', 'exp_avg_sq').astype('f8').std():.3e}" in said
    assert sum(" mean " in line for line in said.splitlines()) == 2
    assert main([str(folder), "--no-statistics"]) == 0 and " mean " not in capsys.readouterr().out


@pytest.mark.req("D07")
def test_damage_is_an_exit_code_and_one_line(folder, capsys):
    path = folder / "rank-00000.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    assert main([str(folder)]) == 1
    wrong = capsys.readouterr().err
    assert wrong.count("\n") == 1 and "rank-00000.safetensors is damaged" in wrong and "model.norm.weight" in wrong


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(["/nope"], "there is no"), (["{}", "--kind", "momentum"], "momentum"), (["{}", "--match", "zz"], "'zz'")],
)
def test_what_cannot_be_shown_is_one_line(folder, capsys, arguments, text):
    assert main([argument.format(folder) for argument in arguments]) == 1
    wrong = capsys.readouterr().err
    assert wrong.startswith("CheckpointError: ") and text in wrong and wrong.count("\n") == 1


def test_statistics_over_several_runs_equal_those_of_the_whole():
    tensor = torch.randn(2 * RUN + 5, generator=torch.Generator().manual_seed(0)) * 1e-3 + 5
    mean, deviation, largest = moments(tensor)
    assert mean == pytest.approx(tensor.double().mean().item(), rel=1e-12)
    assert deviation == pytest.approx(tensor.double().std(correction=0).item(), rel=1e-12)
    assert largest == tensor.max().item()
    tensor[7] = float("nan")
    assert all(map(math.isnan, moments(tensor)))
