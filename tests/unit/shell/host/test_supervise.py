"""A process is ended when it is still, never when it is busy or starved: the decision, look by look."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.shell.host.process import (
    ForkServer,
    Taken,
    child_pids,
    free_port,
    service_command,
    start_service,
    with_our_source,
)
from services.shell.host.running import AFTER, BESIDE, shared
from services.shell.host.stack import SHARED
from services.shell.host.supervise import PAUSES, SETTLED, Backoff, Child, Supervisor, describe
from services.shell.host.watch import BUSY, COMPUTES, HUNG, LONGEST, LOOK, ProcessStillness, Seen, Thread, threads_of
from tests.support.clients.responders import until

spans_of_life = st.lists(st.floats(min_value=0, max_value=3 * SETTLED), max_size=30)


def test_deaths_in_a_row_wait_longer_until_a_long_life() -> None:
    backoff = Backoff()
    assert [backoff.after(0.0) for _ in range(len(PAUSES) + 2)] == [*PAUSES, PAUSES[-1], PAUSES[-1]]
    backoff = Backoff()
    for _ in PAUSES:
        backoff.after(1.0)
    assert backoff.after(SETTLED) == PAUSES[0]
    assert backoff.after(1.0) == PAUSES[1]


@given(spans_of_life)
def test_the_wait_is_the_one_of_the_deaths_since_the_last_long_life(spans: list[float]) -> None:
    backoff, row = Backoff(), 0
    for span in spans:
        row = 0 if span >= SETTLED else row
        assert backoff.after(span) == PAUSES[min(row, len(PAUSES) - 1)]
        row += 1


def test_return_codes_in_words() -> None:
    assert describe(3) == "exit code 3"
    assert describe(-9) == "killed by SIGKILL"
    assert describe(-250) == "killed by signal 250"


async def test_a_service_is_a_copy_of_the_fork_server_and_a_child_like_any_other(tmp_path: Path) -> None:
    """However often it ends; when the fork server has ended, too, it is a program of its own, until there is another fork server."""
    if (running := shared()) is None:
        pytest.skip("shared memory without a file: Linux only")
    # Nobody is there to talk to, so it waits.
    environ = {**os.environ, "INFAAS_BUS__URL": f"nats://127.0.0.1:{free_port()}", "INFAAS_METRICS__PORT": "0"}
    command, before = service_command(["dispatcher"], None), child_pids()
    launched = list[subprocess.Popen[bytes] | Taken]()
    supervisor = Supervisor()
    forks = ForkServer([*SHARED, "gateway"], None, os.environ, tmp_path / "forks.log")
    (server,) = child_pids() - before
    forks.wait_ready()

    def launch() -> subprocess.Popen[bytes] | Taken:
        ours = with_our_source(environ)
        launched.append(
            start_service(command, log=tmp_path / "log", environ=ours, cwd=tmp_path, running=running, forks=forks)
        )
        return launched[-1]

    supervisor.start(Child("it", launch, running=running, hung=600.0))
    try:
        assert len(os.listdir(f"/proc/{server}/task")) == 1, "a copy of more threads than one hangs"
        for copies in (1, 2):
            copy = launched[-1]
            assert (type(copy), copy.pid in child_pids(), os.getpgid(copy.pid)) == (Taken, True, copy.pid)
            place = Path(f"/proc/{copy.pid}")
            shown = b"\0".join(map(os.fsencode, command))
            await until(lambda: (place / "cmdline").read_bytes().rstrip(b"\0") == shown)  # noqa: B023  awaited here
            assert f"INFAAS_BUS__URL={environ['INFAAS_BUS__URL']}\0" in (place / "environ").read_text()
            assert (place / "cwd").resolve() == tmp_path
            held = {str(each.resolve()) for each in (place / "fd").iterdir()}  # one may be closed meanwhile
            assert {str(tmp_path / "log"), "/dev/null"} <= held
            assert sum("memfd" in each for each in held) == 1, "none of the others' memory"
            assert not any(str(tmp_path / "forks.log") in each for each in held)
            os.kill(server if copies == 2 else copy.pid, signal.SIGKILL)
            os.kill(copy.pid, signal.SIGKILL)
            await until(lambda: len(launched) == copies + 1)  # noqa: B023  awaited here
            assert copy.returncode == -signal.SIGKILL
        assert isinstance(launched[-1], subprocess.Popen)
        assert await asyncio.to_thread(forks.wait_ready)
        os.kill(launched[-1].pid, signal.SIGKILL)
        await until(lambda: len(launched) == 4)
        assert isinstance(launched[-1], Taken)
    finally:
        forks.close()
        await supervisor.stop()


# A process that works, and goes when it is let go. A successor is ready when the file is there; one that comes after the other says when it begins.
LEAVES = """
import signal, sys, time
from pathlib import Path
from services.shell.host.running import AFTER, LEAVES, READY, inherited
running, ready, begun = inherited(), Path(sys.argv[1]), Path(sys.argv[2])
asked = []
if running.before is None:
    running.kept.put(b"left")
