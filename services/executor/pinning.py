"""Threads that are kept to some cores, and the proof that they are."""

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from services.executor.backends.base import Unavailable

_TASKS = Path("/proc/self/task")
_Made = TypeVar("_Made")


def pinned_thread() -> ThreadPoolExecutor:
    """One thread, for `making_on` and everything that runs there afterwards."""
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="pinned")


def making_on(cores: Sequence[int], make: Callable[[], _Made]) -> tuple[_Made, str]:
    """In the calling thread: keep it to these cores, then make something whose threads are to run there too.

    A thread inherits the affinity of the one that starts it, so a framework's own pool lands on the same cores. Returns what
    was made, and a proof: how many threads the operating system now reports as kept to exactly these cores. Raises Unavailable.
    """
    if not hasattr(os, "sched_setaffinity"):
        raise Unavailable("this operating system cannot keep a thread to some cores")
    names = ", ".join(map(str, cores))
    try:
        os.sched_setaffinity(0, cores)
    except (OSError, ValueError) as error:
        raise Unavailable(f"this process cannot run on core {names}: {error}") from error
    before = _tasks()
    made = make()
    wanted = set(cores)
    there = [task for task in (_tasks() - before) | {threading.get_native_id()} if _affinity(task) == wanted]
    if threading.get_native_id() not in there:
        raise Unavailable(f"the system did not keep the thread to core {names}")
    return (
        made,
        f"{len(there)} thread{'s' * (len(there) > 1)} kept to core{'s' * (len(cores) > 1)} {names} by the system",
    )


def _tasks() -> set[int]:
    try:
        return {int(entry.name) for entry in _TASKS.iterdir()}
    except OSError:
        return set()


def _affinity(task: int) -> set[int]:
    try:
        return os.sched_getaffinity(task)
    except OSError:  # it has ended
        return set()
