"""Logging: plain sentences on a terminal, JSON lines on a pipe. Only the shell and edges log; actors record events."""

import json
import logging
import sys
from typing import Any

from bus.messages.public import QueryHead

_STANDARD = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def _more(record: logging.LogRecord) -> dict[str, Any]:
    """What was passed as `extra`."""
    return {key: value for key, value in record.__dict__.items() if key not in _STANDARD}


class JsonLines(logging.Formatter):
    """One JSON object a line: time, level, logger, message, service, and whatever was passed as `extra`."""

    def __init__(self, service: str = "") -> None:
        super().__init__()
        self._always = {"service": service} if service else {}

    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": record.created,
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
            **self._always,
            **_more(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


class Sentences(logging.Formatter):
    """A line for people: time, level, logger and message, then whatever was passed as `extra`, as name=value."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)-7s %(name)s: %(message)s")

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  (the base class's name)
        more = "".join(f" {key}={value}" for key, value in _more(record).items())
        return super().formatMessage(record) + more


def set_up(level: str = "INFO", service: str = "") -> None:
    """Send all logging to stderr, in the form that fits who reads it. service: what JSON lines name as theirs."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Sentences() if sys.stderr.isatty() else JsonLines(service))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())


def about(message: Any) -> dict[str, Any]:
    """Which queries a message or command is about, as `extra` of a log line: uid (hexadecimal) and the client's id, or `uids`.

    message: a query's head, a route, or what holds a route, routes, uids or works with routes.
    """
    route = getattr(message, "route", message)
    works = getattr(message, "works", None)
    if works:
        return {"uids": [work.route.uid.hex() for work in works]}
    if uids := getattr(message, "uids", None):
        return {"uids": [uid.hex() for uid in uids]}
    found: dict[str, Any] = {}
    uid = getattr(route, "uid", None)
    if isinstance(uid, bytes):
        found["uid"] = uid.hex()
    label = getattr(route, "id", None)
    if isinstance(label, str) and (found or isinstance(route, QueryHead)):
        found["query"] = label
    return found
