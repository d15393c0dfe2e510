"""What the controller asks of its edge. Pure."""

from typing import Any

import msgspec
from msgspec import Struct

from bus.messages.events import ScalingEvent, WorkerEvent
from bus.messages.scaling import LeaderRecord, MachineRecord, StartMachine, StopMachine
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Publish, Record


class ClaimLease(Struct, frozen=True, kw_only=True):
    """Write `record` as the leader's, if it `allows` what stands there; the answer is a `LeaseClaimed`. by: who asks."""

    record: LeaderRecord
    expected: LeaderRecord | None
    by: str

    def allows(self, present: LeaderRecord | None) -> bool:
        """Whether this may be replaced: it is what was expected, or a renewal of our own that nobody has answered yet."""
        expected = self.expected
        if present is None or expected is None or expected.holder != self.by:
            return present == expected
        return (present.holder, present.epoch) == (expected.holder, expected.epoch)


class LeaseClaimed(Struct, frozen=True, kw_only=True):
    """present: what stands there now, when the claim came too late."""

    ok: bool
    present: LeaderRecord | None = None


class SaveRecord(Struct, frozen=True, kw_only=True):
    """Note this down for whoever leads next."""

    record: MachineRecord


class DeleteRecord(Struct, frozen=True, kw_only=True):
    """This machine is no more."""

    worker: str


class Start(Struct, frozen=True, kw_only=True):
    """Have a machine started."""

    order: StartMachine


class Stop(Struct, frozen=True, kw_only=True):
    """Have a machine stopped."""

    order: StopMachine


class ListMachines(Struct, frozen=True, kw_only=True):
    """Look which machines there are; the answer is an `Inventory`."""


class Node(Struct, frozen=True, kw_only=True):
    """A machine that the provider has. name: its worker's, if it carries one; kind: of worker that it may carry, "" = none.

    worker: the kind that it is told to carry, order: whose order that was ("EPOCH-NUMBER", "" = the operator's). availability: as the
    operator has set it, "active" or else. empty: no worker of earlier orders is left on it. bought: made by order, for this worker only.
    """

    name: str
    kind: str = ""
    worker: str = ""
    order: str = ""
    up: bool = True
    availability: str = "active"
    empty: bool = True
    bought: bool = False

    @property
    def open(self) -> bool:
        """Whether it may carry a worker, as far as the machine itself is concerned."""
        return self.up and self.availability == "active"


class Inventory(Struct, frozen=True, kw_only=True):
    """buys: when no machine is free, one may be made. error: why nothing can be told now; `nodes` says nothing then."""

    nodes: tuple[Node, ...] = ()
    buys: bool = False
    error: str = ""


# -- Keys of the control bucket and what stands under them. Pure.

LEADER = "controller"
_MACHINE = "machine."
_leader = msgspec.msgpack.Decoder(LeaderRecord)
_machine = msgspec.msgpack.Decoder(MachineRecord)


def machine_key(worker: str) -> str:
    return _MACHINE + worker


def worker_of_key(key: str) -> str | None:
    """Whose machine's key this is; None for other keys."""
    return key.removeprefix(_MACHINE) if key.startswith(_MACHINE) else None


def decode_leader(value: bytes | None) -> LeaderRecord | None:
    """The record; None when there is none that can be read."""
    try:
        return _leader.decode(value) if value else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


def decode_machine(value: bytes | None) -> MachineRecord | None:
    try:
        return _machine.decode(value) if value else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


# -- Collects what one turn of the controller brings about. It decides nothing. Pure.

STORE_S = 5.0  # s for one write to the bucket


class ControllerEffects:
    """now, epoch: of this turn; epoch 0: not leading, nothing may be ordered."""

    def __init__(self, name: str, subjects: Subjects, *, simulated: bool = False) -> None:
        self.name = name
        self.subjects = subjects
        self.now = 0.0
        self.epoch = 0
        self._mark = "simulated: " if simulated else ""
        self._out: list[Effect] = []
        self._numbers = 0

    def begin(self, now: float, epoch: int) -> None:
        self.now, self.epoch = now, epoch
        self._out = []

    def effects(self) -> list[Effect]:
        return self._out

    def add(self, effect: Effect) -> None:
        self._out.append(effect)

    def order(self, worker: str, order: str, message: Any, reply: str = "") -> None:
        """An order to a worker's monitor."""
        self._out.append(Publish(self.subjects.worker(worker, order), message, reply))

    def reply_subject(self) -> str:
        """A new one, whose last token is a number of our own."""
        self._numbers += 1
        return self.subjects.controller(f"reply.{self.name}.{self._numbers}")

    def save(self, record: MachineRecord) -> None:
        self._out.append(Do(("save", record.worker), SaveRecord(record=record), STORE_S))

    def drop(self, worker: str) -> None:
        self._out.append(Do(("drop", worker), DeleteRecord(worker=worker), STORE_S))

    def scaling(self, action: str, worker: str | None, reason: str, count: int = 1) -> None:
        event = ScalingEvent(
            time=self.now,
            scaler="vm",
            worker=worker,
            app=None,
            model=None,
            variant=None,
            action=action,
            count=count,
            reason=self._mark + reason,
        )
        self._out.append(Record(event))

    def worker_state(self, worker: str, hardware: str, old: str, new: str, reason: str) -> None:
        event = WorkerEvent(
            time=self.now,
            worker=worker,
            hardware=hardware,
            from_state=old,
            to_state=new,
            reason=self._mark + reason,
        )
        self._out.append(Record(event))
