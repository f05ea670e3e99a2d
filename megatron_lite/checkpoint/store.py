"""Checkpoints on disk: whole or absent, written by every rank, read from any layout into any other.

save         copies equal? -> step-00000010.partial -> every rank's file -> manifest -> rename -> delete older ones
latest       the newest folder whose manifest and file sizes hold
load         fills the shards of one rank from whatever layout was saved
read_tensors whole tensors under their names, one at a time
verify       every byte against its checksum
"""

from __future__ import annotations

import shutil
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import orjson
import torch
import torch.distributed as dist
from torch import Tensor
from xxhash import xxh3_64_hexdigest

from megatron_lite.checkpoint.copies import differing_copies, gather_all
from megatron_lite.checkpoint.files import BLOCK, PARTIAL, SavedFile, strided, sync_folder, write_file
from megatron_lite.checkpoint.layout import Copy, Strided, compare_names, gaps, owns, parts, pieces_of, plan, table
from megatron_lite.checkpoint.manifest import NAME as MANIFEST
from megatron_lite.checkpoint.manifest import Manifest, check_sizes, read_manifest, write_manifest
from megatron_lite.errors import CheckpointError, require
from megatron_lite.parallel.shard import FlatShard, Piece

if TYPE_CHECKING:
    from megatron_lite.parallel.context import ParallelContext

KINDS = ("master", "exp_avg", "exp_avg_sq")


def folder_name(step: int) -> str:
    """The name of the checkpoint of a step."""
    return f"step-{step:08d}"


def save(root: Path, step: int, shards: list[FlatShard], ctx: ParallelContext, meta: dict[str, Any], keep: int) -> Path:
    """Write `root`/step-XXXXXXXX from every rank's own shards and keep the newest `keep` checkpoints. A collective.

    The folder appears under its name only once it is complete and durable. CheckpointError, on all ranks alike: copies
    of a replicated tensor differ (nothing is written then), or some rank could not write.
    """
    _all_well(ctx, "; ".join(differing_copies(shards, ctx)))
    final, partial = root / folder_name(step), root / (folder_name(step) + PARTIAL)
    _all_well(ctx, _try(ctx, root, lambda: _clear(root, partial)) if ctx.world.rank == 0 else "")
    try:
        entry: dict[str, Any] = {}
        _all_well(ctx, _try(ctx, partial, lambda: entry.update(_write_shards(partial, shards, ctx))))
        entries = _gather_entries(ctx, entry)
        failure = ""
        if ctx.world.rank == 0:
            failure = _try(ctx, partial, lambda: _commit(partial, final, _manifest(step, ctx, meta, entries)))
        _all_well(ctx, failure)
    except CheckpointError:
        if ctx.world.rank == 0:  # nobody writes any more: give the space back
            shutil.rmtree(partial, ignore_errors=True)
        raise
    if ctx.world.rank == 0:
        _delete_old(root, keep, final)
    return final


def latest(root: Path) -> Path | None:
    """The newest checkpoint in `root` that is complete, or None; those passed over are named on stderr."""
    for folder in _newest_first(root):
        try:
            check_sizes(folder, read_manifest(folder))
        except CheckpointError as error:
            print(f"checkpoint {folder} is passed over: {error}", file=sys.stderr, flush=True)
        else:
            return folder
    return None


def find(path: Path, where: str) -> Path:
    """A checkpoint folder, or the newest one in a folder of checkpoints or in a stage's folder.

    CheckpointError, naming `where` the path was given: no such folder, or no complete checkpoint in it.
    """
    require(path.is_dir(), f"{where}: there is no folder {path}", CheckpointError)
    if (path / MANIFEST).exists():
        return path
    found = latest(path) or latest(path / "checkpoints")
    hint = "; a Hugging Face folder is imported first, with tools/convert_hf.py" * (path / "config.json").is_file()
    require(found is not None, f"{where}: {path} is no checkpoint and holds none{hint}", CheckpointError)
    assert found is not None
    return found


def read_meta(folder: Path) -> dict[str, Any]:
    """What `save` was given as `meta`."""
    return read_manifest(folder).meta


def has_moments(folder: Path) -> bool:
    """Whether a checkpoint holds optimizer state beside the weights."""
    return set(KINDS) <= set(read_manifest(folder).kinds)


