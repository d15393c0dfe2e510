"""Output of every command: failures as one line, results as JSON, tables and text, progress on stderr."""

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
    """End the command because of bad usage: `message` on stderr, exit code 2."""
    raise Failure(message, USAGE)


def show(document: Any, as_json: bool, render: Callable[[Any], None]) -> None:
    """Print one result: as one JSON document, or as text by `render`."""
    if as_json:
        print_json(document)
    else:
        render(document)


def print_json(document: Any, file: TextIO | None = None) -> None:
    """Print one JSON document on one line of stdout (or a file). numpy values become numbers and lists, paths become text."""
    print(json.dumps(document, default=_plain, allow_nan=False), file=file, flush=True)


@contextmanager
def for_the_result() -> Iterator[None]:
    """Send to stderr what is printed within, even by a solver's C code. Only the result goes to stdout."""
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
    """Print one line of progress on stderr."""
    print(text, file=sys.stderr, flush=True)


def one_line(text: object) -> str:
    """The text without line breaks."""
    return " ".join(str(text).split())


def _plain(value: Any) -> Any:
    for method in ("tolist", "item"):
        if hasattr(value, method):
            return getattr(value, method)()
    return value.hex() if isinstance(value, bytes) else str(value)


class Column(NamedTuple):
    """A column of a table. title: with the unit. value: the item's field, or a function of the item."""

    title: str
    value: str | Callable[[Mapping[str, Any]], Any]


def print_table(items: Sequence[Mapping[str, Any]], columns: Sequence[Column], empty: str) -> None:
    """Print one line for each item, or `empty` if there is none."""
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
    """A value as text: numbers with three or four digits, None and "" as a dash."""
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
    """A measured number with its significant digits."""
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    if value == 0 or abs(value) >= 0.001:
        return f"{value:.4g}"
    return f"{value:.3g}"


def _value(item: Mapping[str, Any], column: Column) -> Any:
    return column.value(item) if callable(column.value) else item.get(column.value)


def hardware_of(item: Mapping[str, Any]) -> str | None:
    """A listed variant's hardware, and whether it is simulated, or the host of its engine."""
    where = "simulated" if item.get("simulated") else item.get("engine")
    return f"{item.get('hardware')} ({where})" if where else item.get("hardware")


def local_time(at: str) -> str:
    """A time in ISO 8601, converted to local time."""
    return datetime.fromisoformat(at).astimezone().isoformat(" ", "seconds")


def refusal_line(refused: Refused) -> str:
    """A refusal in one line: the reason, the closest variant, the time after which to try again."""
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
