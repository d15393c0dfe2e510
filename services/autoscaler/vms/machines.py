"""Machines on their way in: noted, ordered, awaited; what fails is told, tried again with back-off, and holds nothing else up. Pure."""

from collections.abc import Sequence

from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import MachineRecord, StartMachine, StopMachine
from services.autoscaler.vms.commands import Start, Stop
from services.autoscaler.vms.fleet import Fleet, Worker
from services.autoscaler.vms.policy import Add, Limits
from services.autoscaler.vms.turn import Turn
from services.core.actor import Do
from services.core.catalog import Catalog

START_S = 8.0  # s for a provider to say that a start is under way
STOP_S = 20.0
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


class Machines:
    """limits: what may be started; an empty set of kinds starts nothing."""

    def __init__(self, fleet: Fleet, catalog: Catalog, turn: Turn, limits: Limits) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._turn = turn
        self._limits = limits
        self._number = 0
        self._asked: dict[str, float] = {}  # starts and stops under way, and when the next try is due
        self._failures: dict[str, tuple[int, float]] = {}  # by kind: in a row, and until when it rests
        self._tries: dict[str, int] = {}

    def forget(self) -> None:
        """Somebody else leads now; names begin anew with our next epoch."""
        self._number = 0
        self._asked.clear()
        self._tries.clear()

    def held(self, kind: str) -> bool:
        """Whether this kind rests after a failed start."""
        return self._turn.now < self._failures.get(kind, (0, 0.0))[1]

    # -- in

    def add(self, chosen: Add, place: Sequence[tuple[str, str]] = ()) -> str:
        """Begin a new machine; returns its name, which no other has had: kind, epoch and a number."""
        turn = self._turn
        self._number += 1
        name = f"{chosen.kind}-{turn.epoch}-{self._number}"
        record = MachineRecord(
            worker=name,
            kind=chosen.kind,
            epoch=turn.epoch,
            state="Booting",
            at=turn.now,
            reason=chosen.reason,
            place=list(place),
        )
        self._fleet.noted(name, record, turn.now)
        self._asked[name] = float("inf")
        turn.save(record)  # before the order: whoever leads next goes on with it
        turn.scaling("add_worker", name, chosen.reason)
        turn.worker_state(name, self._hardware(chosen.kind), "None", "Booting", f"ordered: {chosen.reason}")
        return name

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
                if turn.now - max(worker.seen, record.at) > LOST_S:
                    self._lose(worker, record, f"not heard of for {LOST_S:.0f} s")

    def _boot(self, worker: Worker, record: MachineRecord) -> None:
        turn = self._turn
        kind = self._limits.kinds.get(record.kind)
        if worker.alive(turn.now):
            ready = MachineRecord(
                worker=record.worker,
                kind=record.kind,
                epoch=record.epoch,
                state="Ready",
                at=turn.now,
                reason=record.reason,
                place=record.place,
            )
            self._failures.pop(record.kind, None)
            self._settled(record.worker)
            self._fleet.noted(record.worker, ready, turn.now)
            turn.save(ready)
            if ready.place:
                self._fill(worker, ready)
        elif turn.now - record.at > BOOT_S + (kind.boot_s if kind is not None else 0.0):
            self._failed(record, "it did not make itself known in time")
        elif turn.now >= self._asked.get(record.worker, 0.0):
            self._start(record)  # ours whose answer was lost, or one of an earlier leader

    def _start(self, record: MachineRecord) -> None:
        turn = self._turn
        kind = self._limits.kinds.get(record.kind)
        self._asked[record.worker] = float("inf")
        order = StartMachine(
            worker=record.worker,
            kind=record.kind,
            epoch=turn.epoch,
            boot_s=kind.boot_s if kind is not None else 0.0,
        )
        turn.add(Do(("start", record.worker), Start(order=order), START_S))

    def _fill(self, worker: Worker, record: MachineRecord) -> None:
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
        reason = f"it was not started: {why}; no {record.kind} is tried for {pause:.0f} s"
        turn.worker_state(record.worker, self._hardware(record.kind), "Booting", "Failed", reason)
        self._lose(None, record, "")

    def _lose(self, worker: Worker | None, record: MachineRecord, why: str) -> None:
        """Give it up; should it be there after all, it is stopped."""
        turn = self._turn
        if worker is not None and why:
            turn.worker_state(record.worker, self._hardware(record.kind), record.state, "Failed", why)
        self._settled(record.worker)
        self.stop(record.worker)
        self._fleet.forget(record.worker)
        turn.drop(record.worker)

    # -- out

    def stop(self, worker: str) -> None:
        """Have it stopped; the answer comes to `actor`, as ("stop", worker)."""
        turn = self._turn
        turn.add(Do(("stop", worker), Stop(order=StopMachine(worker=worker, epoch=turn.epoch)), STOP_S))

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

    def _hardware(self, kind: str) -> str:
        """The kind of device that sets a machine apart, for events."""
        found = self._limits.kinds.get(kind)
        devices = found.devices if found is not None else ()
        return next((device.kind for device in devices if device.kind != "cpu"), "cpu")
