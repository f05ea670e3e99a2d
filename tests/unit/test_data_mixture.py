"""How much of each source a stage reads: by fractions of the sources, and what happens when one runs dry."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_lite.data.loader import ended, open_training
from megatron_lite.errors import DataError
from tests.helpers.corpora import counting, data_recipe, write_corpus


@pytest.fixture
def two(tmp_path):
    """Two corpora of 10 and 20 rows of 16 tokens, the second one's ids from 1000 on."""
    write_corpus(tmp_path / "a", counting([61, 1, 99]))
    write_corpus(tmp_path / "b", counting([200, 121], start=1000))
    return {"a": {"path": str(tmp_path / "a")}, "b": {"path": str(tmp_path / "b")}}


def _fractions(sources, fractions, **options):
    return data_recipe(sources, stage={"blend": None, "fractions": fractions}, **options)


@pytest.mark.req("C03")
def test_fractions_scale_whole_sources(two, tmp_path):
    """One of a and a half of b: 10 of their rows each, in every round of 20."""
    rows = open_training(_fractions(two, {"a": 1.0, "b": 0.5}), 0, tmp_path / "cache")
    places = [rows.place(i) for i in range(60)]
    for n in range(0, 60, 20):
        assert sum(name == "a" for name, _, _ in places[n : n + 20]) == 10
    assert sorted(at for name, epoch, at in places[:20] if name == "a" and epoch == 0) == list(range(10))
    in_b = [at for name, epoch, at in places if name == "b" and epoch == 0]
    assert sorted(in_b) == list(range(20))
    first, second = rows.describe(40)
    assert first.startswith("sources.a: 20 rows = 320 tokens (50.00%), 2.00 epochs (fraction 1) of 10 rows of 161")
    assert second.startswith("sources.b: 20 rows = 320 tokens (50.00%), 1.00 epochs (fraction 0.5) of 20 rows of 321")


def test_fractions_follow_the_rows_there_are_and_weights_do_not(two, tmp_path):
    """A longer b has more rows in a round, at the same fractions."""
    before = open_training(_fractions(two, {"a": 1.0, "b": 1.0}), 0, tmp_path / "cache")
    assert before.blend.weights == {"a": 1, "b": 2} and before.blend.counts(300) == {"a": 100, "b": 200}
    write_corpus(tmp_path / "b", counting([200, 121, 320], start=1000))
    after = open_training(_fractions(two, {"a": 1.0, "b": 1.0}), 0, tmp_path / "cache")
    assert after.blend.weights == {"a": 1, "b": 4} and after.fingerprint != before.fingerprint
    assert open_training(data_recipe(two), 0, tmp_path / "cache").blend.weights == {"a": 1, "b": 1}


def test_a_source_may_be_taken_several_times_or_not_at_all(two, tmp_path):
    rows = open_training(_fractions(two, {"a": 3, "b": 0}), 0, tmp_path / "cache")
    assert [rows.place(i)[1] for i in range(30)] == [0] * 10 + [1] * 10 + [2] * 10
    assert "3.00 epochs (fraction 3)" in rows.describe(30)[0] and "0 rows" in rows.describe(30)[1]


def test_equal_proportions_give_equal_rows_however_they_are_said(two, tmp_path):
    as_fractions = open_training(_fractions(two, {"a": 1.0, "b": 1.0}), 0, tmp_path / "cache")
    as_weights = open_training(data_recipe(two, {"a": 5.0, "b": 10.0}), 0, tmp_path / "cache")
    assert as_fractions.fingerprint == as_weights.fingerprint
    assert [as_fractions.place(i) for i in range(50)] == [as_weights.place(i) for i in range(50)]


# ---- sources that run dry


def _stopping(two, most: float, steps: int, rows: int = 4, **other):
    sources = {"a": two["a"] | {"max_epochs": most, "when_exhausted": "stop"}, "b": two["b"] | other}
    return data_recipe(sources, {"a": 1, "b": 2}, rows=rows, steps=steps)


