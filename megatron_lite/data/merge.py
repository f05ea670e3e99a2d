"""Pairs joined into one: the documents of the first, then those of the second, … as if prepared at once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from megatron_lite.data.corpus import read_manifest
from megatron_lite.data.indexed import IndexedDataset
from megatron_lite.data.writer import IndexedWriter
from megatron_lite.errors import DataError, require

TOKENS = 1 << 22  # copied at a time
SUMS = ("empty", "filtered", "checked")
SAME = ("format", "tokenizer", "backend", "versions", "key", "ids_key", "where", "append_eod", "on_bad_line")


def merge(prefixes: Sequence[str], output: str, progress: Callable[[int], None] = lambda tokens: None) -> IndexedWriter:
    """Write `output`.bin, .idx and, if every part has a manifest, .json. `progress` is told tokens as they are copied.

    Errors: parts of different dtypes, or whose manifests tell of different tokenizers or options.
    """
    require(len(prefixes) > 0, "nothing to merge", DataError)
    require(output not in prefixes, f"{output} is one of the parts; merge into another name", DataError)
    parts = [IndexedDataset(prefix, mmap=False) for prefix in prefixes]
    for part in parts:
        part.check()
        require(
            part.dtype == parts[0].dtype,
            f"{part.prefix} holds {part.dtype}, {parts[0].prefix} holds {parts[0].dtype}: prepare them alike",
            DataError,
        )
    manifest = _joined([str(prefix) for prefix in prefixes])
    Path(output).parent.mkdir(parents=True, exist_ok=True)
    with IndexedWriter(output, parts[0].dtype) as writer:
        for part in parts:
            _copy(part, writer, progress)
        writer.manifest = manifest
    return writer


def _copy(part: IndexedDataset, writer: IndexedWriter, progress: Callable[[int], None]) -> None:
    """Whole documents of about TOKENS tokens at a time."""
    starts = part.document_starts()
    first = 0
    while first < part.num_documents:
        last = int(starts.searchsorted(starts[first] + TOKENS, "left"))
        last = min(max(last, first + 1), part.num_documents)
        tokens = part.read(int(starts[first]), int(starts[last] - starts[first]))
        writer.add_documents(tokens, starts[first + 1 : last + 1] - starts[first:last])
        progress(len(tokens))
        first = last


def _joined(prefixes: list[str]) -> dict[str, Any] | None:
    """One manifest out of those of all parts; None when a part has none."""
    manifests = [read_manifest(prefix) for prefix in prefixes]
    found = [manifest for manifest in manifests if manifest is not None]
    if len(found) < len(prefixes):
        return None
    first = found[0]
    for prefix, manifest in zip(prefixes, found, strict=True):
        for key in SAME:
            require(
                manifest.get(key) == first.get(key),
                f"{prefix} was prepared with {key} = {manifest.get(key)}, {prefixes[0]} with {first.get(key)}",
                DataError,
            )
    joined = {key: first.get(key) for key in SAME}
    joined |= {key: sum(manifest.get(key, 0) for manifest in found) for key in SUMS}
    joined["bad"] = dict(sorted(sum((Counter(manifest.get("bad", {})) for manifest in found), Counter()).items()))
    joined["shard"] = " + ".join(str(manifest.get("shard")) for manifest in found)
    joined["inputs"] = [entry for manifest in found for entry in manifest.get("inputs", [])]
    return joined
