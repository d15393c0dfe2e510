"""Orders to the provider: which machine starts under which name, and which stops; the dry run, which changes nothing; and the machines
of a provider that has its own: which are free, closed by the operator, or set to run a worker. Pure.

Those are known from inventories, which take time. An inventory says nothing about machines that were ordered since it began.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from math import inf

from msgspec import Struct, field

from bus.fields import filled
from bus.messages.scaling import MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.commands import ControllerEffects, Inventory, ListMachines, Node, Start, Stop, Turn
from services.autoscaler.vms.fleet import SILENT_S, Fleet
from services.autoscaler.vms.rules import Add, FleetLimits, Remove
from services.core.actor import NOTHING, Do, Effect

INVENTORY_S = 15.0  # s: several managers may have to be asked, one after the other


class InventoryView(Struct, eq=False):
    """What is known of the provider's machines.

    exists: whether the provider has machines of its own. If it has none, machines are made under new names.
    """

    fleet: Fleet
    exists: bool = False
    _nodes: dict[str, Node] = {}
    _buys: bool = False
    _known: bool = False  # an inventory has succeeded
    _answered: bool = False
    _error: str = ""
    _began: float = -inf  # when the inventory began that is shown
    _asked: float | None = None  # when the inventory began that is under way
    _ordered: dict[str, float] = {}  # when a machine was last ordered to do something; inf: its stop is under way

    @property
    def ready(self) -> bool:
        """Whether decisions can be made: an inventory has ended, well or not."""
        return self._answered or not self.exists

    @property
    def known(self) -> bool:
        """Whether it is known which machines are set to run workers."""
        return self._known

    def forget(self) -> None:
        """A new epoch begins."""
        self._nodes, self._ordered = {}, {}
        self._known = self._answered = False
        self._asked = None

    # -- inventories

    def refresh(self, turn: Turn) -> tuple[Effect, ...]:
        """Begin an inventory, unless one is under way."""
        if not self.exists or self._asked is not None:
            return NOTHING
        self._asked = turn.now
        return (Do(("inventory", str(turn.epoch)), ListMachines(), INVENTORY_S),)

    def listed(self, inventory: Inventory) -> None:
        """The inventory has ended."""
        began, self._asked = self._asked, None
        if began is None:
            return
        self._answered, self._error = True, inventory.error
        if inventory.error:
            return
        self._known, self._began, self._buys = True, began, inventory.buys
        self._nodes = {node.name: node for node in inventory.nodes}
        self._ordered = {name: at for name, at in self._ordered.items() if at >= began}

    def ordered(self, name: str, now: float, *, stops: bool = False) -> None:
        """This machine was ordered to do something, or has done it. stops: its stop begins; the next call ends it."""
        if self.exists:
            self._ordered[name] = inf if stops else now

    # -- machines

    def node(self, name: str) -> Node | None:
        """The machine; None also if the last inventory says nothing about its present state."""
        return self._nodes.get(name) if self._ordered.get(name, -inf) < self._began else None

    def has(self, name: str) -> bool:
        return name in self._nodes

    def order_of(self, name: str) -> str:
        """The order that set this machine to run a worker."""
        node = self._nodes.get(name)
        return node.order if node is not None else ""

    def free(self, kind: str, now: float) -> Iterator[str]:
        """Machines of this kind that run nothing and may run a worker."""
        for name in sorted(self._nodes):
            node = self.node(name)
            if node is not None and node.kind == kind and not _why_not(node) and not self._occupied(name, now):
                yield name

    def obstacle(self, kind: str, now: float) -> str:
        """Why no machine of this kind can be had; empty if one can."""
        if not self.exists:
            return ""
        if self._error and not self._known:
            return f"which machines are there is not known: {self._error}"
        if self._buys or next(self.free(kind, now), None) is not None:
            return ""
        reasons = Counter(_why_not(node) or "about to change" for node in self._nodes.values() if node.kind == kind)
        counts = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
        return f"no machine of kind {kind} is free ({counts or 'there is none'})"

    def closed(self) -> dict[str, str]:
        """Machines with a worker that the operator wants empty, and what they are set to."""
        nodes = [self.node(name) for name in self._nodes]
        return {n.name: n.availability for n in nodes if n is not None and n.worker and n.availability != "active"}

    def unrecorded(self, kinds: Iterable[str]) -> list[Node]:
        """Machines that are set to run a worker of these kinds and that the fleet does not know."""
        wanted, nodes = set(kinds), [self.node(name) for name in sorted(self._nodes)]
        return [n for n in nodes if n is not None and n.worker in wanted and n.name not in self.fleet.workers]

    def _occupied(self, name: str, now: float) -> bool:
        worker = self.fleet.workers.get(name)
        return worker is not None and (worker.record is not None or now - worker.seen <= SILENT_S)


def _why_not(node: Node) -> str:
    """Why a machine cannot be given a worker; empty if it can."""
    if not node.up:
        return "down"
    if node.availability != "active":
        return f"set to {node.availability}"
    if node.worker:
        return "with a worker"
    return "being emptied" if not node.empty or node.bought else ""


START_S = 8.0  # s for a provider to say that a start is under way
STOP_S = 20.0  # s for a provider to stop a machine
SAY_AGAIN_S = 60.0  # s after which a dry run reports a reason again that has come back


class MachineOrders(Struct, eq=False):
    """Makes and numbers the orders to the provider, from 1 in each epoch."""

    fleet: Fleet
    limits: FleetLimits
    inventory: InventoryView
    _number: int = 0
    _failures: Counter[str] = field(default_factory=Counter)  # in a row, of machines of the provider's own

    def forget(self) -> None:
        """A new epoch begins, with numbers and names of its own."""
        self._number = 0

    def boot_s(self, kind: str) -> float:
        found = self.limits.kinds.get(kind)
        return found.boot_s if found is not None else 0.0

    def new(self, kind: str, turn: Turn) -> StartMachine:
        """One more machine of this kind. It is a free one, preferably one that has not failed; else it gets a new name.

        A new name is the kind, the epoch and the order's number.
        """
        free = min(self.inventory.free(kind, turn.now), key=lambda name: (self._failures[name], name), default="")
        number = self._next(turn)
        while self.inventory.has(f"{kind}-{number}"):
            number = self._next(turn)
        return StartMachine(
            worker=free or f"{kind}-{number}",
            kind=kind,
            epoch=turn.epoch,
            boot_s=self.boot_s(kind),
            order=number,
            bought=self.inventory.exists and not free,
        )

    def adopted(self, node: Node, turn: Turn) -> StartMachine:
        """The order by which this machine runs the worker that it is already set to run."""
        return StartMachine(
            worker=node.name,
            kind=node.worker,
            epoch=turn.epoch,
            boot_s=self.boot_s(node.worker),
            order=node.order or self._next(turn),
            bought=node.bought,
        )

    def again(self, record: MachineRecord, turn: Turn) -> StartMachine:
        """The order of this record, repeated by the present leader."""
        return filled(StartMachine, record, epoch=turn.epoch, boot_s=self.boot_s(record.kind))

    def stop(self, worker: str, turn: Turn) -> StopMachine:
        """The order that ends this worker, and its machine if that was made for it."""
        found = self.fleet.workers.get(worker)
        record = found.record if found is not None else None
        return StopMachine(
            worker=worker,
            epoch=turn.epoch,
            kind=found.kind if found is not None else "",
            order=record.order if record is not None and record.order else self.inventory.order_of(worker),
            bought=record is not None and record.bought,
        )

    def failed(self, record: MachineRecord) -> None:
        """Its machine did not come up."""
        if self.inventory.exists and not record.bought:
            self._failures[record.worker] += 1

    def succeeded(self, record: MachineRecord) -> None:
        self._failures.pop(record.worker, None)

    def _next(self, turn: Turn) -> str:
        self._number += 1
        return f"{turn.epoch}-{self._number}"


def record_of(
    order: StartMachine, state: str, at: float, reason: str, place: Sequence[tuple[str, str]] = ()
) -> MachineRecord:
    """The record of an order. place: variants that the machine is for, and the app of each."""
    return filled(MachineRecord, order, state=state, at=at, reason=reason, place=list(place))


class DryRun(Struct, eq=False):
    """Records what would be done to machines, once for as long as the reason holds, and shows the orders to the provider.

    The provider is in a dry run, too: it only logs what an order would change.
    """

    effects: ControllerEffects
    orders: MachineOrders
    _said: dict[tuple[str, str], float] = {}

    def add(self, chosen: Add, turn: Turn) -> list[Effect]:
        if not self._is_new("add", chosen.kind, turn.now):
            return []
        order = self.orders.new(chosen.kind, turn)
        why = f"dry run: not started: {chosen.reason}"
        return [
            self.effects.scaling(turn.now, "add_worker", order.worker, why, 0),
            Do(("dry run", order.worker), Start(order=order), START_S),
        ]

    def remove(self, chosen: Remove, turn: Turn) -> list[Effect]:
        if not self._is_new("remove", chosen.worker, turn.now):
            return []
        why = f"dry run: not removed: {chosen.reason}"
        return [
            self.effects.scaling(turn.now, "remove_worker", chosen.worker, why, 0),
            Do(("dry run", chosen.worker), Stop(order=self.orders.stop(chosen.worker, turn)), STOP_S),
        ]

    def _is_new(self, what: str, about: str, now: float) -> bool:
        self._said = {said: at for said, at in self._said.items() if now - at <= SAY_AGAIN_S}
        new = (what, about) not in self._said
        self._said[what, about] = now
        return new
