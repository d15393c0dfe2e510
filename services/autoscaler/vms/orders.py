"""Orders to the provider: which machine starts under which name, and which stops; and the dry run, which changes nothing. Pure."""

from collections import Counter
from collections.abc import Sequence

from bus.messages.scaling import MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.commands import ControllerEffects, Node, Start, Stop, Turn
from services.autoscaler.vms.fleet import Fleet
from services.autoscaler.vms.inventory import InventoryView
from services.autoscaler.vms.rules import Add, FleetLimits, Remove
from services.core.actor import Do, Effect

START_S = 8.0  # s for a provider to say that a start is under way
STOP_S = 20.0  # s for a provider to stop a machine
SAY_AGAIN_S = 60.0  # s after which a dry run reports a reason again that has come back


class MachineOrders:
    """Makes and numbers the orders to the provider, from 1 in each epoch."""

    def __init__(self, fleet: Fleet, limits: FleetLimits, inventory: InventoryView) -> None:
        self._fleet = fleet
        self._limits = limits
        self._inventory = inventory
        self._number = 0
        self._failures: Counter[str] = Counter()  # in a row, of machines of the provider's own

    def forget(self) -> None:
        """A new epoch begins, with numbers and names of its own."""
        self._number = 0

    def boot_s(self, kind: str) -> float:
        found = self._limits.kinds.get(kind)
        return found.boot_s if found is not None else 0.0

    def new(self, kind: str, turn: Turn) -> StartMachine:
        """One more machine of this kind. It is a free one, preferably one that has not failed; else it gets a new name.

        A new name is the kind, the epoch and the order's number.
        """
        free = min(self._inventory.free(kind, turn.now), key=lambda name: (self._failures[name], name), default="")
        number = self._next(turn)
        while self._inventory.has(f"{kind}-{number}"):
            number = self._next(turn)
        return StartMachine(
            worker=free or f"{kind}-{number}",
            kind=kind,
            epoch=turn.epoch,
            boot_s=self.boot_s(kind),
            order=number,
            bought=self._inventory.exists and not free,
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
        return StartMachine(
            worker=record.worker,
            kind=record.kind,
            epoch=turn.epoch,
            boot_s=self.boot_s(record.kind),
            order=record.order,
            bought=record.bought,
        )

    def stop(self, worker: str, turn: Turn) -> StopMachine:
        """The order that ends this worker, and its machine if that was made for it."""
        found = self._fleet.workers.get(worker)
        record = found.record if found is not None else None
        return StopMachine(
            worker=worker,
            epoch=turn.epoch,
            kind=found.kind if found is not None else "",
            order=record.order if record is not None and record.order else self._inventory.order_of(worker),
            bought=record is not None and record.bought,
        )

    def failed(self, record: MachineRecord) -> None:
        """Its machine did not come up."""
        if self._inventory.exists and not record.bought:
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
    return MachineRecord(
        worker=order.worker,
        kind=order.kind,
        epoch=order.epoch,
        state=state,
        at=at,
        reason=reason,
        place=list(place),
        order=order.order,
        bought=order.bought,
    )


class DryRun:
    """Records what would be done to machines, once for as long as the reason holds, and shows the orders to the provider.

    The provider is in a dry run, too: it only logs what an order would change.
    """

    def __init__(self, effects: ControllerEffects, orders: MachineOrders) -> None:
        self._effects = effects
        self._orders = orders
        self._said: dict[tuple[str, str], float] = {}

    def add(self, chosen: Add, turn: Turn) -> list[Effect]:
        if not self._is_new("add", chosen.kind, turn.now):
            return []
        order = self._orders.new(chosen.kind, turn)
        why = f"dry run: not started: {chosen.reason}"
        return [
            self._effects.scaling(turn.now, "add_worker", order.worker, why, 0),
            Do(("dry run", order.worker), Start(order=order), START_S),
        ]

    def remove(self, chosen: Remove, turn: Turn) -> list[Effect]:
        if not self._is_new("remove", chosen.worker, turn.now):
            return []
        why = f"dry run: not removed: {chosen.reason}"
        return [
            self._effects.scaling(turn.now, "remove_worker", chosen.worker, why, 0),
            Do(("dry run", chosen.worker), Stop(order=self._orders.stop(chosen.worker, turn)), STOP_S),
        ]

    def _is_new(self, what: str, about: str, now: float) -> bool:
        self._said = {said: at for said, at in self._said.items() if now - at <= SAY_AGAIN_S}
        new = (what, about) not in self._said
        self._said[what, about] = now
        return new
