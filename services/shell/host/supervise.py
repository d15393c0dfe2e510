"""Keeps child processes running: restarts with back-off, a clean stop, and nothing left behind."""

import asyncio
import ctypes
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from services.shell.host.process import POLITE, ServerError, Steps

log = logging.getLogger(__name__)

PAUSES = (
    0.1,
    0.2,
    0.5,
    1.0,
    2.0,
)  # s before the first, second, ... restart in a row. A worker is back within 5 s after any of them
SETTLED = 5.0  # s of life after which an end counts as the first again


class Backoff:
    """The pause before a child that ended is started again."""

    def __init__(self) -> None:
        self.failures = 0

    def after(self, lived: float) -> float:
        """Seconds to wait now that it has ended after `lived` seconds."""
        if lived >= SETTLED:
            self.failures = 0
        pause = PAUSES[min(self.failures, len(PAUSES) - 1)]
        self.failures += 1
        return pause


@dataclass(frozen=True, eq=False)
class Child:
    """What to keep running.

    launch: starts the process, from the main thread (may raise ServerError). stage: children of the highest stage are stopped
    first. steps: the signals that stop it. on_exit: called at once, with the reason in words, when it ends unasked.
    """

    name: str
    launch: Callable[[], subprocess.Popen[bytes]]
    stage: int = 1
    steps: Steps = POLITE
    on_exit: Callable[[str], None] | None = None


class Supervisor:
    """Starts children and keeps them running until `stop`. Use it from the main thread's event loop."""

    def __init__(self) -> None:
        self.restarts: dict[str, int] = {}
        self._keeping: dict[Child, asyncio.Task[None]] = {}
        self._running: dict[Child, subprocess.Popen[bytes]] = {}
        self._stopping: set[Child] = set()
        self._stopped = False
        self._before = frozenset(child_pids())
        adopt_orphans()

    def start(self, child: Child) -> None:
        """Launch a child and keep it running. Raises ServerError."""
        if self._stopped:
            raise ServerError(f"{child.name} is not started: everything is being stopped")
        self._running[child] = child.launch()
        self.restarts[child.name] = 0
        self._keeping[child] = asyncio.get_running_loop().create_task(self._keep(child))

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now."""
        return {child.name: process.pid for child, process in self._running.items()}

    async def stop_only(self, children: Iterable[Child]) -> None:
        """Stop these children side by side, and what is left in their process groups; returns when they have ended."""
        going = [child for child in children if child in self._keeping]
        self._stopping.update(going)
        await asyncio.gather(*(self._stop(child) for child in going))
        if self._stopped:
            return  # `stop` does the rest
        for child in going:
            self._keeping.pop(child, None)
            self._running.pop(child, None)
            self._stopping.discard(child)
            self.restarts.pop(child.name, None)

    async def stop(self) -> None:
        """Stop all children, stage by stage, and whatever they have left behind; returns when nothing runs."""
        self._stopped = True
        for stage in sorted({child.stage for child in self._keeping}, reverse=True):
            children = [child for child in self._keeping if child.stage == stage]
            self._stopping.update(children)
            await asyncio.gather(*(self._stop(child) for child in children))
        end_orphans(self._before)

    async def _keep(self, child: Child) -> None:
        backoff = Backoff()
        while True:  # also if it is to be stopped before this begins: somebody must wait for its end
            process = self._running.get(child)
            lived = 0.0
            if process is not None:
                started = time.monotonic()
                await ended(process)
                lived = time.monotonic() - started
                _kill_group_and_reap(process)
                del self._running[child]
                if child in self._stopping:
                    return
                reason = describe(process.returncode)
                log.warning("%s ended (%s)", child.name, reason)
                if child.on_exit is not None:
                    child.on_exit(reason)
            if child in self._stopping:
                return
            await asyncio.sleep(backoff.after(lived))
            if child in self._stopping:
                return
            self._relaunch(child)

    def _relaunch(self, child: Child) -> None:
        self.restarts[child.name] += 1
        try:
            self._running[child] = child.launch()
        except ServerError as error:
            log.error("cannot restart %s: %s", child.name, error)

    async def _stop(self, child: Child) -> None:
        keeping = self._keeping[child]
        process = self._running.get(child)
        if process is None:  # it waits to be started again
            keeping.cancel()
        else:
            for signum, seconds in child.steps:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)  # not yet reaped, so the id is still this child's
                await asyncio.wait([keeping], timeout=seconds)
                if keeping.done():
                    break
        with suppress(asyncio.CancelledError):
            await keeping


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Return once the process has ended; it is left to be reaped, so its id cannot be anybody else's yet."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or an old kernel
        await _poll(process.pid)
        return
    loop = asyncio.get_running_loop()
    readable = loop.create_future()

    def note() -> None:
        if not readable.done():
            readable.set_result(None)

    loop.add_reader(descriptor, note)
    try:
        await readable
    finally:
        loop.remove_reader(descriptor)
        os.close(descriptor)


async def _poll(pid: int) -> None:
    def over() -> bool:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None

    while not over():  # noqa: ASYNC110  nothing would set an event
        await asyncio.sleep(0.1)


def describe(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _kill_group_and_reap(process: subprocess.Popen[bytes]) -> None:
    """Kill what an ended child left in its process group, then take its exit code."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# ---- orphans: what our children leave behind comes to us instead of init (Linux), so that a stop can be complete

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """From now on orphans among our descendants become our children."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def child_pids() -> set[int]:
    """Ids of our child processes, adopted and ended ones included; empty where the system does not say."""
    found: set[int] = set()
    for task in Path("/proc/self/task").glob("*/children"):
        with suppress(OSError):
            found.update(int(pid) for pid in task.read_text().split())
    return found


def end_orphans(before: frozenset[int], patience: float = 5.0) -> None:
    """Kill and reap every child that is not among `before`, and the orphans that this makes, for at most `patience` seconds."""
    give_up = time.monotonic() + patience
    while (left := child_pids() - before) and time.monotonic() < give_up:
        for pid in left:
            with suppress(ProcessLookupError, ChildProcessError):
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, os.WNOHANG)
        time.sleep(0.02)