signal.signal(signal.SIGTERM, lambda *_: (asked.append(1), running.says(LEAVES)))
while running.role and not ready.exists():
    time.sleep(0.01)
if running.role == AFTER:
    running.says(READY)
    while running.role:
        time.sleep(0.01)
    begun.write_bytes(b"".join(running.before.kept.left().values()))
if not asked:
    running.says(READY)
running.turn()  # from now on it is asked to end
while not (asked and running.let_go):
    running.turn()
    time.sleep(0.01)
"""


class Part:
    """A supervised part whose processes leave in favour of successors. exits: what was told of its ends, if told: why, and whether a successor
    served.
    """

    def __init__(self, place: Path, succession: int = BESIDE, *, again: bool = True, told: bool = True) -> None:
        self.ready, self.begun = place / "ready", place / "begun"
        self.launched: list[int] = []
        self.exits: list[tuple[str, bool]] = []
        self._succession, self._again, self._told = succession, again, told

    def child(self) -> Child:
        running = shared()
        if running is None:
            pytest.skip("shared memory without a file: Linux only")

        def launch() -> subprocess.Popen[bytes]:
            command: list[str | Path] = [sys.executable, "-c", LEAVES, self.ready, self.begun]
            environ = with_our_source(os.environ)
            found = start_service(command, log=None, environ=environ, running=running)
            self.launched.append(found.pid)
            return found

        steps = ((signal.SIGTERM, 60.0), (signal.SIGKILL, 60.0))
        again = self.child if self._again else None
        ended = (lambda reason, succeeded: self.exits.append((reason, succeeded))) if self._told else None
        return Child("it", launch, 1, steps, ended, running=running, again=again, succession=self._succession)

    @asynccontextmanager
    async def supervised(self) -> AsyncIterator[Supervisor]:
        supervisor = Supervisor()
        child = self.child()
        supervisor.start(child)
        assert child.running is not None
        running = child.running
        try:
            await until(lambda: running.turns > 0, LONG)
            yield supervisor
        finally:
            await supervisor.stop()

    @asynccontextmanager
    async def succeeded(self, by: signal.Signals = signal.SIGTERM) -> AsyncIterator[tuple[Supervisor, int]]:
        """The supervisor, and the first process, which has got this signal, and then a successor that is not ready."""
        async with self.supervised() as supervisor:
            (old,) = self.launched
            os.kill(old, by)
            await self.launches(2)
            yield supervisor, old

    async def launches(self, count: int) -> None:
        """Until so many processes have been started, of all."""
        await until(lambda: len(self.launched) == count, LONG)

    async def serves(self, supervisor: Supervisor, number: int = -1) -> None:
        """Until this one of them is the part's process."""
        await until(lambda: supervisor.pids == {"it": self.launched[number]}, LONG)


LONG = 120.0  # s; only ends a failing test


