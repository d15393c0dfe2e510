"""Nodes and tasks as the Docker API tells them: what is made of labels, whose orders count, which machines are free."""

from typing import Any

import pytest

from bus.messages.scaling import StartMachine, StopMachine
from services.autoscaler.vms.providers.swarmnodes import (
    SwarmNode,
    ambiguous,
    busy,
    inventory,
    later,
    machine,
    named,
    obstacle,
    outdated,
    started,
    stopped,
)

NOW = 1_763_780_400.0  # 2025-11-22T03:00:00Z
AT = "2025-11-22T03:00:00.123456789Z"
CONSTRAINT = "node.labels.infaas.worker == cpu"


def node(name: str = "n1", **more: Any) -> SwarmNode:
    labels = {f"infaas.{key}": value for key, value in more.pop("labels", {"pool": "cpu"}).items()}
    found: dict[str, Any] = {
        "ID": f"id-{name}",
        "Version": {"Index": 7},
        "CreatedAt": AT,
        "UpdatedAt": AT,
        "Spec": {"Role": "worker", "Availability": more.pop("availability", "active"), "Labels": labels},
        "Description": {"Hostname": name, "Engine": {"Labels": more.pop("engine", {})}},
        "Status": {"State": more.pop("state", "ready")},
    }
    return machine(found | more)


def task(state: str = "running", on: str = "id-n1", constraint: str = CONSTRAINT, at: str = AT, **more: Any) -> Any:
    spec = {"Placement": {"Constraints": ["node.platform.os == linux", constraint]}, "ContainerSpec": more}
    return {"ID": "t", "NodeID": on, "Spec": spec, "Status": {"State": state, "Timestamp": at}}


def start(**more: Any) -> StartMachine:
    return StartMachine(**({"worker": "n1", "kind": "cpu", "epoch": 3, "order": "3-1"} | more))


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, ("cpu", "", True, "active")),
        ({"labels": {}, "engine": {"infaas.pool": "gpu"}}, ("gpu", "", True, "active")),
        ({"engine": {"infaas.pool": "gpu"}}, ("cpu", "", True, "active")),
        ({"labels": {"worker": "cpu"}, "state": "down"}, ("", "cpu", False, "active")),
        ({"state": "unknown", "availability": "drain"}, ("cpu", "", True, "drain")),
        ({"state": "disconnected"}, ("cpu", "", False, "active")),
    ],
)
def test_a_node_as_the_api_has_it(fields: Any, expected: Any) -> None:
    found = node(**fields)
    assert (found.pool, found.worker, found.up, found.availability) == expected
    assert (found.version, found.updated) == (7, NOW)


def test_nodes_may_lack_fields_and_unusable_names_are_left_out() -> None:
    found = machine({"ID": "a", "Version": {"Index": 1}, "Spec": {"Labels": None}, "Description": {"Hostname": "a"}})
    assert (found.labels, found.pool, found.availability, found.updated) == ({}, "", "active", 0.0)
    machines = [node("a.example.org"), node("b"), node("b", ID="other"), node("c")]
    found, unusable = inventory(machines, [], NOW)
    assert [n.name for n in found] == ["c"]
    assert unusable == ["a.example.org", "b"]


@pytest.mark.parametrize(
    ("fields", "order", "why"),
    [
        ({}, {}, ""),
        ({"state": "down"}, {}, "the node n1 is down"),
        ({"availability": "pause"}, {}, "the node n1 is set to pause"),
        ({"labels": {}}, {}, "the node n1 has no label infaas.pool, not cpu"),
        ({"labels": {"pool": "gpu"}}, {}, "the node n1 has infaas.pool=gpu, not cpu"),
        ({"labels": {"pool": "cpu", "worker": "gpu"}}, {}, "the node n1 runs a worker of kind gpu, not cpu"),
        ({"labels": {"worker": "cpu"}}, {}, ""),  # the operator's, without a pool
        ({"labels": {"worker": "cpu", "order": "3-1"}}, {}, ""),  # repeated
        ({"labels": {"worker": "cpu", "order": "3-2"}}, {}, "the node n1 was given to order 3-2 since"),
        ({"labels": {"worker": "cpu", "order": "3-10"}}, {"order": "3-9"}, "the node n1 was given to order 3-10 since"),
        ({"labels": {"pool": "cpu", "epoch": "4"}}, {}, "the order is of epoch 3, and on n1 another controller has spoken in epoch 4"),
        ({"labels": {"pool": "cpu", "epoch": "3"}}, {}, ""),
        ({"labels": {"pool": "cpu", "epoch": "who knows"}}, {}, ""),
    ],
)  # fmt: skip
def test_which_orders_are_carried_out(fields: Any, order: Any, why: str) -> None:
    assert obstacle(node(**fields), start(**order), NOW + 1.0) == why


