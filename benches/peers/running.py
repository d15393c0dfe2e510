"""One server of a system under test: its start, its processes' CPU and memory, its end."""

import ctypes
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import rig
from numpy.typing import NDArray

from peers.systems import SERVERS, WAIT_MS, Peer, requests

START_S = 180.0  # at most, until the first right answer
STOP_S = 20.0
ASK_S = 0.02  # between questions until the first answer
PORTS = 12  # that must be free from one before a server's port on
SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER


def adopt() -> None:
    """Make what a server leaves behind a child of this process, so that it is counted and ended."""
    ctypes.CDLL(None, use_errno=True).prctl(SUBREAPER, 1, 0, 0, 0)


def free_port() -> int:
    """A port of which the neighbours are free, too: some systems take several."""
    rng = np.random.default_rng()
    while True:
        port = int(rng.integers(20_000, 30_000))
        with suppress(OSError):
            for each in range(port - 4, port + PORTS):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", each))
            return port


def cpu() -> float:
    """CPU seconds of all processes of the server that is running, and of what it left behind, up to now."""
    return sum(seconds for pid, (_, seconds) in rig.cpu(os.getpid()).items() if pid != os.getpid())


@contextmanager
def serving(
    name: str, peer: Peer, python: str, model: Path, batch: int, directory: Path, more: Mapping[str, str]
) -> Iterator["Server"]:
    """The system's server with this model; ended with all its processes. Raises RuntimeError if no right answer comes."""
    port = free_port()
    log = directory / f"{name}.log"
    keep = {key: value for key, value in os.environ.items() if not key.startswith(("INFAAS_", "PYTHON", "VIRTUAL_ENV"))}
    given = {
        "PATH": f"{Path(python).parent}:{os.environ['PATH']}",
        "HOME": str(directory),
        "PEER_NAME": name,
        "PEER_MODEL": str(model),
        "PEER_PORT": str(port),
        "PEER_BATCH": str(batch),
        "PEER_WAIT_MS": str(WAIT_MS),
        "OMP_NUM_THREADS": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
        "BENTOML_DO_NOT_TRACK": "True",
        "DO_NOT_TRACK": "1",
    }
    with log.open("wb") as out:
        began = time.monotonic()
        process = subprocess.Popen(
            [python, str(SERVERS / f"{peer.like or name}_server.py")],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            cwd=directory,
            env=keep | given | more,
            start_new_session=True,
        )
    try:
        yield Server(peer, process, port, began, log)
    finally:
        _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(STOP_S)
    while left := rig.tree(os.getpid())[1:]:
        for one in left:
            with suppress(psutil.Error):
                one.kill()
        time.sleep(0.05)
        process.poll()
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


class Server:
    """A server that has been started, and asks after its answers."""

    def __init__(self, peer: Peer, process: "subprocess.Popen[bytes]", port: int, began: float, log: Path) -> None:
        self._peer, self._process, self._began, self._log = peer, process, began, log
        self.port = port

    def first_answer(self, served: str, x: NDArray[np.float32]) -> float:
        """Seconds from the command to the first answer of status 200."""
        body = requests(self._peer, served, self.port, x[:1])[0]
        said = b""
        while time.monotonic() < self._began + START_S:
            if self._process.poll() is not None:
                raise RuntimeError(f"it ended with {self._process.returncode}: {self._tail()}")
            with suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 5.0) as connection:
                connection.sendall(body)
                said = connection.recv(65536)
                if said[9:12] == b"200":
                    return time.monotonic() - self._began
            time.sleep(ASK_S)
        raise RuntimeError(f"no answer within {START_S:.0f} s: {said[:200]!r} {self._tail()}")

    def _tail(self) -> str:
        lines = [line.strip() for line in self._log.read_text(errors="replace").splitlines() if line.strip()]
        return " | ".join(lines[-3:])[:400]

    def memory(self) -> float:
        """Proportional set size of its processes in MB (2^20)."""
        return sum(rig.memory(*(one.pid for one in psutil.Process().children())).values())

    def load(self, table: Path, *options: str) -> dict[str, Any]:
        """A run of the generator, with `cpu_ms` of the server for an answer and `others`, the cores that other programs took.

        Raises RuntimeError on errors and wrong answers.
        """
        more = ("--json",) if self._peer.as_json else ()
        before, all_before, began = cpu(), rig.busy(), time.monotonic()
        result = rig.generate("http", "127.0.0.1", str(self.port), table, *options, *more)
        time.sleep(1.0)  # what is written after the answer counts, too
        if result["errors"]:
            raise RuntimeError(f"errors under load: {result['errors']}")
        used, took = cpu() - before, time.monotonic() - began
        result["cpu_ms"] = 1000 * used / result["answered_all"]
        result["others"] = max(0.0, (rig.busy() - all_before - used - result["generator_cpu_s"]) / took)
        return result


def alone(model: Path, x: NDArray[np.float32], seconds: float) -> dict[str, float]:
    """The model by itself, an item at a time, in a process of its own: answers a second, and CPU milliseconds for one."""
    code = (
        "import json, sys, time; from model import load; import numpy as np; run = load(); x = np.load(sys.argv[1]); n = 0\n"
        "run(x[:1]); began, used = time.monotonic(), time.process_time()\n"
        f"while time.monotonic() - began < {seconds}: run(x[n % len(x)][None]); n += 1\n"
        "print(json.dumps({'rate': n / (time.monotonic() - began), 'cpu_ms': 1000 * (time.process_time() - used) / n}))"
    )
    path = model.with_suffix(".x.npy")
    np.save(path, x)
    env = os.environ | {"PEER_MODEL": str(model), "PEER_PORT": "0", "PEER_BATCH": "1", "PEER_WAIT_MS": "0"}
    words = [sys.executable, "-c", code, str(path)]
    done = subprocess.run(words, cwd=SERVERS, env=env, capture_output=True, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout)
    return found
