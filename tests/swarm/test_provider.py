"""The VM-autoscaler's Swarm provider before real engines: labels start and end exactly the workers that they should, whoever leads."""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bus.messages.scaling import StopMachine
from services.autoscaler.vms.commands import Inventory
from services.autoscaler.vms.commands import Node as Known
from services.autoscaler.vms.providers import swarmnodes
from services.autoscaler.vms.providers.base import ProviderError
from services.autoscaler.vms.providers.swarm import Managers, OutOfSequence
from services.autoscaler.vms.providers.swarm import Swarm as Provider
from services.core.settings import SwarmSettings
from tests.support.servers.nats import run
from tests.swarm.node import Node, eventually
from tests.swarm.nodes import Swarm
from tests.swarm.sleepers import IMAGE, containers, insist, pooled, running, start, stop

pytest.importorskip("docker", reason="docker-py is missing: the extra swarm")

pytestmark = [
    pytest.mark.swarm,
    pytest.mark.timeout(240),
    # docker-py forgets the socket of an engine that refuses it, which is found when memory is freed: in the next test, perhaps
    pytest.mark.filterwarnings("ignore:unclosed <socket:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


@pytest.fixture(scope="module")
def made() -> Iterator[Swarm]:
    """One manager, three machines: two of the pool cpu, one of gpu."""
    with pooled(1, *({"infaas.pool": kind, "rack": "7"} for kind in ("cpu", "cpu", "gpu"))) as swarm:
        yield swarm


@pytest.fixture
def swarm(made: Swarm) -> Iterator[Swarm]:
    """The same, with no worker anywhere, before and after."""
    yield made
    for name in ("w0", "w1", "w2"):
        node = made.nodes[name]
        ours = ("worker", "order", "epoch", "bought")
        gone = [
            word for key in ours if f"infaas.{key}" in made.labels(node) for word in ("--label-rm", f"infaas.{key}")
        ]
        made.manager.docker("node", "update", "--availability", "active", *gone, node.id)
    eventually(lambda: not made.tasks(), "no worker's task is left")
    eventually(lambda: not any(containers(made, name) for name in ("w0", "w1", "w2")), "no worker is left")


def provide(*nodes: Node, work: Callable[[Provider], Awaitable[None]], **settings: Any) -> None:
    async def main() -> None:
        provider = Provider(SwarmSettings(hosts=tuple(node.host for node in nodes), **settings))
        try:
            await work(provider)
        finally:
            await provider.close()

    run(main())


def known(inventory: Inventory) -> dict[str, Known]:
    assert inventory.error == ""
    return {node.name: node for node in inventory.nodes}


def test_labels_start_workers_where_they_should_and_end_exactly_the_one(swarm: Swarm) -> None:
    async def work(provider: Provider) -> None:
        assert {name: (n.kind, n.worker, n.open, n.empty) for name, n in known(await provider.inventory()).items()} == {
            "w0": ("cpu", "", True, True),
            "w1": ("cpu", "", True, True),
            "w2": ("gpu", "", True, True),
        }
        await provider.start(start("w0"))
        await provider.start(start("w1", 2))
        await provider.start(start("w2", 3, kind="gpu"))
        all_three = {"w0": ["worker-cpu"], "w1": ["worker-cpu"], "w2": ["worker-gpu"]}
        eventually(lambda: running(swarm) == all_three, "three workers run")
        before = {name: containers(swarm, name) for name in ("w0", "w2")}
        version = swarm.manager.inspect("node", "w0")[0]["Version"]
        await provider.start(start("w0"))  # again: nothing is written
        assert swarm.manager.inspect("node", "w0")[0]["Version"] == version
        assert known(await provider.inventory())["w0"] == Known(
            name="w0", kind="cpu", worker="cpu", order="1-1", empty=False
        )
        await insist(lambda: provider.stop(stop("w1", 2)))
        eventually(lambda: running(swarm) == {"w0": ["worker-cpu"], "w2": ["worker-gpu"]}, "one has ended")
        assert {name: containers(swarm, name) for name in ("w0", "w2")} == before
        assert swarm.labels(swarm.nodes["w1"]) == {"infaas.pool": "cpu", "rack": "7", "infaas.epoch": "1"}
        await insist(lambda: provider.stop(stop("w1", 2)))  # again
        await insist(lambda: provider.stop(stop("nobody")))

    provide(swarm.manager, work=work)


def test_who_may_not_carry_a_worker_is_refused_with_the_reason(swarm: Swarm) -> None:
    async def work(provider: Provider) -> None:
        for order, why in (
            (start("w2"), "w2 has infaas.pool=gpu, not cpu"),
            (start("m0"), "m0 has no label infaas.pool, not cpu"),
            (start("nobody"), "no node of the Swarm has the host name nobody"),
            (start("nobody", bought=True), "no command makes nobody: machines.swarm.add is empty"),
        ):
            with pytest.raises(ProviderError, match=why):
                await provider.start(order)
        for availability in ("drain", "pause"):
            swarm.manager.docker("node", "update", "--availability", availability, "w0")
            node = known(await provider.inventory())["w0"]
            assert (node.availability, node.open) == (availability, False)
            with pytest.raises(ProviderError, match=f"w0 is set to {availability}"):
                await provider.start(start("w0"))
        assert "infaas.worker" not in swarm.labels(swarm.nodes["w0"])

    provide(swarm.manager, work=work)


def test_an_earlier_leader_and_an_earlier_order_change_nothing(swarm: Swarm) -> None:
    async def work(provider: Provider) -> None:
        await provider.start(start("w0", 5, epoch=4))
        with pytest.raises(ProviderError, match="another controller has spoken in epoch 4"):
            await provider.start(start("w0", 9, epoch=3))
        with pytest.raises(ProviderError, match="another controller has spoken in epoch 4"):
            await provider.stop(StopMachine(worker="w0", kind="cpu", epoch=3, order="4-5"))
        await insist(lambda: provider.stop(StopMachine(worker="w0", kind="cpu", epoch=4, order="3-7")))
        # that was about an earlier worker of this name
        assert swarm.labels(swarm.nodes["w0"])["infaas.worker"] == "cpu"
        await insist(lambda: provider.stop(StopMachine(worker="w0", kind="cpu", epoch=5, order="4-5")))
        with pytest.raises(ProviderError, match="another controller has spoken in epoch 5"):
            await provider.start(start("w0", 6, epoch=4))  # it was stopped since by a later leader
        assert "infaas.worker" not in swarm.labels(swarm.nodes["w0"])

    provide(swarm.manager, work=work)


def test_nobodys_labels_are_lost_where_many_write_at_once(swarm: Swarm) -> None:
    """A stale version is refused with `update out of sequence`; both sides read again."""
    stale, node = [], swarm.nodes["w0"]
    others = {f"other.{number}": str(number) for number in range(12)}
    done = threading.Event()

    async def write(managers: Managers, key: str, value: str) -> None:
        while True:
            one = next(m for m in map(swarmnodes.machine, await managers.ask(_nodes)) if m.name == "w0")
            try:
                return await managers.ask(_update(one, one.spec | {"Labels": one.labels | {key: value}}))
            except OutOfSequence:
                stale.append(key)

    async def write_all() -> None:
        managers, count = Managers([swarm.manager.host], "", 5.0), 0
        for key, value in others.items():
            await write(managers, key, value)
        while not stale and count < 1000:
            count += 1
            await write(managers, "other.more", str(count))
        done.set()
        await managers.close()

    async def work(provider: Provider) -> None:
        writing, number = asyncio.create_task(write_all()), 0
        while not done.is_set():
            number += 1
            await insist(lambda number=number: provider.start(start("w0", number)))
            await insist(lambda number=number: provider.stop(stop("w0", number)))
        await writing
        await provider.start(start("w0", 10_000))

    provide(swarm.manager, work=work)
    labels = swarm.labels(node)
    assert labels == labels | others | {"infaas.worker": "cpu", "infaas.order": "1-10000", "rack": "7"}
    gone = [word for key in labels if key.startswith("other.") for word in ("--label-rm", key)]
    swarm.manager.docker("node", "update", *gone, node.id)
    assert stale, "nobody met anybody"


def test_several_controllers_that_start_the_same_at_once_start_it_once(swarm: Swarm) -> None:
    async def work(provider: Provider) -> None:
        others = [Provider(SwarmSettings(hosts=(swarm.manager.host,))) for _ in range(5)]
        await asyncio.gather(*(one.start(start("w0")) for one in [provider, *others]))
        for one in others:
            await one.close()

    provide(swarm.manager, work=work)
    tasks = eventually(lambda: swarm.tasks("worker-cpu"), "the worker's task runs")
    assert [task["Where"] for task in tasks] == ["w0"]
    eventually(lambda: len(containers(swarm, "w0")) == 1, "an earlier test's has ended, too")


def test_a_dry_run_changes_nothing_and_says_what_it_would(swarm: Swarm, caplog: pytest.LogCaptureFixture) -> None:
    before = swarm.manager.inspect("node", "w0", "w1")

    async def work(provider: Provider) -> None:
        with caplog.at_level(logging.INFO):
            await provider.start(start("w0"))
            await provider.start(start("cpu-1-9", bought=True))
            with pytest.raises(ProviderError, match=r"infaas\.pool=gpu"):
                await provider.start(start("w2"))
            await provider.stop(stop("w1", bought=True))

    provide(swarm.manager, work=work, dry_run=True, add=("false",), remove=("false",))
    assert swarm.manager.inspect("node", "w0", "w1") == before
    said = [record for record in caplog.records if "dry run: " in record.message]
    assert [record.message for record in said] == [
        "dry run: labels of a node would be changed",
        "dry run: `add` would be run",
        "dry run: `remove` would be run",
    ]
    assert vars(said[0])["labels"] == {"infaas.worker": "cpu", "infaas.order": "1-1", "infaas.epoch": "1"}


def test_a_machine_that_is_bought_gets_its_label_when_it_has_joined_and_is_given_back(
    swarm: Swarm, tmp_path: Path
) -> None:
    hook = tmp_path / "hook"
    hook.write_text(f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n')
    hook.chmod(0o755)
    name = "cpu-1-4"

    async def work(provider: Provider) -> None:
        assert (await provider.inventory()).buys
        await provider.start(start(name, 4, bought=True))
        await provider.start(start(name, 4, bought=True))  # it has been ordered and is not there yet
        assert (tmp_path / "calls").read_text() == f"on cpu {name}\n"
        swarm.add(name, engine_labels={"infaas.pool": "cpu"})
        swarm.nodes[name].docker("import", swarm.directory / "image.tar", IMAGE)
        node = known(await provider.inventory())[name]
        assert (node.kind, node.worker, node.open) == ("cpu", "", True)
        await provider.start(start(name, 4, bought=True))
        eventually(lambda: running(swarm) == {name: ["worker-cpu"]}, "its worker runs")
        assert known(await provider.inventory())[name].bought
        await insist(lambda: provider.stop(stop(name, 4)))
        assert (tmp_path / "calls").read_text() == f"on cpu {name}\noff cpu {name}\n"

    try:
        provide(swarm.manager, work=work, add=(str(hook), "on"), remove=(str(hook), "off"))
    finally:
        if name in swarm.nodes:
            swarm.forget(swarm.nodes[name])


def test_a_machine_that_dies_loses_its_label_and_comes_back_without_a_worker(swarm: Swarm) -> None:
    """It is killed as a machine that loses its power; the label is the managers', who need not wait for it."""
    swarm.add("w9", {"infaas.pool": "cpu"})
    swarm.nodes["w9"].docker("import", swarm.directory / "image.tar", IMAGE)
    node = swarm.nodes["w9"]

    async def work(provider: Provider) -> None:
        await provider.start(start("w9"))
        eventually(lambda: running(swarm) == {"w9": ["worker-cpu"]}, "its worker runs")
        node.kill()
        eventually(lambda: swarm.status(node) == "down", "it is Down")
        found = known(await provider.inventory())["w9"]
        assert (found.up, found.open, found.worker) == (False, False, "cpu")
        with pytest.raises(ProviderError, match="w9 is down"):
            await provider.start(start("w9", 2))
        await insist(lambda: provider.stop(stop("w9", epoch=2)))
        assert "infaas.worker" not in swarm.labels(node)

    try:
        provide(swarm.manager, work=work)
    finally:
        swarm.forget(node)


@pytest.fixture
def three() -> Iterator[Swarm]:
    """Three managers and two machines of the pool."""
    with pooled(3, *[{"infaas.pool": "cpu"}] * 2) as swarm:
        yield swarm


def test_a_leader_of_the_swarm_that_dies_in_the_middle_loses_and_doubles_nothing(three: Swarm) -> None:
    leader = three.leader
    others = [node for name, node in three.nodes.items() if name.startswith("m") and node is not leader]

    async def work(provider: Provider) -> None:
        await provider.start(start("w0"))
        eventually(lambda: running(three) == {"w0": ["worker-cpu"]}, "the first worker runs")
        first = containers(three, "w0")
        busy = asyncio.create_task(_back_and_forth(provider))
        await asyncio.sleep(1.0)
        leader.kill()
        await busy
        eventually(lambda: running(three) == {"w0": ["worker-cpu"], "w1": ["worker-cpu"]}, "the second worker runs")
        # A manager that has just become the leader may still call a container running that has been ended for the next.
        eventually(lambda: len(containers(three, "w1")) == 1, "one container of the second")
        assert containers(three, "w0") == first
        assert known(await provider.inventory())["w0"].order == "1-1"
        await insist(lambda: provider.stop(stop("w0")))
        eventually(lambda: running(three) == {"w1": ["worker-cpu"]}, "the first has ended")

    async def _back_and_forth(provider: Provider) -> None:
        """Starts and stops of the other machine, while the leader dies."""
        for number in range(2, 14):
            await insist(lambda number=number: provider.start(start("w1", number)))
            await asyncio.sleep(0.2)
            if number < 13:
                await insist(lambda number=number: provider.stop(stop("w1", number)))

    provide(leader, *others, work=work, timeout_s=2.0)


def _nodes(client: Any) -> Any:
    return client.nodes()


def _update(one: swarmnodes.SwarmNode, spec: dict[str, Any]) -> Callable[[Any], Any]:
    return lambda client: client.update_node(one.id, one.version, spec)
