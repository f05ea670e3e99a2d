"""Dealing rows to sources and shuffling within them: exact, periodic, and the same wherever it is asked."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_lite.data.blend import Blend, Permutation, integer_weights
from megatron_lite.errors import ConfigError

WEIGHTS = st.dictionaries(
    st.sampled_from("abcdefghijkl"),
    st.integers(0, 60) | st.sampled_from([1e-9, 0.3, 0.041, 2.5]) | st.floats(0.01, 1),
    min_size=1,
).filter(lambda weights: sum(weights.values()) > 0)


@settings(max_examples=60, deadline=None)
@given(WEIGHTS, st.integers(1, 400))
def test_every_prefix_is_within_one_row_of_its_share(weights, num_rows):
    blend = Blend(weights)
    share = {name: Fraction(w, blend.period) for name, w in blend.weights.items()}
    counts = dict.fromkeys(weights, 0)
    for row in range(num_rows):
        name, number = blend(row)
        assert number == counts[name]
        counts[name] += 1
        assert all(abs(counts[n] - share[n] * (row + 1)) < 1 for n in weights)
    assert blend.counts(num_rows) == counts


@settings(max_examples=30, deadline=None)
@given(WEIGHTS, st.lists(st.integers(0, 5000), max_size=20))
def test_asking_out_of_order_or_far_ahead_changes_nothing(weights, rows):
    one, other = Blend(weights), Blend(dict(reversed(weights.items())))
    answers = [one(row) for row in rows]
    assert [other(row) for row in sorted(rows)] == [answer for _, answer in sorted(zip(rows, answers, strict=True))]


def test_the_deal_repeats_after_the_sum_of_the_integer_weights():
    blend = Blend({"a": 0.3, "b": 0.1, "c": 0.05})
    assert blend.weights == {"a": 6, "b": 2, "c": 1} and blend.period == 9
    assert [blend(row)[0] for row in range(9)] * 3 == [blend(row)[0] for row in range(9, 36)]
    assert blend(9 * 10**15 + 4) == (blend(4)[0], blend(4)[1] + blend.weights[blend(4)[0]] * 10**15)
    assert blend.counts(9 * 10**15) == {"a": 6 * 10**15, "b": 2 * 10**15, "c": 10**15}


@pytest.mark.req("C02")
def test_a_source_too_light_to_be_drawn_is_fine():
    assert Blend({"a": 1e-9, "b": 1.0}).counts(10) == {"a": 0, "b": 10}
    assert Blend({"a": 0.0, "b": 1.0}).counts(10) == {"a": 0, "b": 10}


@pytest.mark.req("C03")
def test_weights_are_shares_of_rows():
    assert Blend({"a": 1, "b": 1}).counts(30) == {"a": 15, "b": 15}
    assert Blend({"a": 10, "b": 20}).counts(30) == {"a": 10, "b": 20}


def test_weights_are_taken_as_they_are_written():
    assert integer_weights({"b": 0.1, "a": 0.3}) == {"a": 3, "b": 1}
    assert integer_weights({"a": 4, "b": 1}) == {"a": 4, "b": 1}
    for wrong in ({"a": -1.0}, {"a": float("nan"), "b": 1}, {"a": float("inf")}, {"a": 0.0}):
        with pytest.raises(ConfigError):
            Blend(wrong)


@pytest.mark.req("C06")
@pytest.mark.parametrize("size", [*range(1, 70), 255, 256, 257, 4097, 65537])
def test_every_epoch_is_a_permutation_of_its_own(size):
    indices = np.arange(size)
    first, second = (Permutation(size, 7, 0, "code", epoch).many(indices) for epoch in (0, 1))
    assert np.array_equal(np.sort(first), indices) and np.array_equal(np.sort(second), indices)
    if size > 5:
        assert not np.array_equal(first, second)


@given(st.integers(1, 2**61), st.integers(0, 2**61), st.integers(0, 2**31))
def test_one_index_and_many_agree_at_any_size(size, index, seed):
    order = Permutation(size, seed, "x")
    index %= size
    assert 0 <= order(index) < size
    assert order.many(np.array([index], dtype=np.int64)).tolist() == [order(index)]


def test_orders_are_spread_evenly():
    """All 24 orders of 4 rows over 2,400 keys: chi-squared with 23 degrees of freedom stays under its 99.9 % point."""
    orders = [tuple(map(Permutation(4, key), range(4))) for key in range(2400)]
    counts = np.array(list(Counter(orders).values()))
    assert len(counts) == 24 and ((counts - 100) ** 2 / 100).sum() < 49.7


def test_neighbours_do_not_stay_neighbours():
    order = Permutation(100_003, 1).many(np.arange(100_003))
    assert abs(np.corrcoef(np.arange(100_003), order)[0, 1]) < 0.02
    assert np.count_nonzero(np.diff(order) == 1) < 10


def test_an_order_never_changes_between_versions():
    """These numbers are the format of every unfinished run: a change of them breaks resuming."""
    assert [Permutation(10, 1234, 0, "code", 0)(i) for i in range(10)] == [1, 6, 8, 9, 4, 2, 3, 5, 0, 7]
    assert "".join(Blend({"a": 4, "b": 1, "c": 2})(i)[0] for i in range(7)) == "aacabac"
