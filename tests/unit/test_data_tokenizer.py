"""Three kinds of tokenizer behind one interface: round trips, sizes, ends of documents, refusals."""

from __future__ import annotations

import json
import unicodedata

import numpy as np
import pytest
import sentencepiece
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from megatron_lite.data.tokenizer import ByteTokenizer, load_tokenizer
from megatron_lite.data.unicode import is_settled
from megatron_lite.errors import DataError

TEXTS = ["def f(x):\n    return x  # <|endoftext|> </s>\n", "", " naïve 中文 🙂", "a" * 300]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A sentencepiece model and a tokenizer.json, both with byte fallback."""
    folder = tmp_path_factory.mktemp("tokenizers")
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["def f(x): return x"] * 50), model_prefix=str(folder / "sp"), vocab_size=280,
        model_type="bpe", byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        add_dummy_prefix=False, user_defined_symbols=["\n"], minloglevel=2, hard_vocab_limit=False,
    )  # fmt: skip
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|endoftext|>", "</s>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
    )  # fmt: skip
    model.train_from_iterator(["def f(x): return x"] * 50, trainer)
    model.save(str(folder / "tokenizer.json"))
    return folder


def _every(folder):
    return [
        load_tokenizer(path) for path in ("byte", str(folder / "sp.model"), str(folder), str(folder / "tokenizer.json"))
    ]


def test_text_comes_back(folder):
    for tokenizer in _every(folder):
        ids, lengths = tokenizer.encode(TEXTS)
        encoded = np.split(ids, np.cumsum(lengths)[:-1])
        assert [tokenizer.decode(ids) for ids in encoded] == TEXTS
        assert ids.dtype.kind in "iu" and int(ids.max()) < tokenizer.vocab_size
        assert lengths[1] == 0 and int(lengths.sum()) == ids.size


def test_text_that_looks_like_a_control_token_is_text(folder):
    for tokenizer in _every(folder):
        assert tokenizer.eod_id is not None
        assert tokenizer.eod_id not in tokenizer.encode([TEXTS[0]])[0].tolist()


def test_an_id_without_text_is_shown_not_dropped(folder):
    for tokenizer in _every(folder):
        ids = [*tokenizer.encode(["f("])[0].tolist(), tokenizer.vocab_size + 7, *tokenizer.encode(["x"])[0].tolist()]
        assert tokenizer.decode(ids) == "f(\ufffdx"


def test_sizes_names_and_fingerprints(folder):
    byte, sp, by_folder, by_file = _every(folder)
    assert (byte.vocab_size, byte.eod_id) == (257, 256)
    assert sp.eod_id == sentencepiece.SentencePieceProcessor(model_file=str(folder / "sp.model")).eos_id()
    assert by_file.eod_id == 0 and by_file.vocab_size == 1 + max(
        tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab().values()
    )
    assert by_folder.fingerprint == by_file.fingerprint
    assert len({byte.fingerprint, sp.fingerprint, by_file.fingerprint}) == 3
    assert [t.name for t in (byte, sp, by_file)] == ["byte", "sentencepiece:sp.model", "tokenizers:tokenizer.json"]


@pytest.mark.parametrize("eos", ["</s>", {"content": "</s>"}, "<nowhere>", None])
def test_the_end_of_a_document_may_be_named_beside_the_file(folder, tmp_path, eos):
    model = json.loads((folder / "tokenizer.json").read_text())
    for token in model["added_tokens"]:
        token["content"] = token["content"].replace("<|endoftext|>", "<other>")
    model["model"]["vocab"]["<other>"] = model["model"]["vocab"].pop("<|endoftext|>")
    (tmp_path / "tokenizer.json").write_text(json.dumps(model))
    assert load_tokenizer(str(tmp_path)).eod_id is None
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    assert load_tokenizer(str(tmp_path)).eod_id == (1 if eos in ("</s>", {"content": "</s>"}) else None)


@given(st.text())
def test_bytes_of_any_text_come_back(text):
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode([text])[0].tolist()) == text


@pytest.mark.req("A14")
def test_what_is_no_tokenizer_is_refused_by_name(tmp_path):
    for name, words in (
        ("nowhere.json", "does not exist; give 'byte'"),
        ("empty", "holds neither tokenizer.json nor tokenizer.model"),
        ("bad.json", "bad.json is not a tokenizer.json"),
        ("bad.model", "bad.model is not a sentencepiece model"),
        ("vocab.txt", "neither a .model nor a .json"),
    ):
        (tmp_path / "empty").mkdir(exist_ok=True)
        for bad in ("bad.json", "bad.model", "vocab.txt"):
            (tmp_path / bad).write_text("{}")
        with pytest.raises(DataError, match=words):
            load_tokenizer(str(tmp_path / name))


def test_settled_text_is_left_alone_by_every_normaliser():
    nfc = tokenizers.normalizers.NFC()
    settled = 0
    for c in [*range(0x80, 0xD800), *range(0xE000, 0x20000), 0xE0001, 0x10FFFF]:
        for before in ("a", "\u1100", "\uac00", "\u0627", "\u09c7", chr(c)):  # letters that others compose with
            text = f"{before}{chr(c)}"
            if is_settled(text, text.encode()):
                settled += 1
                assert nfc.normalize_str(text) == text == unicodedata.normalize("NFC", text)
    assert settled > 300_000
    for text in ("a\u0301", "\u1100\u1161", "\uac00\u11a8", "\u212b", "\u09c7\u09be", "\u0378", "a\U000e0fff"):
        assert not is_settled(text, text.encode())
    for text in (
        "plain",
        "\u00e9",
        "\u4e2d\u6587",
        "\ud55c\uae00",
        "\u201cquoted\u201d \u2013",
        "x\u0301",
        "\U0001f600",
    ):
        assert is_settled(text, text.encode())
