"""The engine proxy before a real manager, asked by the client library that the VM-autoscaler uses: docker-py."""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.nats import free_port
from tests.support.servers.processes import environ, eventually
from tests.swarm.node import Node
from tests.swarm.nodes import Swarm, missing

docker = pytest.importorskip("docker", reason="docker-py is missing: the extra swarm")

pytestmark = [pytest.mark.swarm, pytest.mark.timeout(180)]
SECRET = "hunter2"


@pytest.fixture(scope="module")
def manager() -> Iterator[Node]:
    """The manager of a swarm of one, with a service that holds secrets in every place there is for them."""
    if reason := missing():
        pytest.skip(reason)
    with Swarm(managers=1, workers=0) as swarm:
        node = swarm.manager
        (node.directory / "secret").write_text(SECRET)
        node.docker("secret", "create", "password", node.directory / "secret")
        node.docker("config", "create", "settings", node.directory / "secret")
        told = ["--env", f"PGPASSWORD={SECRET}", "--secret", "password", "--config", "settings"]
        told += ["--label", f"note={SECRET}", "--container-label", f"note={SECRET}", "--label", "infaas.kind=cpu"]
        told += ["--mount", "type=bind,src=/,dst=/host", "--health-cmd", f"check {SECRET}"]
        placed = ["--mode", "global", "--endpoint-mode", "dnsrr", "--restart-delay", "300s", "--no-resolve-image"]
        node.docker("service", "create", "--detach", "--name", "worker-cpu", *placed, *told, "nowhere:1", "run", SECRET)
        yield node


@pytest.fixture(scope="module")
def proxy(manager: Node) -> Iterator[tuple[str, Path]]:
    """Its address, and its log."""
    port, pages = free_port(), free_port()
    said = environ(
        INFAAS_ENGINE__PORT=str(port),
        INFAAS_ENGINE__SOCKET=manager.host.removeprefix("unix://"),
        INFAAS_METRICS__PORT=str(pages),
    )
    log = manager.directory / "proxy.log"
    command = [sys.executable, "-P", "-m", "infaas.cli", "run", "engine-proxy"]
    with log.open("w") as file, subprocess.Popen(command, env=said, stderr=file) as process:
        try:
            assert eventually(lambda: "the engine proxy runs" in log.read_text())
            yield f"tcp://127.0.0.1:{port}", log
        finally:
            process.terminate()
            process.wait(20)


@pytest.fixture
def client(proxy: tuple[str, Path]) -> Iterator[Any]:
    found = docker.DockerClient(base_url=proxy[0], timeout=30)
    yield found
    found.close()


def test_it_settles_the_version_and_says_who_manages(client: Any) -> None:
    assert client.ping()
    assert client.version()["ApiVersion"] == client.api.api_version
    assert client.info()["Swarm"]["ControlAvailable"] is True


def test_nodes_services_and_tasks_are_read(client: Any, manager: Node) -> None:
    (node,) = client.nodes.list()
    assert (node.id, node.attrs["Description"]["Hostname"]) == (manager.id, manager.name)
    assert node.attrs["Status"]["State"] == "ready"
    assert client.nodes.list(filters={"role": "worker"}) == []
    assert client.nodes.get(manager.name).id == node.id
    (service,) = client.services.list(filters={"name": "worker-cpu"})
    assert service.attrs["Spec"]["Labels"] == {"infaas.kind": "cpu"}
    assert eventually(lambda: bool(client.api.tasks(filters={"service": "worker-cpu"})))
    (task, *_) = client.api.tasks(filters={"service": "worker-cpu", "node": manager.name})
    assert (task["NodeID"], task["ServiceID"]) == (node.id, service.id)
    assert task["Status"]["State"]


def test_no_secret_is_read(client: Any) -> None:
    assert eventually(lambda: bool(client.api.tasks()))
    told = [client.api.nodes(), client.api.services(), client.api.tasks(), client.info(), client.version()]
    assert SECRET not in json.dumps(told)
    assert "PRIVATE" not in json.dumps(told)


