"""services/engine/views.py: what is told of answers that a real engine gave, and what is not."""

import json
from typing import Any

import pytest

from services.engine.views import VIEWS, Unexpected, node, view
from tests.support.servers.docker_engine import ANSWERS, NODE

RECORDED: dict[str, Any] = json.loads(ANSWERS.read_text())
SECRET = (
    "hunter2"  # stands wherever people put passwords: environment, arguments, labels, health check, log options, proxy
)
PLACES = (
    "Env",
    "Args",
    "Command",
    "Secrets",
    "Configs",
    "Mounts",
    "Healthcheck",
    "LogDriver",
    "TLSInfo",
    "PreviousSpec",
)


def keys(found: Any) -> set[str]:
    if isinstance(found, dict):
        return set(found).union(*(keys(value) for value in found.values()))
    return set().union(*(keys(item) for item in found)) if isinstance(found, list) else set()


@pytest.mark.parametrize("path", VIEWS)
def test_no_secret_is_told(path: str) -> None:
    told = view(path)(RECORDED[path])
    assert SECRET not in json.dumps(told)
    assert not keys(told) & set(PLACES)


def test_secrets_were_there() -> None:
    for path in ("/info", "/tasks", "/services"):
        assert SECRET in json.dumps(RECORDED[path])
    assert set(PLACES) - keys(RECORDED) == {"Command", "PreviousSpec"}


def test_a_node_is_told_with_the_whole_spec_that_goes_back() -> None:
    (told,) = view("/nodes")(RECORDED["/nodes"])
    assert told["Spec"] == RECORDED["/nodes"][0]["Spec"]
    assert (told["ID"], told["Version"]) == (NODE, {"Index": 14})
    assert told["Description"]["Hostname"] == "n0"
    assert told["Status"]["State"] == "ready"
    assert told["ManagerStatus"]["Leader"] is True
    assert told == node(RECORDED["/nodes"][0]) == view(f"/nodes/{NODE}")(RECORDED["/nodes"][0])


def test_a_task_is_told_with_where_and_how_it_is() -> None:
    (recorded,) = json.loads(json.dumps(RECORDED["/tasks"]))
    recorded["Spec"]["ContainerSpec"]["StopGracePeriod"] = 45 * 10**9
    (told,) = view("/tasks")([recorded])
    assert told["Status"]["State"] == "rejected"
    assert told["DesiredState"] == "ready"
    assert told["NodeID"] == NODE
    assert told["ServiceID"] == RECORDED["/services"][0]["ID"]
    assert told["Spec"]["ContainerSpec"] == {
        "Image": "nowhere.example/infaas:1",
        "StopGracePeriod": 45 * 10**9,  # how long its container may go on after its label went
    }


def test_a_service_is_told_with_its_name_place_and_own_labels() -> None:
    (told,) = view("/services")(RECORDED["/services"])
    assert told["Spec"]["Name"] == "worker-cpu"
    assert told["Spec"]["Mode"] == {"Global": {}}
    assert told["Spec"]["Labels"] == {"com.docker.stack.namespace": "infaas", "infaas.kind": "cpu"}
    assert told["Spec"]["TaskTemplate"]["Placement"] == {"Constraints": ["node.labels.infaas.worker == cpu"]}


def test_what_is_told_of_the_engine() -> None:
    info = view("/info")(RECORDED["/info"])
    assert info["Swarm"]["ControlAvailable"] is True
    assert "Cluster" not in info["Swarm"]
    assert view("/version")(RECORDED["/version"])["ApiVersion"] == "1.41"


@pytest.mark.parametrize("path", VIEWS)
def test_what_a_later_engine_adds_stays_with_it(path: str) -> None:
    def grown(found: Any) -> Any:
        if isinstance(found, list):
            return [grown(item) for item in found]
        if not isinstance(found, dict):
            return found
        return {key: grown(value) for key, value in found.items()} | {"Added": {"by": "a later engine"}}

    plain, more = view(path)(RECORDED[path]), view(path)(grown(RECORDED[path]))
    told = keys(more) - keys(plain)
    assert told <= {"Added", "by"}
    for one in more if isinstance(more, list) else [more]:
        assert "Added" not in one
        assert "Added" not in one.get("Swarm", {})
        assert "Added" not in one.get("Description", {})
        assert "Added" not in one.get("Spec", {}) or path == "/nodes"


@pytest.mark.parametrize("found", [None, 1, "text", [1], [None], {"a": 1}, [{"Description": []}]])
def test_what_is_no_answer_is_seen(found: Any) -> None:
    with pytest.raises(Unexpected):
        view("/nodes")(found)
    with pytest.raises(Unexpected):
        view("/services")([{"Spec": 1}])