def lives(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


async def test_a_process_that_was_asked_to_end_goes_when_its_successor_is_ready(tmp_path: Path) -> None:
    part = Part(tmp_path)
    async with part.succeeded() as (supervisor, old):
        assert lives(old)
        assert supervisor.pids == {"it": old}
        assert [one.running for one in supervisor.parts] == [True]
        part.ready.touch()
        await until(lambda: not lives(old), LONG)
        await part.serves(supervisor, 1)
        assert supervisor.restarts == {"it": 1}
        assert part.exits == []
        assert [one.name for one in supervisor.parts] == ["it"]
        os.kill(part.launched[1], signal.SIGKILL)  # it is a child like any other
        await part.launches(3)
        assert part.exits == [("killed by SIGKILL", False)]


async def test_a_successor_that_comes_after_begins_when_the_other_has_ended(tmp_path: Path) -> None:
    part = Part(tmp_path, AFTER)
    async with part.succeeded() as (supervisor, old):
        assert not part.begun.exists()
        part.ready.touch()
        await until(lambda: part.begun.exists() and part.begun.read_bytes() == b"left", LONG)
        assert not lives(old)
        assert supervisor.pids == {"it": part.launched[1]}


async def test_the_successor_of_a_process_that_dies_meanwhile_takes_its_place(tmp_path: Path) -> None:
    part = Part(tmp_path, told=False)
    async with part.succeeded() as (supervisor, old):
        os.kill(old, signal.SIGKILL)
        await part.serves(supervisor, 1)
        assert len(part.launched) == 2


async def test_a_process_of_whose_death_others_are_told_is_started_anew_and_not_succeeded(tmp_path: Path) -> None:
    """Its successor would go on with the name of the one that has died."""
    part = Part(tmp_path)
    async with part.succeeded() as (supervisor, old):
        os.kill(old, signal.SIGKILL)
        await part.launches(3)
        await part.serves(supervisor, 2)
        assert part.exits == [("killed by SIGKILL", False)]
        assert not any(map(lives, part.launched[:2]))
        assert supervisor.restarts == {"it": 1}

        await until(lambda: supervisor.parts[0].watched, LONG)
        os.kill(part.launched[2], signal.SIGTERM)  # it can have a successor, like the first
        await part.launches(4)
        part.ready.touch()
        await part.serves(supervisor, 3)
        await until(lambda: not lives(part.launched[2]), LONG)
        assert len(part.exits) == 1


async def test_nothing_is_told_of_a_successor_that_ends_before_it_is_ready(tmp_path: Path) -> None:
    part = Part(tmp_path)
    async with part.succeeded() as (supervisor, old):
        os.kill(part.launched[1], signal.SIGKILL)
        await part.launches(3)
        assert supervisor.pids == {"it": old}
        part.ready.touch()
        await part.serves(supervisor, 2)
        await until(lambda: not lives(old), LONG)
        assert part.exits == []


ENDED = "it did not turn for 2 s (stopped by a signal) and was ended"


async def test_a_process_that_is_stopped_for_good_goes_on_until_its_successor_is_ready(tmp_path: Path) -> None:
    """What waits for it is read, and why it was replaced is told."""
    part = Part(tmp_path)
    async with part.succeeded(signal.SIGSTOP) as (supervisor, old):
        assert lives(old)
        assert threads_of(old, main=True)[0].state != "T"
        assert supervisor.hangs == {"it": 1}
        part.ready.touch()
        await until(lambda: part.exits, LONG)
        assert part.exits == [(ENDED, True)]
        await part.serves(supervisor, 1)


async def test_a_process_that_is_stopped_again_while_its_successor_starts_is_ended(tmp_path: Path) -> None:
    part = Part(tmp_path)
    async with part.succeeded(signal.SIGSTOP) as (supervisor, old):
        os.kill(old, signal.SIGSTOP)
        await part.launches(3)
        assert not lives(old)
        assert supervisor.hangs == {"it": 2}
        assert part.exits == [(ENDED, False)]
        await part.serves(supervisor, 2)


async def test_why_a_process_ended_is_told_once_whether_its_successor_was_quicker_or_not(tmp_path: Path) -> None:
    """It is stopped again when its successor becomes ready. If that is seen first, it goes on and leaves."""
    part = Part(tmp_path)
    async with part.succeeded(signal.SIGSTOP) as (supervisor, old):
        os.kill(old, signal.SIGSTOP)
        part.ready.touch()
        await until(lambda: not lives(old), LONG)
        await until(lambda: part.exits, LONG)
        succeeded = part.exits[0][1]
        await until(lambda: len(part.launched) == (2 if succeeded else 3), LONG)
        await part.serves(supervisor, -1)
        assert part.exits == [(ENDED, succeeded)]


async def test_a_stop_waits_for_no_successor(tmp_path: Path) -> None:
    part = Part(tmp_path)
    async with part.succeeded() as (supervisor, _):
        await supervisor.stop()
        assert not any(map(lives, part.launched))


async def test_what_can_have_no_successor_goes_at_once_and_is_started_again(tmp_path: Path) -> None:
    part = Part(tmp_path, again=False)
    async with part.supervised() as supervisor:
        os.kill(part.launched[0], signal.SIGTERM)
        await part.launches(2)
        assert part.exits == [("exit code 0", False)]
        assert supervisor.restarts == {"it": 1}


# -- A process is ended when it is still, never when it is busy or starved: the decision, look by look.
MINUTE = round(60 / LOOK)  # looks


def verdict(still: ProcessStillness, *looks: Seen, passed: float = LOOK) -> str:
    """The first reason to end the process, or the last word."""
    return next((why for one in looks if (why := still.looked(one, passed))), "")


def asleep(turns: int = 7, state: str = "S", *, busy: bool = False, threads: int = 2) -> Seen:
    return Seen(turns, busy, (Thread(state, 1.0, 1.0),) * threads)


def test_stopped_processes_are_ended_by_looks_of_one_that_turns() -> None:
    still = ProcessStillness()
    stopped = asleep(state="T", busy=True)  # what it computes makes no difference
    found = [still.looked(stopped, LOOK) for _ in range(20)]
    # the first look has nothing to compare with
    assert found.index("did not turn for 2 s (stopped by a signal)") == HUNG / LOOK
    still = ProcessStillness()
    still.looked(asleep(state="T"), LOOK)
    assert still.looked(asleep(state="T"), 3600.0) == "", "it was starved, or the machine slept"
    assert still.still == LONGEST


def test_only_what_does_not_turn_is_ended() -> None:
    assert verdict(ProcessStillness(), *[asleep()] * MINUTE) == "did not turn for 2 s (it waits for what does not come)"
    still = ProcessStillness()
    for turns in range(1, 20):
        assert verdict(still, *[asleep(turns)] * 7) == ""
    assert verdict(ProcessStillness(), *[asleep(threads=2 + n % 2) for n in range(MINUTE)]) == ""


def test_busy_starting_and_waiting_processes_are_left_alone() -> None:
    assert verdict(ProcessStillness(), *[asleep(0)] * MINUTE) == ""
    assert "stopped by a signal" in verdict(ProcessStillness(), *[asleep(0, "T", threads=1)] * 10)
    assert verdict(ProcessStillness(10.0), *[asleep(0, "T", threads=1)] * 39) == "", "a database is given more time"
    assert "for 10 s" in verdict(ProcessStillness(10.0), *[asleep(0, "T", threads=1)] * 42)
    for state in "RDt":
        looks = [Seen(7, False, (Thread(state, 1.0, 1.0), Thread("S", 1.0, 1.0)))] * MINUTE
        assert verdict(ProcessStillness(), *looks) == "", state
        looks = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread(state, 1.0, 1.0)))] * MINUTE
        assert verdict(ProcessStillness(), *looks) == "", f"another thread: {state}"
    assert verdict(ProcessStillness(), *[asleep(busy=True)] * (MINUTE - 10)) == ""
    assert verdict(ProcessStillness(), *[asleep(busy=True)] * (MINUTE + 10)).startswith(f"did not turn for {BUSY:g} s")


