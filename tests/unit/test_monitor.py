"""What a run tells: speed, lines, files and sinks."""

import os
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import orjson
import pytest
import torch

from megatron_lite.config.schema import Logging
from megatron_lite.errors import ConfigError
from megatron_lite.monitor.environment import describe_environment, write_environment
from megatron_lite.monitor.log import duration, log_line, short
from megatron_lite.monitor.metrics import MetricsFile, mfu, peak_flops, peak_memory_bytes, tflops
from megatron_lite.monitor.sinks import Sinks, check_packages


@pytest.mark.req("Q04")
def test_teraflops_are_ten_to_the_twelve():
    assert tflops(100_663_296, seconds=1.0, num_devices=1) == pytest.approx(1.0066e-4, rel=1e-4)
    assert tflops(8e15, seconds=2.0, num_devices=16) == 250.0


def test_mfu_of_the_published_stablelm_run():
    tokens_per_second = 4e12 / (30 * 86400)  # 256 A100, about 30 days
    per_token = 2.002452e10  # full attention, sequences of 4096
    assert mfu(per_token * tokens_per_second, 1.0, 256, peak_flops("NVIDIA A100-SXM4-40GB")) == pytest.approx(
        0.387, abs=5e-4
    )
    assert mfu(1e12, 1.0, 1, peak_flops("cpu")) is None


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A10", None),
        ("NVIDIA RTX A1000", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
    ],
)
def test_peaks_are_known_by_device_name_or_not_at_all(name, peak):
    assert peak_flops(name) == peak


def test_peak_memory_covers_what_was_held():
    held = np.ones(8 << 20)
    assert peak_memory_bytes(torch.device("cpu")) > held.nbytes


def test_a_step_is_one_readable_line():
    line = log_line(
        step=10, num_steps=955_000, tokens=41_943_040, loss=10.81234, lr=1.6e-6, grad_norm=2.5, step_time_s=2.7212,
        tokens_per_second=1_541_234.0, mfu=0.3871, memory_bytes=31 << 30, time_left_s=2.6e6,
    )  # fmt: skip
    assert line == (
        "step     10/955000 | tokens  41.9M | loss 10.8123 | lr 1.60e-06 | grad norm 2.500 | 2721 ms |  1.54M tokens/s"
        " | MFU 38.7% | 31.00 GiB | 30d02h left"
    )
    plain = log_line(
        step=3, num_steps=3, tokens=96, loss=float("nan"), lr=0.0, grad_norm=float("inf"), step_time_s=0.01,
        tokens_per_second=3200.0, mfu=None, memory_bytes=0, time_left_s=0.0,
    )  # fmt: skip
    assert "loss nan" in plain and "grad norm inf" in plain and "MFU n/a" in plain and plain.endswith("| 0s left")


def test_counts_keep_three_digits():
    shown = [short(n) for n in (0, 7, 999, 1000, 9_994, 12_345, 999_499, 999_500, 4_194_304, 4e12, 123e13)]
    assert shown == ["0", "7", "999", "1.00k", "9.99k", "12.3k", "999k", "1.00M", "4.19M", "4.00T", "1230.00T"]


def test_durations_show_their_two_largest_units():
    shown = [duration(s) for s in (-1, 0.4, 59.4, 59.6, 185, 3600, 7620, 2.6e6)]
    assert shown == ["0s", "0s", "59s", "1m00s", "3m05s", "1h00m", "2h07m", "30d02h"]


def _lines(path):
    return [orjson.loads(line) for line in path.read_bytes().splitlines()]


def test_numbers_keep_every_digit_and_nan_is_null(tmp_path):
    file = MetricsFile(tmp_path / "deep" / "metrics.jsonl", None)
    loss = 1 / 3
    file.write({"step": 1, "loss": loss, "tokens": 2**53 + 1, "grad_norm": float("nan")})
    assert _lines(tmp_path / "deep" / "metrics.jsonl") == [
        {"step": 1, "loss": loss, "tokens": 2**53 + 1, "grad_norm": None}
    ]
    file.close()


