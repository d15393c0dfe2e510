"""Processes that our children leave behind come to us instead of init (Linux), so that a stop can be complete."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt() -> None:
    """From now on orphans among our descendants become our children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def children() -> set[int]:
    """Ids of our child processes, adopted and ended ones included; empty where the system does not say."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(pid) for pid in task.read_text().split())
    return found


def end_all(before: frozenset[int], patience: float = 5.0) -> None:
    """Kill and reap every child that is not among `before`, and what that sets free, for at most `patience` seconds."""
    give_up = time.monotonic() + patience
    while (left := children() - before) and time.monotonic() < give_up:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
