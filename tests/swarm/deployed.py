"""The stack of ops/, deployed on a swarm of this machine by its own commands, and load on it."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.servers.processes import ROOT
from tests.swarm import image
from tests.swarm.node import Node, SwarmError, eventually
from tests.swarm.nodes import Swarm

APPS = {"digits": "phone", "pictures": "tablet"}  # app to its client
SETTINGS = """\
[registrar]
threads = [1]
max_batches = [8]
[machines]
provider = "swarm"
idle_s = 10.0
utilisation_above = 1.0  # the "machines" share the cores of one, and what others do there is no reason for one more
[machines.swarm]
hosts = ["tcp://tasks.engine-proxy:2375"]
[machines.kinds.cpu]
minimum = 2
maximum = 3
cores = 2
memory_mb = 2000
"""


class Load:
    """queries: what came of each, in the order in which they ended."""

    def __init__(self, node: Node, login: Mapping[str, str], app: str, rate: float) -> None:
        ours = {key: value for key, value in os.environ.items() if not key.startswith("INFAAS_")}
        self.queries: list[dict[str, Any]] = []
        self.sent: int | None = None
        self.resent = 0
        self._process = node.popen(
            [sys.executable, "-m", "tests.swarm.load", app, str(rate)],
            cwd=ROOT,
            env=ours | {"PYTHONPATH": str(ROOT)} | login,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def rate(self, rate: float) -> None:
        """So many queries a second from now on."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{rate}\n")
        self._process.stdin.flush()

    def end(self) -> None:
        """No more queries; returns when each that was sent has ended."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join(10)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()

    @property
    def answers(self) -> int:
        return len(self.answered())

    @property
    def said(self) -> dict[str, int]:
        """How queries ended, and why."""
        return dict(Counter(query.get("why", query["how"]) for query in self.queries))

    def more(self, answers: int) -> None:
        """Return when so many more have been answered: the load goes on."""
        enough = self.answers + answers
        eventually(lambda: self.answers >= enough, f"{answers} more answers; {self.said}", 60)

    def answered(self) -> list[dict[str, Any]]:
        return [query for query in self.queries if query["how"] == "answered"]

    def failed(self) -> list[dict[str, Any]]:
        """Queries that were refused or lost."""
        return [query for query in self.queries if query["how"] != "answered"]

    def lost(self) -> list[dict[str, Any]]:
        """Queries that nobody answered or refused."""
        return [query for query in self.queries if query["how"] == "lost"]

    def ended(self) -> None:
        """Each query that was sent has ended, in one way; call it after `end`."""
        assert self.sent is not None, f"the load generator died: {self.said}"
        assert len(self.queries) == self.sent

    def longest_gap(self, since: float, until: float | None = None) -> float:
        """The longest time (s) without an answer, between two Unix times."""
        times = [query["at"] + query["took"] for query in self.answered()]
        inside = sorted(at for at in times if at >= since and (until is None or at <= until))
        marks = [since, *inside, *([until] if until is not None else [])]
        return max((b - a for a, b in itertools.pairwise(marks)), default=0.0)

    def first_answer_of(self, worker: str) -> float | None:
        """Unix time of the first answer that a worker gave."""
        times = [query["at"] + query["took"] for query in self.answered() if query["worker"] == worker]
        return min(times) if times else None

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            told = json.loads(line)
            if "sent" in told:
                self.sent, self.resent = told["sent"], told["resent"]
            else:
                self.queries.append(told)


class Deployed:
    """The system on its swarm. timings: (what, seconds), for the table at the end."""

    def __init__(self, swarm: Swarm, directory: Path, timings: list[tuple[str, float]]) -> None:
        self.swarm = swarm
        self.directory = directory
        self.timings = timings
        self.secrets = directory / "secrets"
        self.stack = "infaas"
        self.ready = False
        self.loads: list[Load] = []
        self.lost_machines: list[float] = []  # Unix times
        self.settings = directory / "infaas.toml"
        self.settings.write_text(SETTINGS)
        self.ops = directory / "ops"  # as they are now: bash reads a script while it runs it
        shutil.copytree(ROOT / "ops", self.ops, ignore=shutil.ignore_patterns("secrets", "wheels", "deploy.env"))

    # -- the operator's commands, on a manager

    def deploy(self, name: str, *options: str, timeout: float = 400, **more: str) -> str:
        """ops/deploy.sh with an image; what it printed. Raises SwarmError when it fails."""
        environ = {
            "IMAGE": name,
            "DB_IMAGE": image.DATABASE,
            "PROMETHEUS_REPLICAS": "0",
            "FILES": "ops/stack.ports.yml",
            "RESOLVE": "never",
            "SECRETS": str(self.secrets),
            "SETTINGS": str(self.settings),
            "BUS_HOSTS": " ".join(self.swarm.addresses),
            "DOCKER_GID": str(Path(self.manager.host.removeprefix("unix://")).stat().st_gid),
            "TIMEOUT": str(int(timeout)),
            **more,
        }
        return self.command("deploy.sh", *options, timeout=timeout + 30, **environ)

    def infaas(self, *words: str, cwd: Path | None = None, timeout: float = 120) -> str:
        """A command of infaas as the operator: ops/infaas.sh."""
        return self.command("infaas.sh", *words, cwd=cwd, timeout=timeout)

    def command(self, script: str, *words: str, cwd: Path | None = None, timeout: float = 120, **environ: str) -> str:
        ours = {key: value for key, value in os.environ.items() if not key.startswith("INFAAS_")}
        manager = self.manager
        done = subprocess.run(
            [self.ops / script, *words],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            cwd=cwd or self.directory,
            env=ours | {"DOCKER_HOST": manager.host, "SECRETS": str(self.secrets), "ENV_FILE": "/dev/null"} | environ,
        )
        if done.returncode != 0:
            raise SwarmError(f"{script} {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout + done.stderr

    def rows(self, query: str) -> list[list[Any]]:
        """What the database says, asked as the operator asks it."""
        return list(self.told("sql", query, "--json")["rows"])

    def workers(self) -> list[dict[str, Any]]:
        """As the operator is told of them."""
        return list(self.told("workers", "--json"))

    def told(self, *words: str) -> Any:
        """What a command that changes nothing prints, as JSON. Each runs in a container, which a busy engine may fail to start: it is asked again."""
        return eventually(lambda: (json.loads(self.infaas(*words)),), f"infaas {words[0]} answers", 240, 1.0)[0]

    @contextmanager
    def timed(self, what: str) -> Iterator[None]:
        """A row of the table."""
        begun = time.monotonic()
        yield
        self.timings.append((what, time.monotonic() - begun))

    def since(self, begun: float, what: str) -> None:
        """The same, since a Unix time."""
        self.timings.append((what, time.time() - begun))

    def lose(self, node: Node) -> float:
        """A machine loses its power; returns the Unix time."""
        self.lost_machines.append(time.time())
        node.kill()
        return self.lost_machines[-1]

    # -- what runs

    @property
    def manager(self) -> Node:
        return self.swarm.manager

    def tasks(self, service: str) -> list[dict[str, Any]]:
        return self.swarm.tasks(f"{self.stack}_{service}")

    def where(self, service: str) -> list[str]:
        """Names of the nodes that a service's tasks run on."""
        return sorted(task["Where"] for task in self.tasks(service))

    def whole(self, without: str = "") -> bool:
        """Whether every service has all tasks that it should have, none of them on the node `without`.

        `docker service ls` still counts those of a machine that is gone.
        """
        tasks = self.swarm.tasks()
        have = Counter(task["ServiceID"][:12] for task in tasks)  # as `ls` shows them
        for service in self.manager.json("service", "ls"):
            want = int(service["Replicas"].split()[0].partition("/")[2])
            if "completed" not in service["Replicas"] and have[service["ID"]] != want:
                return False
        return all(task["Where"] != without for task in tasks)

    def versions(self) -> dict[str, set[str]]:
        """The label of version of the images that each service's running tasks have."""
        found: dict[str, set[str]] = {}
        for task in self.swarm.tasks():
            name = task["Spec"]["ContainerSpec"]["Image"]
            labels = self.manager.inspect("image", name)[0]["Config"]["Labels"] or {}
            service = self.manager.inspect("service", task["ServiceID"])[0]["Spec"]["Name"]
            found.setdefault(service.partition("_")[2], set()).add(labels.get(image.LABEL, ""))
        return found

    # -- clients

    def login(self, user: str) -> dict[str, str]:
        servers = [node.address for node in self.swarm.nodes.values() if node.alive and node.name.startswith("m")]
        return {
            "INFAAS_NATS_URL": ",".join(f"tls://{address}:4222" for address in servers),
            "INFAAS_NKEY_SEED": str(self.secrets / "auth" / "users" / f"{user}.nk"),
            "INFAAS_TLS_CA": str(self.secrets / "auth" / "ca.pem"),
        }

    @contextmanager
    def load(self, rate: float = 10.0, app: str = "digits") -> Iterator[Load]:
        """Load from a machine of the swarm, from when the first answer is there; after it, each query has ended."""
        load = Load(self.swarm.nodes["w0"], self.login(APPS[app]), app, rate)
        self.loads.append(load)
        try:
            eventually(lambda: load.answers > 0, f"a first answer; {load.said}", 60)
            yield load
        finally:
            load.end()

    def report(self) -> str:
        """What a person would look at, where something is wrong."""
        lines = [self.swarm.report()]
        with contextlib.suppress(SwarmError, subprocess.TimeoutExpired):
            lines.append(self.infaas("workers", timeout=30))
            lines.append(
                self.infaas("sql", "SELECT * FROM infaas.scaling_events WHERE scaler = 'vm' ORDER BY time", timeout=30)
            )
        return "\n".join(lines)
