"""What `infaas up` starts, as its settings say."""

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import pytest
from nats.aio.client import Client

from bus.durability import weaknesses
from infaas.cli.up import _plan
from services.core.settings import MachineKind, MachineSettings, WorkerSettings
from services.shell.host.machine import devices_of, environ_of, initial, worker_of
from services.shell.host.nats import find_nats_server
from services.shell.host.process import ServerError
from services.shell.host.stack import Stack
from services.shell.host.supervise import Child
from services.shell.settings import load
from tests.support.servers.nats import free_port, run, skip_without_nats
from tests.support.servers.processes import eventually


class Children:
    """Keeps a list instead of processes."""

    def __init__(self) -> None:
        self.kept: list[Child] = []

    def start(self, child: Child) -> None:
        self.kept.append(child)


def planned(directory: Path, settings: str, **more: Any) -> Stack:
    (directory / "infaas.toml").write_text(settings)
    options: dict[str, Any] = {
        "port_base": None,
        "workers": 1,
        "max_workers": None,
        "dispatchers": None,
        "simulate": None,
    }
    config = directory / "infaas.toml"
    return Stack(_plan(directory, config=config, dashboard=False, gateway=False, **(options | more)))


def dispatchers_of(stack: Stack) -> list[Child]:
    """What it keeps running as dispatchers."""
    children = Children()
    stack._supervisor = children  # type: ignore[assignment]
    stack._start_serving({})
    return [child for child in children.kept if child.name.startswith("dispatcher")]


@pytest.mark.parametrize(("option", "count"), [(None, 3), (2, 2)])
def test_as_many_dispatchers_as_the_option_or_else_the_settings_say(
    tmp_path: Path, option: int | None, count: int
) -> None:
    stack = planned(tmp_path, "[dispatcher]\ncount = 3\n", dispatchers=option)
    assert [child.name for child in dispatchers_of(stack)] == [f"dispatcher-{number}" for number in range(count)]


def test_a_database_with_both_roles_is_used_as_it_is(tmp_path: Path) -> None:
    stack = planned(tmp_path, "[store]\ndsn = 'postgres://writer@db/i'\nreader_dsn = 'postgres://reader@db/i'\n")
    assert run(stack._start_store(0)) == ("postgres://writer@db/i", "postgres://reader@db/i")


@pytest.mark.parametrize("most", [2**20, 2**24])
def test_nats_takes_messages_as_large_as_the_settings_say(tmp_path: Path, most: int) -> None:
    skip_without_nats()
    stack = planned(tmp_path, f"[bus]\nmax_payload = {most}\n[dispatcher]\nmax_inline = 1000\n[jobs]\nchunk_kb = 1\n")

    async def main() -> int:
        client = Client()
        try:
            await client.connect(await stack._start_nats(0), allow_reconnect=False)
            return client.max_payload
        finally:
            await client.close()
            await stack._supervisor.stop()

    assert asyncio.run(main()) == most


@pytest.mark.parametrize(("sync", "certain"), [("", True), ("sync_interval: always", False)])
def test_a_nats_of_ones_own_that_may_lose_what_it_acknowledged_is_told_and_refused(
    tmp_path: Path, sync: str, certain: bool
) -> None:
    """bus.monitoring says where it shows that, and bus.require_durable that it is a reason not to start."""
    port, pages = free_port(), free_port()
    text = f'listen: "127.0.0.1:{port}"\nhttp: "127.0.0.1:{pages}"\njetstream {{ store_dir: "{tmp_path / "js"}"\n{sync}\n}}\n'
    (tmp_path / "nats.conf").write_text(text)
    try:
        server = subprocess.Popen([find_nats_server(), "-c", tmp_path / "nats.conf"], stderr=subprocess.DEVNULL)
    except ServerError as error:
        pytest.skip(str(error))
    url, where = f"nats://127.0.0.1:{port}", f"http://127.0.0.1:{pages}"

    def told(monitoring: str, require: str) -> list[str]:
        file = f"[bus]\nurl = '{url}'\nmonitoring = '{monitoring}'\nrequire_durable = {require}\n"
        stack = planned(tmp_path, file)
        run(stack._start_nats(0))
        return stack.notices

    try:
        eventually(lambda: bool(weaknesses(url, where)) == certain and bool(weaknesses(url, "http://127.0.0.1:1")))
        assert [weak.certain for weak in weaknesses(url, "http://127.0.0.1:1")] == [False]
        assert len(told(where, "false")) == certain
        for monitoring in [where] * certain + ["http://127.0.0.1:1"]:
            with pytest.raises(ServerError, match=r"bus\.require_durable forbids.*: set `"):
                told(monitoring, "true")
        if not certain:
            assert told(where, "true") == []
    finally:
        server.kill()
        server.wait()


# -- What a worker of a kind is, and with which workers a system starts.
KINDS = {
    "cpu": MachineKind(minimum=1, maximum=4),
    "small": MachineKind(minimum=2, maximum=3, cores=1, memory_mb=1000),
    "accelerated": MachineKind(maximum=1, simulate={"gpu": 1}),
}


def test_kinds_say_what_they_have_and_how_many_there_are_first() -> None:
    base = WorkerSettings(cores=2, memory_mb=4000, simulate={"inferentia": 1})
    small, accelerated = worker_of("small", KINDS, base), worker_of("accelerated", KINDS, base)
    assert (small.kind, small.cores, small.memory_mb, small.simulate) == ("small", 1, 1000, {"inferentia": 1})
    assert (accelerated.cores, accelerated.memory_mb, accelerated.simulate) == (2, 4000, {"gpu": 1})
    assert worker_of("unheard-of", {}, base).cores == 2
    assert initial(2, MachineSettings()) == {"w0": "cpu", "w1": "cpu"}
    assert initial(1, MachineSettings(kinds=KINDS)) == {"w0": "cpu", "small-0": "small", "small-1": "small"}
    assert initial(1, MachineSettings(kinds={"cpu": MachineKind(minimum=2, maximum=3)})) == {"w0": "cpu", "w1": "cpu"}
    base = WorkerSettings(cores=2, memory_mb=4000, name="a-1-1")
    for kind in KINDS:
        worker = worker_of(kind, KINDS, base)
        read = load(environ=environ_of(worker)).worker
        assert read == worker
        assert [d.kind for d in devices_of(read)] == [d.kind for d in devices_of(worker)]


def test_kinds_are_settings_in_variables_too() -> None:
    environ = {
        "INFAAS_MACHINES__KINDS__CPU__MINIMUM": "1",
        "INFAAS_MACHINES__KINDS__CPU__MAXIMUM": "3",
        "INFAAS_MACHINES__KINDS__FAST__MAXIMUM": "2",
        "INFAAS_MACHINES__KINDS__FAST__SIMULATE": "gpu=2",
        "INFAAS_MACHINES__KINDS__FAST__BOOT_S": "20",
    }
    kinds = load(environ=environ).machines.kinds
    assert kinds == {
        "cpu": MachineKind(minimum=1, maximum=3),
        "fast": MachineKind(maximum=2, simulate={"gpu": 2}, boot_s=20),
    }


def test_remote_engines_are_one_device_whose_address_are_their_hosts() -> None:
    for engines in (("a.test", "10.1.2.3:8000"), "a.test, 10.1.2.3:8000"):
        _, device = devices_of(WorkerSettings(cores=2, gpus=0), (), engines)
        assert (device.name, device.kind, device.address) == ("remote", "remote", "a.test 10.1.2.3:8000")
    assert len(devices_of(WorkerSettings(cores=2, gpus=0), (), "")) == 1
