"""What every command shares: a clean failure, and results as JSON or as text."""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import datetime
from typing import Any, NamedTuple, NoReturn, TextIO

from infaas.errors import Refused

FAILED = 1  # the request failed
USAGE = 2  # the command was used wrongly


class Failure(Exception):
    """Ends a command with one line on stderr and this exit code."""

    def __init__(self, message: str, code: int = FAILED) -> None:
        super().__init__(message)
        self.code = code


def fail(message: str, code: int = FAILED) -> NoReturn:
    """End the command: `message` on stderr, exit code 1 (the request failed) or 2 (bad usage)."""
    raise Failure(message, code)


def usage(message: str) -> NoReturn:
    """End the command because it was used wrongly: exit code 2."""
    raise Failure(message, USAGE)


def show(document: Any, as_json: bool, render: Callable[[Any], None]) -> None:
    """Print one result: as one JSON document and nothing else, or for people by `render`."""
    if as_json:
        print_json(document)
    else:
        render(document)


def print_json(document: Any, file: TextIO | None = None) -> None:
    """One JSON document on one line of stdout (or a file); numpy scalars and paths become what they stand for."""
    print(json.dumps(document, default=_plain, allow_nan=False), file=file, flush=True)


@contextmanager
def for_the_result() -> Iterator[None]:
    """What is printed within, by a user's modules or a solver's C code, goes to stderr: stdout belongs to the result."""
    import ctypes  # noqa: PLC0415  (few commands need it)

    sys.stdout.flush()
    library = ctypes.CDLL(None)
    kept = os.dup(1)
    try:
        os.dup2(2, 1)
        with redirect_stdout(sys.stderr):
            yield
    finally:
        library.fflush(None)
        os.dup2(kept, 1)
        os.close(kept)


def progress(text: str) -> None:
    """A line for people who wait; never on stdout."""
    print(text, file=sys.stderr, flush=True)


def one_line(text: object) -> str:
    """A text without line breaks, for error messages."""
    return " ".join(str(text).split())


def _plain(value: Any) -> Any:
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value.hex() if isinstance(value, bytes) else str(value)


# -- Plain tables for terminals and logs: aligned columns, numbers to the right, nothing cut off.


class Column(NamedTuple):
    """title: as shown, with the unit. value: the item's field, or a function of the item."""

    title: str
    value: str | Callable[[Mapping[str, Any]], Any]


def print_table(items: Sequence[Mapping[str, Any]], columns: Sequence[Column], empty: str) -> None:
    """One line an item; `empty` when there is none."""
    if not items:
        print(empty)
        return
    cells = [[_value(item, column) for column in columns] for item in items]
    texts = [[text(value) for value in row] for row in cells]
    widths = [max(len(column.title), *(len(row[i]) for row in texts)) for i, column in enumerate(columns)]
    right = [all(row[i] is None or isinstance(row[i], (int, float)) for row in cells) for i in range(len(columns))]
    for row in [[column.title for column in columns], *texts]:
        aligned = [cell.rjust(w) if r else cell.ljust(w) for cell, w, r in zip(row, widths, right, strict=True)]
        print("  ".join(aligned).rstrip())


def text(value: Any) -> str:
    """A value for people: numbers to three or four digits, nothing as a dash."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(map(str, value)) or "-"
    return str(value)


def number(value: float) -> str:
    """A measured number without digits that mean nothing."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def _value(item: Mapping[str, Any], column: Column) -> Any:
    return column.value(item) if callable(column.value) else item.get(column.value)


def local_time(at: str) -> str:
    """A time in ISO 8601 for people, where they are."""
    return datetime.fromisoformat(at).astimezone().isoformat(" ", "seconds")


def refusal_line(refused: Refused) -> str:
    """A refusal in one line: why, what comes closest, when to try again."""
    parts = [str(refused)]
    if refused.closest:
        parts.append(f"closest: {_offer(refused.closest)}")
    if refused.retry_after_ms is not None:
        parts.append(f"try again in {number(refused.retry_after_ms)} ms")
    return "; ".join(parts)


def _offer(closest: dict[str, Any]) -> str:
    figures = [
        f"{label} {number(float(value))}{unit}"
        for name, label, unit in (
            ("accuracy", "accuracy", ""),
            ("latency_ms", "latency", " ms"),
            ("cost", "US$", " per 1,000"),
        )
        if isinstance(value := closest.get(name), (int, float))
    ]
    return f"{closest.get('variant')} ({', '.join(figures)})"