def test_a_resumed_run_drops_later_steps_and_a_torn_line(tmp_path):
    path = tmp_path / "metrics.jsonl"
    file = MetricsFile(path, None)
    for step in range(1, 8):
        file.write({"step": step})
    file.close()
    with path.open("ab") as raw:
        raw.write(b'{"step":5,"lo')
    file = MetricsFile(path, 5)
    file.write({"step": 6, "again": True})
    file.close()
    assert _lines(path) == [{"step": n} for n in range(1, 6)] + [{"step": 6, "again": True}]
    MetricsFile(path, None).close()
    assert path.read_bytes() == b""
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_lines_survive_a_kill(tmp_path):
    code = (
        "import os, signal, sys; from pathlib import Path; from megatron_lite.monitor.metrics import MetricsFile\n"
        "MetricsFile(Path(sys.argv[1]), None).write({'step': 1}); os.kill(os.getpid(), signal.SIGKILL)"
    )
    path = tmp_path / "metrics.jsonl"
    done = subprocess.run([sys.executable, "-c", code, path], timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL and _lines(path) == [{"step": 1}]


def test_the_environment_of_a_run_is_written(tmp_path):
    write_environment(tmp_path / "stage-1" / "environment.json", torch.device("cpu"), 3)
    found = orjson.loads((tmp_path / "stage-1" / "environment.json").read_bytes())
    assert found == describe_environment(torch.device("cpu"), 3)
    assert found["world_size"] == 3 and found["packages"]["torch"] == torch.__version__
    assert found["python"] == ".".join(map(str, sys.version_info[:3]))


def _modules(monkeypatch, **modules):
    """Stand-ins for packages that may not be installed here."""
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name.replace("__", "."), module)
    monkeypatch.setattr("megatron_lite.monitor.sinks.find_spec", lambda name: modules.get(name))


class _FakeWandb:
    """Records what a run is told; fails at a step."""

    class WandbError(Exception):
        """The package's own."""

    def __init__(self, fails_at=None):
        self.errors, self.started, self.logged, self.finished = SimpleNamespace(Error=self.WandbError), [], [], 0
        self.fails_at = fails_at

    def init(self, **options):
        self.started.append(options)
        return self

    def log(self, numbers, step):
        if step == self.fails_at:
            raise self.WandbError("disk quota")
        self.logged.append((step, numbers))

    def finish(self):
        self.finished += 1


def test_a_missing_package_is_an_error_that_names_the_extra(monkeypatch):
    monkeypatch.setattr("megatron_lite.monitor.sinks.find_spec", lambda name: None)
    with pytest.raises(
        ConfigError, match=r"logging.tensorboard and logging.wandb .*megatron_lite\[tensorboard,wandb\]"
    ):
        check_packages(Logging(tensorboard=True, wandb=True))
    check_packages(Logging())


@pytest.mark.req("Q02")
def test_wandb_gets_one_offline_run_with_the_numbers_of_every_step(monkeypatch, tmp_path):
    fake = _FakeWandb()
    _modules(monkeypatch, wandb=fake)
    monkeypatch.delenv("WANDB_MODE", raising=False)
    sinks = Sinks(Logging(wandb=True), tmp_path, "general", {"seed": 1})
    sinks.write(1, {"step": 1, "loss": 2.5, "mfu": None, "skipped": 0, "flag": True})
    sinks.close()
    assert [(o["mode"], o["name"], o["config"]) for o in fake.started] == [("offline", "general", {"seed": 1})]
    assert fake.logged == [(1, {"loss": 2.5, "skipped": 0.0})] and fake.finished == 1
    monkeypatch.setenv("WANDB_MODE", "disabled")
    Sinks(Logging(wandb=True), tmp_path, "general", {})
    assert fake.started[-1]["mode"] == "disabled"


def test_a_failing_sink_is_reported_once_and_dropped_and_the_others_go_on(monkeypatch, tmp_path, capsys):
    wandb, seen = _FakeWandb(fails_at=2), []
    writer = SimpleNamespace(
        add_text=lambda *a: None,
        add_scalar=lambda key, value, step: seen.append((key, value, step)),
        close=lambda: None,
    )
    board = SimpleNamespace(SummaryWriter=lambda folder: writer)
    _modules(monkeypatch, wandb=wandb, tensorboard=board, torch__utils__tensorboard=board)
    sinks = Sinks(Logging(wandb=True, tensorboard=True), tmp_path, "x", {})
    for step in (1, 2, 3):
        sinks.write(step, {"loss": 1.0})
    sinks.close()
    said = capsys.readouterr().err
    assert said.count("wandb failed") == 1 and "disk quota" in said
    assert [step for step, _ in wandb.logged] == [1] and seen == [("loss", 1.0, step) for step in (1, 2, 3)]


def test_a_sink_that_cannot_start_is_left_out(monkeypatch, tmp_path, capsys):
    fake = _FakeWandb()
    fake.init = lambda **options: (_ for _ in ()).throw(OSError("no space"))
    _modules(monkeypatch, wandb=fake)
    sinks = Sinks(Logging(wandb=True), tmp_path, "x", {})
    sinks.write(1, {"loss": 1.0})
    assert "wandb could not be started and is left out: no space" in capsys.readouterr().err
    assert os.listdir(tmp_path) == []
