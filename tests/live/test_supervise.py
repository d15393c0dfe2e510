"""Children are kept running and stopped completely."""

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.servers.processes import alive, eventually, read_line, script

# Runs one shell command as a supervised child; each line of its stdin-less life is told as JSON; SIGTERM stops it.
SUPERVISE = """
import asyncio, json, signal, sys
from pathlib import Path
from services.shell.host import process
from services.shell.host.process import ServerError
from services.shell.host.running import shared
from services.shell.host.supervise import Child, Supervisor

directory, command = Path(sys.argv[1]), sys.argv[2]

def tell(**fact):
    print(json.dumps(fact), flush=True)

async def main():
    supervisor, stop, running = Supervisor(), asyncio.Event(), shared()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)

    def launch():
        if (directory / "broken").exists():
            (directory / "broken").unlink()
            raise ServerError("not this time")
        child = process.start_service(["sh", "-c", command], log=directory / "log", cwd=directory, running=running)
        tell(launched=child.pid)
        return child

    steps = ((signal.SIGTERM, 0.3), (signal.SIGKILL, 5.0))
    supervisor.start(Child("it", launch, steps=steps, on_exit=lambda reason, succeeded: tell(exited=reason), running=running))
    await stop.wait()
    await supervisor.stop()
    tell(stopped=supervisor.restarts["it"])

asyncio.run(main())
"""


def next_fact(process) -> Any:
    return json.loads(read_line(process))


def test_a_killed_child_is_reported_and_restarted(tmp_path: Path) -> None:
    with script(SUPERVISE, str(tmp_path), "exec sleep 600") as supervisor:
        first = next_fact(supervisor)["launched"]
        os.kill(first, signal.SIGKILL)
        assert next_fact(supervisor) == {"exited": "killed by SIGKILL"}
        second = next_fact(supervisor)["launched"]
        assert second != first
        supervisor.terminate()
        assert next_fact(supervisor) == {"stopped": 1}
        assert not alive(second)


# A service whose loop turns until it waits for a lock that nobody gives up.
HANGS = """
import threading
from services.shell.host.running import inherited
running = inherited()
running.turn()
lock = threading.Lock()
lock.acquire()
lock.acquire()
"""


def test_a_loop_that_waits_for_what_does_not_come_is_ended_too(tmp_path: Path) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    with script(SUPERVISE, str(tmp_path), f"exec {sys.executable} hangs.py") as supervisor:
        first = next_fact(supervisor)["launched"]
        assert next_fact(supervisor) == {
            "exited": "it did not turn for 2 s (it waits for what does not come) and was ended"
        }
        assert next_fact(supervisor)["launched"] != first


def test_a_child_that_keeps_ending_is_restarted_again_and_again(tmp_path: Path) -> None:
    with script(SUPERVISE, str(tmp_path), "exit 3") as supervisor:
        for _ in range(3):
            assert "launched" in next_fact(supervisor)
            assert next_fact(supervisor) == {"exited": "exit code 3"}


def test_a_restart_that_fails_is_tried_again(tmp_path: Path) -> None:
    with script(SUPERVISE, str(tmp_path), "touch broken; sleep 0.2") as supervisor:
        assert "launched" in next_fact(supervisor)
        assert "exited" in next_fact(supervisor)
        assert "launched" in next_fact(supervisor)


def test_stopping_ends_stubborn_children_and_what_they_left_in_other_sessions(tmp_path: Path) -> None:
    command = "trap '' TERM; setsid sleep 601 & echo $! > left; (setsid sleep 602 & echo $! > orphan); while :; do sleep 1; done"
    with script(SUPERVISE, str(tmp_path), command) as supervisor:
        stubborn = next_fact(supervisor)["launched"]
        assert eventually(lambda: _pid(tmp_path / "left") > 0 and _pid(tmp_path / "orphan") > 0)
        pids = [stubborn, _pid(tmp_path / "left"), _pid(tmp_path / "orphan")]
        assert all(alive(pid) for pid in pids)
        supervisor.terminate()
        assert next_fact(supervisor) == {"stopped": 0}
        assert not [pid for pid in pids if alive(pid)]


def test_children_die_with_a_killed_supervisor(tmp_path: Path) -> None:
    with script(SUPERVISE, str(tmp_path), "trap '' TERM; while :; do sleep 1; done") as supervisor:
        child = next_fact(supervisor)["launched"]
        supervisor.kill()
        assert eventually(lambda: not alive(child))


def _pid(file: Path) -> int:
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return 0


# Two children, of which one is stopped alone; then a third; then everything is stopped.
PART = """
import asyncio, json, signal, sys
from pathlib import Path
from services.shell.host import process
from services.shell.host.process import ServerError
from services.shell.host.running import shared
from services.shell.host.supervise import Child, Supervisor

directory = Path(sys.argv[1])

def tell(**fact):
    print(json.dumps(fact), flush=True)

def child(name, command):
    def launch():
        return process.start(["sh", "-c", command], log=directory / "log", on_our_death=signal.SIGKILL, cwd=directory)
    return Child(name, launch, steps=((signal.SIGTERM, 0.3), (signal.SIGKILL, 5.0)))

async def main():
    supervisor = Supervisor()
    stubborn = child("stubborn", "trap '' TERM; sleep 601 & while :; do sleep 1; done")
    supervisor.start(stubborn)
    supervisor.start(child("other", "exec sleep 602"))
    tell(**supervisor.pids)
    await supervisor.stop_only([stubborn])
    tell(left=sorted(supervisor.pids), restarts=sorted(supervisor.restarts))
    supervisor.start(child("third", "exec sleep 603"))
    tell(**supervisor.pids)
    await supervisor.stop()
    try:
        supervisor.start(child("late", "exec sleep 604"))
    except ServerError as error:
        tell(refused=str(error))

asyncio.run(main())
"""


def test_one_child_can_be_stopped_alone_and_another_started_meanwhile(tmp_path: Path) -> None:
    with script(PART, str(tmp_path)) as supervisor:
        first = next_fact(supervisor)
        assert next_fact(supervisor) == {"left": ["other"], "restarts": ["other"]}
        assert not alive(first["stubborn"])
        second = next_fact(supervisor)
        assert second["other"] == first["other"]
        assert "being stopped" in next_fact(supervisor)["refused"]
        assert not [pid for pid in second.values() if alive(pid)]


# A copy of a fork server; both are told.
COPY = """
import asyncio, json, os
from services.shell.host import process
from services.shell.host.supervise import Supervisor

async def main():
    supervisor = Supervisor()
    before = process.child_pids()
    forks = process.ForkServer(["dispatcher"], None, os.environ, None)
    forks.wait_ready()
    nowhere = process.with_our_source({**os.environ, "INFAAS_BUS__URL": "nats://127.0.0.1:1", "INFAAS_METRICS__PORT": "0"})
    process.start_service(process.service_command(["dispatcher"], None), log=None, environ=nowhere, forks=forks)
    copies = sorted(process.child_pids() - before)
    print(json.dumps(copies), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_fork_server_and_its_copies_die_with_a_killed_supervisor() -> None:
    with script(COPY) as supervisor:
        processes = next_fact(supervisor)
        assert len(processes) == 2
        supervisor.kill()
        assert eventually(lambda: not any(map(alive, processes)))
