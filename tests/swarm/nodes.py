"""Several Docker engines on this machine, each a machine of its own: what a test of a Swarm needs of the world.

A node has its own network, mounts, processes and host name, and runs a real dockerd with its own images and volumes. The nodes' networks
meet at a bridge in one more network namespace that has no uplink: no packet leaves this machine. Nothing of this has a name outside of
the nodes' processes, which die with ours; files that are left when we are killed, the next `Swarm` removes.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from services.shell.host.process import Lock, ServerError, dies_with_parent
from tests.swarm.node import INITS, Node, SwarmError, eventually

PREFIX = "infaas-swarm-"
PROGRAMS = ("dockerd", "docker", "ip", "unshare", "nsenter", "iptables", "mount")
POOL = "10.99.0.0/16"  # addresses of overlay networks


def missing() -> str | None:
    """Why there can be no swarm on this machine, or None."""
    if os.name != "posix" or os.geteuid() != 0:
        return "needs Linux and root: network namespaces, mounts, dockerd"
    if absent := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"not installed: {', '.join(absent)} (Debian: docker.io, iproute2, iptables)"
    if not any(map(shutil.which, INITS)):
        return "not installed: tini or docker-init"
    links = "ip link add br9 type bridge && ip link add vx9 type vxlan id 9 dstport 4789 && ip link add ve8 type veth peer name ve9"
    with tempfile.TemporaryDirectory(prefix="infaas-probe-") as place:
        for name in ("lower", "upper", "work", "merged"):
            Path(place, name).mkdir()
        mount = f"cd {place} && mount -t overlay overlay -o lowerdir=lower,upperdir=upper,workdir=work merged"
        probes = {"bridges, vxlan and veth": links, "overlay mounts": mount, "NAT": "iptables -w -t nat -L -n"}
        for what, probe in probes.items():
            command = ["unshare", "--net", "--mount", "--pid", "--fork", "sh", "-c", probe]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                return f"in namespaces of this machine there are no {what}: {done.stderr.strip()}"
    return None


class Swarm:
    """A swarm of `managers` and `workers`, named m0, m1, ... and w0, w1, ...; `close` it.

    images: what each node gets before it joins: the directory of an engine (`data`) that is off, whose images it shares.
    """

    def __init__(
        self, managers: int = 1, workers: int = 2, *, images: Path | None = None, heartbeat: str = "2s"
    ) -> None:
        remove_leftovers()
        self.directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = Lock(self.directory / "lock")
        self.nodes: dict[str, Node] = {}
        self._images = images
        self._heartbeat = heartbeat
        self._next = 10
        self._subnet = f"198.18.{os.getpid() % 250 + 1}"
        self._switch: subprocess.Popen[bytes] | None = None
        self._tokens: dict[str, str] = {}
        try:
            self._switch_on()
            names = [f"m{number}" for number in range(managers)] + [f"w{number}" for number in range(workers)]
            for node in [self.boot(name) for name in names]:
                node.ready()
            if managers:
                self._begin(self.nodes["m0"])
            for name in names[1:] if managers else ():
                self.join(self.nodes[name], manager=name.startswith("m"))
        except BaseException:
            self.close()
            raise

    # -- machines

    def add(
        self,
        name: str,
        labels: Mapping[str, str] | None = None,
        engine_labels: Mapping[str, str] | None = None,
        *,
        manager: bool = False,
    ) -> Node:
        """One more machine joins; `labels` are the swarm's, engine_labels its own, from the first moment."""
        node = self.boot(name, engine_labels)
        node.ready()
        self.join(node, manager=manager)
        if labels:
            self.label(node, labels)
        return node

    def boot(self, name: str, engine_labels: Mapping[str, str] | None = None, data: Path | None = None) -> Node:
        """A machine that belongs to no swarm yet; returns before its engine answers. data: what it keeps, else a directory of its own."""
        address = f"{self._subnet}.{self._next}"
        self._next += 1
        node = self.nodes[name] = Node(
            self.directory / name, address, self.directory.name, engine_labels=engine_labels or {}, data=data
        )
        if self._images is not None:
            share_images(self._images, node.directory / "data")
        node.boot()
        assert self._switch is not None
        switch = ["nsenter", f"--net=/proc/{self._switch.pid}/ns/net", "ip"]
        inside = ["nsenter", f"--net={node.network[1].removeprefix('--net=')}", "ip"]
        port = f"v-{name}"[:15]
        cable = ["link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", node.network[1].split("/")[2]]
        for command in (
            [*switch, *cable],
            [*switch, "link", "set", port, "master", "br0", "up"],
            [*inside, "link", "set", "lo", "up"],
            [*inside, "address", "add", f"{address}/24", "dev", "eth0"],
            [*inside, "link", "set", "eth0", "up"],
        ):
            _run(command)
        node.plugged()
        return node

    def join(self, node: Node, *, manager: bool = False) -> None:
        """The machine becomes a node of the swarm, and is Ready."""
        leader = self.manager
        role = "manager" if manager else "worker"
        node.docker(
            "swarm", "join", "--token", self._tokens[role], "--advertise-addr", node.address, f"{leader.address}:2377"
        )
        node.id = node.docker("info", "--format", "{{.Swarm.NodeID}}")
        eventually(lambda: self.status(node) == "ready", f"{node.name} is Ready in the swarm")

    def leave(self, node: Node, timeout: float = 90) -> None:
        """An orderly goodbye: drained, out of the swarm, switched off, forgotten."""
        self.manager.docker("node", "update", "--availability", "drain", node.id)
        eventually(lambda: not node.docker("ps", "--quiet"), f"{node.name} is empty", timeout)
        if self.manager_of(node):
            self.manager.docker("node", "demote", node.id)
        node.docker("swarm", "leave", "--force")
        self.forget(node)

    def forget(self, node: Node) -> None:
        """Switch it off, if it is on, and remove it from the swarm and from here."""
        node.kill()
        self.nodes.pop(node.name, None)

        def removed() -> bool:
            with contextlib.suppress(SwarmError):
                self.manager.docker("node", "demote", node.id)  # of a manager; of others it changes nothing
            self.manager.docker("node", "rm", "--force", node.id)
            return True

        if node.id:
            eventually(removed, f"{node.name} is removed", 30)
        remove_cgroups(f"{self.directory.name}/{node.name}")
        remove_tree(node.directory)

    # -- the swarm

    @property
    def manager(self) -> Node:
        """A manager that lives and that the others agree with."""
        managers = [node for node in self.nodes.values() if node.alive and node.name.startswith("m")]
        for node in managers[:-1]:
            with contextlib.suppress(SwarmError, subprocess.TimeoutExpired):
                node.docker("node", "ls", "--quiet", timeout=10)
                return node
        return managers[-1]

    @property
    def leader(self) -> Node:
        """The manager that leads the others."""
        for entry in self.manager.json("node", "ls"):
            if entry["ManagerStatus"] == "Leader":
                return self.nodes[entry["Hostname"]]
        raise SwarmError("the swarm has no leader")

    def status(self, node: Node) -> str:
        """ready, down or unknown."""
        return str(self.manager.inspect("node", node.id)[0]["Status"]["State"])

    def manager_of(self, node: Node) -> bool:
        return "ManagerStatus" in self.manager.inspect("node", node.id)[0]

    def label(self, node: Node, labels: Mapping[str, str]) -> None:
        """Set labels of a node; an empty value removes one."""
        words = []
        for key, value in labels.items():
            words += ["--label-add", f"{key}={value}"] if value else ["--label-rm", key]
        self.manager.docker("node", "update", *words, node.id)

    def labels(self, node: Node) -> dict[str, str]:
        return dict(self.manager.inspect("node", node.id)[0]["Spec"].get("Labels") or {})

    def tasks(self, service: str | None = None) -> list[dict[str, Any]]:
        """Running tasks that should run, as the API has them, of one service or of all, with their node's name as "Where"."""
        manager = self.manager
        services = [service] if service else manager.docker("service", "ls", "--quiet").split()
        if not services:
            return []
        ids = manager.docker("service", "ps", "--quiet", "--filter", "desired-state=running", *services).split()
        names = {node.id: node.name for node in self.nodes.values()}
        return [
            task | {"Where": names.get(task.get("NodeID", ""), "")}
            for task in _inspected(manager, ids)
            if task["Status"]["State"] == "running"
        ]

    @property
    def addresses(self) -> list[str]:
        """Those of the machines that there are, and of the next ones."""
        return [f"{self._subnet}.{number}" for number in range(10, max(20, self._next + 1))]

    def containers(self, node: str, word: str) -> list[str]:
        """Names of the containers that run on a node, with a word in them."""
        return [name for name in self.nodes[node].docker("ps", "--format", "{{.Names}}").split() if word in name]

    def report(self) -> str:
        """What a person would look at when something is wrong: nodes, services, tasks that failed and why, logs."""
        lines = []
        try:
            manager = self.manager
            lines += [manager.docker("node", "ls"), manager.docker("service", "ls")]
            for name in manager.docker("service", "ls", "--format", "{{.Name}}").split():
                shown = "{{.Name}}\t{{.Node}}\t{{.DesiredState}}\t{{.CurrentState}}\t{{.Error}}"
                tasks = manager.docker("service", "ps", "--no-trunc", "--format", shown, name)
                lines.append(tasks)
                with contextlib.suppress(SwarmError, subprocess.TimeoutExpired):
                    lines.append(manager.docker("service", "logs", "--raw", "--tail", "15", name, timeout=10))
        except (SwarmError, subprocess.TimeoutExpired) as error:
            lines.append(str(error))
        return "\n".join(lines)

    def close(self) -> None:
        """Everything ends, nothing is left."""
        for node in self.nodes.values():
            node.kill()
        if self._switch is not None:
            self._switch.kill()
            self._switch.wait(20)
        self._lock.release()
        remove_cgroups(self.directory.name)
        remove_tree(self.directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _switch_on(self) -> None:
        before = os.stat("/proc/self/ns/net").st_ino
        self._switch = subprocess.Popen(
            dies_with_parent(["unshare", "--net", "sleep", "infinity"], signal.SIGKILL),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        place = f"/proc/{self._switch.pid}/ns/net"
        eventually(lambda: os.stat(place).st_ino != before, "the switch has a network of its own", 10, 0.01)
        for words in (["link", "add", "br0", "type", "bridge"], ["link", "set", "br0", "up"]):
            _run(["nsenter", f"--net={place}", "ip", *words])

    def _begin(self, node: Node) -> None:
        node.docker("swarm", "init", "--advertise-addr", node.address, "--default-addr-pool", POOL)
        node.docker("swarm", "update", "--dispatcher-heartbeat", self._heartbeat)
        self._tokens = {role: node.docker("swarm", "join-token", "--quiet", role) for role in ("manager", "worker")}
        node.id = node.docker("info", "--format", "{{.Swarm.NodeID}}")


def share_images(source: Path, target: Path) -> None:
    """Give a new engine the images of one that is off. Layers are only read: the same files serve both, and no disk is used."""
    target.mkdir(parents=True)
    for part in ("image", "overlay2"):
        links = ["--link"] if part == "overlay2" else []
        subprocess.run(["cp", "-a", *links, source / part, target / part], check=True)


def remove_leftovers() -> None:
    """Remove the files of swarms whose process was killed; their nodes died with it."""
    for directory in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(ServerError, OSError):
            Lock(directory / "lock").release()  # its owner lives: raises
            remove_cgroups(directory.name)
            remove_tree(directory)


def remove_tree(directory: Path) -> None:
    """Remove a directory with an engine's files, some hundred thousand of them."""
    subprocess.run(["rm", "-rf", directory], check=False)


def remove_cgroups(name: str) -> None:
    """Remove the empty control groups below `name`, in each hierarchy."""
    top = Path("/sys/fs/cgroup")
    for place in (top, *top.iterdir()):
        for directory, _, _ in os.walk(place / name, topdown=False):
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _inspected(node: Node, ids: Sequence[str]) -> Iterator[dict[str, Any]]:
    if ids:
        yield from json.loads(node.docker("inspect", "--type", "task", *ids))


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SwarmError(f"{' '.join(command)}: {done.stderr.strip()}")
