"""Checks of JSON texts: the memory that they would take, and duplicate names. Pure."""

import json
from collections.abc import Mapping
from typing import Any

import msgspec

from services.gateway.errors import RequestFailed

UNCHECKED_JSON = 2**18  # bytes of JSON that are decoded without an estimate of their memory
MAX_JSON_MEMORY = 48 * 2**20  # bytes of memory that decoded JSON may take, about
LIST, MAP, ITEM = 64, 240, 32  # bytes that each takes in CPython, about
UNKNOWN = -1

_skip = msgspec.json.Decoder(msgspec.Raw).decode  # checks the whole text and keeps nothing


def check_json_size(text: bytes, end: int | None = None) -> None:
    """Refuse JSON that would take too much memory: `[],` has three bytes as text, and sixty as an empty list.

    end: bytes of `text` that are JSON; None: all. The estimate counts brackets and commas, inside of strings too: it may be too
    high for such strings, but not by much. Raises RequestFailed: 413, or 400 where the text is not JSON.
    """
    end = len(text) if end is None else end
    if end <= UNCHECKED_JSON:
        return
    memory = LIST * text.count(b"[", 0, end)
    if memory <= MAX_JSON_MEMORY:
        memory += MAP * text.count(b"{", 0, end)
    if memory <= MAX_JSON_MEMORY:
        memory += ITEM * text.count(b",", 0, end)
    if memory > MAX_JSON_MEMORY:
        try:
            _skip(memoryview(text)[:end])
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            deep = isinstance(error, RecursionError)
            raise RequestFailed(
                None, "the JSON is nested too deeply" if deep else f"the body is not JSON: {error}"
            ) from error
        raise RequestFailed(
            None,
            f"as JSON this would take more than {MAX_JSON_MEMORY // 2**20} MiB of memory: send large tensors as binary data, or in parts",
            code="too_large",
        )


class _Duplicate(ValueError):
    pass


def quotes(values: Mapping[str, Any]) -> int:
    """The number of quotation marks in the JSON of an object of scalars; UNKNOWN where it holds anything else."""
    count = 0
    for value in values.values():
        if isinstance(value, str):
            count += 4
        elif isinstance(value, int | float) or value is None:
            count += 2
        else:
            return UNKNOWN
    return count


def may_have_more_names(text: bytes, expected: int) -> bool:
    """Whether a text may hold names that were not read, or one name twice. Only such a text is worth parsing a second time.

    expected: the number of quotation marks around what was read, or UNKNOWN.
    """
    return expected == UNKNOWN or text.count(b'"') != expected or b"\\" in text


def find_duplicate(text: bytes) -> str:
    """A sentence about the first name that occurs twice in one JSON object; "" when there is none.

    Readers differ in which of two values counts, so such requests are refused.
    """
    try:
        json.loads(text, object_pairs_hook=_distinct)
    except _Duplicate as error:
        return f"the JSON has the name {str(error)[:80]!r} twice in one object"
    except (ValueError, RecursionError):
        return "the JSON cannot be read"
    return ""


def _distinct(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Duplicate(name)
        names.add(name)
