"""Nodes and tasks of a Swarm, as the Docker API shows them, and the labels that make a node run a worker. Pure.

The operator sets `infaas.pool=KIND`, on the node or its engine: it may run a worker of this kind. The VM-autoscaler sets
`infaas.worker=KIND`, by which the Swarm starts that worker; `infaas.order`, the order; `infaas.epoch`, the epoch of the leader that
changed the node last; `infaas.bought=true`, if the node was made for this worker and is removed with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any

from msgspec import Struct

from bus.fields import filled
from bus.messages.scaling import StartMachine, StopMachine
from bus.subjects import valid_name
from services.autoscaler.vms.commands import Node

POOL, WORKER, ORDER, EPOCH, BOUGHT = (f"infaas.{name}" for name in ("pool", "worker", "order", "epoch", "bought"))
STALE_S = 600.0  # s after which a label's epoch is ignored: no order is so late, but after the loss of its bucket epochs restart
GRACE_S = 10.0  # s that a container has to end, unless its service says otherwise
# States of tasks that have ended; tasks in others may still run.
_OVER = frozenset({"complete", "shutdown", "failed", "rejected", "remove", "orphaned"})


class SwarmNode(Struct, frozen=True, kw_only=True):
    """A node. version: of this description, for updates. spec: complete, since an update replaces it. updated: Unix seconds.

    up: also if its state is unknown, since a manager that has just become the leader has not heard from the nodes yet.
    """

    id: str
    name: str
    version: int
    spec: dict[str, Any]
    labels: dict[str, str]
    pool: str
    up: bool
    availability: str
    created: str
    updated: float

    @property
    def worker(self) -> str:
        return self.labels.get(WORKER, "")

    @property
    def order(self) -> str:
        return self.labels.get(ORDER, "")

    @property
    def bought(self) -> bool:
        return self.labels.get(BOUGHT) == "true"


def machine(found: Mapping[str, Any]) -> SwarmNode:
    """One item of GET /nodes."""
    spec, description = dict(found.get("Spec") or {}), found.get("Description") or {}
    labels = dict(spec.get("Labels") or {})
    engine = (description.get("Engine") or {}).get("Labels") or {}
    return SwarmNode(
        id=found["ID"],
        name=description.get("Hostname", ""),
        version=int(found["Version"]["Index"]),
        spec=spec,
        labels=labels,
        pool=labels.get(POOL) or engine.get(POOL) or "",
        up=(found.get("Status") or {}).get("State") not in ("down", "disconnected"),
        availability=spec.get("Availability", "active"),
        created=found.get("CreatedAt", ""),
        updated=_seconds(found.get("UpdatedAt", "")),
    )


def named(machines: Iterable[SwarmNode], name: str) -> list[SwarmNode]:
    """The nodes of this host name, the valid one first: a machine that joins again leaves its old node behind."""
    found = [one for one in machines if one.name == name]
    return sorted(found, key=lambda one: (one.up, one.created), reverse=True)


def ambiguous(same: Sequence[SwarmNode]) -> bool:
    """Whether several nodes that are up have this name."""
    return sum(one.up for one in same) > 1


def busy(tasks: Iterable[Mapping[str, Any]], now: float = inf) -> set[str]:
    """Ids of nodes on which a task of a worker service may still run, that is, of a service placed by the label.

    now: tasks count, too, if their label was removed so lately that their container may still be ending. The Swarm calls such a task
    rejected from that moment, and does not say when its container has ended.
    """
    return {
        task.get("NodeID", "")
        for task in tasks
        if any(map(_by_label, _constraints(task))) and (_runs(task) or now - _rejected(task) < _grace(task))
    }


def inventory(
    machines: Sequence[SwarmNode], tasks: Iterable[Mapping[str, Any]], now: float
) -> tuple[list[Node], list[str]]:
    """The provider's inventory, and names that cannot be used: they are invalid for workers, or several nodes have them."""
    taken, found, unusable = busy(tasks, now), [], []
    for name in sorted({one.name for one in machines if one.pool or one.worker}):
        same = named(machines, name)
        one = same[0]
        if not valid_name(name) or ambiguous(same):
            unusable.append(name)
            continue
        # the label of a node that is gone must be removed, too
        old = next((other for other in same if other.worker), one)
        found.append(
            filled(
                Node,
                one,
                kind=one.pool,
                worker=one.worker or old.worker,
                order=one.order or old.order,
                empty=one.id not in taken,
            )
        )
    return found, unusable


