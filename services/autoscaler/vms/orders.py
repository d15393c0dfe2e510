"""What providers are told: which machine starts under which name, which stops, and whose order it is. Pure."""

from collections import Counter
from collections.abc import Sequence

from bus.messages.scaling import MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.commands import Node
from services.autoscaler.vms.fleet import Fleet
from services.autoscaler.vms.policy import Limits
from services.autoscaler.vms.stock import Stock
from services.autoscaler.vms.turn import Turn


class Orders:
    """Numbers them, from 1 in each epoch."""

    def __init__(self, fleet: Fleet, turn: Turn, limits: Limits, stock: Stock) -> None:
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
