"""Text to ids and back, behind one small interface: bytes, sentencepiece, or the tokenizers library.

Text that looks like a control token, `<|endoftext|>` typed in a document for instance, is text: it never becomes the
control id. No tokenizer adds ids of its own before or after a text.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Sequence, Sized
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Protocol

import numpy as np
import orjson

from megatron_lite.data.unicode import is_settled, tables
from megatron_lite.errors import DataError, require

END_OF_TEXT = "<|endoftext|>"
Ids = tuple[np.ndarray, np.ndarray]  # integers [sum of lengths], int64 [texts]


class Tokenizer(Protocol):
    """What the rest of the package asks of a tokenizer."""

    name: str  # kind and file name, for people
    fingerprint: str  # sha256 of the file; equal fingerprints give equal ids
    vocab_size: int  # largest id + 1
    eod_id: int | None  # put after each document when asked; None: this tokenizer has no such id

    def encode(self, texts: list[str]) -> Ids:
        """The ids of all texts laid end to end, and how many each has."""

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids. An id the tokenizer does not have becomes the replacement character."""


class ByteTokenizer:
    """UTF-8 bytes, and id 256 between documents."""

    name = "byte"
    fingerprint = hashlib.sha256(b"byte").hexdigest()
    vocab_size = 257
    eod_id: int | None = 256

    def encode(self, texts: list[str]) -> Ids:
        """One id per byte."""
        raws = [text.encode("utf-8") for text in texts]
        return np.frombuffer(b"".join(raws), dtype=np.uint8).astype(np.int32), _lengths(raws)

    def decode(self, ids: Sequence[int]) -> str:
        """Bytes that are not UTF-8 become the replacement character."""
        extra = {256: END_OF_TEXT.encode()}
        raw = b"".join(bytes([i]) if i < 256 else extra.get(i, "\ufffd".encode()) for i in map(int, ids))
        return raw.decode("utf-8", errors="replace")


