"""Requests' bodies: one JSON object, no name twice in it."""

from typing import Any

import msgspec

from services.gateway.clipper.problems import JSON, ClipperProblem
from services.gateway.oip.duplicates import UNKNOWN, find_duplicate

_SCHEMA = '{"input": [double] | [int] | [string] | [byte] | [float]} or {"input_batch": [...]}'
_WORDS = {
    str: "a text", int: "a whole number", float: "a number", list: "a list", bool: "true or false", dict: "an object",
}  # fmt: skip
_decode = msgspec.json.Decoder().decode


def read(body: bytes, expected: str = _SCHEMA) -> dict[str, Any]:
    """The object that a body is. expected: what it should be, for the message. Raises ClipperProblem."""
    try:
        found = _decode(body)
    except RecursionError as error:
        raise _wrong("it is nested too deeply", expected) from error
    except UnicodeDecodeError as error:
        raise _wrong("it is not UTF-8", expected) from error
    except msgspec.DecodeError as error:
        raise _wrong(str(error), expected) from error
    if not isinstance(found, dict):
        raise _wrong("it is no object", expected)
    if again := find_duplicate(body, _quotes(found)):
        raise _wrong(again, expected)
    return found


def _quotes(found: dict[str, Any]) -> int:
    """Quotation marks in the text, where that can be told at a glance: names, texts, and lists of numbers."""
    count = 0
    for value in found.values():
        if isinstance(value, dict):
            return UNKNOWN
        first = value
        while isinstance(first, list) and first:
            first = first[0]
        if isinstance(value, list) and not isinstance(first, (int, float)):
            return UNKNOWN
        count += 4 if isinstance(value, str) else 2
    return count


def _wrong(reason: str, expected: str) -> ClipperProblem:
    return ClipperProblem(JSON, f"Error parsing JSON: {reason}. Expected JSON schema: {expected}")


def field(body: dict[str, Any], name: str, kind: type | tuple[type, ...], *, needed: bool = True) -> Any:
    """One field of the given type. Raises ClipperProblem."""
    value = body.get(name)
    if value is None:
        if needed:
            raise ClipperProblem(JSON, f"Error parsing JSON: field {name} is missing")
        return None
    wanted = kind if isinstance(kind, tuple) else (kind,)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        shown = " or ".join(dict.fromkeys(_WORDS[one] for one in wanted))
        raise ClipperProblem(JSON, f"Error parsing JSON: field {name} must be {shown}")
    return value


def version(body: dict[str, Any], name: str, *, needed: bool = True) -> str | None:
    """A version: Clipper's clients send texts, and some of them numbers."""
    value = field(body, name, (str, int), needed=needed)
    return None if value is None else str(value)