def test_time_that_any_thread_ran_or_waited_for_a_cpu_is_no_silence() -> None:
    """Asleep at every look, and yet it has not stood still: so is a process that is starved by others."""
    starved = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread("S", 1.0, LOOK * n))) for n in range(MINUTE)]
    computing = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread("S", LOOK * n, 1.0))) for n in range(MINUTE)]
    assert verdict(ProcessStillness(), *starved) == ""
    assert verdict(ProcessStillness(), *computing) == ""
    half = [Seen(7, False, (Thread("S", 1.0, LOOK / 2 * n),)) for n in range(MINUTE)]
    still = ProcessStillness()
    assert [still.looked(one, LOOK) for one in half].index(
        "did not turn for 2 s (it waits for what does not come)"
    ) == 16


def test_a_loop_that_only_computes_is_ended_after_30_s_of_its_own_computing() -> None:
    held = [Seen(7, False, (Thread("R", LOOK * n, 1.0),)) for n in range(MINUTE)]
    still = ProcessStillness()
    found = [still.looked(one, LOOK) for one in held]
    assert found.index("did not turn in 30 s of computing") == COMPUTES / LOOK
    starved = [Seen(7, False, (Thread("R", LOOK / 10 * n, LOOK * n),)) for n in range(3 * MINUTE)]
    assert verdict(ProcessStillness(), *starved) == "", "it got a tenth of a CPU: 18 s in three minutes"
    beside = [Seen(7, False, (Thread("S", 1.0, 1.0), Thread("R", LOOK * n, 1.0))) for n in range(5 * MINUTE)]
    assert verdict(ProcessStillness(), *beside) == "", "another thread computes: so looks a load"


def test_threads_are_known_and_where_nothing_is_said_nobody_is_ended() -> None:
    assert verdict(ProcessStillness(), *[Seen(7, False, ())] * MINUTE) == ""
    assert threads_of(2**22 + 1) == ()
    mine, *_ = threads_of(os.getpid())
    assert mine.state == "R"
    assert mine.ran > 0
    assert threads_of(os.getpid(), main=True)[0].ran >= mine.ran
