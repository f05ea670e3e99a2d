"""The ProLong recipe at a thousandth of its lengths, on parquet of the published schema: prepared, planned, trained."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tokenizers

from megatron_lite.config.load import read_recipe, to_toml
from megatron_lite.config.schema import Recipe
from megatron_lite.data.indexed import IndexedDataset
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import MODEL, lines, run_stages
from tools import inspect_data, preprocess_data

RECIPE = Path(__file__).parents[2] / "examples" / "prolong_qwen3" / "recipe.toml"
EOS = 500


def _tokenizer(path: Path) -> Path:
    """501 ids: words w0 … w499 and the end of text."""
    words = {f"w{i}": i for i in range(EOS)}
    model = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    model.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    model.add_special_tokens([tokenizers.AddedToken("<|endoftext|>", special=True)])
    model.save(str(path))
    return path


def _parquet(folder: Path, domains: dict[str, int], seed: int) -> None:
    """Documents of about so many tokens for each domain, in two files of the published columns."""
    rng = np.random.default_rng(seed)
    for part in range(2):
        rows = []
        for domain, length in domains.items():
            for i in range(12):
                ids = ((rng.integers(0, EOS) + 3 * np.arange(rng.integers(length // 2, length + 1))) % EOS).tolist()
                rows.append({
                    "text": " ".join(f"w{i}" for i in ids), "input_ids": ids, "length": len(ids), "domain": domain,
                    "src_partition": "train", "src_sample_idx": i, "src_doc_idx": 0,
                })  # fmt: skip
        schema = pa.schema({
            "text": pa.string(), "input_ids": pa.list_(pa.int32()), "length": pa.int32(), "domain": pa.string(),
            "src_partition": pa.string(), "src_sample_idx": pa.int32(), "src_doc_idx": pa.int32(),
        })  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"train-{part:02d}-of-02.parquet"
        pq.write_table(pa.Table.from_pylist(rows, schema), path, compression="zstd")


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Recipe]:
    """A folder with corpora, and the recipe with 1/1024 of the lengths and a tiny model."""
    folder = tmp_path_factory.mktemp("prolong")
    tokenizer = _tokenizer(folder / "tokenizer.json")
    recipe = tomllib.loads(RECIPE.read_text())
    long = {"code": 64, "book": 64, "code-512k": 700, "book-512k": 700}
    _parquet(folder / "raw" / "long", long, seed=0)
    for i, (name, source) in enumerate(recipe["sources"].items()):
        if name not in long:
            _parquet(folder / "raw" / name, {name: 45}, seed=i + 1)
        raw = folder / "raw" / ("long" if name in long else name)
        flags = ["--input", raw, "--output-prefix", folder / name, "--tokenizer", tokenizer, "--append-eod"]
        flags += ["--ids-key", "input_ids", *(["--where", f"domain={name}"] if name in long else [])]
        assert preprocess_data.main([str(flag) for flag in flags]) == 0
        source["path"] = str(folder / name)
    for stage in recipe["stages"]:
        stage |= {
            "steps": 4,
            "seq_len": stage["seq_len"] // 1024,
            "lr": stage["lr"] | {"peak": 1e-3, "warmup_steps": 1},
        }
        stage["batch_tokens"] = 4 * stage["seq_len"]
    del recipe["init_from"], recipe["parallel"], recipe["checkpoint"]
    recipe |= {
        "run": str(folder / "run"), "precision": "fp32", "tokenizer": {"path": str(tokenizer)},
        "model": MODEL | {"vocab_size": EOS + 1, "max_position_embeddings": 512}, "logging": {"every": 1},
    }  # fmt: skip
    return folder, read_recipe(to_toml(Recipe.model_validate(recipe)))


@pytest.mark.req("A07")
def test_ready_ids_are_untouched_and_end_with_one_end_of_text(prepared: tuple[Path, Recipe]) -> None:
    folder, _ = prepared
    rows = [row for part in sorted((folder / "raw" / "long").iterdir()) for row in pq.read_table(part).to_pylist()]
    dataset = IndexedDataset(folder / "book")
    expected = [[*row["input_ids"], EOS] for row in rows if row["domain"] == "book"]
    assert [dataset.document(i).tolist() for i in range(dataset.num_documents)] == expected


def test_both_stages_train_in_any_layout_and_deal_rows_by_weight(prepared: tuple[Path, Recipe]) -> None:
    folder, recipe = prepared
    losses = {}
    for world, run in ((1, "one"), (2, "two")):
        mine = recipe.model_copy(update={"run": str(folder / run)})
        first, second = (run_ranks(run_stages, world, mine, stage)[0] for stage in (0, 1))
        assert first["step"] == second["step"] == 4 and "weights of stage 1" in " ".join(second["origin"])
        assert second["updates"] == 8  # the moments go on
        losses[run] = [line["loss"] for stage in (0, 1) for line in lines(mine, stage, "metrics")]
    assert losses["one"] == pytest.approx(losses["two"], rel=1e-5) and len(losses["one"]) == 8


def test_the_share_of_long_documents_is_told(prepared: tuple[Path, Recipe], capsys: pytest.CaptureFixture[str]) -> None:
    folder, _ = prepared
    assert inspect_data.main(["stats", str(folder / "book"), str(folder / "book-512k")]) == 0
    told = capsys.readouterr().out.count("share of tokens in documents of at least: 4K 0.0%")
    assert told == 3  # of each corpus, and of both together
    assert json.loads((folder / "book.json").read_text())["filtered"] == 0  # parquet leaves rows out by column
