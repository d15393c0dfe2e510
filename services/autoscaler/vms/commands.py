"""What the controller sends out: commands to its edge, orders to workers, events; and its records in the control bucket. Pure."""

from collections.abc import Mapping
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.events import ScalingEvent, WorkerEvent
from bus.messages.fleet import EnsureLoaded, PlannedBy
from bus.messages.scaling import DriftRecord, LeaderRecord, MachineRecord, PipelineReplicas, StartMachine, StopMachine
from bus.subjects import Subjects
from services.core.actor import Do, Effect, Publish, Record
from services.core.planning.problem import FleetPlan, FleetProblem

LEADER = "controller"  # key of the leader's record
DRIFT = "drift."  # keys of what has drifted, by app, begin with it
_MACHINE = "machine."  # keys of machines' records begin with it
STORE_S = 5.0  # s for one write to the control bucket


class ClaimLease(Struct, frozen=True, kw_only=True):
    """Write `record` as the leader's record if `allows` is true of the present one. The answer is a `LeaseClaimed`.

    expected: what the claimant believes to be the present record. by: the claimant.
    """

    record: LeaderRecord
    expected: LeaderRecord | None
    by: str

    def allows(self, present: LeaderRecord | None) -> bool:
        """Whether this record may be replaced: it is the expected one, or an unanswered renewal of the claimant's own."""
        expected = self.expected
        if present is None or expected is None or expected.holder != self.by:
            return present == expected
        return (present.holder, present.epoch) == (expected.holder, expected.epoch)


class LeaseClaimed(Struct, frozen=True, kw_only=True):
    """present: the record that is there now, if the claim came too late."""

    ok: bool
    present: LeaderRecord | None = None


class SaveMachine(Struct, frozen=True, kw_only=True):
    """Write the record of a machine, for the next leader. None: delete it, because the machine is gone."""

    worker: str
    record: MachineRecord | None = None


class SaveReplicas(Struct, frozen=True, kw_only=True):
    """Write what is kept for a pipeline, for the next leader, unless a later one has written it already.

    record: None: delete it, because the pipeline is no longer deployed. epoch, at: of the record, or when that was found.
    """

    pipeline: str
    epoch: int
    at: float
    record: PipelineReplicas | None = None

    def allows(self, present: PipelineReplicas | None) -> bool:
        """Whether this record may be replaced."""
        if present is None:
            return self.record is not None
        return (present.epoch, present.at) <= (self.epoch, self.at)


class SaveDrift(Struct, frozen=True):
    """Write what is known of an app's drift, for the next leader. None: delete it, because the app is gone."""

    app: str
    record: DriftRecord | None = None


class FetchDistribution(Struct, frozen=True):
    """Get a `services.core.drift.Distribution` of this key. The answer is None if it cannot be read."""

    key: str


class Start(Struct, frozen=True, kw_only=True):
    """Have the provider start a machine."""

    order: StartMachine


class Stop(Struct, frozen=True, kw_only=True):
    """Have the provider stop a machine."""

    order: StopMachine


class ListMachines(Struct, frozen=True, kw_only=True):
    """Ask the provider which machines it has. The answer is an `Inventory`."""