def test_labels_of_a_worker_come_and_go_and_others_stay() -> None:
    one = node(labels={"pool": "cpu", "db": "true"})
    wanted = started(one, start())
    assert wanted == one.labels | {"infaas.worker": "cpu", "infaas.order": "3-1", "infaas.epoch": "3"}
    labels = {key.removeprefix("infaas."): value for key, value in wanted.items()}
    after = stopped(node(labels=labels), StopMachine(worker="n1", epoch=4, order="3-1"))
    assert after == one.labels | {"infaas.epoch": "4"}
    assert started(node(), start(bought=True))["infaas.bought"] == "true"
    assert stopped(one, StopMachine(worker="n1", epoch=4)) == one.labels  # nothing to do


def test_later_orders_win_for_ten_minutes() -> None:
    assert later("3-10", "3-9")
    assert later("4-1", "3-99")
    assert later("1-1", "")
    assert not later("3-1", "3-1")
    assert not later("", "1-1")
    assert not later("nonsense", "1-1")
    # No order is so late; but a control bucket that was lost begins with epoch 1 again.
    one = node(labels={"pool": "cpu", "epoch": "9"})
    assert outdated(one, 1, NOW + 599.0)
    assert not outdated(one, 1, NOW + 601.0)


def test_tasks_that_a_label_decides_about_keep_a_node_busy_until_they_have_ended() -> None:
    assert busy([task("running"), task("pending", on="id-n2")]) == {"id-n1", "id-n2"}
    assert busy([task("shutdown"), task("failed"), task("complete"), task("orphaned")]) == set()
    assert busy([task(constraint="node.labels.infaas.nats == true")]) == set()
    assert busy([task(constraint="node.labels.infaas.worker==gpu")]) == {"id-n1"}
    assert busy([{"ID": "t", "NodeID": "n", "Status": {"State": "running"}, "Spec": {}}]) == set()
    # The Swarm says rejected at once, and never when the container has ended.
    gone = task("rejected")
    assert busy([gone]) == set()
    assert busy([gone], NOW + 9.0) == {"id-n1"}
    assert busy([gone], NOW + 11.0) == set()
    assert busy([task("rejected", StopGracePeriod=60 * 10**9)], NOW + 59.0) == {"id-n1"}


def test_the_inventory() -> None:
    machines = [
        node("a"),
        node("b", labels={"pool": "cpu", "worker": "cpu", "order": "1-1"}),
        node("c", state="down"),
        node("d", labels={"db": "true"}),  # nothing to do with workers
        node("e", labels={"worker": "cpu", "bought": "true"}),
    ]
    found, unusable = inventory(machines, [task(on="id-a")], NOW)
    assert [(n.name, n.kind, n.worker, n.order, n.up, n.empty, n.bought) for n in found] == [
        ("a", "cpu", "", "", True, False, False),
        ("b", "cpu", "cpu", "1-1", True, True, False),
        ("c", "cpu", "", "", False, True, False),
        ("e", "", "cpu", "", True, True, True),
    ]
    assert unusable == []


def test_a_machine_that_has_joined_anew_leaves_an_old_node_behind() -> None:
    old = node("a", ID="old", state="down", labels={"worker": "cpu", "order": "1-1"})
    new = node("a", ID="new", CreatedAt="2025-11-22T04:00:00Z")
    assert [one.id for one in named([old, new], "a")] == ["new", "old"]
    assert not ambiguous(named([old, new], "a"))
    [found], _ = inventory([old, new], [], NOW)
    assert (found.up, found.worker, found.order) == (True, "cpu", "1-1")  # the old one's label has to go first
