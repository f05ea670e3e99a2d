"""Build a small corpus from the standard library of the Python that runs this file. Nothing is downloaded.

  code   one document per module: its source as Python reads it, nothing cut or reformatted
  prose  one document per module: its docstrings; one per topic of the language reference in `pydoc_data`
  long   one document per package: its modules one after the other, each under a line that names it

What is held out for validation is decided per package, top-level module or topic by a hash of its name, and the same
way for all three sources: no text that validation sees is in any training document. Same Python, same bytes.

    python examples/tiny/build_corpus.py --output quickstart/corpus
writes code.train.jsonl, code.validation.jsonl, and so on for prose and long.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import inspect
import json
import sysconfig
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

# Tests are absent from some builds of Python, and corpora should not depend on that more than they must; tables of
# character sets are not text; the topics of the language reference are prose and must not come back as code.
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data", "__pycache__"}
RESERVED = "\u2581"  # sentencepiece writes a space as this character, so text that holds it cannot survive a round trip
HELD_OUT = 0.06  # share of characters aimed at for validation, per kind of unit
MIN_LONG = 40_000  # characters of a package that make a long document


class Document(NamedTuple):
    """One text of one source."""

    source: str  # code, prose or long
    unit: str  # what is held out as a whole: a package, a top-level module, a topic
    name: str
    text: str


def modules(library: Path) -> Iterator[tuple[Path, str]]:
    """(path inside the library, source) of every module that can be read, in order of path."""
    for path in sorted(library.rglob("*.py")):
        inside = path.relative_to(library)
        if LEFT_OUT.isdisjoint(inside.parts) and not inside.parts[0].startswith(("config-", "_sysconfigdata")):
            try:
                with tokenize.open(path) as file:  # honours the encoding that the module declares
                    text = file.read()
            except (SyntaxError, UnicodeDecodeError):
                continue  # modules that are broken on purpose
            yield inside, text


def docstrings(text: str) -> list[str]:
    """The docstrings of a module, its classes and its functions, in order of appearance, indentation removed."""
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError):
        return []
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = sorted((n for n in ast.walk(tree) if isinstance(n, kinds)), key=lambda n: getattr(n, "lineno", 0))
    return [inspect.cleandoc(found) for n in nodes if (found := ast.get_docstring(n, clean=False))]


def documents(library: Path) -> Iterator[Document]:
    """Every document of every source; a docstring that appears in several modules is kept once."""
    seen: set[str] = set()
    packages: dict[str, list[str]] = {}
    for path, text in modules(library):
        unit = path.parts[0].removesuffix(".py")
        yield Document("code", unit, f"code/{path}", text)
        fresh = [d for d in dict.fromkeys(docstrings(text)) if len(d) >= 40 and d not in seen]
        seen.update(fresh)
        if fresh:
            yield Document("prose", unit, f"prose/{path}", "\n\n".join(fresh) + "\n")
        if len(path.parts) > 1:
            packages.setdefault(unit, []).append(f"# {path}\n{text}")
    for unit, parts in packages.items():
        if sum(map(len, parts)) >= MIN_LONG:
            yield Document("long", unit, f"long/{unit}", "\n".join(parts))
    from pydoc_data import topics  # the language reference, as the `help` command shows it

    for name, text in sorted(topics.topics.items()):
        yield Document("prose", f"topic {name}", f"prose/topics/{name}", text.strip() + "\n")


def held_out_units(docs: list[Document]) -> set[str]:
    """Units for validation: in order of the hash of their names until their share of the characters is reached.

    Packages with a long document, other modules, and topics are three kinds, so that each source has validation text.
    """
    long_units = {d.unit for d in docs if d.source == "long"}
    sizes: dict[str, dict[str, int]] = {"package": {}, "module": {}, "topic": {}}
    for doc in docs:
        kind = "topic" if doc.unit.startswith("topic ") else "package" if doc.unit in long_units else "module"
        sizes[kind][doc.unit] = sizes[kind].get(doc.unit, 0) + len(doc.text)
    held_out: set[str] = set()
    for units in sizes.values():
        # A unit that is a large part of its kind stays in training.
        usable = {u: size for u, size in units.items() if size <= HELD_OUT * sum(units.values())}
        total = 0
        for unit in sorted(usable, key=lambda u: hashlib.sha256(u.encode()).digest()):
            if total >= HELD_OUT * sum(units.values()):
                break
            held_out.add(unit)
            total += usable[unit]
    return held_out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the .jsonl files")
    args = parser.parse_args()

    found = list(documents(Path(sysconfig.get_path("stdlib"))))
    held_out = held_out_units(found)
    kept: dict[str, list[Document]] = {}
    texts: set[tuple[str, str]] = set()
    for doc in found:
        if not doc.text.strip() or RESERVED in doc.text or "\0" in doc.text or (doc.source, doc.text) in texts:
            continue
        texts.add((doc.source, doc.text))
        kept.setdefault(f"{doc.source}.{'validation' if doc.unit in held_out else 'train'}", []).append(doc)

    args.output.mkdir(parents=True, exist_ok=True)
    for name, docs in sorted(kept.items()):
        docs.sort(key=lambda d: hashlib.sha256(d.name.encode()).digest())  # no order of names in the files
        path, temporary = args.output / f"{name}.jsonl", args.output / f"{name}.jsonl.partial"
        with temporary.open("w", encoding="utf-8") as file:
            for doc in docs:
                file.write(json.dumps({"id": doc.name, "text": doc.text}, ensure_ascii=False) + "\n")
        temporary.replace(path)
        print(f"{path}: {len(docs):,} documents, {sum(len(d.text) for d in docs):,} characters")
    print(f"left out as empty, repeated or with a reserved character: {len(found) - sum(map(len, kept.values()))}")
    print(f"held out: {', '.join(sorted(u for u in held_out if not u.startswith('topic ')))}, and some topics")


if __name__ == "__main__":
    main()
