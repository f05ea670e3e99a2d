"""Sampling: the cache changes no logit, a batch changes no sequence, and each parameter does what it says."""

from __future__ import annotations

import pytest
import torch

from megatron_lite.errors import ConfigError
from megatron_lite.models import generate as generation
from megatron_lite.models.generate import generate, pack, sample
from megatron_lite.models.transformer import Transformer
from megatron_lite.parallel.context import single_process
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import Run, build_run, qwen3, stablelm

CPU = torch.device("cpu")
MODELS = {
    "stablelm": stablelm(initializer_range=0.1),
    "qwen3": qwen3(initializer_range=0.1),
    "qwen3-kv1-untied": qwen3(initializer_range=0.1, num_key_value_heads=1, tie_word_embeddings=False),
}
PROMPTS = [[5], [3, 1, 4, 1, 5, 9, 2], [27, 18, 28]]


@pytest.fixture(params=MODELS)
def model(request) -> Transformer:
    return build_run(Run(MODELS[request.param]), single_process())[0]


@torch.no_grad()
def whole(model: Transformer, sequence: list[int]) -> torch.Tensor:
    """Logits after the last token, everything read anew."""
    ids, doc = pack([sequence], CPU)
    return model.logits(ids, doc)[-1]


def recorded(model: Transformer, monkeypatch, prompts: list[list[int]], **options) -> tuple[list, list[torch.Tensor]]:
    """What generate returns, and the logits [B, V] of each of its steps."""
    seen: list[torch.Tensor] = []

    def recording(logits, *args):
        seen.append(logits.clone())
        return sample(logits, *args)

    with monkeypatch.context() as patch:
        patch.setattr(generation, "sample", recording)
        return generate(model, prompts, **options), seen


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_cached_and_uncached_logits_are_equal_over_a_whole_continuation(model, monkeypatch, temperature):
    outputs, seen = recorded(model, monkeypatch, PROMPTS, max_new_tokens=20, temperature=temperature, seed=3)
    assert len(seen) == 20 and all(len(output) == 20 for output in outputs)
    for i, (prompt, output) in enumerate(zip(PROMPTS, outputs, strict=True)):
        for t in range(20):
            difference = (seen[t][i] - whole(model, prompt + output[:t])).abs().max().item()
            assert difference <= 1e-5, (i, t, difference)


def test_prompts_of_unequal_length_continue_as_each_alone(model):
    together = generate(model, PROMPTS, max_new_tokens=15, temperature=0.0)
    assert together == [generate(model, [prompt], max_new_tokens=15, temperature=0.0)[0] for prompt in PROMPTS]


def test_greedy_takes_the_likeliest_each_time(model):
    (output,) = generate(model, [PROMPTS[1]], max_new_tokens=8, temperature=0.0)
    sequence = list(PROMPTS[1])
    for token in output:
        assert token == int(whole(model, sequence).argmax())
        sequence.append(token)


def test_a_sequence_ends_at_the_stop_id_and_the_others_go_on(model):
    free = generate(model, PROMPTS, max_new_tokens=12, temperature=1.0, seed=5)
    stop = free[1][4]
    stopped = generate(model, PROMPTS, max_new_tokens=12, temperature=1.0, seed=5, stop_id=stop)
    assert stop not in stopped[1] and len(stopped[1]) <= 4
    for before, after in zip(free, stopped, strict=True):
        assert after == (before[: before.index(stop)] if stop in before else before)


def test_generation_ends_when_all_sequences_have(model, monkeypatch):
    first = generate(model, [PROMPTS[0]], max_new_tokens=1, temperature=0.0)[0][0]
    outputs, seen = recorded(model, monkeypatch, [PROMPTS[0]], max_new_tokens=9, temperature=0.0, stop_id=first)
    assert outputs == [[]] and len(seen) == 1


def test_the_same_seed_draws_the_same(model):
    one, again, other = (generate(model, PROMPTS, max_new_tokens=10, seed=seed) for seed in (1, 1, 2))
    assert one == again != other


def test_the_model_is_as_before_after_generating(model):
    before = whole(model, PROMPTS[1])
    generate(model, PROMPTS, max_new_tokens=3)
    assert torch.equal(whole(model, PROMPTS[1]), before)


def draws(logits: list[float], temperature: float, top_p: float, count: int = 20_000) -> torch.Tensor:
    """Share of draws of each id."""
    stream = torch.Generator().manual_seed(0)
    rows = torch.tensor(logits)[None].repeat(count, 1)
    return torch.bincount(torch.tensor(sample(rows, temperature, top_p, stream)), minlength=len(logits)) / count


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax_at_a_temperature(temperature):
    logits = [0.3, 2.0, -1.0, 1.0]
    expected = (torch.tensor(logits) / temperature).softmax(0)
    torch.testing.assert_close(draws(logits, temperature, 1.0), expected, rtol=0, atol=0.015)


@pytest.mark.parametrize(
    "top_p, kept", [(1e-9, [1]), (0.5, [1]), (0.51, [1, 3]), (0.8, [1, 3]), (0.81, [0, 1, 3]), (1.0, [0, 1, 2, 3])]
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    probabilities = torch.tensor([0.15, 0.5, 0.05, 0.3])
    shares = draws(probabilities.log().tolist(), 1.0, top_p)
    expected = torch.zeros(4)
    expected[kept] = probabilities[kept] / probabilities[kept].sum()
    torch.testing.assert_close(shares, expected, rtol=0, atol=0.015)


def test_temperature_zero_ignores_top_p():
    stream = torch.Generator().manual_seed(0)
    assert sample(torch.tensor([[0.0, 3.0, 1.0], [5.0, 3.0, 1.0]]), 0.0, 0.1, stream) == [1, 0]


@pytest.mark.parametrize(
    "prompts, options, message",
    [
        ([[1], []], {}, "at least one token"),
        ([], {}, "at least one token"),
        ([[1], [4, 101]], {}, "id 101, outside the model.s vocabulary of 101"),
        ([[1], [-1, 4]], {}, "id -1, outside the model.s vocabulary of 101"),
        ([[1]], {"temperature": -0.5}, "temperature -0.5 is negative"),
        ([[1]], {"top_p": 0.0}, "top_p 0.0 is not in"),
        ([[1]], {"top_p": 1.5}, "top_p 1.5 is not in"),
    ],
)
def test_bad_arguments_are_refused_in_words(prompts, options, message):
    model, _ = build_run(Run(qwen3()), single_process())
    with pytest.raises(ConfigError, match=message):
        generate(model, prompts, max_new_tokens=2, **options)


def _continuations(ctx, config) -> list[list[int]]:
    model, _ = build_run(Run(config), ctx)
    return generate(model, PROMPTS, max_new_tokens=10, temperature=0.7, top_p=0.9, seed=4)


def test_tensor_parallel_ranks_draw_what_one_process_draws():
    truth = run_ranks(_continuations, 1, MODELS["qwen3"])[0]
    assert run_ranks(_continuations, 2, MODELS["qwen3"], tp=2) == [truth, truth]
