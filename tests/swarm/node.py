"""One machine of a swarm: namespaces of its own, in which a real dockerd runs."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from services.shell.host.process import dies_with_parent, tail

T = TypeVar("T")
INITS = ("tini", "docker-init")  # as Debian calls it, and Docker's own packages

# A node waits until its network is there; then it is a machine with a name and a /run of its own. PID 1 reaps what containers leave.
BOOT = 'read -r go && hostname "$1" && mount -t tmpfs tmpfs /run && mkdir /run/lock && shift && exec "$@" < /dev/null'


class SwarmError(Exception):
    """A node does not do what it should; with what it said."""


def eventually(look: Callable[[], T], what: str, timeout: float = 60.0, every: float = 0.2) -> T:
    """The first truthy value that `look` returns; raises SwarmError after `timeout` s."""
    until = time.monotonic() + timeout
    error: Exception | None = None
    while True:
        try:
            if found := look():
                return found
            error = None
        except (SwarmError, subprocess.TimeoutExpired) as failure:
            error = failure
        if time.monotonic() > until:
            raise SwarmError(f"not within {timeout:.0f} s: {what}" + (f"; {error}" if error else ""))
        time.sleep(every)


class Node:
    """One machine. `network`: how a command enters its network; `host`: its DOCKER_HOST."""

    def __init__(
        self, directory: Path, address: str, cgroup: str, *, engine_labels: Mapping[str, str], data: Path | None = None
    ) -> None:
        self.directory, self.address, self.cgroup = directory, address, cgroup
        self.data = data or directory / "data"
        self.name = directory.name
        self.host = f"unix://{directory}/docker.sock"
        self.alive = False
        self.id = ""  # in the swarm
        self._labels = engine_labels
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def network(self) -> list[str]:
        assert self._process is not None
        return ["nsenter", f"--net=/proc/{self._process.pid}/ns/net"]

    def boot(self) -> None:
        """The machine is switched on; its network is still to be plugged in (`plugged`). From the main thread only."""
        self.directory.mkdir(exist_ok=True)
        init = next(filter(None, map(shutil.which, INITS)))
        config = self.directory / "daemon.json"
        config.write_text(json.dumps(self._config(), indent=1))
        daemon = [
            init,
            "-s",
            "--",
            "dockerd",
            "--config-file",
            config,
            "--cgroup-parent",
            f"/{self.cgroup}/{self.name}",
        ]
        unshare = ["unshare", "--net", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with (self.directory / "dockerd.log").open("ab") as log:
            self._process = subprocess.Popen(
                dies_with_parent([*unshare, "sh", "-c", BOOT, "sh", self.name, *daemon], signal.SIGKILL),
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
            )
        self.alive = True
        eventually(self._init, f"{self.name} has processes of its own", 10, 0.01)

    def plugged(self) -> None:
        """Its network is there: the engine may start."""
        assert self._process is not None
        assert self._process.stdin is not None
        with self._process.stdin as stdin:
            stdin.write(b"go\n")

    def ready(self) -> None:
        """Return when the engine answers; raises SwarmError."""

        def answers() -> bool:
            if self._process is None or self._process.poll() is not None:
                raise RuntimeError(f"{self.name}: dockerd ended: {self.log[-2000:]}")
            return bool(self.docker("version", "--format", "{{.Server.Version}}", timeout=5))

        eventually(answers, f"{self.name}: dockerd answers", 30, 0.1)

    def docker(self, *words: str | Path, timeout: float = 120, environ: Mapping[str, str] | None = None) -> str:
        """What the docker client prints against this engine; raises SwarmError with what it complained of."""
        done = subprocess.run(
            ["docker", "--host", self.host, *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env=os.environ | (environ or {}),
        )
        if done.returncode != 0:
            raise SwarmError(
                f"{self.name}: docker {' '.join(map(str, words))}: {done.stderr.strip() or done.stdout.strip()}"
            )
        return done.stdout.strip()

    def json(self, *words: str) -> list[dict[str, Any]]:
        """The same of a listing command, a map a line."""
        return [json.loads(line) for line in self.docker(*words, "--format", "{{json .}}").splitlines()]

    def inspect(self, kind: str, *names: str) -> list[dict[str, Any]]:
        return list(json.loads(self.docker(kind, "inspect", *names))) if names else []

    def exec(
        self, command: Sequence[str | Path], timeout: float = 120, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Run a program of this machine in the node's network; raises SwarmError when it fails."""
        done = subprocess.run(
            [*self.network, *command], capture_output=True, text=True, timeout=timeout, check=False, **options
        )
        if done.returncode != 0:
            raise SwarmError(f"{self.name}: {' '.join(map(str, command))}: {done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done

    def popen(self, command: Sequence[str | Path], **options: Any) -> subprocess.Popen[bytes]:
        """Start a program of this machine in the node's network; it dies with us. From the main thread only."""
        return subprocess.Popen(dies_with_parent([*self.network, *command], signal.SIGKILL), **options)

    def kill(self) -> None:
        """Power off, no goodbye: engine, containers and everything else on it die in the same instant."""
        if self._process is None:
            return
        if (first := self._init()) and self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(first, signal.SIGKILL)
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(20)
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.alive = False

    @property
    def log(self) -> str:
        return tail(self.directory / "dockerd.log", 10_000)

    def _init(self) -> int | None:
        """The process that is PID 1 on the node."""
        assert self._process is not None
        pid = self._process.pid
        try:
            children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        except OSError:
            return None
        return int(children[0]) if children else None

    def _config(self) -> dict[str, Any]:
        config: dict[str, Any] = {
            "data-root": str(self.data),
            "exec-root": "/run/docker",
            "pidfile": "/run/docker.pid",
            "hosts": [
                self.host,
                "unix:///run/docker.sock",
            ],  # the other one for containers, who see the node's own /run
            "storage-driver": "overlay2",
            "exec-opts": ["native.cgroupdriver=cgroupfs"],
            "shutdown-timeout": 5,
            "log-opts": {"max-size": "5m", "max-file": "2"},
            # No DNS server is within reach: a name that is not there yet would cost 10 s.
            "dns-opts": ["ndots:1", "timeout:1", "attempts:2"],
            "labels": [f"{key}={value}" for key, value in self._labels.items()],
        }
        if " 20.10" in subprocess.run(["dockerd", "--version"], capture_output=True, text=True, check=True).stdout:
            config["deprecated-key-path"] = (
                f"{self.directory}/key.json"  # the engine's id, else one file for all of them
            )
        return config
