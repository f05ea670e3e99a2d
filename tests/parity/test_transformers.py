"""Our models equal those of `transformers` in fp32: logits, loss and every gradient, at tp 1 and 2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig, Qwen3Config, StableLmConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from megatron_lite.config.model import ModelConfig, RopeScaling
from megatron_lite.config.schema import Parallel
from megatron_lite.models.generate import generate, pack
from megatron_lite.models.rope import attention_factor, inverse_frequencies
from megatron_lite.ops.reference.pointwise import rms_norm
from megatron_lite.parallel import comm
from megatron_lite.parallel.context import ParallelContext, single_process
from megatron_lite.parallel.grid import kv_replicas
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Run, build_run, qwen3, stablelm

TOLERANCE = 1e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
COMMON = {"vocab_size": 101, "num_hidden_layers": 2, "num_attention_heads": 4, "attn_implementation": "eager"}


def their_qwen3(**changes: object) -> PreTrainedConfig:
    fields = {"hidden_size": 60, "intermediate_size": 112, "head_dim": 20, "rope_parameters": {"rope_theta": 1e4}}
    return Qwen3Config(**COMMON | fields | {"rms_norm_eps": 1e-6, "max_position_embeddings": 128} | changes)


def our_qwen3(**changes: object) -> ModelConfig:
    return qwen3(**{"hidden_size": 60, "intermediate_size": 112, "head_dim": 20} | changes)


def their_stablelm(rotary: float, **changes: object) -> PreTrainedConfig:
    rope = {"rope_theta": 1e4, "partial_rotary_factor": rotary}
    fields = {"hidden_size": 64, "intermediate_size": 112, "layer_norm_eps": 1e-5, "rope_parameters": rope}
    return StableLmConfig(**COMMON | fields | {"max_position_embeddings": 128} | changes)


def our_stablelm(rotary: float, **changes: object) -> ModelConfig:
    return stablelm(**{"intermediate_size": 112, "partial_rotary_factor": rotary} | changes)


def their_llama(**changes: object) -> PreTrainedConfig:
    fields = {"hidden_size": 60, "intermediate_size": 112, "head_dim": 20, "rope_parameters": {"rope_theta": 5e5}}
    return LlamaConfig(**COMMON | fields | {"rms_norm_eps": 1e-5, "max_position_embeddings": 128} | changes)


def our_llama(**changes: object) -> ModelConfig:
    return our_qwen3(**{"model_type": "llama", "qk_norm": False, "norm_eps": 1e-5, "rope_theta": 5e5} | changes)


def same(kind: str, **changes: object) -> tuple[PreTrainedConfig, ModelConfig]:
    """The two configurations of one model; `changes` are fields that both name alike."""
    if kind != "stablelm":
        theirs, ours = {"qwen3": (their_qwen3, our_qwen3), "llama": (their_llama, our_llama)}[kind]
        return theirs(**changes), ours(**changes)
    rotary = changes.pop("rotary", 0.25)
    return their_stablelm(rotary, **changes), our_stablelm(rotary, **changes)


CASES = {
    "qwen3-kv1-tied": same("qwen3", num_key_value_heads=1, tie_word_embeddings=True),
    "qwen3-kv2-untied": same("qwen3", num_key_value_heads=2, tie_word_embeddings=False),
    "qwen3-kv4-tied-biases": same("qwen3", num_key_value_heads=4, tie_word_embeddings=True, attention_bias=True),
    "qwen3-kv1-untied-biases": same("qwen3", num_key_value_heads=1, tie_word_embeddings=False, attention_bias=True),
    "stablelm-kv4": same("stablelm", num_key_value_heads=4, tie_word_embeddings=False),
    "stablelm-kv2-tied": same("stablelm", num_key_value_heads=2, tie_word_embeddings=True),
    "stablelm-kv1-half-rotary": same(
        "stablelm", num_key_value_heads=1, tie_word_embeddings=False, rotary=0.5, hidden_size=48, head_dim=12
    ),
    "stablelm-kv2-qkv-biases": same("stablelm", num_key_value_heads=2, tie_word_embeddings=False, use_qkv_bias=True),
    "llama-kv2": same("llama", num_key_value_heads=2, tie_word_embeddings=False),
    "llama-kv1-tied-biases": same(
        "llama", num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "qwen3-yarn": (
        their_qwen3(num_key_value_heads=2, tie_word_embeddings=False, rope_parameters={"rope_theta": 1e4, **YARN}),
        our_qwen3(
            num_key_value_heads=2, tie_word_embeddings=False,
            rope_scaling=RopeScaling(factor=4.0, original_max_position_embeddings=32),
        ),
    ),
}  # fmt: skip


def their_model(config: PreTrainedConfig) -> torch.nn.Module:
    """A model whose every parameter is random, norms and biases too."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    assert model.config._attn_implementation == "eager"
    stream = torch.Generator().manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(0, 0.1, generator=stream)
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The weights as a checkpoint has them: a tied head is absent."""
    tied = model.config.tie_word_embeddings
    return {name: value for name, value in model.state_dict().items() if not (tied and name == "lm_head.weight")}


def truth_of(config: PreTrainedConfig, rows: int, length: int) -> dict:
    """Logits, loss and gradients of their model on random ids with some labels ignored."""
    model = their_model(config)
    stream = torch.Generator().manual_seed(12)
    ids = torch.randint(0, 101, (rows, length), generator=stream)
    labels = ids.masked_fill(torch.rand(rows, length, generator=stream) < 0.3, -100)
    answer = model(input_ids=ids, labels=labels)
    answer.loss.backward()
    return {
        "ids": ids, "labels": F.pad(labels[:, 1:], (0, 1), value=-100), "tensors": tensors_of(model),
        "logits": answer.logits.detach(), "loss": answer.loss.item(),
        "gradients": {name: parameter.grad for name, parameter in model.named_parameters()},
    }  # fmt: skip


def _compare(ctx: ParallelContext, config: ModelConfig, file: Path) -> None:
    truth = torch.load(file)
    ids, labels = truth["ids"], truth["labels"].flatten()
    for sequence_parallel in (False, True) if ctx.tp.size > 1 else (False,):
        model, optimizer = build_run(Run(config, parallel=Parallel(sequence_parallel=sequence_parallel)), ctx)
        optimizer.fill(truth["tensors"].items())
        held = {piece.name for bucket in optimizer.weights.buckets for piece in bucket.pieces}
        assert held == set(truth["tensors"])
        flat, doc = pack(ids.tolist(), ctx.device)
        with torch.no_grad():
            difference = (model.logits(flat, doc) - truth["logits"].flatten(0, 1)).abs().max().item()
        assert difference <= TOLERANCE, f"logits differ by {difference}"
        optimizer.expect(last=True)
        loss = model(flat, labels, doc) / (labels >= 0).sum()
        loss.backward()
        optimizer.reduce()
        assert abs(loss.item() - truth["loss"]) <= TOLERANCE
        seen = {name: torch.zeros_like(gradient) for name, gradient in truth["gradients"].items()}
        for state in optimizer.states:
            for piece in state.bucket.pieces:
                region = tuple(slice(s, s + n) for s, n in zip(piece.start, piece.shape, strict=True))
                ours = state.grad[piece.offset : piece.offset + piece.numel].view(piece.shape)
                theirs = truth["gradients"][piece.name]
                error = (ours - theirs[region]).abs().max().item() / theirs.abs().max().item()
                assert error <= TOLERANCE, f"gradient of {piece.name} differs by {error} of its largest value"
                seen[piece.name][region] += 1 / piece.copies
        for name, count in seen.items():
            whole = comm.all_sum(count, ctx.tp)
            assert whole.allclose(torch.ones(())), f"{name} was not compared everywhere"


@pytest.mark.req("E01", "E05", "E06", "K03", "K05", "N08")
@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("case", CASES)
def test_logits_loss_and_gradients_equal_transformers(case, tp, tmp_path):
    theirs, ours = CASES[case]
    rows, length = (2, 71) if case == "qwen3-yarn" else (4, 15)  # yarn: beyond the original 32 positions
    file = tmp_path / "truth.pt"
    torch.save(truth_of(theirs, rows, length), file)
    run_ranks(_compare, tp, ours, file, tp=tp, kv_replicas=kv_replicas(ours.num_key_value_heads, tp))


@pytest.mark.parametrize("case", ["qwen3-kv2-untied", "stablelm-kv4", "llama-kv2"])
def test_greedy_continuations_equal_transformers(case):
    theirs, ours = CASES[case]
    reference = their_model(theirs)
    model, optimizer = build_run(Run(ours), single_process())
    optimizer.fill(tensors_of(reference).items())
    prompt = [5, 17, 99, 3, 42]
    expected = reference.generate(
        torch.tensor([prompt]), max_new_tokens=40, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    assert generate(model, [prompt], max_new_tokens=40, temperature=0.0) == [expected[0, len(prompt) :].tolist()]


@pytest.mark.req("N02")
def test_rms_norm_of_small_values_equals_transformers():
    stream = torch.Generator().manual_seed(1)
    reference = Qwen3RMSNorm(60, eps=1e-6)
    reference.weight.data.normal_(1, 0.1, generator=stream)
    x = torch.randn(37, 60, generator=stream) * 1e-4
    torch.testing.assert_close(rms_norm(x, reference.weight, 1e-6), reference(x), rtol=1e-6, atol=1e-7)


@pytest.mark.req("K03", "K04")
@pytest.mark.parametrize("head_dim", [16, 20, 64])
@pytest.mark.parametrize("original", [32, 1000])
@pytest.mark.parametrize("betas", [(32.0, 1.0), (8.0, 2.0)])
def test_yarn_frequencies_equal_transformers(head_dim, original, betas):
    rope = YARN | {
        "rope_theta": 1e4, "original_max_position_embeddings": original, "beta_fast": betas[0], "beta_slow": betas[1]
    }  # fmt: skip
    config = Qwen3Config(head_dim=head_dim, max_position_embeddings=4 * original, rope_parameters=rope)
    theirs, factor = ROPE_INIT_FUNCTIONS["yarn"](config, device="cpu")
    scaling = RopeScaling(factor=4.0, original_max_position_embeddings=original, beta_fast=betas[0], beta_slow=betas[1])
    torch.testing.assert_close(inverse_frequencies(head_dim, 1e4, scaling), theirs, rtol=2e-6, atol=0)
    assert attention_factor(scaling) == pytest.approx(factor, rel=1e-12)
