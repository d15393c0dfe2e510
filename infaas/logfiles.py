"""The log files of a system's processes on this machine, for `infaas logs` and the dashboard."""

import json
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LOGS = "logs"  # below the data directory, one file a process
LEVELS = {"DEBUG": 10, "INFO": 20, "WARNING": 30, "ERROR": 40, "CRITICAL": 50}
READ = 2**20  # bytes at the end of a file in which the last lines are looked for, unless told otherwise

Line = tuple[float, str, str]  # Unix seconds, process, text


class LogFile:
    """One process's log. new: its lines up to now were not shown yet."""

    def __init__(self, path: Path, *, new: bool = False) -> None:
        self._path = path
        self._at = 0 if new else path.stat().st_size
        self._time = path.stat().st_mtime
        self._rest = b""

    def last(self, count: int, least: int, read: int = READ) -> list[Line]:
        """The last lines, at most so many, of at least this level. read: bytes at the file's end in which they are looked for."""
        with self._path.open("rb") as file:
            begin = max(0, self._at - read)
            file.seek(begin)
            text = file.read(self._at - begin)
        whole, _, self._rest = text.rpartition(b"\n")
        if begin:
            whole = whole.partition(b"\n")[2]  # the first line was cut
        return list(self._read(whole.split(b"\n"), least))[-count:] if count else []

    def new(self, least: int) -> list[Line]:
        """The lines since the last call. A file that has become shorter was begun anew."""
        try:
            with self._path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if size < self._at:
                    self._at, self._rest = 0, b""
                file.seek(self._at)
                text = self._rest + file.read()
                self._at = file.tell()
        except FileNotFoundError:
            return []
        whole, _, self._rest = text.rpartition(b"\n")
        self._time = time.time()
        return list(self._read(whole.split(b"\n"), least)) if whole else []

    def _read(self, lines: Iterable[bytes], least: int) -> Iterator[Line]:
        """A line without a time of its own has the time of the one before it; at the start, of the one after it."""
        texts = [text for raw in lines if (text := raw.decode(errors="replace").rstrip())]
        entries = [_entry(text) for text in texts]
        times = [float(entry["time"]) if entry else _time_in(text) for text, entry in zip(texts, entries, strict=True)]
        at = next((found for found in times if found is not None), self._time)
        for text, entry, found in zip(texts, entries, times, strict=True):
            at = at if found is None else found
            if entry is None:
                yield at, self._path.stem, text
            elif LEVELS.get(str(entry.get("level")), least) >= least:
                yield at, self._path.stem, _sentence(entry)


def _entry(text: str) -> Mapping[str, Any] | None:
    """A JSON line of a service; None: it is something else."""
    if not text.startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("time"), (int, float)) else None


# PostgreSQL's lines (in UTC) begin with a time; so do those of nats-server (local time), after its pid.
_TIME = re.compile(r"(?:\[\d+\] )?(\d{4})[-/](\d\d)[-/](\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)( UTC)?")


def _time_in(text: str) -> float | None:
    """The time that a server's line begins with, in Unix seconds."""
    found = _TIME.match(text)
    if found is None:
        return None
    year, month, day, clock, utc = found.groups()
    try:
        at = datetime.fromisoformat(f"{year}-{month}-{day} {clock}")
    except ValueError:
        return None
    return (at.replace(tzinfo=UTC) if utc else at).timestamp()


def _sentence(entry: Mapping[str, Any]) -> str:
    known = ("time", "level", "logger", "message", "service", "exception")
    more = "".join(f" {name}={value}" for name, value in entry.items() if name not in known)
    trace = f"\n{entry['exception']}" if "exception" in entry else ""
    return f"{entry.get('level', ''):7} {entry.get('message', '')}{more}{trace}"
