"""What providers are told: which machine starts under which name, which stops, and whose order it is. Pure."""

from collections import Counter
from collections.abc import Sequence

from bus.messages.scaling import MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.commands import ControllerEffects, Node, Start, Stop
from services.autoscaler.vms.fleet import Fleet
from services.autoscaler.vms.inventory import InventoryView
from services.autoscaler.vms.policy import Add, FleetLimits, Remove
from services.core.actor import Do


class MachineOrders:
    """Numbers them, from 1 in each epoch."""

    def __init__(self, fleet: Fleet, turn: ControllerEffects, limits: FleetLimits, stock: InventoryView) -> None:
        self._fleet = fleet
        self._turn = turn
        self._limits = limits
        self._stock = stock
        self._number = 0
        self._bad: Counter[str] = Counter()  # machines of the provider's own: failures in a row

    def forget(self) -> None:
        """Somebody else leads now; names and numbers begin anew with our next epoch."""
        self._number = 0

    def boot_s(self, kind: str) -> float:
        found = self._limits.kinds.get(kind)
        return found.boot_s if found is not None else 0.0

    def new(self, kind: str) -> StartMachine:
        """One more machine of this kind: a free one, which failed lately the last, else a new name: kind, epoch, number."""
        free = min(self._stock.free(kind), key=lambda name: (self._bad[name], name), default="")
        number = self._next()
        while self._stock.exists(f"{kind}-{number}"):
            number = self._next()
        return StartMachine(
            worker=free or f"{kind}-{number}",
            kind=kind,
            epoch=self._turn.epoch,
            boot_s=self.boot_s(kind),
            order=number,
            bought=self._stock.surveyed and not free,
        )

    def adopted(self, node: Node) -> StartMachine:
        """The order by which this machine carries what it is told to already."""
        return StartMachine(
            worker=node.name,
            kind=node.worker,
            epoch=self._turn.epoch,
            boot_s=self.boot_s(node.worker),
            order=node.order or self._next(),
            bought=node.bought,
        )

    def again(self, record: MachineRecord) -> StartMachine:
        """The order that this record is about, by whoever leads now."""
        return StartMachine(
            worker=record.worker,
            kind=record.kind,
            epoch=self._turn.epoch,
            boot_s=self.boot_s(record.kind),
            order=record.order,
            bought=record.bought,
        )

    def stop(self, worker: str) -> StopMachine:
        """The order that ends this worker, and its machine where that was made for it."""
        found = self._fleet.workers.get(worker)
        record = found.record if found is not None else None
        return StopMachine(
            worker=worker,
            epoch=self._turn.epoch,
            kind=found.kind if found is not None else "",
            order=record.order if record is not None and record.order else self._stock.order_of(worker),
            bought=record is not None and record.bought,
        )

    def failed(self, record: MachineRecord) -> None:
        """It did not come up."""
        if self._stock.surveyed and not record.bought:
            self._bad[record.worker] += 1

    def came(self, record: MachineRecord) -> None:
        self._bad.pop(record.worker, None)

    def _next(self) -> str:
        self._number += 1
        return f"{self._turn.epoch}-{self._number}"


def record_of(
    order: StartMachine, state: str, at: float, reason: str, place: Sequence[tuple[str, str]] = ()
) -> MachineRecord:
    """The note about an order. place: variants that the machine is for, and for which app."""
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


START_S = 8.0  # s for a provider to say that a start is under way


STOP_S = 20.0


# -- A dry run: what would be done to machines is told, once for as long as there is a reason, and shown to the
# provider. Pure.

AGAIN_S = 60.0  # s after which a reason that comes back is told again


class DryRun:
    """The provider is in a dry run, too: of the orders that it gets here it only says what they would change."""

    def __init__(self, turn: ControllerEffects, orders: MachineOrders) -> None:
        self._turn = turn
        self._orders = orders
        self._told: dict[tuple[str, str], float] = {}

    def add(self, chosen: Add) -> None:
        if self._new("add", chosen.kind):
            order = self._orders.new(chosen.kind)
            self._turn.scaling("add_worker", order.worker, f"dry run: not started: {chosen.reason}", 0)
            self._turn.add(Do(("rehearse", order.worker), Start(order=order), START_S))

    def remove(self, chosen: Remove) -> None:
        if self._new("remove", chosen.worker):
            self._turn.scaling("remove_worker", chosen.worker, f"dry run: not removed: {chosen.reason}", 0)
            order = self._orders.stop(chosen.worker)
            self._turn.add(Do(("rehearse", chosen.worker), Stop(order=order), STOP_S))

    def _new(self, what: str, about: str) -> bool:
        now = self._turn.now
        self._told = {told: at for told, at in self._told.items() if now - at <= AGAIN_S}
        new = (what, about) not in self._told
        self._told[what, about] = now
        return new
