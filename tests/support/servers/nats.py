"""Real servers for tests: a nats-server on a free loopback port, and what starting and stopping it takes."""

import asyncio
import contextlib
import os
import secrets
import signal
import socket
import subprocess
import time
import warnings
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
import uvloop

from services.shell.host import process
from services.shell.host.nats import find_nats_server
from services.shell.host.process import ServerError

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one asynchronous test body on the loop that production uses; a body that leaves connections open fails.

    uvloop never finishes closing when its warning of an open connection is turned into an error, so it is collected here.
    """
    runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
    try:
        result = runner.run(work)
    finally:
        with warnings.catch_warnings(record=True) as left_open:
            warnings.simplefilter("always", ResourceWarning)
            runner.close()
    assert not left_open, f"left open: {[str(warning.message) for warning in left_open]}"
    return result


_GIVEN: set[int] = set()


def free_port() -> int:
    """A port that nobody listens on, that no outgoing connection takes, and that no other test gets, nor one in a process beside this one."""
    processes = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    ours = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    while (port := process.free_port()) % processes != ours or port in _GIVEN:
        pass
    _GIVEN.add(port)
    return port


class NatsServer:
    """One nats-server with JetStream and a password, its state in `directory`; it can be stopped and started again."""

    def __init__(self, directory: Path, port: int | None = None, max_payload: int = 8 * 2**20, extra: str = "") -> None:
        self.port = port or free_port()
        self.directory = directory
        self.url = f"nats://tester:secret@127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._config = directory / "nats.conf"
        directory.mkdir(parents=True, exist_ok=True)
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: {max_payload}\n'
            # Streams of all tests stay reserved until the session ends, far beyond what they hold and any disk has.
            f'jetstream {{ store_dir: "{directory / "jetstream"}", max_file_store: 100TB }}\n'
            'authorization { users: [ { user: "tester", password: "secret" }, { user: "limited", password: "secret", '
            'permissions: { publish: { deny: ["forbidden.>", "$SYS.>"] } } } ] }\n'
            f"{extra}"
        )

    def start(self) -> None:
        binary = find_nats_server()
        with (self.directory / "nats.log").open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(self._config)], stdout=log, stderr=log)
        self._wait_ready()

    def stop(self, *, kill: bool = False) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGCONT)  # a test may have stopped it
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        self._process.wait(60)
        self._process = None

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_ready(self) -> None:
        until = time.monotonic() + 60
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                if sock.recv(5) == b"INFO ":
                    return
            assert self._process is not None
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"nats-server did not start: {(self.directory / 'nats.log').read_text()[-2000:]}")


def skip_without_nats() -> None:
    try:
        find_nats_server()
    except ServerError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """The one nats-server of a test session; tests that stop a server start their own."""
    skip_without_nats()
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def nats_url(nats_server: NatsServer) -> str:
    """URL, with user and password, of the session's nats-server."""
    return nats_server.url


@pytest.fixture
def prefix() -> str:
    """A prefix that no other test has: subjects, streams and buckets below it are this test's own."""
    return f"t{secrets.token_hex(4)}"
