"""What every command shares: a clean failure, and results as JSON or as text."""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn, TextIO

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
