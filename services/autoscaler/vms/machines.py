"""Machines on their way in: noted, ordered, awaited; what fails is told, tried again with back-off, and holds nothing else up. Pure."""

from collections.abc import Sequence

from msgspec.structs import replace

from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import MachineRecord, StartMachine
from services.autoscaler.vms.commands import ControllerEffects, Start, Stop
from services.autoscaler.vms.fleet import SILENT_S, Fleet, FleetWorker
from services.autoscaler.vms.inventory import InventoryView
from services.autoscaler.vms.orders import START_S, STOP_S, MachineOrders, record_of
from services.autoscaler.vms.policy import Add, FleetLimits
from services.core.actor import Do
from services.core.catalog import Catalog

BOOT_S = 60.0  # s beyond its boot time for a machine to make itself known
PLACE_S = 15.0  # s in which a machine that was added by a rule is filled
PAUSES = (
    1.0,
    2.0,
    5.0,
    10.0,
    30.0,
    60.0,
)  # s before the next start of a kind after the first, second, ... failure in a row
LOST_S = 60.0  # s of silence after which a machine of ours is given up
DOWN_S = 20.0  # the same, where the provider knows that the machine is down


class Machines:
    """limits: what may be started; an empty set of kinds starts nothing. insists: what is given up is stopped again and again until
    the provider says that it is gone, since it may cost or come back; else once.
    """

    def __init__(
        self,
        fleet: Fleet,
        catalog: Catalog,
        turn: ControllerEffects,
        limits: FleetLimits,
        stock: InventoryView,
        orders: MachineOrders,
        *,
        insists: bool = False,
    ) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._turn = turn
        self._limits = limits
        self._stock = stock
        self._orders = orders
        self._insists = insists
        self._since = 0.0  # when we began to lead
        self._asked: dict[str, float] = {}  # starts and stops under way, and when the next try is due
        self._failures: dict[str, tuple[int, float]] = {}  # by kind: in a row, and until when it rests
        self._tries: dict[str, int] = {}

    def forget(self) -> None:
        """Somebody else leads now."""
        self._since = self._turn.now
        self._orders.forget()
        self._asked.clear()
        self._tries.clear()

    def held(self, kind: str) -> bool:
        """Whether this kind rests after a failed start."""
        return self._turn.now < self._failures.get(kind, (0, 0.0))[1]

    # -- in

    def add(self, chosen: Add, place: Sequence[tuple[str, str]] = ()) -> str:
        """Begin a new machine; returns its name: a free one's, else one that no other has had."""
        order = self._orders.new(chosen.kind)
        self._turn.scaling("add_worker", order.worker, chosen.reason)
        self._begin(order, chosen.reason, f"ordered: {chosen.reason}", place)
        return order.worker

    def adopt(self) -> None:
        """Take on machines that are told to carry a worker, by the operator or by orders that nobody remembers."""
        for node in self._stock.unnoted(self._limits.kinds):
            order = self._orders.adopted(node)
            why = f"its node is told to carry a worker of kind {node.worker}"
            if node.open:
                self._begin(order, why, why)
            elif self._settled_in():
                state = node.availability if node.up else "down"
                record = record_of(order, "Stopping", self._turn.now, f"{why}, and is {state}")
                self._give_up(record)

    def _begin(self, order: StartMachine, reason: str, told: str, place: Sequence[tuple[str, str]] = ()) -> None:
        turn, name = self._turn, order.worker
        record = record_of(order, "Booting", turn.now, reason, place)
        self._fleet.noted(name, record, turn.now)
        self._asked[name] = float("inf")
        self._stock.act(name)
        turn.save(record)  # before the order: whoever leads next goes on with it
        turn.worker_state(name, self._hardware(order.kind), "None", "Booting", told)

    def saved(self, worker: str) -> None:
        """The note is written: act on it."""
        found = self._fleet.workers.get(worker)
        if found is not None and found.record is not None and found.record.state == "Booting":
            self._start(found.record)

    def unsaved(self, worker: str, error: str) -> None:
        """The note could not be written: without it no machine is ordered."""
        record = self._record(worker)
        if record is not None and record.state == "Booting":
            self._failed(record, f"it could not be noted down: {error}")

    def advance(self) -> None:
        """Look after machines that boot, have come, or are lost."""
        turn = self._turn
        for worker in list(self._fleet.workers.values()):
            record = worker.record
            if record is None:
                continue
            if record.state == "Booting":
                self._boot(worker, record)
            elif record.state == "Ready":
                if record.place and turn.now - record.at < PLACE_S:
                    self._fill(worker, record)
                patience, why = self._patience(worker, record)
                if turn.now - max(worker.seen, record.at) > patience:
                    self._lose(worker, record, why or f"not heard of for {patience:.0f} s")
            elif record.state == "Stopping" and turn.now >= self._asked.get(record.worker, 0.0):
                self.stop(record.worker)

    def _boot(self, worker: FleetWorker, record: MachineRecord) -> None:
        turn = self._turn
        node = self._stock.node(record.worker)
        if worker.alive(turn.now):
            ready = replace(record, state="Ready", at=turn.now)
            self._failures.pop(record.kind, None)
            self._orders.came(record)
            self._settled(record.worker)
            self._fleet.noted(record.worker, ready, turn.now)
            turn.save(ready)
            if ready.place:
                self._fill(worker, ready)
        elif node is not None and not node.open:
            self._failed(record, f"its node is {f'set to {node.availability}' if node.up else 'down'}")
        elif turn.now - record.at > BOOT_S + self._orders.boot_s(record.kind):
            self._failed(record, "it did not make itself known in time")
        elif turn.now >= self._asked.get(record.worker, 0.0) or (node is not None and not node.worker):
            self._start(
                record
            )  # ours whose answer was lost, or one of an earlier leader; or a bought one that is there now

    def _start(self, record: MachineRecord) -> None:
        turn = self._turn
        self._asked[record.worker] = float("inf")
        self._stock.act(record.worker)
        turn.add(Do(("start", record.worker), Start(order=self._orders.again(record)), START_S))

    def _fill(self, worker: FleetWorker, record: MachineRecord) -> None:
        """Load what it was added for; repeated until it is there, since orders are idempotent."""
        turn = self._turn
        for variant, app in record.place:
            known = self._catalog.variant(variant)
            if known is None or worker.of(variant):
                continue
            why = f"{worker.name} was added: {record.reason}"
            order = EnsureLoaded(
                variant=known, at_least=1, app=app or None, orderer=turn.name, reason=why, epoch=turn.epoch
            )
            turn.order(worker.name, "load", order)

    # -- how it went

    def started(self, worker: str, error: str | None) -> None:
        """The provider has answered. error: why not; None: nobody knows, it is asked again."""
        self._stock.act(worker)
        record = self._record(worker)
        if record is None or record.state != "Booting":
            return
        if error is None:
            self._asked[worker] = self._turn.now + self._pause(worker)
        elif error:
            self._failed(record, error)

    def _failed(self, record: MachineRecord, why: str) -> None:
        turn = self._turn
        count = self._failures.get(record.kind, (0, 0.0))[0] + 1
        pause = PAUSES[min(count, len(PAUSES)) - 1]
        self._failures[record.kind] = (count, turn.now + pause)
        self._orders.failed(record)
        reason = f"it was not started: {why}; no {record.kind} is tried for {pause:.0f} s"
        turn.worker_state(record.worker, self._hardware(record.kind), "Booting", "Failed", reason)
        self._lose(None, record, "")

    def _lose(self, worker: FleetWorker | None, record: MachineRecord, why: str) -> None:
        """Give it up; should it be there after all, it is stopped."""
        turn = self._turn
        if worker is not None and why:
            turn.worker_state(record.worker, self._hardware(record.kind), record.state, "Failed", why)
        self._settled(record.worker)
        if self._insists:
            self._give_up(replace(record, state="Stopping", at=turn.now, epoch=turn.epoch, place=[]))
            return
        self.stop(record.worker)
        self._fleet.forget(record.worker)
        turn.drop(record.worker)

    def _give_up(self, record: MachineRecord) -> None:
        self._fleet.noted(record.worker, record, self._turn.now)
        self._turn.save(record)
        self.stop(record.worker)

    # -- out

    def stop(self, worker: str) -> None:
        """Have it stopped; the answer comes to `actor`, as ("stop", worker)."""
        self._asked[worker] = float("inf")
        self._stock.act(worker, stops=True)
        self._turn.add(Do(("stop", worker), Stop(order=self._orders.stop(worker)), STOP_S))

    def stopped(self, worker: str, error: str | None) -> None:
        """The provider has answered. error: why not; None: nobody knows. Of one that was given up; the others are `leaving`'s."""
        self._stock.act(worker)
        record = self._record(worker)
        if record is None or record.state != "Stopping":
            return
        if error == "":
            self._settled(worker)
            self._fleet.forget(worker)
            self._turn.drop(worker)
            return
        first = worker not in self._tries
        self._asked[worker] = self._turn.now + self._pause(worker)
        if error and first:
            self._turn.worker_state(
                worker, self._hardware(record.kind), "Failed", "Failed", f"it was not stopped: {error}"
            )

    # -- inside

    def _record(self, worker: str) -> MachineRecord | None:
        found = self._fleet.workers.get(worker)
        return found.record if found is not None else None

    def _pause(self, worker: str) -> float:
        tries = self._tries[worker] = self._tries.get(worker, 0) + 1
        return PAUSES[min(tries, len(PAUSES)) - 1]

    def _settled(self, worker: str) -> None:
        self._asked.pop(worker, None)
        self._tries.pop(worker, None)

    def _patience(self, worker: FleetWorker, record: MachineRecord) -> tuple[float, str]:
        """How long a worker may be silent, and why no longer where that is not said by the time itself."""
        node = self._stock.node(record.worker)
        if node is None:
            return LOST_S, ""
        if node.availability == "drain" or (node.availability != "active" and worker.leaving):
            return SILENT_S, f"its node is set to {node.availability}"
        if not node.up:
            return DOWN_S, "its node is down"
        if not node.worker:
            return SILENT_S, "its node is not told to carry a worker any more"
        return LOST_S + self._orders.boot_s(record.kind), ""  # it may be fetching the image of its next version

    def _settled_in(self) -> bool:
        """Whether we have led for so long that whoever is there has been heard."""
        return self._turn.now - self._since > LOST_S

    def _hardware(self, kind: str) -> str:
        """The kind of device that sets a machine apart, for events."""
        found = self._limits.kinds.get(kind)
        devices = found.devices if found is not None else ()
        return next((device.kind for device in devices if device.kind != "cpu"), "cpu")
