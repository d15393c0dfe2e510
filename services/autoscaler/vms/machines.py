"""Machines that start, run, are lost or are given up. A start that fails is recorded and tried again with back-off. Pure."""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.scaling import MachineRecord, StartMachine
from services.autoscaler.vms.commands import ControllerEffects, Start, Stop, Turn
from services.autoscaler.vms.fleet import SILENT_S, Fleet, FleetWorker
from services.autoscaler.vms.orders import START_S, STOP_S, InventoryView, MachineOrders, record_of
from services.autoscaler.vms.rules import Add, FleetLimits
from services.core.actor import Do, Effect
from services.core.catalog import Catalog

BOOT_S = 60.0  # s, beside its boot time, for a machine's worker to send a heartbeat
PLACE_S = 15.0  # s in which a machine that was added by a rule is filled
PAUSES = (1.0, 2.0, 5.0, 10.0, 30.0, 60.0)  # s before the next try after the first, second, ... failure in a row
LOST_S = 60.0  # s of silence after which a machine is given up
DOWN_S = 20.0  # s of silence after which one is given up that the provider says is down


class Machines(Struct, eq=False):
    """limits: what may be started; with an empty set of kinds nothing is. confirm_stops: a machine that is given up is stopped again
    and again until the provider confirms it, since it may cost money or come back; else it is stopped once.
    """

    fleet: Fleet
    catalog: Catalog
    effects: ControllerEffects
    limits: FleetLimits
    inventory: InventoryView
    orders: MachineOrders
    confirm_stops: bool = False
    _since: float = 0.0  # when we began to lead
    _next_try: dict[str, float] = {}  # of starts and stops under way; inf: the provider has not answered yet
    _failures: dict[str, tuple[int, float]] = {}  # by kind: in a row, and until when no start is tried
    _tries: dict[str, int] = {}

    def forget(self, turn: Turn) -> None:
        """A new epoch begins."""
        self._since = turn.now
        self.orders.forget()
        self._next_try.clear()
        self._tries.clear()

    def pauses(self, kind: str, now: float) -> bool:
        """Whether no machine of this kind is started now because one has failed."""
        return now < self._failures.get(kind, (0, 0.0))[1]

    # -- starts

    def add(self, chosen: Add, turn: Turn, place: Sequence[tuple[str, str]] = ()) -> tuple[str, list[Effect]]:
        """Begin a new machine. Returns its name, too: a free machine's, or a new one."""
        order = self.orders.new(chosen.kind, turn)
        event = self.effects.scaling(turn.now, "add_worker", order.worker, chosen.reason)
        return order.worker, [event, *self._begin(order, turn, chosen.reason, f"ordered: {chosen.reason}", place)]

    def adopt(self, turn: Turn) -> list[Effect]:
        """Take on machines that are set to run a worker by the operator, or by orders without a record."""
        found: list[Effect] = []
        for node in self.inventory.unrecorded(self.limits.kinds):
            order = self.orders.adopted(node, turn)
            why = f"its node is set to run a worker of kind {node.worker}"
            if node.open:
                found += self._begin(order, turn, why, why)
            elif turn.now - self._since > LOST_S:  # workers that run would have been heard by now
                state = node.availability if node.up else "down"
                found += self._give_up(record_of(order, "Stopping", turn.now, f"{why}, and is {state}"), turn)
        return found

    def _begin(
        self, order: StartMachine, turn: Turn, reason: str, event: str, place: Sequence[tuple[str, str]] = ()
    ) -> list[Effect]:
        name = order.worker
        record = record_of(order, "Booting", turn.now, reason, place)
        self.fleet.record_changed(name, record, turn.now)
        self._next_try[name] = float("inf")
        self.inventory.ordered(name, turn.now)
        return [
            self.effects.save(record),  # before the order, so that the next leader goes on with it
            self.effects.worker_state(turn.now, name, self._hardware(order.kind), "None", "Booting", event),
        ]

    def saved(self, worker: str, turn: Turn) -> list[Effect]:
        """The record is written, so the machine can be ordered."""
        found = self.fleet.workers.get(worker)
        if found is None or found.record is None or found.record.state != "Booting":
            return []
        return [self._start(found.record, turn)]

    def not_saved(self, worker: str, error: str, turn: Turn) -> list[Effect]:
        """The record could not be written. Without it no machine is ordered."""
        record = self._record(worker)
        if record is None or record.state != "Booting":
            return []
        return self._failed(record, f"its record could not be written: {error}", turn)

    def advance(self, turn: Turn) -> list[Effect]:
        """Go on with machines that boot, have come up, or are lost."""
        found: list[Effect] = []
        for worker in list(self.fleet.workers.values()):
            record = worker.record
            if record is None:
                continue
            if record.state == "Booting":
                found += self._boot(worker, record, turn)
            elif record.state == "Ready":
                if record.place and turn.now - record.at < PLACE_S:
                    found += self._fill(worker, record, turn)
                patience, why = self._patience(worker, record)
                if turn.now - max(worker.seen, record.at) > patience:
                    found += self._lose(worker, record, why or f"silent for {patience:.0f} s", turn)
            elif record.state == "Stopping" and turn.now >= self._next_try.get(record.worker, 0.0):
                found.append(self.stop(record.worker, turn))
        return found

    def _boot(self, worker: FleetWorker, record: MachineRecord, turn: Turn) -> list[Effect]:
        node = self.inventory.node(record.worker)
        if worker.alive(turn.now):
            ready = replace(record, state="Ready", at=turn.now)
            self._failures.pop(record.kind, None)
            self.orders.succeeded(record)
            self._settled(record.worker)
            self.fleet.record_changed(record.worker, ready, turn.now)
            return [self.effects.save(ready), *(self._fill(worker, ready, turn) if ready.place else ())]
        if node is not None and not node.open:
            why = f"its node is {f'set to {node.availability}' if node.up else 'down'}"
            return self._failed(record, why, turn)
        if turn.now - record.at > BOOT_S + self.orders.boot_s(record.kind):
            return self._failed(record, "its worker sent no heartbeat in time", turn)
        if turn.now >= self._next_try.get(record.worker, 0.0) or (node is not None and not node.worker):
            # An order whose answer was lost, or of an earlier leader; or a machine that was bought is there now.
            return [self._start(record, turn)]
        return []

    def _start(self, record: MachineRecord, turn: Turn) -> Effect:
        self._next_try[record.worker] = float("inf")
        self.inventory.ordered(record.worker, turn.now)
        return Do(("start", record.worker), Start(order=self.orders.again(record, turn)), START_S)

    def _fill(self, worker: FleetWorker, record: MachineRecord, turn: Turn) -> list[Effect]:
        """Orders to load what the machine was added for, repeated until it is loaded: they are idempotent."""
        found: list[Effect] = []
        for variant, app in record.place:
            known = self.catalog.variant(variant)
            if known is None or worker.of(variant):
                continue
            why = f"{worker.name} was added: {record.reason}"
            found.append(self.effects.load(worker.name, known, 1, app, why, turn))
        return found

    def started(self, worker: str, error: str | None, turn: Turn) -> list[Effect]:
        """The provider has answered. error: why it did not start; None: unknown, so it is asked again."""
        self.inventory.ordered(worker, turn.now)
        record = self._record(worker)
        if record is None or record.state != "Booting":
            return []
        if error is None:
            self._next_try[worker] = turn.now + self._pause(worker)
        return self._failed(record, error, turn) if error else []

    def _failed(self, record: MachineRecord, why: str, turn: Turn) -> list[Effect]:
        count = self._failures.get(record.kind, (0, 0.0))[0] + 1
        pause = PAUSES[min(count, len(PAUSES)) - 1]
        self._failures[record.kind] = (count, turn.now + pause)
        self.orders.failed(record)
        reason = f"it was not started: {why}; no {record.kind} is tried for {pause:.0f} s"
        hardware = self._hardware(record.kind)
        event = self.effects.worker_state(turn.now, record.worker, hardware, "Booting", "Failed", reason)
        return [event, *self._lose(None, record, "", turn)]

    # -- stops

    def _lose(self, worker: FleetWorker | None, record: MachineRecord, why: str, turn: Turn) -> list[Effect]:
        """Give the machine up. It is stopped, in case it runs after all."""
        found: list[Effect] = []
        if worker is not None and why:
            hardware = self._hardware(record.kind)
            found.append(self.effects.worker_state(turn.now, record.worker, hardware, record.state, "Failed", why))
        self._settled(record.worker)
        if self.confirm_stops:
            stopping = replace(record, state="Stopping", at=turn.now, epoch=turn.epoch, place=[])
            return found + self._give_up(stopping, turn)
        found.append(self.stop(record.worker, turn))
        self.fleet.forget(record.worker)
        found.append(self.effects.delete(record.worker))
        return found

    def _give_up(self, record: MachineRecord, turn: Turn) -> list[Effect]:
        self.fleet.record_changed(record.worker, record, turn.now)
        return [self.effects.save(record), self.stop(record.worker, turn)]

    def stop(self, worker: str, turn: Turn) -> Effect:
        """Have it stopped. The controller gets the answer as ("stop", worker)."""
        self._next_try[worker] = float("inf")
        self.inventory.ordered(worker, turn.now, stops=True)
        return Do(("stop", worker), Stop(order=self.orders.stop(worker, turn)), STOP_S)

    def stopped(self, worker: str, error: str | None, turn: Turn) -> list[Effect]:
        """The provider has answered about a machine that was given up; `MachineDrain` handles the others.

        error: why it was not stopped; None: unknown.
        """
        self.inventory.ordered(worker, turn.now)
        record = self._record(worker)
        if record is None or record.state != "Stopping":
            return []
        if error == "":
            self._settled(worker)
            self.fleet.forget(worker)
            return [self.effects.delete(worker)]
        first = worker not in self._tries
        self._next_try[worker] = turn.now + self._pause(worker)
        if not error or not first:
            return []
        why, hardware = f"it was not stopped: {error}", self._hardware(record.kind)
        return [self.effects.worker_state(turn.now, worker, hardware, "Failed", "Failed", why)]

    # -- common

    def _record(self, worker: str) -> MachineRecord | None:
        found = self.fleet.workers.get(worker)
        return found.record if found is not None else None

    def _pause(self, worker: str) -> float:
        tries = self._tries[worker] = self._tries.get(worker, 0) + 1
        return PAUSES[min(tries, len(PAUSES)) - 1]

    def _settled(self, worker: str) -> None:
        self._next_try.pop(worker, None)
        self._tries.pop(worker, None)

    def _patience(self, worker: FleetWorker, record: MachineRecord) -> tuple[float, str]:
        """How many seconds a worker may be silent, and the reason if the silence itself is not it."""
        node = self.inventory.node(record.worker)
        if node is None:
            return LOST_S, ""
        if node.availability == "drain" or (node.availability != "active" and worker.leaving):
            return SILENT_S, f"its node is set to {node.availability}"
        if not node.up:
            return DOWN_S, "its node is down"
        if not node.worker:
            return SILENT_S, "its node is not set to run a worker any more"
        return LOST_S + self.orders.boot_s(record.kind), ""  # it may be fetching the image of its next version

    def _hardware(self, kind: str) -> str:
        """The kind of device that events name: the first accelerator, else the CPU."""
        found = self.limits.kinds.get(kind)
        devices = found.devices if found is not None else ()
        return next((device.kind for device in devices if device.kind != "cpu"), "cpu")