def load(folder: Path, shards: list[FlatShard], shapes: Mapping[str, tuple[int, ...]],
         kinds: tuple[str, ...] = KINDS) -> None:  # fmt: skip
    """Fill the tensors of one rank's shards in place, whatever layout the checkpoint was saved in.

    `shapes` are those of the whole model, of which this rank may hold a part.

    Not a collective. All elements of all pieces are filled and padding is zeroed. Beyond the shards themselves, memory
    holds the run of one piece. CheckpointError: kinds, names or shapes that do not fit, missing or damaged files.
    """
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    _require_kinds(folder, manifest, kinds)
    saved, files = manifest.saved(), _Files(folder, manifest)
    wrong = compare_names(shapes, saved.shapes)
    require(not wrong, f"{folder} does not fit this model: " + "; ".join(wrong[:8]), CheckpointError)
    for shard in shards:
        for kind in kinds:
            assert shard.tensors[kind].numel() == shard.hi - shard.lo
            for start, stop in gaps(shard.pieces, shard.lo, shard.hi):
                shard.tensors[kind].detach()[start:stop].zero_()
        for part, copies in plan(shard, saved):
            for kind in kinds:
                _fill(shard.tensors[kind].detach()[part.first : part.stop], copies, kind, files)


def read_tensors(
    folder: Path, kind: str = "master", names: Sequence[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Whole fp32 tensors under their names, one at a time: `names` in that order, or all in the order of the buckets.

    Every byte of the checkpoint is verified first, those of replicated copies too. CheckpointError as in `load`.
    """
    manifest = read_manifest(folder)
    _require_kinds(folder, manifest, (kind,))
    damage = verify(folder)
    require(not damage, "; ".join(damage[:8]), CheckpointError)
    saved, files = manifest.saved(), _Files(folder, manifest)
    for name in saved.shapes if names is None else names:
        shape = saved.shapes[name]
        tensor = torch.empty(shape, dtype=torch.float32)
        piece = Piece(name, shape, (0,) * len(shape), shape)
        shard = FlatShard(name, (piece,), piece.numel, 0, piece.numel, {kind: tensor.view(-1)})
        for _, copies in plan(shard, saved):
            _fill(tensor.view(-1), copies, kind, files)
        yield name, tensor


def verify(folder: Path) -> list[str]:
    """Compare every byte with its checksum; one line for each damaged file, naming the tensors in the damaged run."""
    manifest = read_manifest(folder)
    check_sizes(folder, manifest)
    tables = {(c["pp"], c["tp"]): c["buckets"] for c in manifest.coordinates}
    damage = []
    for entry in manifest.files:
        try:
            file = SavedFile(folder, entry)
        except CheckpointError as error:
            damage.append(str(error))
            continue
        for tensor, size in file.sizes.items():
            bucket = tensor.rsplit(".", 1)[0]
            lo = entry["ranges"][bucket][0]
            for start in range(0, size, BLOCK):
                stop = min(start + BLOCK, size)
                try:
                    file.read(tensor, start, stop)
                except CheckpointError as error:
                    held = parts(pieces_of(tables[entry["pp"], entry["tp"]][bucket]), lo + start, lo + stop)
                    damage.append(f"{error} (it holds {', '.join(part.piece.name for part in held)})")
    return damage


class _Files:
    """Saved files by name, opened when first needed."""

    def __init__(self, folder: Path, manifest: Manifest):
        self._folder = folder
        self._entries = {entry["name"]: entry for entry in manifest.files}
        self._open: dict[str, SavedFile] = {}

    def __getitem__(self, name: str) -> SavedFile:
        if name not in self._open:
            self._open[name] = SavedFile(self._folder, self._entries[name])
        return self._open[name]


def _fill(target: Tensor, copies: Sequence[Copy], kind: str, files: _Files) -> None:
    assert target.dtype == torch.float32
    host = target if target.device.type == "cpu" else torch.empty(target.numel())
    flat = host.numpy()
    for copy in copies:
        start, stop = copy.source.offset, copy.source_stop
        run = files[copy.file].read(f"{copy.bucket}.{kind}", start, stop)
        source = strided(run, Strided(0, copy.source.strides), copy.shape)
        strided(flat, copy.target, copy.shape)[...] = source
    if host is not target:
        target.copy_(host)


def _require_kinds(folder: Path, manifest: Manifest, kinds: tuple[str, ...]) -> None:
    missing = [kind for kind in kinds if kind not in manifest.kinds]
    require(
        not missing,
        f"{folder} holds {', '.join(manifest.kinds)} but not {', '.join(missing)}"
        + ('; set checkpoint.on_missing_optimizer = "reset" to start with fresh moments' if "master" in kinds else ""),
        CheckpointError,
    )


def _try(ctx: ParallelContext, path: Path, action: Callable[[], None]) -> str:
    """Run `action`; the story of its failure, or nothing."""
    try:
        action()
    except OSError as error:
        where = error.filename or path
        return f"rank {ctx.world.rank} cannot write {where}: {error.strerror} (errno {error.errno})"
    except (RuntimeError, MemoryError, CheckpointError) as error:
        return f"rank {ctx.world.rank} cannot write {path}: {error}"
    return ""


def _all_well(ctx: ParallelContext, failure: str) -> None:
    """Raise on every rank when any rank failed. A collective."""
    failures = list(dict.fromkeys(text for text in gather_all(ctx.world, failure) if text))
    require(not failures, "the checkpoint was not saved: " + "; ".join(failures[:4]), CheckpointError)


def _clear(root: Path, partial: Path) -> None:
    root.mkdir(parents=True, exist_ok=True)
    for stale in root.glob("step-*" + PARTIAL):
        shutil.rmtree(stale)
    partial.mkdir()
    sync_folder(root)


def _write_shards(partial: Path, shards: Sequence[FlatShard], ctx: ParallelContext) -> dict[str, Any]:
    mine = [shard for shard in shards if owns(shard)]
    pieces = orjson.dumps(table(shards))
    place: dict[str, Any] = {"rank": ctx.world.rank, "pp": ctx.pp.rank, "tp": ctx.tp.rank}
    place["kinds"] = list(dict.fromkeys(kind for shard in shards for kind in shard.tensors))
    place["table"] = zlib.compress(pieces, 1) if ctx.data.rank == 0 else b""
    place["table_hash"] = xxh3_64_hexdigest(pieces)
    if not mine:
        return place
    path = partial / f"rank-{ctx.world.rank:05d}.safetensors"
    tensors = {f"{shard.bucket}.{kind}": tensor for shard in mine for kind, tensor in shard.tensors.items()}
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
    try:
        written = write_file(path, tensors)
    except OSError as error:
        done = path.stat().st_size if path.exists() else 0
        reason = f"{error.strerror}, after {done} of about {size} bytes"
        raise OSError(error.errno, reason, str(path)) from error
    return {**written, **place, "ranges": {shard.bucket: [shard.lo, shard.hi] for shard in mine}}


def _gather_entries(ctx: ParallelContext, entry: dict[str, Any]) -> list[dict[str, Any]]:
    """Every rank's entry on rank 0, an empty list elsewhere. A collective."""
    if ctx.world.group is None:
        return [entry]
    first = ctx.world.rank == 0
    entries: list[Any] = [None] * ctx.world.size
    dist.gather_object(entry, entries if first else None, dst=ctx.world.ranks[0], group=ctx.world.group)
    return entries if first else []


def _manifest(step: int, ctx: ParallelContext, meta: dict[str, Any], entries: Sequence[dict[str, Any]]) -> Manifest:
    """One manifest from what every rank wrote."""
    tables = {(e["pp"], e["tp"]): e["table"] for e in entries if e["table"]}
    hashes = {(e["pp"], e["tp"], e["table_hash"]) for e in entries}
    assert len(hashes) == len(tables), "ranks of one (pp, tp) coordinate do not hold the same pieces"
    inner = ("table", "table_hash", "kinds")
    return Manifest(
        step=step,
        kinds=entries[0]["kinds"],
        layout={"world": ctx.world.size, "pp": ctx.pp.size, "dp": ctx.dp.size, "cp": ctx.cp.size, "tp": ctx.tp.size},
        meta=meta,
        coordinates=[
            {"pp": pp, "tp": tp, "buckets": orjson.loads(zlib.decompress(text))} for (pp, tp), text in tables.items()
        ],
        files=[{key: value for key, value in e.items() if key not in inner} for e in entries if "name" in e],
    )


def _commit(partial: Path, final: Path, manifest: Manifest) -> None:
    write_manifest(partial, manifest)
    sync_folder(partial)
    replaced = final.with_name(final.name + ".replaced" + PARTIAL)
    if final.exists():  # a damaged one that was passed over, or a run that went back to an older one
        final.rename(replaced)
    partial.rename(final)
    sync_folder(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _newest_first(root: Path) -> list[Path]:
    found = [path for path in root.glob("step-*") if path.is_dir() and path.name.removeprefix("step-").isdigit()]
    return sorted(found, key=lambda path: int(path.name.removeprefix("step-")), reverse=True)


def _delete_old(root: Path, keep: int, newest: Path) -> None:
    """Delete complete checkpoints beyond the newest `keep`, never the one just written."""
    complete = [newest]
    for folder in _newest_first(root):
        try:
            check_sizes(folder, read_manifest(folder))
        except CheckpointError:
            continue  # damaged: does not count, and is left for its owner to look at
        if folder != newest:
            complete.append(folder)
    for folder in complete[keep:]:
        try:
            shutil.rmtree(folder.rename(folder.with_name(folder.name + PARTIAL)))
        except OSError as error:
            print(f"old checkpoint {folder} could not be deleted: {error}", file=sys.stderr, flush=True)
