"""What a process computes is known after it has ended, however it ends."""

import os
import signal
import sys
from pathlib import Path

import pytest

from services.shell.host import process
from services.shell.host.running import MOST, Running, shared

UIDS = [bytes([n]) * 16 for n in range(5)]
ENDS = f"""
import os
from services.shell.host.running import inherited
running = inherited()
done = running.begin([bytes([9]) * 16])
running.begin([bytes([n]) * 16 for n in range(5)])
running.end(done)
assert "INFAAS_RUNNING_FD" not in os.environ and not os.get_inheritable(running.fd)
os.kill(os.getpid(), {int(signal.SIGKILL)})
"""

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="shared memory without a file: Linux only")


def memory() -> Running:
    found = shared()
    assert found is not None
    return found


def test_it_is_known_after_the_process_was_killed() -> None:
    running = memory()
    assert running.read() is None, "nobody has said anything yet"
    command: list[str | Path] = [sys.executable, "-c", ENDS]
    environ = process.with_our_source(os.environ)
    child = process.start_service(command, log=None, environ=environ, running=running)
    assert child.wait(30.0) == -signal.SIGKILL
    assert running.read() == UIDS
    running.forget()
    assert running.read() is None


def test_batches_side_by_side_and_too_many_queries() -> None:
    running = memory()
    running.clear()
    assert running.read() == []
    first, second = running.begin(UIDS[:2]), running.begin(UIDS[2:])
    assert running.read() == UIDS
    running.end(first)
    assert running.read() == UIDS[2:]
    many = running.begin(UIDS[:1] * MOST)
    assert running.read() is None, "more than there is room for: not known"
    running.end(many)
    running.end(second)
    assert running.read() == []
