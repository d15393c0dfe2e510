"""The grammar of subjects, wildcards and keys, the same for every bus."""

import re
from collections.abc import Mapping
from functools import lru_cache

from bus.port import BusError

MOST_SUBJECT = 1000  # bytes; a server closes connections whose control lines (subject, reply subject, sizes) pass 4096
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*\Z")


def check_subject(subject: str) -> None:
    """What could end a protocol line and begin another must never get into it. Raises BusError."""
    if not subject or " " in subject or not subject.isprintable():
        raise BusError(f"{subject[:80]!r} is not a subject: it is empty, or has spaces or control characters")
    if len(subject) > MOST_SUBJECT or (not subject.isascii() and len(subject.encode()) > MOST_SUBJECT):
        raise BusError(f"{subject[:80]!r}... is longer than the {MOST_SUBJECT} bytes that a subject may have")


def check_pattern(pattern: str) -> None:
    """Tokens joined by dots, `*` for any one of them, `>` at the end for all the rest. Raises BusError."""
    check_subject(pattern)
    tokens = pattern.split(".")
    for place, part in enumerate(tokens):
        wild = "*" in part or ">" in part
        if not part or (wild and len(part) > 1) or (part == ">" and place < len(tokens) - 1):
            raise BusError(f"{pattern!r} is not a subject to listen on: an empty token, or a misplaced wildcard")


def check_key(key: str) -> None:
    """Raises BusError for what a key-value bucket cannot have as a key."""
    if not _KEY.match(key):
        raise BusError(f"{key!r} is no key: letters, digits and - / _ = in parts joined by dots")


def check_headers(headers: Mapping[str, str]) -> None:
    """Names are printable ASCII without colon or space, values have no line breaks. Raises BusError."""
    for name, value in headers.items():
        if not name or not name.isascii() or not name.isprintable() or ":" in name or " " in name:
            raise BusError(f"{name!r} is no header name: printable ASCII without colon or space")
        if "\r" in value or "\n" in value:
            raise BusError(f"the value of header {name!r} has line breaks")


@lru_cache(maxsize=65536)
def matches(pattern: str, subject: str) -> bool:
    """Whether `pattern` covers `subject`."""
    wanted = pattern.split(".")
    given = subject.split(".")
    if wanted[-1] == ">":
        wanted.pop()
        if len(given) <= len(wanted):
            return False
        given = given[: len(wanted)]
    return len(wanted) == len(given) and all(want in ("*", have) for want, have in zip(wanted, given, strict=True))
