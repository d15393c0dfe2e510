"""The controller of a cluster: the VM-autoscaler (INFaaS, section 4.2.3). Of all that run, one leads and acts; all follow. Pure.

Every period it looks at the fleet as heartbeats tell it, adds machines by the rules of policy.py, goes on with what is pending
(machines that boot, machines that leave, instances to be placed), and lets an idle machine go. What it is about to do to a machine
is noted in the control bucket first, so that its successor goes on with it instead of doing it twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence

from msgspec import Struct

from bus.messages.fleet import LoadReply, WorkerHeartbeat
from bus.messages.scaling import AskForCapacity
from bus.subjects import Subjects
from services.autoscaler.vms.commands import (
    LEADER,
    ControllerEffects,
    Inventory,
    decode_leader,
    decode_machine,
    worker_of_key,
)
from services.autoscaler.vms.drain import MachineDrain
from services.autoscaler.vms.fleet import Fleet, in_state
from services.autoscaler.vms.inventory import InventoryView
from services.autoscaler.vms.lease import Lease
from services.autoscaler.vms.machines import Machines
from services.autoscaler.vms.orders import DryRun, MachineOrders
from services.autoscaler.vms.placement import InstancePlacement
from services.autoscaler.vms.policy import (
    Add,
    Blocked,
    FleetLimits,
    Hardware,
    HardwareNeed,
    Remove,
    WorkerSummary,
    answer,
    below_minimum,
    removal,
    wants,
)
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Undelivered,
    Watch,
)
from services.core.catalog import Catalog
from services.core.placement import OVERCOMMIT

ACQUAINT_S = 2.0  # s in which heartbeats of all workers that are there have come
APPEAR_S = 30.0  # s of leading after which a worker that has not been heard of is not there
DONE = "finished"  # the fact that ends registration work
AT_MOST = 8  # variants that a new machine is filled with


class RenewLease(Struct, frozen=True):
    """Timer: look to the lease."""


class ReviewFleet(Struct, frozen=True):
    """Timer: decide."""


class RegistrationProgress(Struct, frozen=True):
    """What every fact about registration work has: the worker that does it."""

    worker: str


class Controller:
    """name: unique to this process's life, "vm-...". simulated: machines are, and events say so. shared_machine: workers are
    processes of one machine, so that only what their own instances compute says how busy their CPU is. inventory: whoever starts
    machines has some of its own and can say which are free. insists: what is given up is stopped until it is gone. dry_run: nothing is
    done to machines, only told.
    """

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        limits: FleetLimits,
        *,
        period_s: float = 2.0,
        lease_s: float = 3.0,
        memory_share: float = 0.8,
        cores_overcommit: float = OVERCOMMIT,
        simulated: bool = False,
        shared_machine: bool = False,
        inventory: bool = False,
        insists: bool = False,
        dry_run: bool = False,
    ) -> None:
        self.lease = Lease(name, lease_s)
        self.fleet = Fleet(limits.kinds, self._threads if shared_machine else None)
        self._name = name
        self._subjects = subjects
        self._limits = limits
        self._period = period_s
        self._share = memory_share
        self._catalog = Catalog()
        self._turn = turn = ControllerEffects(name, subjects, simulated=simulated)
        self._stock = stock = InventoryView(self.fleet, turn, surveyed=inventory and bool(limits.kinds))
        orders = MachineOrders(self.fleet, turn, limits, stock)
        self._machines = Machines(self.fleet, self._catalog, turn, limits, stock, orders, insists=insists)
        self._placing = InstancePlacement(self.fleet, self._catalog, turn, memory_share, cores_overcommit)
        self._leaving = MachineDrain(
            self.fleet, self._catalog, turn, self._machines, stock, memory_share, cores_overcommit
        )
        self._rehearsal = DryRun(turn, orders) if dry_run else None
        self._started = 0.0
        self._led_since = 0.0
        self._led = 0  # the epoch that we have taken up
        self._blocked: dict[Hardware, str] = {}
        self._short: set[str] = set()  # kinds of which there are too few, as has been told

    def _threads(self, variant: str) -> int:
        record = self._catalog.variant(variant)
        return max(1, record.threads) if record is not None else 1

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s = self._subjects
        return (
            Inlet(subject=s.worker_heartbeat(), message=WorkerHeartbeat),
            Inlet(subject=s.controller("ask"), message=AskForCapacity),
            Inlet(subject=s.workshop("*"), message=bytes),
            *(
                Inlet(subject=s.registrar(fact), message=RegistrationProgress)
                for fact in ("built", "variant-failed", "progress", DONE)
            ),
            Inlet(subject=s.controller(f"reply.{self._name}.*"), message=LoadReply),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.control_bucket))

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        now, message, turn = envelope.now, envelope.message, self._turn
        turn.begin(now, self.lease.epoch if self.lease.leads(now) else 0)
        match message:
            case WorkerHeartbeat():
                self.fleet.heartbeat(message, now)
            case ReviewFleet():
                turn.add(After("look", self._period, ReviewFleet()))
                self._look()
            case RenewLease():
                turn.add(After("beat", self.lease.period, RenewLease()))
                self._claim()
            case Done() | Failed() | TimedOut():
                self._ended(message)
            case AskForCapacity():
                self._asked(message)
            case bytes():
                self.fleet.errand(envelope.subject.split(".")[-2], now, over=False)
            case RegistrationProgress():
                self.fleet.errand(message.worker, now, over=envelope.subject.endswith(f".{DONE}"))
            case LoadReply():
                self._placing.replied(envelope.subject, message)
            case Undelivered():
                self._placing.replied(message.reply_subject, None)
            case Changed():
                self._changed(message, now)
            case Synced():
                if message.bucket == self._subjects.control_bucket:
                    self.lease.known(now)
                    self._claim()
            case Started():
                self._started = now
                turn.add(After("beat", self.lease.period, RenewLease()))
                turn.add(After("look", self._period, ReviewFleet()))
            case Stopping():
                claim = self.lease.give_up(now)
                if claim is not None:
                    turn.add(Do(("give up",), claim, message.grace))
        return turn.effects()

    # -- the lead

    def _claim(self) -> None:
        claim = self.lease.due(self._turn.now)
        if claim is not None:
            self._turn.add(Do(("claim",), claim, self.lease.period * 2))

    def _changed(self, change: Changed, now: float) -> None:
        if change.bucket == self._subjects.catalog_bucket:
            self._catalog.apply(change.key, change.value)
        elif change.key == LEADER:
            self.lease.changed(decode_leader(change.value), now)
        else:
            worker = worker_of_key(change.key)
            if worker is not None and not self.lease.epoch:  # who leads knows better: it is an echo
                self.fleet.noted(worker, decode_machine(change.value), now)

    def _take_up(self) -> None:
        """A new epoch of ours: whatever we thought to be under way is an earlier leader's."""
        self._led, self._led_since = self._turn.epoch, self._turn.now
        self._machines.forget()
        self._placing.forget()
        self._leaving.forget()
        self._stock.forget()
        self._blocked.clear()
        self._short.clear()

    # -- what the edge says

    def _ended(self, message: Done | Failed | TimedOut) -> None:
        what, *rest = message.id
        error = None if isinstance(message, TimedOut) else message.error if isinstance(message, Failed) else ""
        if what == "claim":
            before = self.lease.epoch
            self.lease.claimed(message.result if isinstance(message, Done) else None, self._turn.now)
            if not before and self.lease.leads(self._turn.now):
                self._turn.epoch = self.lease.epoch
                self._look()
            return
        if what == "survey" and rest == [str(self._led)]:
            told = message.result if isinstance(message, Done) else Inventory(error=error or "nobody answers in time")
            self._stock.found(told)
            return
        if not self._turn.epoch or self._turn.epoch != self._led or not rest:
            return
        worker = rest[0]
        if what == "start":
            self._machines.started(worker, error)
        elif what == "stop":
            self._machines.stopped(worker, error)
            self._leaving.stopped(worker, error)
        elif what == "save" and error == "":
            self._machines.saved(worker)
            self._leaving.saved(worker)
        elif what == "save":
            self._machines.unsaved(worker, error or "the bucket did not answer in time")

    def _asked(self, ask: AskForCapacity) -> None:
        if self._turn.epoch and self._turn.epoch == self._led:
            self._placing.ask(ask)
            self._placing.advance(self._machine_for)

    # -- deciding

    def _look(self) -> None:
        turn = self._turn
        self.fleet.tidy(turn.now)
        if not turn.epoch:
            return
        if turn.epoch != self._led:
            self._take_up()
        if turn.now - self._started < ACQUAINT_S:
            return
        self._stock.look()
        if not self._stock.ready:
            return
        if self._rehearsal is None:
            self._machines.adopt()
            self._machines.advance()
            self._leaving.adopt()
        shut = self._stock.shut()
        found = wants(self._seen(), self._limits)
        wanted = {want.hardware for want in found} | self._placing.wants_hardware()
        stays = self._leaving.advance(wanted, shut)
        self._placing.advance(self._machine_for)
        if not stays:
            for want in found:
                self._answer(want)
        self._blocked = {hardware: why for hardware, why in self._blocked.items() if hardware in wanted}
        if (self._stock.known and self._rehearsal is None) or turn.now - self._led_since > APPEAR_S:
            self._keep_minimum(shut)
        if not self._leaving.worker:
            self._remove(shut, idle=not found)

    def _seen(self) -> list[WorkerSummary]:
        return self.fleet.seen(self._turn.now, self._limits.settle_s)

    def _answer(self, want: HardwareNeed) -> None:
        """A rule asks for a machine: it gets what is in trouble now on that hardware."""
        self._add(want.hardware, self._chosen(want), self._in_trouble(want.hardware))

    def _chosen(self, want: HardwareNeed) -> Add | Blocked:
        return answer(want, self._seen(), self._limits, self._share, self._machines.held, self._stock.lacking)

    def _add(self, hardware: Hardware, chosen: Add | Blocked, place: Sequence[tuple[str, str]] = ()) -> str | None:
        """The new machine's name, if there is to be one."""
        if isinstance(chosen, Blocked):
            if chosen.reason and hardware not in self._blocked:  # once, not every period
                self._blocked[hardware] = chosen.reason
                self._say_blocked(chosen)
        elif self._rehearsal is not None:
            self._rehearsal.add(chosen)
        else:
            return self._machines.add(chosen, place)
        return None

    def _machine_for(self, want: HardwareNeed) -> str | None:
        """For an ask: the machine that boots for it already, one that need not go after all, or a new one."""
        leaving = self._leaving.worker
        if leaving and self._leaving.advance({want.hardware}):
            return leaving
        booting = (seen.name for seen in self._seen() if seen.state == "Booting" and want.hardware in seen.hardware)
        name = next(booting, None)
        if name is not None:
            return name
        return self._add(want.hardware, self._chosen(want))

    def _keep_minimum(self, shut: Collection[str]) -> None:
        found = below_minimum(self._seen(), self._limits, self._machines.held, self._stock.lacking, shut)
        if isinstance(found, Add):
            self._add(("", False), found)
            return
        for blocked in found:
            if blocked.kind not in self._short:
                self._say_blocked(blocked)
        self._short = {blocked.kind for blocked in found}

    def _say_blocked(self, blocked: Blocked) -> None:
        """A count of 0 says that nothing was added."""
        self._turn.scaling("add_worker", None, f"not added: {blocked.reason}", 0)

    def _remove(self, shut: Mapping[str, str], *, idle: bool) -> None:
        """What the operator wants empty goes; else, where nothing is wanted, what is idle."""
        workers = self._seen()
        going = next((worker for worker in workers if worker.name in shut and self._may_leave(worker)), None)
        if going is not None:
            chosen: Remove | None = Remove(worker=going.name, reason=f"its node is set to {shut[going.name]}")
        else:
            chosen = removal(workers, self._limits, self._leaving.spared) if idle else None
        if chosen is not None and self._rehearsal is not None:
            self._rehearsal.remove(chosen)
        elif chosen is not None:
            self._leaving.begin(chosen, shut)

    def _may_leave(self, worker: WorkerSummary) -> bool:
        """Whether there is anything to drain: neither what has not come yet nor what nobody hears of."""
        known = self.fleet.workers[worker.name]
        ordered = known.record is not None and known.record.state == "Booting"
        return worker.kind in self._limits.kinds and worker.state in ("Ready", "Booting") and not ordered

    def _in_trouble(self, hardware: Hardware) -> list[tuple[str, str]]:
        """Variants on this hardware, and an app of each, that a new machine takes load from: troubled ones, else the busiest."""
        rows: dict[str, tuple[bool, float, str]] = {}
        for worker in self.fleet.ready(self._turn.now):
            for one in worker.instances:
                if worker.hardware_of(one) != hardware:
                    continue
                troubled = in_state(one, "Overloaded") or in_state(one, "Interfered")
                before, load, app = rows.get(one.variant, (False, 0.0, ""))
                rows[one.variant] = (troubled or before, load + one.load, next(iter(one.app_states), app))
        found = sorted(rows.items(), key=lambda row: (not row[1][0], -row[1][1], row[0]))
        only = [row for row in found if row[1][0]] or [row for row in found[:1] if row[1][1] > 0]
        return [(variant, app) for variant, (_, _, app) in only[:AT_MOST]]
