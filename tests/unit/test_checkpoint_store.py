"""Saving and loading in one process: whole or absent, damage named, kept and deleted as told."""

import errno
import os
import re
import resource
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch

from megatron_lite.checkpoint.files import BLOCK
from megatron_lite.checkpoint.manifest import NAME, read_manifest
from megatron_lite.checkpoint.store import latest, read_meta, read_tensors, save, verify
from megatron_lite.errors import CheckpointError
from megatron_lite.parallel.shard import FlatShard, Piece
from tests.helpers.shards import KINDS, SHAPES, expected, load, lone_rank, make_shards, whole_tensor

META = {"state": {"step": 10, "consumed_samples": 2**40 + 1}, "text": 'a = "b"\n'}


def _save(root, step=10, keep=3, kinds=KINDS, meta=META):
    return save(root, step, make_shards(1, 0, 1, 0, filled=True, kinds=kinds), lone_rank(), meta, keep)


def _one(count, kinds=KINDS, value=1.0, bucket="b"):
    tensors = {kind: torch.full((count,), value) for kind in kinds}
    return FlatShard(bucket, (Piece("w", (count,), (0,), (count,)),), count, 0, count, tensors)


def _steps(root):
    return sorted(path.name for path in root.iterdir())


def test_what_was_saved_is_loaded_to_the_bit_with_padding_zeroed(tmp_path):
    folder = _save(tmp_path)
    shards = make_shards(1, 0, 1, 0, filled=False)
    load(folder, shards)
    for shard in shards:
        for kind in KINDS:
            assert shard.tensors[kind].numpy().tobytes() == expected(shard, kind).tobytes()
    assert folder == tmp_path / "step-00000010" == latest(tmp_path)
    assert read_meta(folder) == META


def test_nan_and_infinity_and_minus_zero_survive(tmp_path):
    odd = np.array([0x7FC00001, 0xFF800000, 0x80000000, 1], np.uint32).view(np.float32)
    shard = FlatShard("b", (Piece("w", (4,), (0,), (4,)),), 4, 0, 4, {"master": torch.from_numpy(odd.copy())})
    folder = save(tmp_path, 1, [shard], lone_rank(), {}, 1)
    again = _one(4, ("master",))
    load(folder, [again], ("master",))
    assert again.tensors["master"].numpy().tobytes() == odd.tobytes()


def test_one_resharded_rank_needs_only_its_own_shards(tmp_path):
    folder = _save(tmp_path)
    for rank in range(5):
        shards = make_shards(4, 2, 5, rank, filled=False)
        load(folder, shards)
        for shard in shards:
            assert np.array_equal(shard.tensors["exp_avg_sq"].numpy(), expected(shard, "exp_avg_sq"))


def test_whole_tensors_are_read_under_their_names_in_the_order_of_the_buckets(tmp_path):
    found = dict(read_tensors(_save(tmp_path)))
    assert list(found) == list(SHAPES)
    for name, tensor in found.items():
        assert np.array_equal(tensor.numpy(), whole_tensor(name, "master"))


@pytest.mark.req("F14")
def test_files_are_plain_safetensors_in_fp32(tmp_path):
    folder = _save(tmp_path)
    with safetensors.safe_open(folder / "rank-00000.safetensors", "np") as file:
        assert sorted(file.keys()) == sorted(f"{b}.{k}" for b in ("decay", "plain") for k in KINDS)
        for key in file.keys():  # noqa: SIM118 - the handle is no mapping
            assert file.get_tensor(key).dtype == np.float32


def test_tensors_longer_than_a_block_are_proven_block_by_block(tmp_path):
    count = 2 * BLOCK + 3
    shard = _one(count, ("master",))
    shard.tensors["master"].copy_(torch.arange(count))
    folder = save(tmp_path, 1, [shard], lone_rank(), {}, 1)
    assert len(read_manifest(folder).files[0]["blocks"]["b.master"]) == 3
    again = _one(count, ("master",))
    load(folder, [again], ("master",))
    assert torch.equal(again.tensors["master"], shard.tensors["master"])
    _flip(folder / "rank-00000.safetensors", -1)
    with pytest.raises(CheckpointError, match=f"elements {2 * BLOCK} to {count - 1} of b.master"):
        load(folder, [again], ("master",))


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.req("D07")
@pytest.mark.parametrize("at", [0, 5, 20, 400, 3000, -1])
def test_one_flipped_byte_is_found_and_the_file_named(tmp_path, at):
    folder = _save(tmp_path)
    _flip(folder / "rank-00000.safetensors", at)
    with pytest.raises(CheckpointError, match=r"step-00000010/rank-00000.safetensors is damaged"):
        load(folder, make_shards(1, 0, 1, 0, filled=False))
    assert "rank-00000.safetensors is damaged" in verify(folder)[0]


