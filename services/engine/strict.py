"""JSON that means the same to everybody who reads it. Pure."""

import json
from typing import Any


class NotStrict(ValueError):
    """The text is no JSON, or could be read in two ways; the words are for people."""


def loads(text: bytes) -> Any:
    """What the text says. Raises NotStrict: also where an object has a key twice, of which others may take the other."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except NotStrict:
        raise
    except RecursionError as error:
        raise NotStrict("the JSON is nested too deeply") from error
    except ValueError as error:
        raise NotStrict(f"this is no JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotStrict("an object has a key twice")
    return found


def _no_number(word: str) -> Any:
    raise NotStrict(f"this is no JSON: {word}")
