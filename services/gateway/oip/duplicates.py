"""Names that stand twice in one JSON object: readers differ in which one counts, so here neither does. Pure."""

import json
from collections.abc import Mapping
from typing import Any

UNKNOWN = -1


class _Twice(ValueError):
    pass


def quotes(values: Mapping[str, Any]) -> int:
    """How many quotation marks an object of scalars has; UNKNOWN where it holds anything else."""
    count = 0
    for value in values.values():
        if isinstance(value, str):
            count += 4
        elif isinstance(value, int | float) or value is None:
            count += 2
        else:
            return UNKNOWN
    return count


def find_duplicate(text: bytes, expected: int) -> str:
    """A sentence about the first name that stands twice; "" when there is none.

    expected: quotation marks in the text if there is none, as far as that is known. Only a text that has another number of them,
    or escapes, is read a second time.
    """
    if expected >= 0 and text.count(b'"') == expected and b"\\" not in text:
        return ""
    try:
        json.loads(text, object_pairs_hook=_once)
    except _Twice as error:
        return f"the JSON has the name {str(error)[:80]!r} twice in one object"
    except (ValueError, RecursionError):
        return "the JSON cannot be read"
    return ""


def _once(pairs: list[tuple[str, Any]]) -> None:
    names = set()
    for name, _ in pairs:
        if name in names:
            raise _Twice(name)
        names.add(name)
