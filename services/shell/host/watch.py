"""Which parts of a system run, and whether a process hangs: what one look at it sees, and how long it has been still. It never takes a busy or starved
process for one that hangs.

A process is still while its event loop does not turn although no thread of it runs, waits for a CPU, or waits for a disk. Linux' own figures
say so (`/proc/PID/task/*/stat`, `schedstat`): a process that is starved by others waits for a CPU, and one that computes runs. Elsewhere
nothing is known, and nothing is counted.
"""

import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct


class SystemPart(Struct, frozen=True, kw_only=True):
    """What is known of one process of a system.

    starting: it has not been up since it was first started. watched: it counts the turns of its loop, so that silence is known without its page.
    silent_s: s that it has not turned, or not answered, 0 while it does. says: what it says that it lacks; None: its page does not answer.
    serves: queries need it; without the others only history, registrations, scaling or pages for people stand still.
    """

    name: str
    running: bool = True
    starting: bool = False
    watched: bool = False
    silent_s: float = 0.0
    says: tuple[str, ...] | None = ()
    serves: bool = True


class Missing(Struct, frozen=True):
    """One thing that a system lacks, in words. serves: queries need it."""

    what: str
    serves: bool


def missing(parts: Iterable[SystemPart], *, started: bool) -> list[Missing]:
    """What the system lacks. It is ready when this is empty, and queries can be answered when nothing of it serves.

    A part that starts for the first time, as a new worker does, is no loss to queries. A page that comes late is none either where the part
    is known to turn: it is busy. started: everything that belongs to the system has been started.
    """
    found = [] if started else [Missing("the system: it is starting or stopping", serves=True)]
    for part in parts:
        serves = part.serves and not part.starting
        if not part.running:
            found.append(Missing(f"{part.name}: does not run", serves))
        elif part.silent_s > 0:
            found.append(Missing(f"{part.name}: silent for {part.silent_s:.1f} s", serves))
        elif part.says is None:
            found.append(Missing(f"{part.name}: does not answer", serves and not part.watched))
        else:
            found += [Missing(f"{part.name}: {word}", serves) for word in part.says]
    return found


LOOK = 0.25  # s between looks
TURN = 0.2  # s between the turns that a process counts
# s that one look may count, however long the last one was ago: the supervisor itself may have been starved
LONGEST = 1.2 * LOOK
TOLD = 0.75  # s of stillness after which it is said everywhere
HUNG = 2.0  # s of stillness after which a process is ended
BUSY = 60.0  # the same while it loads or computes a model: the executor's own watchdog comes first, and a driver may sleep for long
COMPUTES = 30.0  # s of CPU time that the thread of its loop has spent without a turn

_TICKS = os.sysconf("SC_CLK_TCK")


class Thread(NamedTuple):
    """state: the kernel's letter. ran, waited: s so far, on a CPU and for one."""

    state: str
    ran: float
    waited: float


class Seen(NamedTuple):
    """What a look sees. turns: of the loop, as the process counts them; 0: it counts none (yet). threads: the loop's own first."""

    turns: int
    busy: bool
    threads: tuple[Thread, ...]


class ProcessStillness(Struct, eq=False):
    """of one process, look by look.

    still: s that it has been still since its loop last turned; of one that counts no turns, s that it has been stopped by a signal. computed: s of CPU
    time since the last turn. stopped: by a signal, as the last look saw it. limit: s of stillness after which it hangs.
    """

    limit: float = HUNG
    still: float = 0.0
    computed: float = 0.0
    stopped: bool = False
    _last: Seen | None = None

    @property
    def turns(self) -> int:
        """What the last look saw."""
        return self._last.turns if self._last is not None else 0

    def looked(self, seen: Seen, passed: float) -> str:
        """Take a look, `passed` s after the last one. Returns why the process must be ended; "" if it must not."""
        last, self._last = self._last, seen
        threads, before = seen.threads, last.threads if last is not None else ()
        stopped = self.stopped = bool(threads) and all(thread.state == "T" for thread in threads)
        if last is None or seen.turns != last.turns or not (seen.turns or stopped):
            self.still = self.computed = 0.0
            return ""
        if threads and before:
            asleep = len(threads) == len(before) and all(thread.state in "SZX" for thread in threads)
            if stopped or asleep:
                self.still += max(0.0, min(passed, LONGEST) - max(0.0, _used(threads) - _used(before)))
            self.computed += max(0.0, threads[0].ran - before[0].ran)
        limit = self.limit if stopped or not seen.busy else max(self.limit, BUSY)
        if self.still >= limit:
            why = "stopped by a signal" if stopped else "it waits for what does not come"
            return f"did not turn for {limit:g} s ({why})"
        if self.computed >= COMPUTES:
            return f"did not turn in {COMPUTES:g} s of computing"
        return ""


def _used(threads: Iterable[Thread]) -> float:
    """S that they ran or waited for a CPU."""
    return sum(thread.ran + thread.waited for thread in threads)


def threads_of(pid: int, *, main: bool = False) -> tuple[Thread, ...]:
    """The threads of a process, that of its event loop first; none where the system does not say. main: only that one."""
    try:
        ids = [pid] if main else sorted(map(int, os.listdir(f"/proc/{pid}/task")), key=lambda thread: thread != pid)
    except OSError:
        return ()
    found = []
    for thread in ids:
        with suppress(OSError, ValueError, IndexError):
            found.append(_thread(Path(f"/proc/{pid}/task/{thread}")))
    return tuple(found)


def _thread(place: Path) -> Thread:
    fields = (place / "stat").read_text().rpartition(")")[2].split()
    ran, waited = (int(fields[11]) + int(fields[12])) / _TICKS, 0.0
    with suppress(OSError, ValueError):  # finer, and only where the kernel keeps it
        ran, waited = (int(word) / 1e9 for word in (place / "schedstat").read_text().split()[:2])
    return Thread(fields[0], ran, waited)
