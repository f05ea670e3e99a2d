"""tools/check_equivalence.py: passes what is equal, fails what is not, names what it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.config.load import load_recipe, to_toml
from megatron_lite.errors import ConfigError
from tests.helpers.runs import tiny_recipe
from tools import check_equivalence as tool

ROOT = Path(__file__).parents[2]


@pytest.mark.req("E13")
def test_a_layout_passes_with_its_differences_and_a_deviating_one_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(to_toml(tiny_recipe(tmp_path)))
    args = tool.parser().parse_args(["--recipe", str(recipe), "--layouts", "tp2-sp", "--steps", "3"])
    plain = tool.launch_layout
    assert tool.main(args) == 0
    assert capsys.readouterr().out.startswith("PASS tp2-sp: loss ")

    def deviating(args: object, layout: tool.Layout, folder: Path) -> None:
        plain(args, tool.parse("one"), folder)  # type: ignore[arg-type]
        if layout.name != "one":
            curve = json.loads((folder / "curve.json").read_text())
            curve[1][0] += 1e-4
            (folder / "curve.json").write_text(json.dumps(curve))

    monkeypatch.setattr(tool, "launch_layout", deviating)
    assert tool.main(args) == 1
    assert capsys.readouterr().out.startswith("FAIL tp2-sp: loss 1.0e-04 (at most 1e-05)")


def test_an_unknown_layout_is_named() -> None:
    with pytest.raises(ConfigError, match="layout 'tp2-xx': 'xx' is none of tpN, ppN, cpN, vN, dpN, one, zero0, sp"):
        tool.parse("tp2-xx")
    with pytest.raises(ConfigError, match="layout 'v2': vN needs ppN above 1"):
        tool.parse("v2")


def test_the_small_model_fits_all_layouts() -> None:
    layouts = [tool.parse(name) for name in ("tp2-cp2-heads-sp", "pp3-v2-dp5", "one")]
    recipe = load_recipe(ROOT / "examples/qwen3_1p7b/recipe.toml", launched=True)
    args = tool.parser().parse_args(["--recipe", "unused", "--layouts", "one"])
    runs = [tool.trial(recipe, 0, layout, layouts, args) for layout in layouts]
    assert len({(run.model, run.rows, run.seq_len) for run in runs}) == 1
    assert runs[0].model.num_hidden_layers == 6 and runs[0].rows % (5 * 3) == 0
    assert runs[2].micro_batch == runs[2].rows and runs[0].micro_batch == 1
