"""Workers that only sleep, in containers that labels start, and the orders for them."""

import asyncio
import io
import tarfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bus.messages.scaling import StartMachine, StopMachine
from tests.swarm.nodes import Swarm, missing

IMAGE = "sleeper:1"
BUSYBOX = Path("/bin/busybox")


@contextmanager
def pooled(managers: int, *workers: Mapping[str, str]) -> Iterator[Swarm]:
    """Managers, and a prepared machine with each of these labels, none with a worker; skips where there can be none."""
    if reason := missing():
        pytest.skip(reason)
    if not BUSYBOX.exists():
        pytest.skip("not installed: busybox-static")
    with Swarm(managers=managers, workers=len(workers)) as swarm:
        prepare(swarm)
        for number, labels in enumerate(workers):
            swarm.label(swarm.nodes[f"w{number}"], dict(labels))
        yield swarm


def prepare(swarm: Swarm) -> None:
    """An image on every node, and a worker service of each kind that runs where the label says."""
    place = swarm.directory / "image.tar"
    with tarfile.open(place, "w") as tar:
        tar.add(BUSYBOX, "bin/busybox")
        link = tarfile.TarInfo("bin/sh")
        link.type, link.linkname = tarfile.SYMTYPE, "busybox"
        tar.addfile(link, io.BytesIO())
    for node in swarm.nodes.values():
        node.docker("import", place, IMAGE)
    for kind in ("cpu", "gpu"):
        swarm.manager.docker(
            *("service", "create", "--detach", "--name", f"worker-{kind}", "--mode", "global", "--no-resolve-image"),
            *("--constraint", f"node.labels.infaas.worker == {kind}", "--endpoint-mode", "dnsrr"),
            *("--stop-grace-period", "5s", "--restart-delay", "1s", IMAGE),
            *("/bin/busybox", "sh", "-c", "trap 'exit 0' TERM; while true; do busybox sleep 0.1; done"),
        )


def containers(swarm: Swarm, name: str) -> list[str]:
    return swarm.nodes[name].docker("ps", "--quiet").split()


def running(swarm: Swarm) -> dict[str, list[str]]:
    """Machine to the worker services that run there."""
    found: dict[str, list[str]] = {}
    for name, node in swarm.nodes.items():
        if node.alive:
            services = node.docker("ps", "--format", '{{.Label "com.docker.swarm.service.name"}}').split()
            if services:
                found[name] = services
    return found


def start(worker: str, number: int = 1, *, epoch: int = 1, kind: str = "cpu", **more: Any) -> StartMachine:
    return StartMachine(worker=worker, kind=kind, epoch=epoch, order=f"{epoch}-{number}", **more)


def stop(worker: str, number: int = 1, *, epoch: int = 1, kind: str = "cpu", **more: Any) -> StopMachine:
    return StopMachine(worker=worker, kind=kind, epoch=epoch, order=f"{epoch}-{number}", **more)


async def insist(act: Callable[[], Awaitable[None]], seconds: float = 60.0) -> None:
    """As the controller does: what nobody has answered is ordered again."""
    async with asyncio.timeout(seconds):
        while True:
            try:
                await act()
            except TimeoutError:
                await asyncio.sleep(0.2)
            else:
                return
