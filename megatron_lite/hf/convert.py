"""A Hugging Face folder to a checkpoint, and a checkpoint to a Hugging Face folder, a block or a tensor at a time.

Both are strict: everything is checked before anything is written, and what was written appears under its name only
when it is whole.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import orjson
from torch import Tensor

from megatron_lite.checkpoint import store
from megatron_lite.checkpoint.files import whole_folder
from megatron_lite.checkpoint.model import SavedModel, read_model, write_imported
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.errors import CheckpointError, DataError, require
from megatron_lite.hf.config import TOKEN_IDS, from_hf, to_hf
from megatron_lite.hf.names import EMBEDDING, HEAD, compare_names, tensor_shapes
from megatron_lite.hf.weights import StoredTensor, open_weights, plan_files, read_json, write_weights

SHARD_BYTES = 5_000_000_000
GENERATION = "generation_config.json"
# What a folder says about its tokenizer; the first two are tokenizers by themselves.
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", GENERATION),
)
TOKENIZER_FOLDER = "tokenizer"  # in an imported checkpoint

Progress = Callable[[int, int], None]  # (elements just done, of so many in all)


@dataclass(frozen=True)
class Converted:
    """What was written."""

    model: SavedModel
    notes: list[str]  # for the user


def import_folder(
    source: Path, checkpoint: Path, family: str | None = None, progress: Progress = lambda done, total: None
) -> Converted:
    """Write the model of a Hugging Face folder as a checkpoint without optimizer state: fp32, equal to the bit.

    family: refuse any other model_type. ConfigError: config.json asks for what our models do not compute;
    CheckpointError: tensors that are missing, misshapen or too many, damaged files, or `checkpoint` is there already.
    """
    where = source / "config.json"
    config = read_json(where)
    model = from_hf(config, str(where), family)
    tensors = open_weights(source)
    wrong = compare_names(model, {name: tensor.shape for name, tensor in tensors.items()})
    require(not wrong, f"{source} does not fit its config.json: {_some(wrong)}", CheckpointError)
    shapes = tensor_shapes(model)
    if model.tie_word_embeddings and HEAD in tensors:
        _require_equal(tensors[EMBEDDING], tensors[HEAD])

    elements = Counter[str]()
    for name in shapes:
        elements[tensors[name].dtype] += prod(shapes[name])
    dtype = elements.most_common(1)[0][0]
    others = {name: tensors[name].dtype for name in shapes if tensors[name].dtype != dtype}
    copied = [name for name in TOKENIZER_FILES if (source / name).is_file()]
    tokenizer = TOKENIZER_FOLDER if set(copied) & set(TOKENIZER_FILES[:2]) else None
    saved = SavedModel(model, dtype, tokenizer, None, others, {name: config.get(name) for name in TOKEN_IDS})

    total = sum(elements.values())

    def blocks(name: str) -> Iterator[np.ndarray]:
        for block in tensors[name].blocks():
            yield block
            progress(block.size, total)

    with whole_folder(checkpoint) as folder:
        (folder / TOKENIZER_FOLDER).mkdir()
        for name in copied:
            shutil.copyfile(source / name, folder / TOKENIZER_FOLDER / name)
        write_imported(folder, saved, shapes, blocks)
    notes = [f"{total:,} parameters from {dtype}{f', {len(others)} tensors in another dtype' if others else ''}"]
    notes += [f"{name} was left out: {why}" for name, why in _left_out(set(tensors) - set(shapes))]
    notes.append(f"tokenizer: {', '.join(copied)}" if tokenizer else "the folder holds no tokenizer")
    return Converted(read_model(checkpoint), notes)


def _left_out(names: set[str]) -> Iterator[tuple[str, str]]:
    for name in sorted(names):
        yield name, "it equals the embedding" if name == HEAD else "it follows from config.json"


def _require_equal(embedding: StoredTensor, head: StoredTensor) -> None:
    """CheckpointError unless the head of a tied model is the embedding, to the bit."""
    row = 0
    width = embedding.shape[1]
    for a, b in zip(embedding.blocks(), head.blocks(), strict=True):
        differs = np.flatnonzero(a.view("<u4") != b.view("<u4"))
        if differs.size:
            raise CheckpointError(
                f"config.json says tie_word_embeddings = true, but {HEAD} is not {EMBEDDING}: they differ first at "
                f"row {(row + int(differs[0])) // width}; set it to false to import both"
            )
        row += a.size


def export_folder(
    checkpoint: Path,
    target: Path,
    *,
    dtype: str | None = None,
    tokenizer: str | None = None,
    shard_bytes: int = SHARD_BYTES,
    progress: Progress = lambda done, total: None,
) -> Converted:
    """Write the weights of a checkpoint, saved in whatever layout, as a folder that transformers loads.

    dtype: fp32, bf16 or fp16; default: what the weights were imported from or trained in. tokenizer: path of the one
    to write beside them, or "none"; default: the checkpoint's. The same weights give the same bytes.
    CheckpointError: damage, or `target` is there already; DataError: the tokenizer is not there.
    """
    saved = read_model(checkpoint)
    shapes = tensor_shapes(saved.config)
    main = dtype or saved.dtype
    dtypes = {name: dtype or saved.other_dtypes.get(name, main) for name in shapes}
    path = saved.tokenizer if tokenizer is None else tokenizer
    files = [] if path in (None, "none", "byte") else _tokenizer_files(Path(str(path)))
    ids = dict(saved.token_ids) or _token_ids(path, files)
    config = to_hf(saved.config, main, ids)

    plan = plan_files(shapes, dtypes, shard_bytes)
    order = [name for names in plan for name in names]
    total = sum(prod(shape) for shape in shapes.values())

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in store.read_tensors(checkpoint, names=order):
            yield name, tensor
            progress(tensor.numel(), total)

    with whole_folder(target) as folder:
        for original, name in files:
            shutil.copyfile(original, folder / name)
        if files and not (folder / "tokenizer_config.json").exists() and (folder / "tokenizer.json").exists():
            _write_json(folder / "tokenizer_config.json", _tokenizer_config(str(path), saved))
        if not (folder / GENERATION).exists() and ids.get("eos_token_id") is not None:
            _write_json(folder / GENERATION, {name: value for name, value in ids.items() if value is not None})
        _write_json(folder / "config.json", config)
        write_weights(folder, plan, shapes, dtypes, tensors())
    notes = [f"{total:,} parameters in {main}, {len(plan)} {'file' if len(plan) == 1 else 'files'}"]
    if not files:
        why = "the byte tokenizer has no files" if path == "byte" else "none was asked for or is known"
        notes.append(f"no tokenizer was written: {why}; --tokenizer PATH names one")
    return Converted(saved, notes)


def _tokenizer_files(path: Path) -> list[tuple[Path, str]]:
    """(file, its name in a Hugging Face folder) of a tokenizer: what lies beside it counts too."""
    require(path.exists(), f"the tokenizer {path} does not exist; --tokenizer PATH names another, --tokenizer none "
                           "leaves it out", DataError)  # fmt: skip
    if path.is_dir():
        whole = any((path / name).is_file() for name in TOKENIZER_FILES[:2])
        require(whole, f"the folder {path} holds neither {' nor '.join(TOKENIZER_FILES[:2])}; --tokenizer PATH names "
                       "another, --tokenizer none leaves it out", DataError)  # fmt: skip
        return [(path / name, name) for name in TOKENIZER_FILES if (path / name).is_file()]
    itself = "tokenizer.model" if path.suffix == ".model" else "tokenizer.json"
    beside = [path.with_name(name) for name in TOKENIZER_FILES[2:]]
    return [(path, itself), *((file, file.name) for file in beside if file.is_file())]


def _token_ids(path: str | None, files: list[tuple[Path, str]]) -> dict[str, Any]:
    """What ends a text: as a generation_config.json beside the tokenizer says, or its end-of-document id."""
    for file, name in files:
        if name == GENERATION:
            found = read_json(file)
            return {key: found[key] for key in TOKEN_IDS if key in found}
    return {"eos_token_id": load_tokenizer(path).eod_id} if files and path else {}


def _tokenizer_config(path: str, saved: SavedModel) -> dict[str, Any]:
    """Enough for AutoTokenizer to open a tokenizer.json."""
    tokenizer = load_tokenizer(path)
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": saved.config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
    }
    return config if tokenizer.eod_id is None else config | {"eos_token": tokenizer.decode([tokenizer.eod_id])}


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_bytes(orjson.dumps(value, option=orjson.OPT_INDENT_2) + b"\n")


def _some(lines: list[str]) -> str:
    """The first few of many."""
    return "; ".join(lines[:8]) + (f"; and {len(lines) - 8} more" if len(lines) > 8 else "")
