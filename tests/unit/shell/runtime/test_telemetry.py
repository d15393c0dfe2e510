"""Log lines: JSON for programs, sentences for people, and which query they are about."""

import json
import logging
import os
import pty
import subprocess
import sys

from msgspec import Raw

from bus.messages.flow import DoneBatch, Execute, Route
from bus.messages.public import QueryHead
from services.core.actor import Done
from services.executor.commands import RunBatch
from services.executor.queue import QueuedQuery
from services.shell.runtime.telemetry import JsonLines, Sentences, about
from tests.support.servers.processes import environ

UID = bytes(range(16))
ROUTE = Route(UID, 0, 0, "reply", 1.0, 1.0, "d", "i", "app", 1, "mine")


def record(**extra: object) -> logging.LogRecord:
    made = logging.LogRecord("services.x", logging.ERROR, "file", 1, "it %s", ("broke",), None)
    made.__dict__.update(extra)
    return made


def test_a_line_for_programs() -> None:
    line = json.loads(JsonLines("dispatcher").format(record(uid="00", worker=object)))
    assert line["level"] == "ERROR"
    assert line["message"] == "it broke"
    assert (line["service"], line["uid"]) == ("dispatcher", "00")
    assert isinstance(line["worker"], str)  # whatever it is, the line is written


def test_a_line_for_people() -> None:
    assert Sentences().format(record(uid="00")).endswith("ERROR   services.x: it broke uid=00")


def test_what_a_message_is_about() -> None:
    work = QueuedQuery(ROUTE, Raw(b""), None, 1, None)
    assert about(ROUTE) == {"uid": UID.hex(), "query": "mine"}
    assert about(Execute(ROUTE, Raw(b""))) == {"uid": UID.hex(), "query": "mine"}
    assert about(QueryHead(id="mine")) == {"query": "mine"}
    assert about(RunBatch("i", [work, work], 0.1, False)) == {"uids": [UID.hex()] * 2}
    assert about(DoneBatch("q", "w", 1, "i", "v", 1, 1.0, 2.0, 0.0, 0, [UID])) == {"uids": [UID.hex()]}
    assert about(Done("machine", 1)) == {}  # an id, but no query's
    assert about(None) == {}


SAY = """
import logging
from services.shell.runtime.telemetry import set_up
set_up("INFO", "test")
logging.getLogger("x").warning("hello", extra={"uid": "77"})
"""


def test_who_reads_decides_the_form() -> None:
    command = [sys.executable, "-c", SAY]
    piped = subprocess.run(command, capture_output=True, text=True, env=environ(), check=True).stderr
    assert json.loads(piped) | {"time": 0} == {
        "time": 0,
        "level": "WARNING",
        "logger": "x",
        "message": "hello",
        "service": "test",
        "uid": "77",
    }
    ours, theirs = pty.openpty()
    subprocess.run(command, stderr=theirs, env=environ(), check=True)
    os.close(theirs)
    assert os.read(ours, 1000).decode().strip().endswith("WARNING x: hello uid=77")
    os.close(ours)