@pytest.mark.req("N03")
def test_a_changed_tensor_stops_an_export_with_its_name(tmp_path):
    folder = _save(tmp_path)
    _flip(folder / "rank-00000.safetensors", -1)
    with pytest.raises(CheckpointError, match=r"plain.exp_avg_sq .* \(it holds .*model.norm.weight"):
        list(read_tensors(folder))


def test_every_flipped_byte_of_a_manifest_is_found(tmp_path):
    folder = save(tmp_path, 3, [_one(2)], lone_rank(), {}, 1)
    text = (folder / NAME).read_bytes()
    for at in range(len(text)):
        changed = bytearray(text)
        changed[at] ^= 1
        (folder / NAME).write_bytes(changed)
        with pytest.raises(CheckpointError):
            read_manifest(folder)


@pytest.mark.parametrize("damage", ["short", "gone", "manifest", "no manifest"])
def test_a_damaged_newest_checkpoint_is_passed_over_and_named(tmp_path, capsys, damage):
    _save(tmp_path, 1), _save(tmp_path, 2)
    file, manifest = tmp_path / "step-00000002" / "rank-00000.safetensors", tmp_path / "step-00000002" / NAME
    if damage == "short":
        os.truncate(file, file.stat().st_size - 1)
    elif damage == "gone":
        file.unlink()
    elif damage == "manifest":
        os.truncate(manifest, 100)
    else:
        manifest.unlink()
    assert latest(tmp_path) == tmp_path / "step-00000001"
    assert re.search(r"step-00000002 is passed over: .*step-00000002", capsys.readouterr().err)


def test_nothing_saved_is_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None and latest(tmp_path / "nope") is None


@pytest.mark.req("M05")
def test_a_missing_folder_is_an_error_that_names_it(tmp_path):
    with pytest.raises(CheckpointError, match="there is no checkpoint folder /nope"):
        load(Path("/nope"), [_one(3)])
    with pytest.raises(CheckpointError, match="not a checkpoint, or was not finished"):
        read_meta(tmp_path)


@pytest.mark.req("M06")
def test_stale_partial_folders_are_removed_and_never_read(tmp_path):
    stale = tmp_path / "step-00000010.partial"
    stale.mkdir()
    (stale / "rank-00000.safetensors").write_bytes(b"half")
    (tmp_path / "step-00000007.partial").mkdir()
    assert latest(tmp_path) is None
    assert _save(tmp_path, 10) == latest(tmp_path)
    assert _steps(tmp_path) == ["step-00000010"]


def test_the_newest_are_kept_and_only_complete_ones_count(tmp_path):
    for step in (1, 2, 3, 10):
        _save(tmp_path, step, keep=3)
    assert _steps(tmp_path) == ["step-00000002", "step-00000003", "step-00000010"]
    (tmp_path / "step-00000010" / NAME).unlink()
    _save(tmp_path, 11, keep=2)
    assert _steps(tmp_path) == ["step-00000003", "step-00000010", "step-00000011"]


def test_the_one_just_written_is_never_deleted(tmp_path):
    for step in (20, 30, 5):
        _save(tmp_path, step, keep=1)
    assert "step-00000005" in _steps(tmp_path)


def test_a_damaged_checkpoint_of_the_same_step_is_replaced(tmp_path):
    folder = _save(tmp_path)
    (folder / NAME).write_bytes(b"{")
    assert latest(tmp_path) is None
    assert _save(tmp_path) == folder == latest(tmp_path)
    assert _steps(tmp_path) == ["step-00000010"]


def test_missing_kinds_are_named_with_the_way_out(tmp_path):
    folder = _save(tmp_path, kinds=("master",))
    with pytest.raises(
        CheckpointError, match='holds master but not exp_avg, exp_avg_sq; .*on_missing_optimizer = "res'
    ):
        load(folder, make_shards(1, 0, 1, 0, filled=False))
    load(folder, make_shards(1, 0, 1, 0, filled=False), ("master",))


