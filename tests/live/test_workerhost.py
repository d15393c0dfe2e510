"""`infaas run worker`: a worker's processes as one, each with its own credentials over TLS, as a container runs them."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.codec import decode
from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.subjects import Subjects
from tests.support.clients.responders import until
from tests.support.servers.nats import free_port
from tests.support.servers.processes import alive, environ, eventually, stands_by
from tests.support.servers.secured_nats import Secured
from tests.support.servers.secured_nats import secured as a_secured_server

SUBJECTS = Subjects()


class Host:
    def __init__(self, server: Secured, directory: Path) -> None:
        self.port = free_port()
        self.directory = directory
        self._environ = environ(
            INFAAS_BUS__URL=server.url,
            INFAAS_BUS__NKEY_SEED=str(server.credentials.file_of("supervisor")),
            INFAAS_BUS__TLS_CA=str(server.credentials.directory / "ca.pem"),
            INFAAS_WORKER__EXECUTOR_NKEY=str(server.credentials.file_of("executor")),
            INFAAS_WORKER__MONITOR_NKEY=str(server.credentials.file_of("monitor")),
            INFAAS_WORKER__NAME="n7",
            INFAAS_WORKER__GPUS="0",
            INFAAS_DATA_DIR=str(directory / "data"),
            INFAAS_METRICS__PORT=str(self.port),
        )
        self.process = self.start("worker.log")

    def start(self, log: str, **more: str) -> subprocess.Popen[bytes]:
        with (self.directory / log).open("wb") as out:
            command = [sys.executable, "-P", "-m", "infaas.cli.run", "worker"]
            return subprocess.Popen(command, stdout=out, stderr=out, env=self._environ | more)

    @property
    def log(self) -> str:
        return (self.directory / "worker.log").read_text()

    def well(self) -> bool:
        command = [sys.executable, "-P", "-m", "services.shell.probe", "/readyz"]
        done = subprocess.run(command, env=self._environ, capture_output=True, text=True, check=False)
        self.said = done.stdout
        return done.returncode == 0

    def children(self) -> dict[str, int]:
        """Process ids by the first service of each."""
        found = {}
        for task in Path(f"/proc/{self.process.pid}/task").iterdir():
            for pid in map(int, (task / "children").read_text().split()):
                try:
                    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                except OSError:  # it has just ended
                    continue
                if b"infaas.cli.run" in words and not stands_by(pid):
                    found[words[words.index(b"infaas.cli.run") + 1].decode()] = pid
        return found


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    with a_secured_server(tmp_path / "secured") as server:
        yield server


@pytest.fixture
def host(secured: Secured, tmp_path: Path) -> Iterator[Host]:
    logs = {name: tmp_path / f"{name}.log" for name in ("registrar", "jobs")}

    def start(name: str) -> subprocess.Popen[bytes]:
        variables = environ(**secured.environ(name), INFAAS_BUS__URL=secured.url, INFAAS_DATA_DIR=str(tmp_path / name))
        with logs[name].open("ab") as log:
            return subprocess.Popen([sys.executable, "-P", "-m", "infaas.cli.run", name], env=variables, stderr=log)

    others = {name: start(name) for name in logs}  # they make the buckets and streams that it waits for
    made = Host(secured, tmp_path)

    def well() -> bool:
        for name, process in others.items():
            if (
                process.poll() is not None
            ):  # a server that is slow ends their start; whoever runs them starts them again
                others[name] = start(name)
        return made.well()

    try:
        assert eventually(well), "".join([made.said, made.log, *(log.read_text() for log in logs.values())])
        yield made
    finally:
        for process in (made.process, *others.values()):
            process.kill()
            process.wait()


async def test_it_serves_restarts_what_ends_and_drains_when_it_is_stopped(secured: Secured, host: Host) -> None:
    bus = await secured.bus("operator")
    # who may hear that an executor ended
    dispatcher = await secured.bus("dispatcher")
    beats: list[WorkerHeartbeat] = []
    exits: list[ExecutorExited] = []
    hear: Any = lambda delivery: beats.append(decode(WorkerHeartbeat, delivery.data))  # noqa: E731
    told: Any = lambda delivery: exits.append(decode(ExecutorExited, delivery.data))  # noqa: E731
    await bus.subscribe(SUBJECTS.worker_heartbeat("n7"), hear)
    await dispatcher.subscribe(SUBJECTS.exited("n7"), told)
    await dispatcher.flush()
    await until(lambda: beats and beats[-1].devices[0].alive)

    # The executor dies: everybody hears of it at once, and a new one comes.
    before = host.children()
    os.kill(before["executor"], signal.SIGKILL)
    await until(lambda: exits)
    assert (exits[0].worker, exits[0].device, exits[0].reason) == ("n7", "cpu", "killed by SIGKILL")
    assert exits[0].running == [], "it computed nothing"
    await until(lambda: host.children().get("executor") not in (None, before["executor"]))
    assert host.children()["monitor"] == before["monitor"]
    await until(lambda: beats[-1].devices[0].alive and not beats[-1].draining)

    # It is stopped: first it drains, then says goodbye, and nothing is left.
    pids = host.children()
    host.process.terminate()
    assert await asyncio.to_thread(host.process.wait, 60) == 0
    assert [beat for beat in beats if beat.draining]
    await until(lambda: beats[-1].leaving)  # said before the end, heard a moment later
    assert not any(alive(pid) for pid in pids.values())
    await dispatcher.close()
    await bus.close()
    # Who starts before the registrar asks whether it may make a bucket; nothing else is tried that is not allowed.
    assert not [line for line in secured.violations if "$JS.API.STREAM.CREATE." not in line]
    assert all(line.startswith("{") for line in host.log.splitlines()), host.log


def test_the_next_one_of_a_machine_waits_for_the_last_one_to_end(host: Host, tmp_path: Path) -> None:
    with host.start("second.log", INFAAS_METRICS__PORT=str(free_port())) as second:
        log = tmp_path / "second.log"
        assert eventually(lambda: "waiting for another worker n7 to end" in log.read_text()), log.read_text()
        assert "the worker n7 runs" not in log.read_text()
        host.process.kill()  # the kernel lets go of its lock
        assert eventually(lambda: "the worker n7 runs" in log.read_text()), log.read_text()
        second.terminate()
        assert second.wait(60) == 0