class SentencePieceTokenizer:
    """A sentencepiece .model; the end of a document is its eos."""

    def __init__(self, path: Path):
        import sentencepiece

        self.name = f"sentencepiece:{path.name}"
        self.fingerprint = _sha256(path)
        try:
            self._model = sentencepiece.SentencePieceProcessor(model_file=str(path))
        except (OSError, RuntimeError) as error:
            raise DataError(f"{path} is not a sentencepiece model: {error}") from error
        self.vocab_size = int(self._model.vocab_size())
        eos = int(self._model.eos_id())
        self.eod_id: int | None = eos if eos >= 0 else None

    def encode(self, texts: list[str]) -> Ids:
        """On one thread."""
        return end_to_end(self._model.encode(texts, out_type=int, num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        """Control ids have no text."""
        runs: list[list[int]] = [[]]
        for i in map(int, ids):
            if i < self.vocab_size:
                runs[-1].append(i)
            else:
                runs.append([])
        return "\ufffd".join(str(self._model.decode(run)) for run in runs)


class JsonTokenizer:
    """A tokenizer.json; the end of a document is `<|endoftext|>`, or else the eos_token of tokenizer_config.json."""

    def __init__(self, path: Path):
        import tokenizers

        self.path = path
        self.name = f"tokenizers:{path.name}"
        self.fingerprint = _sha256(path)
        try:
            self._model = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # noqa: BLE001 - the library raises Exception itself for a file it cannot read
            raise DataError(f"{path} is not a tokenizer.json: {error}") from error
        self._model.encode_special_tokens = True  # text that looks like a control token is split like any text
        self._model.no_truncation()
        self._model.no_padding()
        vocabulary = self._model.get_vocab(with_added_tokens=True)
        self._known = set(vocabulary.values())
        self.vocab_size = max(self._known) + 1
        eod = END_OF_TEXT if END_OF_TEXT in vocabulary else _named_eos(path.with_name("tokenizer_config.json"))
        self.eod_id: int | None = vocabulary.get(eod) if eod is not None else None

    def encode(self, texts: list[str]) -> Ids:
        """On the library's own threads: all cores, unless RAYON_NUM_THREADS was set before."""
        encoded = self._model.encode_batch_fast(texts, add_special_tokens=False)  # `encode` without offsets
        return end_to_end([encoding.ids for encoding in encoded])

    def decode(self, ids: Sequence[int]) -> str:
        """Control ids are written out."""
        runs: list[list[int]] = [[]]
        for i in map(int, ids):
            if i in self._known:
                runs[-1].append(i)
            else:
                runs.append([])
        return "\ufffd".join(str(self._model.decode(run, skip_special_tokens=False)) for run in runs)


class FastBackend:
    """The ids of a tokenizer.json by gigatoken, many times as fast as the tokenizers library on the same text.

    Left out of the copy it reads: special tokens, so that text that looks like one stays text, and what adds ids.

    The two normalise by tables of different Unicode versions. Text that none of them would change is read as it is;
    the rest is normalised by the tokenizers library first, and read there if it is unsettled even then.
    """

    def __init__(self, tokenizer: JsonTokenizer):
        import gigatoken
        import tokenizers

        self.name = f"gigatoken {version('gigatoken')}"
        table = orjson.loads(tokenizer.path.read_bytes())
        normalizer = table.get("normalizer")
        if normalizer not in (None, {"type": "NFC"}):
            raise ValueError(f"normalizer {normalizer}")
        table["added_tokens"] = [token for token in table.get("added_tokens", []) if not token.get("special")]
        table |= {"post_processor": None, "truncation": None, "padding": None}
        self._model = gigatoken.Tokenizer.from_json(orjson.dumps(table))
        self._reference = tokenizer
        self._normalizer = None
        if normalizer is not None:
            self._normalizer = tokenizers.normalizers.NFC()
            tables()  # takes a quarter of a second, now instead of at the first text that needs them
        self._whole = [token["content"] for token in table["added_tokens"]]  # cut out of a text before it is normalised
        self._encode([b"a"])  # the first call imports much; now, not amid a corpus

    def encode(self, texts: list[str]) -> Ids:
        """On one thread."""
        raws = [self._ready(text) for text in texts]
        if all(raw is not None for raw in raws):
            return self._encode([raw for raw in raws if raw is not None])
        fast = _apart(self._encode([raw for raw in raws if raw is not None]))
        slow = _apart(self._reference.encode([text for text, raw in zip(texts, raws, strict=True) if raw is None]))
        parts = [next(slow if raw is None else fast) for raw in raws]
        return np.concatenate(parts), _lengths(parts)

    def _ready(self, text: str) -> bytes | None:
        """The UTF-8 of what there is to read, or None if the two may read it differently."""
        raw = text.encode("utf-8")
        if self._normalizer is None or is_settled(text, raw):
            return raw
        if any(token in text for token in self._whole):
            return None
        normal = self._normalizer.normalize_str(text)
        raw = normal.encode("utf-8")
        return raw if is_settled(normal, raw) else None

    def _encode(self, raws: list[bytes]) -> Ids:
        if not raws:
            return end_to_end([])
        layout = self._model.encode_batch(raws, parallel=False).layout
        offsets = np.asarray(layout.offsets)
        return np.asarray(layout.content.data)[offsets[0] : offsets[-1]], np.diff(offsets)


def fast_backend(tokenizer: Tokenizer) -> FastBackend | None:
    """A faster way to the same ids, where there is one and its package is installed."""
    if not isinstance(tokenizer, JsonTokenizer) or find_spec("gigatoken") is None:
        return None
    try:
        return FastBackend(tokenizer)
    except (ValueError, TypeError, RuntimeError):  # a kind of tokenizer that it does not know
        return None


def load_tokenizer(path: str) -> Tokenizer:
    """`byte`, a sentencepiece .model, a tokenizer.json, or a folder that holds tokenizer.json or tokenizer.model."""
    if path == "byte":
        return ByteTokenizer()
    file = Path(path).expanduser()
    if file.is_dir():
        found = [file / name for name in ("tokenizer.json", "tokenizer.model") if (file / name).is_file()]
        require(bool(found), f"the folder {file} holds neither tokenizer.json nor tokenizer.model", DataError)
        file = found[0]
    require(
        file.is_file(),
        f"the tokenizer {path} does not exist; give 'byte', a sentencepiece .model, a tokenizer.json or its folder",
        DataError,
    )
    require(
        file.suffix in (".model", ".json"),
        f"the tokenizer {path} is neither a .model nor a .json file",
        DataError,
    )
    return SentencePieceTokenizer(file) if file.suffix == ".model" else JsonTokenizer(file)


def end_to_end(ids: Sequence[Sequence[int]], dtype: type = np.int32) -> Ids:
    """Lists of ids as one array of that type, and how many each has."""
    lengths = _lengths(ids)
    return np.fromiter(itertools.chain.from_iterable(ids), dtype=dtype, count=int(lengths.sum())), lengths


def _apart(encoded: Ids) -> Iterator[np.ndarray]:
    """The ids of each text."""
    ids, lengths = encoded
    return iter(np.split(ids, np.cumsum(lengths)[:-1]) if len(lengths) else [])


def _lengths(parts: Sequence[Sized]) -> np.ndarray:
    return np.fromiter(map(len, parts), dtype=np.int64, count=len(parts))


def _named_eos(config: Path) -> str | None:
    """The eos_token of a tokenizer_config.json: a string, or a table with its content."""
    if not config.is_file():
        return None
    try:
        eos = orjson.loads(config.read_bytes()).get("eos_token")
    except (orjson.JSONDecodeError, AttributeError) as error:
        raise DataError(f"{config} is not a JSON object: {error}") from error
    name = eos.get("content") if isinstance(eos, dict) else eos
    return name if isinstance(name, str) else None


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