def test_a_stage_ends_with_the_last_whole_step_before_a_source_runs_dry(two, tmp_path):
    recipe = _stopping(two, 2.0, steps=50)
    rows = open_training(recipe, 0, tmp_path / "cache")
    endless = open_training(data_recipe(two, {"a": 1, "b": 2}), 0, tmp_path / "cache")
    steps = rows.num_rows // 4
    assert rows.blend.counts(4 * steps)["a"] <= 20 < rows.blend.counts(4 * (steps + 1))["a"]
    assert rows.describe(4 * steps)[0] == (
        f"the stage ends after {steps} of 50 steps: sources.a has rows for max_epochs=2 and when_exhausted = 'stop'"
    )
    shorter = ended(recipe, 0, rows)
    assert shorter.stages[0].num_steps == steps and recipe.stages[0].num_steps == 50
    assert (shorter.stages[0].steps, shorter.stages[0].tokens) == (steps, None)
    for i in range(4 * steps):
        assert np.array_equal(rows.row(i).tokens, endless.row(i).tokens)


@pytest.mark.parametrize(
    ("most", "batch", "steps"), [(0.5, 1, 16), (0.5, 4, 4), (1.0, 30, 1), (1.3, 39, 1), (2.0, 5, 12)]
)
def test_where_a_stage_ends_is_exact(two, tmp_path, most, batch, steps):
    """a gives every third row; of its 10 rows there are 10 * most."""
    rows = open_training(_stopping(two, most, 99, batch), 0, tmp_path / "cache")
    counts = [rows.blend.counts(n * batch)["a"] for n in range(100)]
    assert rows.num_rows == batch * steps == batch * max(n for n in range(100) if counts[n] <= 10 * most)


def test_a_stage_that_ends_before_a_source_does_is_left_as_it_is(two, tmp_path):
    recipe = _stopping(two, 2.0, steps=12)
    rows = open_training(recipe, 0, tmp_path / "cache")
    assert rows.num_rows is None and ended(recipe, 0, rows) is recipe and rows.ending == ""
    assert rows.fingerprint == open_training(data_recipe(two, {"a": 1, "b": 2}), 0, tmp_path / "cache").fingerprint


def test_a_stage_ends_with_the_first_of_several_sources(two, tmp_path):
    recipe = _stopping(two, 2.0, 50, max_epochs=1.0, when_exhausted="stop")
    rows = open_training(recipe, 0, tmp_path / "cache")
    assert rows.num_rows == 28 and "ends after 7 of 50 steps: sources.b has rows for max_epochs=1" in rows.ending


def test_a_source_that_may_not_run_dry_counts_only_up_to_where_the_stage_ends(two, tmp_path):
    open_training(_stopping(two, 1.0, 50, max_epochs=1.0), 0, tmp_path / "cache")
    with pytest.raises(DataError, match=r"\[sources.b\] the stage takes 23 rows .*, which has 20: 1.15 epochs"):
        open_training(_stopping(two, 1.1, 50, 1, max_epochs=1.0), 0, tmp_path / "cache")


@pytest.mark.req("C15")
def test_a_source_that_runs_dry_within_the_first_step_is_refused(two, tmp_path):
    with pytest.raises(
        DataError, match="ends after 0 of 50 steps: sources.a .*; that is less than one step of 40 rows"
    ):
        open_training(_stopping(two, 1.0, 50, rows=40), 0, tmp_path / "cache")


def test_a_schedule_that_no_longer_fits_is_refused(two, tmp_path):
    recipe = _stopping(two, 1.0, 50)
    lr = recipe.stages[0].lr.model_copy(update={"warmup_steps": 9})
    recipe = recipe.model_copy(update={"stages": (recipe.stages[0].model_copy(update={"lr": lr}),)})
    with pytest.raises(DataError, match=r"ends after 7 of 50 steps: .*, but .* 9 steps of warm-up do not fit into 7"):
        open_training(recipe, 0, tmp_path / "cache")
