"""Where in a scenario file something stands, and the refusal that names it."""

import re
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, NamedTuple, NoReturn

_BARE = re.compile(r"[A-Za-z0-9_-]+\Z")
_LONGEST = 60  # characters of a value that a refusal shows


class ScenarioError(ValueError):
    """A scenario that cannot be run. The text: file, key, what is wrong there, and the remedy."""


class Place(NamedTuple):
    """A key in a file, as load[0].rate[2][1]; entries of lists are numbered from 0."""

    file: str
    key: str = ""

    def at(self, key: str | int) -> "Place":
        """Of something inside."""
        if isinstance(key, int):
            return Place(self.file, f"{self.key}[{key}]")
        written = key if _BARE.match(key) else shown(key)
        return Place(self.file, f"{self.key}.{written}" if self.key else written)

    def refuse(self, reason: str) -> NoReturn:
        """Raises ScenarioError."""
        raise ScenarioError(": ".join(part for part in (self.file, self.key, reason) if part))


def shown(value: Any) -> str:
    """A value as a refusal shows it: on one line, and not at length."""
    try:
        written = repr(value)
    except (ValueError, RecursionError):  # a whole number of thousands of digits
        return "that"
    return written if len(written) <= _LONGEST else f"{written[:_LONGEST]}…"


def meant(name: str, known: Iterable[str]) -> str:
    """A guess at what a name should have been; else all there are, where they are few."""
    names = sorted(known)
    near = get_close_matches(name[:100], names, n=1)
    if near:
        return f"; did you mean {near[0]}?"
    return f"; there are {', '.join(names)}" if 0 < len(names) <= 12 else ""
