"""Writing TOML (reading is tomllib's): tables, arrays of tables, values in lists. None and empty tables stay out."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from megatron_lite.errors import ConfigError


def write(table: Mapping[str, Any]) -> str:
    """A document that tomllib reads back as `table`, tuples as lists, without keys that hold None or an empty table."""
    return "\n".join(_table(table, "")).lstrip("\n") + "\n"


def _table(table: Mapping[str, Any], path: str) -> Iterator[str]:
    # Plain values come first: in TOML they belong to the last header above them.
    for key, value in table.items():
        if value is not None and not isinstance(value, Mapping) and not _is_tables(value):
            yield f"{_key(key)} = {_value(value)}"
    for key, value in table.items():
        name = f"{path}{_key(key)}"
        if isinstance(value, Mapping) and value:
            yield from ("", f"[{name}]", *_table(value, f"{name}."))
        elif _is_tables(value):
            for item in value:
                yield from ("", f"[[{name}]]", *_table(item, f"{name}."))


def _is_tables(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(item, Mapping) for item in value)


def _key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _string(key)


def _string(text: str) -> str:
    # JSON escapes are TOML escapes; DEL is the one control character that JSON leaves as it is.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def _value(value: Any) -> str:
    match value:
        case bool():
            return "true" if value else "false"
        case int() | float():
            return repr(value)
        case str():
            return _string(value)
        case list() | tuple():
            return f"[{', '.join(_value(item) for item in value)}]"
        case Mapping():
            pairs = (f"{_key(key)} = {_value(item)}" for key, item in value.items() if item is not None)
            return f"{{{', '.join(pairs)}}}"
    raise ConfigError(f"{value!r} of type {type(value).__name__} cannot be written to a recipe")
