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
    """One process's log. new: its lines up to now were not shown yet. about: only what it says of the process whose name begins so."""

    def __init__(self, path: Path, *, new: bool = False, about: str = "") -> None:
        self._path = path
        self._about = about
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
        """A line without a time of its own has the time of the one before it; at the start, of the one after it.

        What a server adds to a line has its level, too. What a process prints without a level is shown at every level.
        """
        texts = [text for raw in lines if (text := raw.decode(errors="replace").rstrip())]
        entries = [_entry(text) or _servers(text) for text in texts]
        at = next((float(entry["time"]) for entry in entries if entry), self._time)
        level, ours = "INFO", True
        for text, entry in zip(texts, entries, strict=True):
            if entry is not None:
                at, ours = float(entry["time"]), "logger" in entry
                level = str(entry.get("level") or level)
            elif ours:
                level = "ERROR" if _CRASH.match(text) else level if level == "ERROR" else "INFO"
            if self._about and not str((entry or {}).get("message", "")).startswith(self._about):
                continue
            if (entry is None and ours) or LEVELS.get(level, least) >= least:
                yield at, self._path.stem, _sentence(entry or {"message": text}, level)


def _entry(text: str) -> Mapping[str, Any] | None:
    """A JSON line of a service; None: it is something else."""
    if not text.startswith("{"):
        return None
    try:
        entry = json.loads(text)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and isinstance(entry.get("time"), (int, float)) else None


_CRASH = re.compile(r"Traceback|Fatal|Segmentation|Aborted|Killed|terminate called|[\w.]+(Error|Exception)\b")
# PostgreSQL's lines (in UTC) begin with a time, its pid and a word; those of nats-server with its pid, a time (UTC) and a word.
_SERVER = re.compile(
    r"(?:\[\d+\] )?(\d{4})[-/](\d\d)[-/](\d\d) (\d\d:\d\d:\d\d(?:\.\d+)?)(?: UTC \[\d+\] (\w+): | \[(\w+)\])? *(.*)"
)
_WORDS = {
    "LOG": "INFO",
    "NOTICE": "INFO",
    "FATAL": "CRITICAL",
    "PANIC": "CRITICAL",
    "DETAIL": "",
    "HINT": "",
    "STATEMENT": "",
    "CONTEXT": "",
    "QUERY": "",
    "LOCATION": "",  # of the line before
    "DBG": "DEBUG",
    "TRC": "DEBUG",
    "INF": "INFO",
    "WRN": "WARNING",
    "ERR": "ERROR",
    "FTL": "CRITICAL",
}
_ROUTINE = ("checkpoint ", "restartpoint ")  # PostgreSQL tells of each twice, every five minutes


def _servers(text: str) -> Mapping[str, Any] | None:
    """A line of PostgreSQL or nats-server; None: it is something else."""
    found = _SERVER.match(text)
    if found is None:
        return None
    year, month, day, clock, word, short, message = found.groups()
    try:
        at = datetime.fromisoformat(f"{year}-{month}-{day} {clock}")
    except ValueError:
        return None
    word = (word or short or "").rstrip("12345")  # PostgreSQL has five levels of DEBUG
    level = "DEBUG" if message.startswith(_ROUTINE) else _WORDS.get(word, word if word in LEVELS else "INFO")
    told = message if level else f"{word}: {message}"
    return {"time": at.replace(tzinfo=UTC).timestamp(), "level": level, "message": told}


def _sentence(entry: Mapping[str, Any], level: str) -> str:
    known = ("time", "level", "logger", "message", "service", "exception")
    more = "".join(f" {name}={value}" for name, value in entry.items() if name not in known)
    trace = f"\n{entry['exception']}" if "exception" in entry else ""
    return f"{level:7} {entry.get('message', '')}{more}{trace}"
