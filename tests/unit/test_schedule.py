"""Learning rates, against anchors that were published or computed by hand."""

from __future__ import annotations

import pytest

from megatron_lite.config.schema import Schedule, Stage
from megatron_lite.optim.schedule import learning_rate

BATCH = 4_194_304


@pytest.mark.parametrize(
    ("step", "rate"),
    [(1, 6.7015707e-8), (1000, 6.7015707e-5), (4775, 3.2e-4), (100_000, 3.1245047e-4), (479_887, 1.6640025e-4),
     (955_000, 1.28e-5)],
)  # fmt: skip
def test_stablelm_anchors(step, rate):
    schedule = Schedule(peak=3.2e-4, final=1.28e-5, warmup_steps=4775)
    assert learning_rate(schedule, step, 955_000) == pytest.approx(rate, rel=1e-7)


@pytest.mark.parametrize(("step", "rate"), [(250, 5e-6), (500, 1e-5), (2750, 5.5e-6), (5000, 1e-6)])
def test_prolong_anchors(step, rate):
    schedule = Schedule(peak=1e-5, final=1e-6, warmup_steps=500)
    assert learning_rate(schedule, step, 5000) == pytest.approx(rate, rel=1e-12)


@pytest.mark.parametrize(("step", "rate"), [(100, 3e-5), (200, 6e-5), (2589, 3e-5), (4978, 0.0)])
def test_zebra_anchors(step, rate):
    schedule = Schedule(peak=6e-5, warmup_steps=200)
    assert learning_rate(schedule, step, 4978) == pytest.approx(rate, rel=1e-12, abs=1e-20)


@pytest.mark.req("L01")
def test_the_first_update_already_learns():
    assert learning_rate(Schedule(peak=1e-3, warmup_steps=10), 1, 20) == pytest.approx(1e-4)


def test_without_warmup_the_first_update_is_the_first_of_the_decay():
    assert learning_rate(Schedule(peak=1.0, shape="linear"), 1, 4) == 0.75
    assert learning_rate(Schedule(peak=1.0, shape="constant"), 1, 4) == 1.0


def test_wsd_holds_its_peak_and_falls_in_a_straight_line():
    schedule = Schedule(peak=1.0, final=0.2, warmup_steps=2, decay_steps=4, shape="wsd")
    rates = [learning_rate(schedule, step, 10) for step in range(1, 11)]
    assert rates == pytest.approx([0.5, 1, 1, 1, 1, 1, 0.8, 0.6, 0.4, 0.2])


def test_linear_falls_from_the_end_of_warmup():
    schedule = Schedule(peak=1.0, final=0.5, warmup_steps=1, shape="linear")
    assert [learning_rate(schedule, step, 6) for step in range(1, 7)] == pytest.approx([1, 0.9, 0.8, 0.7, 0.6, 0.5])


@pytest.mark.parametrize("shape", ["cosine", "linear", "wsd", "constant"])
@pytest.mark.parametrize("warmup", [0, 1, 3, 7])
def test_every_shape_peaks_at_the_end_of_warmup_ends_at_final_and_stays_between(shape, warmup):
    final, num_steps = (0.25 if shape != "constant" else 0.0), 7
    for decay in range(num_steps - warmup + 1) if shape == "wsd" else [None]:
        schedule = Schedule(peak=2.0, final=final, warmup_steps=warmup, decay_steps=decay, shape=shape)
        rates = [learning_rate(schedule, step, num_steps) for step in range(1, num_steps + 1)]
        assert all(0 < rate <= 2.0 for rate in rates)
        assert rates[:warmup] == [2.0 * step / warmup for step in range(1, warmup + 1)]
        assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
        if shape != "constant" and warmup < num_steps and decay != 0:
            assert rates[-1] == pytest.approx(final)


def _stage(**fields):
    return Stage(**{"name": "s", "seq_len": 10, "micro_batch": 1, "blend": {}, "lr": {"peak": 1.0}} | fields)


@pytest.mark.parametrize(("tokens", "steps"), [(0, 0), (1, 1), (100, 1), (101, 2), (350, 4)])
def test_tokens_become_the_steps_that_see_at_least_as_many(tokens, steps):
    lr = {"peak": 1.0, "warmup_tokens": tokens, "decay_tokens": tokens, "shape": "wsd"}
    lr = _stage(batch_tokens=100, steps=10, lr=lr).lr_in_steps
    assert (lr.warmup_steps, lr.decay_steps, lr.warmup_tokens, lr.decay_tokens) == (steps, steps, None, None)


def test_a_ramp_has_small_steps_until_its_tokens_were_seen():
    stage = _stage(
        batch_tokens=100, tokens=1000, batch_ramp=((50, 20), (200, 50)), lr={"peak": 1.0, "warmup_tokens": 70}
    )
    sizes = [20, 20, 20, 50, 50, 50, *[100] * 8]
    assert stage.num_steps == len(sizes) and stage.batch_sizes == (20, 50, 100)
    assert [stage.batch_at(step) for step in range(1, len(sizes) + 1)] == sizes
    assert [stage.tokens_after(step) for step in range(4)] == [0, 20, 40, 60] and stage.rows_after(6) == 21
    assert stage.lr_in_steps.warmup_steps == 4  # 60 tokens after three steps, 110 after four


def test_without_a_ramp_every_step_is_alike():
    stage = _stage(batch_tokens=100, tokens=955)
    assert stage.num_steps == 10 and {stage.batch_at(step) for step in range(1, 11)} == {100}
