"""Nodes and tasks of a Swarm as the Docker API tells them, and the labels by which a node carries a worker. Pure.

Set by the operator: `infaas.pool=KIND`, of the node or of its engine: it may carry a worker of this kind. Set by the VM-autoscaler:
`infaas.worker=KIND`, by which the Swarm starts that worker; `infaas.order`, whose order that was; `infaas.epoch`, the last leader that
has spoken; `infaas.bought=true`, the node was made for this worker and is removed with it.
"""

from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from math import inf
from typing import Any

from msgspec import Struct

from bus.messages.scaling import StartMachine, StopMachine
from bus.subjects import valid_name
from services.autoscaler.vms.commands import Node

POOL, WORKER, ORDER, EPOCH, BOUGHT = (f"infaas.{name}" for name in ("pool", "worker", "order", "epoch", "bought"))
STALE_S = (
    600.0  # s after which a label's epoch holds nobody up any more: no order is so late, but a lost bucket begins anew
)
GRACE_S = 10.0  # s that a container has to end, where its service does not say
_OVER = frozenset(
    {"complete", "shutdown", "failed", "rejected", "remove", "orphaned"}
)  # of tasks; the others may still run


class SwarmNode(Struct, frozen=True, kw_only=True):
    """A node. version: of what is known here, for updates. spec: whole, since an update replaces it. updated: Unix s.

    up: also while nothing is known: a manager that has only just come to lead has yet to hear from the nodes.
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
    """Those of this host name, the one that counts first: a machine that has joined anew leaves its old node behind."""
    found = [one for one in machines if one.name == name]
    return sorted(found, key=lambda one: (one.up, one.created), reverse=True)


def ambiguous(same: Sequence[SwarmNode]) -> bool:
    """Whether several machines that are up have this name."""
    return sum(one.up for one in same) > 1


def busy(tasks: Iterable[Mapping[str, Any]], now: float = inf) -> set[str]:
    """Ids of nodes on which a task of a worker service may still run: one that the label decides about.

    now: counts those, too, whose label went so lately that their container may still be ending. The Swarm calls such a task rejected
    from that moment, and never tells when its container has ended.
    """
    return {
        task.get("NodeID", "")
        for task in tasks
        if any(map(_by_label, _constraints(task))) and (_runs(task) or now - _rejected(task) < _grace(task))
    }


def inventory(
    machines: Sequence[SwarmNode], tasks: Iterable[Mapping[str, Any]], now: float
) -> tuple[list[Node], list[str]]:
    """What the controller is told, and names that cannot be used: no worker can be called so, or two machines are."""
    taken, found, unusable = busy(tasks, now), [], []
    for name in sorted({one.name for one in machines if one.pool or one.worker}):
        same = named(machines, name)
        one = same[0]
        if not valid_name(name) or ambiguous(same):
            unusable.append(name)
            continue
        old = next((other for other in same if other.worker), one)  # a label on a node that is gone has to go, too
        found.append(
            Node(
                name=name,
                kind=one.pool,
                worker=one.worker or old.worker,
                order=one.order or old.order,
                up=one.up,
                availability=one.availability,
                empty=one.id not in taken,
                bought=one.bought,
            )
        )
    return found, unusable


def obstacle(one: SwarmNode, order: StartMachine, now: float) -> str:
    """Why this machine may not carry the worker that is ordered; empty when it may, or does already."""
    late = outdated(one, order.epoch, now)
    if late:
        return late
    if not one.up:
        return f"the node {one.name} is down"
    if one.availability != "active":
        return f"the node {one.name} is set to {one.availability}"
    if one.worker:
        if one.worker != order.kind:
            return f"the node {one.name} carries a worker of kind {one.worker}, not {order.kind}"
        return f"the node {one.name} was given to order {one.order} since" if later(one.order, order.order) else ""
    if one.pool != order.kind:
        return f"the node {one.name} has {f'{POOL}={one.pool}' if one.pool else f'no label {POOL}'}, not {order.kind}"
    return ""


def started(one: SwarmNode, order: StartMachine) -> dict[str, str]:
    """Its labels when it carries the worker."""
    labels = one.labels | {WORKER: order.kind, EPOCH: str(order.epoch)}
    if order.order:
        labels[ORDER] = order.order
    if order.bought:
        labels[BOUGHT] = "true"
    return labels


def stopped(one: SwarmNode, order: StopMachine) -> dict[str, str]:
    """Its labels when it does not any more. The epoch stays, so that no earlier leader's order is obeyed."""
    labels = {key: value for key, value in one.labels.items() if key not in (WORKER, ORDER)}
    return labels | {EPOCH: str(order.epoch)} if one.worker else labels


def outdated(one: SwarmNode, epoch: int, now: float) -> str:
    """Why an order of this epoch comes too late; empty when it does not."""
    label = one.labels.get(EPOCH, "")
    if not label.isdigit() or epoch >= int(label) or now - one.updated > STALE_S:
        return ""
    return f"the order is of epoch {epoch}, and on {one.name} another controller has spoken in epoch {label}"


def later(one: str, other: str) -> bool:
    """Whether the first of two orders, "EPOCH-NUMBER" each, was given after the second; one that nobody gave was before all."""
    return _place(one) > _place(other)


def _place(order: str) -> tuple[int, ...]:
    parts = order.split("-")
    return tuple(map(int, parts)) if all(part.isdigit() for part in parts) else ()


def _runs(task: Mapping[str, Any]) -> bool:
    return (task.get("Status") or {}).get("State") not in _OVER


def _rejected(task: Mapping[str, Any]) -> float:
    """When the task was told to end since the node's label had gone; Unix s, -inf where it was not."""
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
    """Unix seconds of the API's times, which have nanoseconds; 0 where there are none."""
    try:
        return datetime.fromisoformat(text[:19] + "+00:00").timestamp()
    except ValueError:
        return 0.0
