"""tools/check_equivalence.py: passes what is equal, fails what is not, names what it does not know."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_lite.config.load import to_toml
from megatron_lite.errors import ConfigError
from tests.helpers.runs import tiny_recipe
from tools import check_equivalence as tool


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
    with pytest.raises(ConfigError, match="layout 'tp2-xx': 'xx' is none of tpN, dpN, sp, zero0"):
        tool.parse("tp2-xx")
