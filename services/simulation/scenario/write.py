"""Writing a scenario file: the TOML of a document of tables, lists, texts, numbers and truth values."""

from collections.abc import Mapping
from json import dumps
from typing import Any


def toml_of(document: Mapping[str, Any]) -> str:
    """The file's text: a [table] for each table of the document, [[blocks]] for each list of tables; all deeper tables are inline."""
    parts = []
    for key, value in document.items():
        if isinstance(value, Mapping):
            inner = {name: one for name, one in value.items() if isinstance(one, Mapping)}
            plain = {name: one for name, one in value.items() if name not in inner}
            if plain or not inner:
                parts.append(_block(f"[{key}]", plain))
            parts += [_block(f"[{key}.{name}]", one) for name, one in inner.items()]
        else:
            parts += [_block(f"[[{key}]]", one) for one in value]
    return "\n".join(parts)


def _block(head: str, fields: Mapping[str, Any]) -> str:
    return "\n".join([head, *(f"{_key(name)} = {_value(value)}" for name, value in fields.items()), ""])


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return (
            "{ " + ", ".join(f"{_key(name)} = {_value(one)}" for name, one in value.items()) + " }" if value else "{}"
        )
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_value, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return repr(value) if isinstance(value, int | float) else dumps(str(value))


def _key(name: str) -> str:
    return name if name.replace("_", "").replace("-", "").isalnum() and name.isascii() else dumps(name)
