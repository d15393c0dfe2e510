"""Plain YAML for documents made of maps, lists and scalars; strings that could be read as anything else are quoted."""

import json
import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z$/][A-Za-z0-9_$/.-]*\Z")
_WIDTH = 100
_WORDS = {"true", "false", "null", "yes", "no", "on", "off", "y", "n"}


def dump(value: Any) -> str:
    """The document as YAML text, keys in the order given."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, dict) and value:
        out = []
        for key, inner in value.items():
            out += _entry(f"{_scalar(key)}:", inner)
        return out
    if isinstance(value, list) and value:
        out = []
        for inner in value:
            first, *rest = _lines(inner)
            out += [f"- {first}", *(f"  {line}" for line in rest)]
        return out
    return [_scalar(value)]


def _entry(key: str, value: Any) -> list[str]:
    if isinstance(value, list) and not any(isinstance(inner, dict | list) for inner in value):
        line = f"{key} [{', '.join(map(_scalar, value))}]"
        if len(line) <= _WIDTH:
            return [line]
    if isinstance(value, dict | list) and value:
        return [key, *(f"  {line}" for line in _lines(value))]
    return [f"{key} {_scalar(value)}"]


def _scalar(value: Any) -> str:
    if isinstance(value, str) and _PLAIN.match(value) and value.lower() not in _WORDS:
        return value
    return json.dumps(value, ensure_ascii=False)
