"""Training repeats its recorded curves: to the bit where they were recorded, else and in other layouts within 1e-5.

tests/golden/curves.py says how the recordings are renewed, and when one would.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from megatron_lite.config.schema import Parallel
from tests.golden.curves import RUNS, STEPS, TOLERANCE, as_curve, curve, largest_difference, machine, recorded, settings
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny import train

RENEW = "if the change of numbers is meant, see tests/golden/curves.py"


@pytest.mark.parametrize("name", RUNS)
def test_one_process_repeats_the_recorded_curve(name):
    golden, now = recorded(name), curve(name)
    assert golden["settings"] == settings(name), f"the run is another one; {RENEW}"
    assert len(now["loss"]) == STEPS
    if golden["machine"] == machine():
        assert all(now[key] == golden[key] for key in now), (
            f"not to the bit: the largest relative difference is {largest_difference(now, golden):.2e}; {RENEW}"
        )
    assert largest_difference(now, golden) <= TOLERANCE, RENEW


@pytest.mark.parametrize("name", RUNS)
def test_the_recorded_model_learns(name):
    golden = recorded(name)
    assert golden["loss"][0] > 4.5 and golden["loss"][-1] < golden["loss"][0] - 1.2


@pytest.mark.req("E03", "E12", "F05")
@pytest.mark.parametrize("name", RUNS)
@pytest.mark.parametrize("layout", ["dp2", "tp2-sp"])
def test_other_layouts_follow_the_recorded_curve(name, layout):
    run = RUNS[name] if layout == "dp2" else replace(RUNS[name], parallel=Parallel(sequence_parallel=True))
    for results, _ in run_ranks(train, 2, run, tp=1 if layout == "dp2" else 2):
        assert largest_difference(as_curve(results), recorded(name)) <= TOLERANCE
