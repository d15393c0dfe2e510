"""Keeps child processes running: restarts with back-off, successors for those that leave, an end for those that hang, a clean stop, and
nothing left behind.
"""

import asyncio
import logging
import os
import signal
import subprocess
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from bus.port import BusError
from services.shell.host.process import (
    AT_ONCE,
    POLITE,
    ServerError,
    Steps,
    Taken,
    adopt_orphans,
    child_pids,
    end_orphans,
)
from services.shell.host.running import BESIDE, GO, LEAVES, READY, SUCCEEDED, Running
from services.shell.host.watch import HUNG, LONGEST, LOOK, TOLD, ProcessStillness, Seen, SystemPart, threads_of

log = logging.getLogger(__name__)

# s before the first, second, ... restart in a row: the query that ended a process ends another one. A worker is back within 5 s after any of them.
PAUSES = (0.0, 0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
SETTLED = 5.0  # s of life after which an end counts as the first again
SWEEP = 5.0  # s between looks for dead orphans
ASK = 0.5  # s between questions to a server
SUCCEED_S = 60.0  # s that a process which is to leave waits for its successor, as long as no second signal comes
SUCCESSION_LOOK = 0.02  # s between looks whether it is ready
Process = subprocess.Popen[bytes] | Taken


async def until_stopped(start: Coroutine[Any, Any, None], stop: Callable[[], Awaitable[None]]) -> None:
    """Start something, and stop it at SIGTERM or Ctrl-C, which may come before it has started. Raises what `start` raises."""
    asked, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.set)
    starting, stopped = loop.create_task(start), loop.create_task(asked.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await stopped
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await stop()


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
    first. steps: the signals that stop it. on_exit: called at once when it ends unasked, or since it hung, with the reason in words and whether its
    successor does its work already. running: where it counts the turns of its loop. asked: a small question to a server that counts none; it ends with the answer, or raises OSError.
    hung: s of stillness after which it is ended (`watch`). serves: queries need it. again: makes the same child once more, with memory of its
    own: a process that was asked to end (SIGTERM) goes when this successor is ready. succession: BESIDE or AFTER (`running`). rests: called when it
    has ended with the exit code 0, since nobody needs it: it is not started again.
    """

    name: str
    launch: Callable[[], "Process"]
    stage: int = 1
    steps: Steps = POLITE
    on_exit: Callable[[str, bool], None] | None = None
    running: Running | None = None
    asked: Callable[[], Awaitable[object]] | None = None
    hung: float = HUNG
    serves: bool = True
    again: "Callable[[], Child] | None" = None
    succession: int = BESIDE
    rests: Callable[[], None] | None = None


class Supervisor:
    """Starts children and keeps them running until `stop`. Use it from the main thread's event loop.

    restarts, hangs: of each child, by name: how often it was started again, and how often because it hung. changed: is called when `pids` is
    another; swept: every SWEEP seconds.
    """

    def __init__(self) -> None:
        self.restarts: dict[str, int] = {}
        self.hangs: dict[str, int] = {}
        self.changed: Callable[[], None] = lambda: None
        self.swept: Callable[[], None] = lambda: None
        self._leaving: dict[Child, asyncio.Task[None]] = {}
        self._successors: dict[Child, Child] = {}  # those that do not do their work alone yet, by the child before
        self._watching: asyncio.Task[None] | None = None
        self._still: dict[Child, ProcessStillness] = {}
        self._unanswered: dict[Child, float] = {}  # s that its question has waited
        self._asking: dict[Child, asyncio.Task[None]] = {}
        self._up: set[Child] = set()  # those that have done their work since they were first started
        self._why: dict[Child, str] = {}  # why we ended it
        self._keeping: dict[Child, asyncio.Task[None]] = {}
        self._running: dict[Child, Process] = {}
        self._stopping: set[Child] = set()
        self._stopped = False
        self._before = frozenset(child_pids())
        adopt_orphans()

    def start(self, child: Child) -> None:
        """Launch a child and keep it running. Raises ServerError."""
        if self._stopped:
            raise ServerError(f"{child.name} is not started: everything is being stopped")
        self._launch(child)
        self.restarts.setdefault(child.name, 0)
        self.hangs.setdefault(child.name, 0)
        loop = asyncio.get_running_loop()
        self._keeping[child] = loop.create_task(self._keep(child))
        if self._watching is None:
            self._watching = loop.create_task(self._watch())
        if child.asked is not None:
            self._asking[child] = loop.create_task(self._ask(child, child.asked))

    @property
    def pids(self) -> dict[str, int]:
        """Process ids of the children that run now."""
        return {
            child.name: process.pid
            for child, process in self._running.items()
            if child not in self._successors.values()
        }

    @property
    def parts(self) -> list[SystemPart]:
        """What is known of each child that is to run."""
        known = [child for child in self._keeping if child not in self._successors.values()]
        return [self._part(child) for child in known if self._stopped or child not in self._stopping]

    def _part(self, child: Child) -> SystemPart:
        silent = max(self._still[child].still if child in self._still else 0.0, self._unanswered.get(child, 0.0))
        return SystemPart(
            name=child.name,
            running=child in self._running,
            starting=child not in self._up,
            watched=child.running is not None and child.running.turns > 0,
            silent_s=silent if silent >= TOLD else 0.0,
            serves=child.serves,
        )

    async def stop_only(self, children: Iterable[Child]) -> None:
        """Stop these children and their successors side by side, and what is left in their process groups; returns when they have ended."""
        names = {child.name for child in children}
        going = [child for child in self._keeping if child.name in names]
        self._stopping.update(going)
        for child in going:
            if (handing := self._leaving.pop(child, None)) is not None:
                handing.cancel()
        await asyncio.gather(*(self._stop(child) for child in going))
        if self._stopped:
            return  # `stop` does the rest
        for child in going:
            self.restarts.pop(child.name, None)
            self.hangs.pop(child.name, None)
            self._forget(child)
        self.changed()

    def _forget(self, child: Child) -> None:
        self._keeping.pop(child, None)
        self._running.pop(child, None)
        self._stopping.discard(child)
        self._successors.pop(child, None)
        self._still.pop(child, None)
        self._unanswered.pop(child, None)
        self._up.discard(child)
        self._why.pop(child, None)
        if (asking := self._asking.pop(child, None)) is not None:
            asking.cancel()

    async def stop(self) -> None:
        """Stop all children, stage by stage, and whatever they have left behind; returns when nothing runs."""
        self._stopped = True
        for task in (self._watching, *self._asking.values(), *self._leaving.values()):
            if task is not None:
                task.cancel()
        self._leaving.clear()
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
                code = _kill_group_and_reap(process)
                del self._running[child]
                self._still.pop(child, None)
                if child.running is not None:
                    child.running.leave()
                if child in self._stopping and child not in self._leaving:
                    return
                if child.rests is not None and code == 0:
                    self._forget(child)
                    self.changed()
                    child.rests()
                    return
                self._tell_end(child, code)
                self.changed()
            if child in self._leaving and self._goes_on(child) and not self._succeeded(child):
                self._leaving[child].cancel()
                await self._call_off(child)
            if child in self._stopping or child in self._leaving:  # its successor runs
                return
            pause = backoff.after(lived)
            await asyncio.sleep(pause)
            if child in self._stopping:
                return
            self._relaunch(child)

    def _tell_end(self, child: Child, code: int) -> None:
        """It has ended, and nobody has stopped it for good."""
        hung, succeeded = self._why.pop(child, ""), self._succeeded(child)
        if succeeded and not hung and code == 0:
            return  # as it was asked to
        reason = f"it {hung} and was ended" if hung else describe(code)
        if not hung:  # it was logged when it was ended
            log.warning("%s ended (%s)", child.name, reason)
        if child.on_exit is not None and child not in self._successors.values():  # such a one has done nothing yet
            child.on_exit(reason, succeeded)

    # -- those that hang

    async def _watch(self) -> None:
        """Look at every child again and again, and end those that hang."""
        clock = asyncio.get_running_loop().time
        before = swept = clock()
        dead: set[int] = set()
        while True:
            await asyncio.sleep(LOOK)
            now = clock()
            if now - swept >= SWEEP:
                swept, dead = now, self._sweep(dead)
                self.swept()
            for child, process in list(self._running.items()):
                if child in self._unanswered and child in self._up:
                    self._unanswered[child] += min(now - before, LONGEST)
                if child not in self._stopping and process.returncode is None:
                    self._look(child, process, now - before)
            before = now

    def _sweep(self, dead: set[int]) -> set[int]:
        """Reap orphans that a killed process has left us, as PostgreSQL's own, if they were dead at the last sweep, too; returns who is dead.

        Whoever has started a process waits for it sooner.
        """
        ours = self._before | {process.pid for process in self._running.values()}
        found = {pid for pid in child_pids() - ours if _is_dead(pid)}
        for pid in found & dead:
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
        return found - dead

    def _look(self, child: Child, process: Process, passed: float) -> None:
        running = child.running
        if running is not None and running.said == LEAVES and not running.let_go and child not in self._leaving:
            self._let_go(child, running)
        turns = running.turns if running is not None else 0
        if turns or (running is None and child.asked is None):
            self._up.add(child)
        still = self._still.get(child)
        if still is None:
            still = self._still[child] = ProcessStillness(TOLD if child in self._why else child.hung)
        # Where the loop turns, one look costs nothing but this comparison.
        threads = () if turns and turns != still.turns else threads_of(process.pid, main=not turns)
        hangs = still.looked(Seen(turns, running is not None and running.busy, threads), passed)
        if hangs:
            log.error("%s %s: ended and started again", child.name, hangs)
            # One that was stopped reads what waits for it, which nobody else could, until its successor is ready; unless it is stopped again.
            goes_on = still.stopped and turns and child.again is not None and child not in self._why
            self._why.setdefault(child, hangs)
            self.hangs[child.name] += 1
            self._still.pop(child)
            for signum in (signal.SIGTERM, signal.SIGCONT) if goes_on else (signal.SIGKILL,):
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)  # not yet reaped, so the id is still this child's

    async def _ask(self, child: Child, question: Callable[[], Awaitable[object]]) -> None:
        """Ask a server again and again; `_watch` counts how long it has not answered."""
        while True:
            self._unanswered.setdefault(child, 0.0)
            with suppress(OSError, BusError):  # it is down, or starts
                await question()
                self._up.add(child)
                del self._unanswered[child]
            await asyncio.sleep(ASK)

    # -- those that leave

    def _let_go(self, child: Child, running: Running) -> None:
        """Its process was asked to end. Where it can have a successor, that one is started first."""
        if child.again is None:
            running.let_go = GO
            return
        successor = child.again()
        assert successor.running is not None, "it is made as this child was"
        successor.running.role, successor.running.before, running.before = child.succession, running, None
        self._successors[child] = successor
        try:
            self.start(successor)
        except ServerError as error:
            log.error("%s leaves without a successor: %s", child.name, error)
            del self._successors[child]
            running.let_go = GO
            return
        log.warning("%s was asked to end: it goes when its successor is ready", child.name)
        self._leaving[child] = asyncio.get_running_loop().create_task(self._hand_over(child, running, successor))

    async def _hand_over(self, child: Child, running: Running, successor: Child) -> None:
        ours = successor.running
        assert ours is not None, "as above"
        keeping, clock = self._keeping[child], asyncio.get_running_loop().time
        end = clock() + SUCCEED_S
        while ours.said != READY and not keeping.done() and clock() < end:  # noqa: ASYNC110  memory sets no event
            await asyncio.sleep(SUCCESSION_LOOK)
        ready = ours.said == READY
        running.let_go = SUCCEEDED if ready else GO
        if not ready and self._goes_on(child):
            await self._call_off(child)
            return
        self._stopping.add(child)
        del self._successors[child]
        self.restarts[child.name] += 1
        self.changed()
        await self._stop(child)
        ours.role = 0
        del self._leaving[child]
        self._forget(child)
        log.warning("%s was restarted%s", child.name, "" if ready else ": its successor was not ready in time")

    def _succeeded(self, child: Child) -> bool:
        """Whether its successor does its work already."""
        successor = self._successors.get(child)
        ours = successor.running if successor is not None else None
        return child in self._leaving and (ours is None or ours.said == READY)

    def _goes_on(self, child: Child) -> bool:
        """Whether it is started again itself if it ends before its successor is ready: who was told of its end takes a successor, which begins
        with what it knows of this one, for the one that has ended.
        """
        return child.on_exit is not None

    async def _call_off(self, child: Child) -> None:
        """It ends before its successor is ready."""
        log.warning("%s is started again without the successor that was not ready", child.name)
        del self._leaving[child]
        successor = self._successors.pop(child)
        self._stopping.add(successor)
        await self._stop(successor, AT_ONCE)
        self._forget(successor)

    def _relaunch(self, child: Child) -> None:
        self.restarts[child.name] += 1
        try:
            self._launch(child)
            log.warning("%s was started again (process %d)", child.name, self._running[child].pid)
        except ServerError as error:
            log.error("cannot restart %s: %s", child.name, error)

    def _launch(self, child: Child) -> None:
        self._hold(child)
        self._running[child] = child.launch()
        self.changed()

    def _hold(self, child: Child) -> None:
        """Its next process waits for a successor when it is asked to end."""
        if child.running is not None:
            child.running.let_go = 0
            child.running.says(0)

    async def _stop(self, child: Child, steps: Steps | None = None) -> None:
        keeping = self._keeping[child]
        process = self._running.get(child)
        if process is None:  # it waits to be started again
            keeping.cancel()
        else:
            if child.running is not None and not child.running.let_go:
                child.running.let_go = GO
            for signum, seconds in steps or child.steps:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signum)  # not yet reaped, so the id is still this child's
                    os.kill(process.pid, signal.SIGCONT)  # one that is stopped hears nothing
                await asyncio.wait([keeping], timeout=seconds)
                if keeping.done():
                    break
        with suppress(asyncio.CancelledError):
            await keeping


async def ended(process: Process) -> None:
    """Return once the process has ended; it is left to be reaped, so its id cannot be anybody else's yet."""
    try:
        descriptor = os.pidfd_open(process.pid)
    except (AttributeError, OSError):  # not Linux, or an old kernel
        while not _is_dead(process.pid):  # noqa: ASYNC110  nothing would set an event
            await asyncio.sleep(0.1)
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


def _is_dead(pid: int) -> bool:
    """Whether this child of ours has ended; it is not reaped."""
    with suppress(ChildProcessError):
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    return False


def describe(code: int) -> str:
    """A return code in words."""
    if code >= 0:
        return f"exit code {code}"
    with suppress(ValueError):
        return f"killed by {signal.Signals(-code).name}"
    return f"killed by signal {-code}"


def _kill_group_and_reap(process: Process) -> int:
    """Kill what an ended child left in its process group, then take its exit code."""
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()