def test_a_checkpoint_of_another_model_is_refused_with_names_and_shapes(tmp_path):
    folder = save(tmp_path, 1, [_one(3)], lone_rank(), {}, 1)
    with pytest.raises(CheckpointError, match=r"w \[3\] in the checkpoint and \[4\] here|w is \[3\] in the checkpoint"):
        load(folder, [_one(4)])
    with pytest.raises(CheckpointError, match="model.norm.weight .* is not in the checkpoint"):
        load(folder, make_shards(1, 0, 1, 0, filled=False))


def _child(code, *args, **kwargs):
    text = "import sys\nfrom pathlib import Path\nfrom tests.unit.test_checkpoint_store import *\n"
    text += "from tests.unit.test_checkpoint_store import _one, _save\n" + textwrap.dedent(code)
    command = [sys.executable, "-c", text, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, timeout=100, check=False, **kwargs)


@pytest.mark.req("M01")
def test_a_save_killed_before_its_rename_leaves_the_older_one_the_latest(tmp_path):
    _save(tmp_path, 5)
    code = """
        import os, signal, megatron_lite.checkpoint.store as store
        when = sys.argv[2]
        def die(*args):
            os.kill(os.getpid(), signal.SIGKILL)
        if when == "file":
            store.write_file = die
        elif when == "manifest":
            store.write_manifest = die
        elif when == "sync":
            sync = store.sync_folder
            store.sync_folder = lambda folder: die() if "partial" in folder.name else sync(folder)
        _save(Path(sys.argv[1]), 10, keep=1)
    """
    for when in ("file", "manifest", "sync"):
        assert _child(code, tmp_path, when).returncode == -9
        assert _steps(tmp_path) == ["step-00000005", "step-00000010.partial"]
        assert latest(tmp_path) == tmp_path / "step-00000005"
        load(latest(tmp_path), make_shards(1, 0, 1, 0, filled=False))
    _save(tmp_path, 10)
    assert _steps(tmp_path) == ["step-00000005", "step-00000010"]


@pytest.mark.req("M03")
def test_a_full_disk_is_reported_with_path_rank_and_errno_and_leaves_nothing(tmp_path):
    _save(tmp_path, 5)
    code = """
        try:
            save(Path(sys.argv[1]), 10, [_one(100_000)], lone_rank(), {}, 1)
        except CheckpointError as error:
            print(error)
    """

    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))

    said = _child(code, tmp_path, preexec_fn=small_files).stdout
    assert re.search(
        rf"rank 0 cannot write .*step-00000010.partial/rank-00000.safetensors.*errno {errno.EFBIG}", said
    ), said
    assert re.search(r"after 200000 of about 1200000 bytes", said), said
    assert _steps(tmp_path) == ["step-00000005"]


def test_loading_a_slice_takes_its_own_memory_and_one_tensor(tmp_path):
    names, size = 24, 1 << 20  # 24 tensors of 4 MiB, three kinds: 288 MiB in one file
    pieces = tuple(Piece(f"w{i}", (1024, 1024), (0, 0), (1024, 1024), i * size) for i in range(names))
    total = names * size
    tensors = {kind: torch.rand(total) for kind in KINDS}
    folder = save(tmp_path, 1, [FlatShard("b", pieces, total, 0, total, tensors)], lone_rank(), {}, 1)
    code = """
        names, size = 24, 1 << 20
        # a column slice of every tensor: an eighth of the model that touches every row of it
        pieces = tuple(Piece(f"w{i}", (1024, 1024), (0, 128), (1024, 128), i * size // 8) for i in range(names))
        tensors = {kind: torch.empty(names * size // 8) for kind in KINDS}
        shard = FlatShard("b", pieces, names * size // 8, 0, names * size // 8, tensors)
        def status(key):
            return int(re.search(rf"{key}:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
        Path("/proc/self/clear_refs").write_text("5")  # forget the peak of importing
        before = status("VmRSS")
        load(Path(sys.argv[1]), [shard])
        print(status("VmHWM") - before)
    """
    done = _child(code, folder)
    own, tensor, block = names * size * 4 * 3 / 8 / 1024, size * 4 / 1024, BLOCK * 4 / 1024  # KiB
    assert own * 0.9 < int(done.stdout) < own + tensor + 2 * block + 4096, (own, done.stdout, done.stderr)