class Node(Struct, frozen=True, kw_only=True):
    """A machine of the provider's. name: also its worker's name, if it runs one.

    kind: of worker that it may run; "": none. worker: the kind of worker that it is set to run; "": none. order: that set it
    ("EPOCH-NUMBER"); "": the operator did. availability: as the operator has set it, "active" or else. empty: no worker of earlier
    orders still runs on it. bought: it was made by an order, for this worker only.
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
        """Whether the machine itself is fit to run a worker."""
        return self.up and self.availability == "active"


class Inventory(Struct, frozen=True, kw_only=True):
    """The machines of a provider. buys: it may make one if none is free. error: why it cannot tell; `nodes` is empty then."""

    nodes: tuple[Node, ...] = ()
    buys: bool = False
    error: str = ""


class ProviderTraits(Struct, frozen=True, kw_only=True):
    """What the controller must know of a provider of machines.

    simulated: its machines are simulated, and events say so. shared_machine: its workers are processes of one machine. So only what
    a worker's own instances compute says how busy its CPU is. has_inventory: it has machines of its own and can list them.
    confirm_stops: a machine that is given up is stopped again and again until the provider confirms it. dry_run: it changes
    nothing and logs what it would change.
    """

    simulated: bool = False
    shared_machine: bool = False
    has_inventory: bool = False
    confirm_stops: bool = False
    dry_run: bool = False


# -- records in the control bucket


def machine_key(worker: str) -> str:
    return _MACHINE + worker


def worker_of_key(key: str) -> str | None:
    """The worker whose machine's record has this key; None: the key is another record's."""
    return key.removeprefix(_MACHINE) if key.startswith(_MACHINE) else None


# -- effects


class Turn(Struct, frozen=True):
    """The handling of one message. now: Unix seconds. epoch: in which this controller leads; 0: it does not, so it orders nothing."""

    now: float
    epoch: int


class ControllerEffects:
    """Makes the effects of one controller. Each method returns them."""

    def __init__(self, name: str, subjects: Subjects, *, simulated: bool = False) -> None:
        self.name = name
        self._subjects = subjects
        self._mark = "simulated: " if simulated else ""
        self._replies = 0

    def send(self, worker: str, order: str, message: Any, reply: str = "") -> Effect:
        """An order to a worker's monitor."""
        return Publish(self._subjects.worker(worker, order), message, reply)

    def load(
        self, worker: str, record: VariantRecord, at_least: int, app: str | None, reason: str, turn: Turn, reply: str = "",
        planned: PlannedBy | None = None,
    ) -> Effect:  # fmt: skip
        """The order that a worker has at least so many instances of a variant."""
        order = EnsureLoaded(
            variant=record,
            at_least=at_least,
            app=app or None,
            orderer=self.name,
            reason=reason,
            epoch=turn.epoch,
            planned=planned,
        )
        return self.send(worker, "load", order, reply)

    def reply_subject(self) -> str:
        """A subject of this controller's that no other order has."""
        self._replies += 1
        return self._subjects.controller(f"reply.{self.name}.{self._replies}")

    def save(self, record: MachineRecord) -> Effect:
        return Do(("save", record.worker), SaveMachine(worker=record.worker, record=record), STORE_S)

    def delete(self, worker: str) -> Effect:
        return Do(("delete", worker), SaveMachine(worker=worker), STORE_S)

    def scaling(self, now: float, action: str, worker: str | None, reason: str, count: int = 1) -> Effect:
        return Record(
            ScalingEvent(
                time=now,
                scaler="vm",
                worker=worker,
                app=None,
                model=None,
                variant=None,
                action=action,
                count=count,
                reason=self._mark + reason,
            )
        )

    def worker_state(self, now: float, worker: str, hardware: str, old: str, new: str, reason: str) -> Effect:
        return Record(
            WorkerEvent(
                time=now, worker=worker, hardware=hardware, from_state=old, to_state=new, reason=self._mark + reason
            )
        )


# -- plans


class SolveFleet(Struct, frozen=True):
    """Command to the edge: make both plans. The answer is `FleetSolved`. growth: None if no machine may come or go."""

    growth: FleetProblem | None
    present: FleetProblem

    def wanting(self, wanted: Mapping[str, int]) -> "SolveFleet":
        """The same with so many instances of these variants, whatever they carry."""
        growth = None if self.growth is None else _wanting(self.growth, wanted)
        return SolveFleet(growth, _wanting(self.present, wanted))

    @property
    def size(self) -> int:
        """Columns of the programmes, about."""
        both = (self.present,) if self.growth is None else (self.growth, self.present)
        return sum(len(one.variants) + sum(len(need.options) for need in one.needs) for one in both)


def _wanting(problem: FleetProblem, wanted: Mapping[str, int]) -> FleetProblem:
    kept = {problem.variants[variants[0]].name: number for variants, number in problem.reserved}
    at: dict[str, list[int]] = {}
    for v, one in enumerate(problem.variants):
        at.setdefault(one.name, []).append(v)
    rows = ((tuple(at[name]), max(number, kept.get(name, 0))) for name, number in wanted.items() if name in at)
    return replace(problem, wanted=tuple(rows))


class FleetSolved(Struct, frozen=True):
    """The plans for both problems, and the milliseconds that they took."""

    growth: FleetPlan | None
    present: FleetPlan
    milliseconds: float