def obstacle(one: SwarmNode, order: StartMachine, now: float) -> str:
    """Why this node may not run the ordered worker; empty if it may, or runs it already."""
    late = outdated(one, order.epoch, now)
    if late:
        return late
    if not one.up:
        return f"the node {one.name} is down"
    if one.availability != "active":
        return f"the node {one.name} is set to {one.availability}"
    if one.worker:
        if one.worker != order.kind:
            return f"the node {one.name} runs a worker of kind {one.worker}, not {order.kind}"
        return f"the node {one.name} was given to order {one.order} since" if later(one.order, order.order) else ""
    if one.pool != order.kind:
        return f"the node {one.name} has {f'{POOL}={one.pool}' if one.pool else f'no label {POOL}'}, not {order.kind}"
    return ""


def started(one: SwarmNode, order: StartMachine) -> dict[str, str]:
    """Its labels when it runs the worker."""
    labels = one.labels | {WORKER: order.kind, EPOCH: str(order.epoch)}
    if order.order:
        labels[ORDER] = order.order
    if order.bought:
        labels[BOUGHT] = "true"
    return labels


def stopped(one: SwarmNode, order: StopMachine) -> dict[str, str]:
    """Its labels when it runs it no more. The epoch is kept, so that orders of earlier leaders are refused."""
    labels = {key: value for key, value in one.labels.items() if key not in (WORKER, ORDER)}
    return labels | {EPOCH: str(order.epoch)} if one.worker else labels


def outdated(one: SwarmNode, epoch: int, now: float) -> str:
    """Why an order of this epoch is outdated; empty if it is not."""
    label = one.labels.get(EPOCH, "")
    if not label.isdigit() or epoch >= int(label) or now - one.updated > STALE_S:
        return ""
    return f"the order is of epoch {epoch}, and on {one.name} another controller has spoken in epoch {label}"


def later(one: str, other: str) -> bool:
    """Whether the first of two orders, "EPOCH-NUMBER" each, was given after the second. No order ("") is before all."""
    return _place(one) > _place(other)


def _place(order: str) -> tuple[int, ...]:
    parts = order.split("-")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def _runs(task: Mapping[str, Any]) -> bool:
    return (task.get("Status") or {}).get("State") not in _OVER


def _rejected(task: Mapping[str, Any]) -> float:
    """When the task was ordered to end because the node's label was removed; Unix seconds; -inf: it was not."""
    status = task.get("Status") or {}
    return _seconds(status.get("Timestamp", "")) if status.get("State") == "rejected" else -inf


def _grace(task: Mapping[str, Any]) -> float:
    """Seconds that its container has to end."""
    container = (task.get("Spec") or {}).get("ContainerSpec") or {}
    return float(container.get("StopGracePeriod") or GRACE_S * 1e9) / 1e9


def _constraints(task: Mapping[str, Any]) -> list[str]:
    placement = (task.get("Spec") or {}).get("Placement") or {}
    return list(placement.get("Constraints") or ())


def _by_label(constraint: str) -> bool:
    return constraint.replace(" ", "").startswith(f"node.labels.{WORKER}==")


def _seconds(text: str) -> float:
    """Unix seconds of the API's times, which have nanoseconds; 0: no time."""
    try:
        return datetime.fromisoformat(text[:19] + "+00:00").timestamp()
    except ValueError:
        return 0.0
