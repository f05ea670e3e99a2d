"""Writes the tables of benchmarks/README.md from benchmarks/results.jsonl.

  python -m benchmarks.table

A table stands between a line such as `<!-- steps -->` and the next blank line after it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import orjson

FOLDER = Path(__file__).parent
README = FOLDER / "README.md"


def results() -> list[dict[str, Any]]:
    """Every saved figure, in the order of saving."""
    return [orjson.loads(line) for line in (FOLDER / "results.jsonl").read_bytes().splitlines()]


def processes(r: dict[str, Any]) -> str:
    """The layout of a measured step in words."""
    return f"tp {r['tp']}" if r["tp"] > 1 else f"dp {r['ranks']}" if r["ranks"] > 1 else "1"


def steps(found: list[dict[str, Any]]) -> list[str]:
    """Training steps: one line for each peer."""
    lines = ["| precision | processes | peer | ours, tokens/s | peer, tokens/s | ratio | lowest – highest |"]
    lines += ["|---|---|---|---|---|---|---|"]
    for r in sorted((r for r in found if "precision" in r), key=lambda r: (r["ranks"], r["tp"], r["precision"])):
        layout = processes(r)
        lines.append(
            f"| {r['precision']} | {layout} | {r['peer']} | {r['ours_tok_s']:,} | {r['peer_tok_s']:,} "
            f"| {r['ratio']:.2f} | {r['ratio_min']:.2f} – {r['ratio_max']:.2f} |"
        )
    return lines


def shares(found: list[dict[str, Any]]) -> list[str]:
    """Where the time of a step goes."""
    lines = ["| precision | processes | forward | backward | optimizer | communication |", "|---|---|---|---|---|---|"]
    seen = {}
    for r in found:
        if "precision" in r:
            layout = processes(r)
            seen[r["ranks"], r["tp"], r["precision"], layout] = r["share"]
    for (_, _, precision, layout), share in sorted(seen.items()):
        parts = [f"{share[name]:.1%}" for name in ("forward", "backward", "optimizer", "communication")]
        lines.append(f"| {precision} | {layout} | " + " | ".join(parts) + " |")
    return lines


def prepare(found: list[dict[str, Any]]) -> list[str]:
    """Preparation of a corpus."""
    lines = ["| tokenizer | backend | peer | ours, MB/s | peer, MB/s | ratio | lowest – highest | start-up |"]
    lines += ["|---|---|---|---|---|---|---|---|"]
    for r in found:
        if "ours_MB_per_s" in r:
            lines.append(
                f"| {r['tokenizer']} | {r['backend']} | {r['peer']} | {r['ours_MB_per_s']} | {r['peer_MB_per_s']} "
                f"| {r['ratio']:.2f} | {r['ratio_min']:.2f} – {r['ratio_max']:.2f} | {r['start_s']} s |"
            )
    return lines


def ops(found: list[dict[str, Any]]) -> list[str]:
    """Kinds of operations of a step."""
    profiles = {r["of"]: r["ops"] for r in found if "ops" in r}
    names = list(next(iter(profiles.values()), {}))
    lines = ["| precision | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    return lines + [
        f"| {of} | " + " | ".join(f"{share[n]:.1%}" for n in names) + " |" for of, share in profiles.items()
    ]


def rows(found: list[dict[str, Any]]) -> list[str]:
    """Indexes and random rows."""
    lines = [
        "| row length | peer | index, ours | index, peer | ours, rows/s | peer, rows/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    for r in found:
        if "ours_rows_per_s" in r:
            lines.append(
                f"| {r['seq_len']:,} | {r['peer']} | {r['ours_build_s']:.3f} s | {r['peer_build_s']:.3f} s "
                f"| {r['ours_rows_per_s']:,.0f} | {r['peer_rows_per_s']:,.0f} | {r['ratio_rows_per_s']:.1f} |"
            )
    return lines


def profile(found: list[dict[str, Any]]) -> list[str]:
    """Where the time of one preparing process goes."""
    lines = []
    for r in found:
        if "profile" in r:
            lines += ["| part | share of the time |", "|---|---|"]
            lines += [f"| {name} | {share:.1%} |" for name, share in r["profile"].items()]
    return lines


def layouts(found: list[dict[str, Any]]) -> list[str]:
    """Steps of layouts beside their estimates."""
    lines = [
        "| precision | layout | step | times one process | waiting | estimated step | estimated / measured "
        "| waiting, estimated |",
        "|---|---|---|---|---|---|---|---|",
    ]
    alone: dict[str, float] = {r["of"]: r["seconds"] for r in found if r.get("layouts") == "dp=1"}
    for r in (r for r in found if "layouts" in r):
        speedup = f"{alone[r['of']] / r['seconds']:.2f}" if r["of"] in alone else ""
        layout = r["layouts"].replace(",", ", ").replace("=", " ").replace("_", " ")
        lines.append(
            f"| {r['of']} | {layout} | {r['seconds']:.2f} s | {speedup} | {r['waiting']:.1%} | {r['estimated']:.2f} s "
            f"| {r['estimated_over_measured']:.2f} | {r['estimated_waiting']:.1%} |"
        )
    return lines


def kind(r: dict[str, Any]) -> str:
    """What a line of results measured."""
    if "precision" in r or "ops" in r:
        return "steps"
    return "layouts" if "layouts" in r else "rows" if "seq_len" in r else "preparation"


def where(found: list[dict[str, Any]]) -> list[str]:
    """On what, when and which code."""
    lines = ["| figures | date | device | torch | commit |", "|---|---|---|---|---|"]
    seen = {}
    for r in found:
        seen[kind(r), r["date"], r["device"], r["torch"], r["commit"][:12]] = None
    return lines + ["| " + " | ".join(key) + " |" for key in seen]


TABLES = {
    "steps": steps,
    "shares": shares,
    "prepare": prepare,
    "profile": profile,
    "ops": ops,
    "rows": rows,
    "layouts": layouts,
    "where": where,
}


def written(text: str) -> str:
    """The text with every table made anew."""
    for name, table in TABLES.items():
        content = "\n".join(table(results()))
        pattern = rf"(<!-- {name} -->\n)(?:\|.*\n)*"
        text = re.sub(pattern, lambda match, content=content: f"{match[1]}{content}\n", text)
    return text


if __name__ == "__main__":
    README.write_text(written(README.read_text()))
