"""Train a sentencepiece model whose ids give back every character of a text, spaces and line ends included.

    python examples/tiny/train_tokenizer.py --input quickstart/corpus/*.train.jsonl --output quickstart/tokenizer.model
                                            --check quickstart/corpus/*.validation.jsonl

BPE with bytes to fall back on; nothing is normalised. The sentences it learns from keep their line ends, so pieces
such as ":\\n" exist (6 % fewer tokens than with line ends as bytes). Every text of --check must come back unchanged.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import sentencepiece

END_OF_DOCUMENT = "<|endoftext|>"
SENTENCE = 3000  # characters; sentencepiece learns from pieces of documents, cut at line ends
PER_FILE = 2_000_000  # characters learnt from each input: more changes nothing at 2,048 ids
AWKWARD = (
    "",
    " ",
    "  x ",
    "\n",
    "a\r\n\tb\f\v",
    "\t\tif x:\n\t\t\treturn\n\n\n",
    "naïve 中文 🙂 \u00a0\u200b\ufeff",
    "a<|endoftext|>b",
)


def texts(path: Path) -> Iterator[str]:
    """The texts of a JSONL file."""
    with path.open(encoding="utf-8") as file:
        for line in file:
            yield json.loads(line)["text"]


def sentences(paths: list[Path]) -> Iterator[str]:
    """Whole lines joined to about SENTENCE characters, PER_FILE characters of each file."""
    for path in paths:
        used = 0
        for text in texts(path):
            buffer = ""
            for line in text.splitlines(keepends=True):
                if buffer and len(buffer) + len(line) > SENTENCE:
                    yield buffer
                    buffer = ""
                buffer += line
            yield buffer
            used += len(text)
            if used >= PER_FILE:
                break


def train(paths: list[Path], vocab_size: int) -> bytes:
    """The serialised model; id 0 is unknown (never produced, thanks to the bytes), id 1 ends a document."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=sentences(paths),
        model_writer=model,
        model_type="bpe",
        vocab_size=vocab_size,
        byte_fallback=True,
        character_coverage=0.9999,
        normalization_rule_name="identity",
        add_dummy_prefix=False,
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,  # indentation in one piece
        max_sentence_length=1 << 20,  # bytes; a single long line is kept
        unk_id=0,
        eos_id=1,
        eos_piece=END_OF_DOCUMENT,
        bos_id=-1,
        pad_id=-1,
        num_threads=1,
        minloglevel=2,
    )
    return model.getvalue()


def first_change(tokenizer: sentencepiece.SentencePieceProcessor, text: str) -> str | None:
    """None if decode(encode(text)) == text, else both sides around the first difference."""
    back = tokenizer.decode(tokenizer.encode(text))
    if back == text:
        return None
    at = next((i for i, (a, b) in enumerate(zip(text, back, strict=False)) if a != b), min(len(text), len(back)))
    return f"character {at}: {text[max(0, at - 20) : at + 20]!r} came back as {back[max(0, at - 20) : at + 20]!r}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--input", type=Path, nargs="+", required=True, help="JSONL files to learn from")
    parser.add_argument("--check", type=Path, nargs="+", default=[], help="JSONL files that must survive a round trip")
    parser.add_argument("--output", type=Path, required=True, help="the .model file")
    parser.add_argument("--vocab-size", type=int, default=2048)
    args = parser.parse_args()

    proto = train(args.input, args.vocab_size)
    tokenizer = sentencepiece.SentencePieceProcessor(model_proto=proto)
    characters = tokens = 0
    for text in (*AWKWARD, *(text for path in args.check for text in texts(path))):
        if (change := first_change(tokenizer, text)) is not None:
            sys.exit(f"error: the tokenizer does not give the text back, at {change}; no model was written")
        characters, tokens = characters + len(text), tokens + len(tokenizer.encode(text))
    if tokenizer.get_piece_size() != args.vocab_size or tokenizer.eos_id() < 0:
        sys.exit(f"error: {tokenizer.get_piece_size()} ids instead of {args.vocab_size}: too little text to learn from")

    args.output.parent.mkdir(parents=True, exist_ok=True)
    temporary = args.output.with_suffix(".partial")
    temporary.write_bytes(proto)
    temporary.replace(args.output)
    print(f"{args.output}: {args.vocab_size:,} ids, {characters / tokens:.2f} characters per token, "
          f"{characters:,} characters came back unchanged")  # fmt: skip


if __name__ == "__main__":
    main()