def labels(node: Any, **change: str | None) -> dict[str, Any]:
    """The node's spec with labels infaas.NAME set, or removed where None."""
    wanted = dict(node.attrs["Spec"].get("Labels") or {})
    for name, value in change.items():
        if value is None:
            del wanted[f"infaas.{name}"]
        else:
            wanted[f"infaas.{name}"] = value
    return {**node.attrs["Spec"], "Labels": wanted}


def test_labels_of_ours_are_set_and_removed(client: Any, manager: Node, proxy: tuple[str, Path]) -> None:
    manager.docker("node", "update", "--label-add", "rack=7", manager.id)
    try:
        for change in ({"worker": "cpu", "order": "cpu"}, {"worker": None, "order": "gpu"}, {"order": None}):
            before = manager.inspect("node", manager.id)[0]
            node = client.nodes.get(manager.id)
            assert node.update(labels(node, **change)) is True
            after = manager.inspect("node", manager.id)[0]
            assert after["Spec"] == {**before["Spec"], "Labels": labels(node, **change)["Labels"]}
        assert after["Spec"]["Labels"] == {"rack": "7"}
    finally:
        manager.docker("node", "update", "--label-rm", "rack", manager.id)
    changes = [line for line in lines(proxy[1]) if line["message"] == "labels of a node were changed"]
    assert [(line["hostname"], line["set"], line["removed"]) for line in changes][-3:] == [
        (manager.name, {"infaas.worker": "cpu", "infaas.order": "cpu"}, []),
        (manager.name, {"infaas.order": "gpu"}, ["infaas.worker"]),
        (manager.name, {}, ["infaas.order"]),
    ]


def lines(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


def test_of_two_writers_the_later_hears_what_the_engine_says(client: Any, manager: Node) -> None:
    first, second = client.nodes.get(manager.id), client.nodes.get(manager.id)
    assert first.update(labels(first, a="1"))
    direct = docker.DockerClient(base_url=manager.host)
    with pytest.raises(docker.errors.APIError) as ours:
        second.update(labels(second, a="2"))
    with pytest.raises(docker.errors.APIError) as theirs:
        direct.api.update_node(manager.id, second.version, labels(second, a="2"))
    direct.close()
    assert (ours.value.status_code, ours.value.explanation) == (theirs.value.status_code, theirs.value.explanation)
    first.reload()
    assert first.update(labels(first, a=None))


def asked(change: dict[str, Any]) -> Callable[[Any, Node], Any]:
    return lambda client, node: client.nodes.get(node.id).update({**client.nodes.get(node.id).attrs["Spec"], **change})


def raw(method: str, path: str, **headers: str) -> Callable[[Any, Node], Any]:
    """What docker-py has no verb for, or answers of its own."""

    def ask(client: Any, _: Node) -> None:
        url = f"{client.api.base_url}/v{client.api.api_version}{path}"
        client.api._raise_for_status(client.api.request(method, url, headers=headers, timeout=9))

    return ask


ATTEMPTS: dict[str, Callable[[Any, Node], Any]] = {
    "list containers": lambda client, _: client.containers.list(),
    "create a container": lambda client, _: client.api.create_container("nowhere:1", "sh"),
    "start a container": lambda client, _: client.api.start("x"),
    "exec in a container": lambda client, _: client.api.exec_create("x", "sh"),
    "attach to a container": raw("POST", "/containers/x/attach?stream=1", Connection="Upgrade", Upgrade="tcp"),
    "attach by a web socket": raw("GET", "/containers/x/attach/ws"),
    "take a session over": raw("POST", "/session", Connection="Upgrade", Upgrade="h2c"),
    "climb out of a path": raw("GET", "/nodes/%2e%2e/containers/json"),
    "read logs": raw("GET", "/services/worker-cpu/logs?stdout=1"),
    "read one service": lambda client, _: client.services.get("worker-cpu"),
    "create a service": lambda client, _: client.services.create("nowhere:1", mounts=["/:/host:rw"]),
    "update a service": lambda client, _: client.services.list()[0].force_update(),
    "remove a service": lambda client, _: client.api.remove_service("worker-cpu"),
    "list secrets": lambda client, _: client.secrets.list(),
    "list configs": lambda client, _: client.configs.list(),
    "make a secret": lambda client, _: client.secrets.create(name="x", data=b"x"),
    "list images": lambda client, _: client.images.list(),
    "pull an image": lambda client, _: client.api.pull("nowhere", tag="1"),
    "list volumes": lambda client, _: client.volumes.list(),
    "list networks": lambda client, _: client.networks.list(),
    "look at the swarm and its tokens": lambda client, _: client.api.inspect_swarm(),
    "unlock key": lambda client, _: client.swarm.get_unlock_key(),
    "leave the swarm": lambda client, _: client.swarm.leave(force=True),
    "begin a swarm": lambda client, _: client.api.init_swarm(force_new_cluster=True),
    "remove a node": lambda client, node: client.api.remove_node(node.id, force=True),
    "demote a node": asked({"Role": "worker"}),
    "drain a node": asked({"Availability": "drain"}),
    "name a node": asked({"Name": "other"}),
    "label of another": asked({"Labels": {"rack": "9"}}),
    "say where databases are": asked({"Labels": {"infaas.db": "true"}}),
    "listen to events": raw("GET", "/events?until=1"),
    "disk usage": lambda client, _: client.df(),
    "prune": lambda client, _: client.containers.prune(),
    "plugins": lambda client, _: client.plugins.list(),
    "log in to a registry": lambda client, _: client.login("a", "b", registry="nowhere"),
}


@pytest.mark.parametrize("attempt", ATTEMPTS.values(), ids=ATTEMPTS.keys())
def test_all_else_is_refused_in_words_that_clients_show(
    attempt: Callable[[Any, Node], Any], client: Any, manager: Node, proxy: tuple[str, Path]
) -> None:
    before = (manager.inspect("node", manager.id)[0]["Spec"], len(lines(proxy[1])))
    with pytest.raises(docker.errors.APIError) as refused:
        attempt(client, manager)
    assert refused.value.status_code == 403
    assert "engine proxy" in refused.value.explanation
    assert manager.inspect("node", manager.id)[0]["Spec"] == before[0]
    logged = [line for line in lines(proxy[1])[before[1] :] if line["message"] == "refused"]
    assert {line["client"] for line in logged} == {"127.0.0.1"}
    assert logged[-1]["reason"] == refused.value.explanation


def test_an_engine_that_goes_away(tmp_path: Path) -> None:
    """Its clients are told so, and do not wait for ever."""
    if reason := missing():
        pytest.skip(reason)
    with Swarm(managers=1, workers=0) as swarm:
        node, port = swarm.manager, free_port()
        said = environ(INFAAS_ENGINE__PORT=str(port), INFAAS_ENGINE__SOCKET=node.host.removeprefix("unix://"))
        command = [sys.executable, "-P", "-m", "infaas.cli", "run", "engine-proxy"]
        with (tmp_path / "log").open("w") as log, subprocess.Popen(command, env=said, stderr=log) as process:
            try:
                assert eventually(lambda: "the engine proxy runs" in (tmp_path / "log").read_text())
                client = docker.DockerClient(base_url=f"tcp://127.0.0.1:{port}", version="1.41", timeout=30)
                assert [found.id for found in client.nodes.list()] == [node.id]
                node.kill()
                began = time.monotonic()
                with pytest.raises(docker.errors.APIError) as away:
                    client.nodes.list()
                assert away.value.status_code == 502
                assert time.monotonic() - began < 15
                client.close()
            finally:
                process.terminate()
                process.wait(20)
