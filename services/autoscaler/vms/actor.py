"""The controller of a cluster: the VM-autoscaler (INFaaS, section 4.2.3). Of several, one leads and acts; all follow. Pure.

Every period it reviews the fleet as heartbeats show it. It adds machines by the plan or by rules.py, goes on with what is pending
(machines that boot, machines that are removed, instances that move), and removes an idle machine. It writes into the control
bucket what it is about to do to a machine. So the next leader goes on with it and does nothing twice.
It keeps the replicas of deployed pipelines (pipelines.py).
"""

from collections.abc import Collection, Iterable, Mapping
from math import inf

from msgspec import Struct

from bus.codec import decode_kept
from bus.messages.fleet import LoadReply, WorkerHeartbeat
from bus.messages.scaling import (
    AskToMove,
    DemandHistory,
    DemandReport,
    LeaderRecord,
    MachineRecord,
    PipelineArrivals,
    QueriesSampled,
)
from bus.subjects import Subjects
from services.autoscaler.drift import DriftWatch
from services.autoscaler.vms.commands import LEADER, ControllerEffects, Inventory, ProviderTraits, Turn, worker_of_key
from services.autoscaler.vms.drain import MachineDrain
from services.autoscaler.vms.fleet import Fleet
from services.autoscaler.vms.growth import MachineGrowth
from services.autoscaler.vms.lease import Lease
from services.autoscaler.vms.machines import Machines
from services.autoscaler.vms.orders import DryRun, InventoryView, MachineOrders
from services.autoscaler.vms.pipelines import PipelineReplication
from services.autoscaler.vms.placement import Moves
from services.autoscaler.vms.planner import FleetPlanner
from services.autoscaler.vms.problem import FleetProblems
from services.autoscaler.vms.rules import FleetLimits, PricedKind, Remove, WorkerSummary, hardware_needs, removal
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    TimedOut,
    Undelivered,
    Watch,
)
from services.core.catalog import Catalog
from services.core.cost import Goal
from services.core.metric import MetricFamily, gauge
from services.core.policy import GuardedPolicy, baseline_of, policy_failures
from services.core.settings import AutoscalerSettings, MonitorSettings, Settings

FIRST_REVIEW_S = 2.0  # s after the start, in which each worker has sent heartbeats
APPEAR_S = 30.0  # s of leading after which a worker that was not heard does not exist
FINISHED = "finished"  # the last message about a registration


class RenewLease(Struct, frozen=True):
    """Timer: renew the lease, or claim it."""


class ReviewFleet(Struct, frozen=True):
    """Timer: decide."""


class RegistrationProgress(Struct, frozen=True):
    """The part that all messages about a registration have: the worker that builds or profiles the model."""

    worker: str


class Controller(TableActor):
    """One candidate for the lead.

    name: "vm-...", of this process's life only. monitor: as the workers' monitors admit loads. policy: a user's own.
    """

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        limits: FleetLimits,
        monitor: MonitorSettings | None = None,
        traits: ProviderTraits | None = None,
        autoscaler: AutoscalerSettings | None = None,
        goal: Goal = "cost",
        policy: GuardedPolicy | None = None,
    ) -> None:
        monitor, autoscaler = monitor or MonitorSettings(), autoscaler or AutoscalerSettings()
        traits = traits or ProviderTraits()
        self.lease = Lease(name, limits.settings.lease_s)
        self.fleet = fleet = Fleet(limits.kinds, self._threads if traits.shared_machine else None)
        self._name = name
        self._subjects = subjects
        self._limits = limits
        self._catalog = catalog = Catalog()
        effects = ControllerEffects(name, subjects, simulated=traits.simulated)
        self._inventory = inventory = InventoryView(fleet, exists=traits.has_inventory and bool(limits.kinds))
        orders = MachineOrders(fleet, limits, inventory)
        self._machines = Machines(
            fleet, catalog, effects, limits, inventory, orders, confirm_stops=traits.confirm_stops
        )
        self._moves = Moves(fleet, catalog, effects, monitor)
        problems = FleetProblems(fleet, catalog, limits, monitor, autoscaler, goal)
        self._policy = policy
        scaling = policy or baseline_of(autoscaler)
        self._planner = FleetPlanner(subjects, fleet, catalog, effects, problems, autoscaler, scaling)
        self.drift = DriftWatch(catalog)
        self._plans = autoscaler.policy != "off"
        self.pipelines = PipelineReplication(catalog, self._planner, problems, plans=self._plans)
        self._drain = MachineDrain(fleet, catalog, effects, self._machines, inventory, monitor, self._planner)
        self._dry_run = DryRun(effects, orders) if traits.dry_run else None
        self._growth = MachineGrowth(
            fleet, limits, effects, self._machines, inventory, self._drain, self._dry_run, monitor.memory_share
        )
        self._started_at = 0.0
        self._led_since = 0.0
        self._led = 0  # the epoch in which this controller has begun to act
        self._late: list[Envelope] = []  # answers that came while the lead had lapsed; it may go on in the same epoch
        self._on: dict[type, Handler] = {
            WorkerHeartbeat: self._heartbeat,
            ReviewFleet: self._review_again,
            RenewLease: self._renew_again,
            AskToMove: self._asked,
            DemandReport: self._demand,
            DemandHistory: self._history,
            PipelineArrivals: self._arrivals,
            QueriesSampled: self._sampled,
            bytes: self._registration_ordered,
            RegistrationProgress: self._registration_reported,
            LoadReply: self._replied,
            Undelivered: self._undelivered,
            Done: self._edge_answered,
            Failed: self._edge_answered,
            TimedOut: self._edge_answered,
            Changed: self._changed,
            Synced: self._synced,
            Started: self._start,
            Stopping: self._stop,
            Recorded: lambda _: NOTHING,
        }
        s = self._subjects
        plan = (
            Inlet(subject=s.demand(), message=DemandReport),
            Inlet(subject=s.controller(f"history.{self._name}"), message=DemandHistory),
        )
        self.inlets = (
            Inlet(subject=s.worker_heartbeat(), message=WorkerHeartbeat),
            Inlet(subject=s.controller("ask"), message=AskToMove),
            *(plan if self._plans else ()),
            Inlet(subject=s.pipeline("arrivals"), message=PipelineArrivals),
            Inlet(subject=s.controller("sampled"), message=QueriesSampled),
            Inlet(subject=s.workshop("*"), message=bytes),
            *(
                Inlet(subject=s.registrar(fact), message=RegistrationProgress)
                for fact in ("built", "variant-failed", "progress", FINISHED)
            ),
            Inlet(subject=s.controller(f"reply.{self._name}.*"), message=LoadReply),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket), Watch(bucket=self._subjects.control_bucket))

    def _threads(self, variant: str) -> int:
        record = self._catalog.variant(variant)
        return max(1, record.threads) if record is not None else 1

    def _turn(self, now: float) -> Turn:
        return Turn(now, self.lease.epoch if self.lease.leads(now) else 0)

    def _acts(self, turn: Turn) -> bool:
        """Whether it leads and knows the workers."""
        return turn.epoch > 0 and turn.epoch == self._led and turn.now - self._started_at >= FIRST_REVIEW_S

    # -- start and end

    def _start(self, envelope: Envelope) -> Iterable[Effect]:
        self._started_at = envelope.now
        return (self._next_renewal(), self._next_review())

    def _stop(self, envelope: Envelope) -> Iterable[Effect]:
        claim = self.lease.give_up(envelope.now)
        return NOTHING if claim is None else (Do(("give up",), claim, envelope.message.grace),)

    def _next_renewal(self) -> Effect:
        return After("renew", self.lease.period, RenewLease())

    def _next_review(self) -> Effect:
        return After("review", self._limits.settings.period_s, ReviewFleet())

    # -- workers

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        self.fleet.heartbeat(envelope.message, envelope.now)
        return NOTHING

    def _registration_ordered(self, envelope: Envelope) -> Iterable[Effect]:
        self.fleet.registers(envelope.subject.split(".")[-2], envelope.now, finished=False)
        return NOTHING

    def _registration_reported(self, envelope: Envelope) -> Iterable[Effect]:
        finished = envelope.subject.endswith(f".{FINISHED}")
        self.fleet.registers(envelope.message.worker, envelope.now, finished=finished)
        return NOTHING

    def _replied(self, envelope: Envelope) -> Iterable[Effect]:
        self._moves.replied(envelope.subject, envelope.message)
        self._planner.replied(envelope.subject, envelope.message, envelope.now)
        return NOTHING

    def _undelivered(self, envelope: Envelope) -> Iterable[Effect]:
        self._moves.replied(envelope.message.reply_subject, None)
        self._planner.replied(envelope.message.reply_subject, None, envelope.now)
        return NOTHING

    def _demand(self, envelope: Envelope) -> Iterable[Effect]:
        turn = self._turn(envelope.now)
        due = self._planner.take(envelope.message, turn)
        if not due or not turn.epoch or turn.epoch != self._led:
            return NOTHING
        return self._planner.plan(turn, self._leaving, at_once=True)

    def _arrivals(self, envelope: Envelope) -> Iterable[Effect]:
        turn = self._turn(envelope.now)
        found = self.pipelines.told(envelope.message, self._leaving, turn) if self._acts(turn) else []
        return [*found, *self._plan(turn)] if found else NOTHING

    def _sampled(self, envelope: Envelope) -> Iterable[Effect]:
        turn = self._turn(envelope.now)
        return self.drift.told(envelope.message, turn) if self._acts(turn) else NOTHING

    def _history(self, envelope: Envelope) -> Iterable[Effect]:
        self._planner.problems.demand.remember(envelope.message)
        return NOTHING

    def _asked(self, envelope: Envelope) -> Iterable[Effect]:
        turn = self._turn(envelope.now)
        if not turn.epoch or turn.epoch != self._led:
            return NOTHING
        self._moves.ask(envelope.message, turn.now)
        return self._moves.advance(lambda need: self._growth.for_need(need, turn), turn)

    # -- the lead

    def _renew_again(self, envelope: Envelope) -> Iterable[Effect]:
        return (self._next_renewal(), *self._claim(envelope.now))

    def _claim(self, now: float) -> tuple[Effect, ...]:
        claim = self.lease.due(now)
        return NOTHING if claim is None else (Do(("claim",), claim, self.lease.period * 2),)

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        change: Changed = envelope.message
        if change.bucket == self._subjects.catalog_bucket:
            turn, planned = self._turn(envelope.now), self.pipelines.planned
            self._catalog.apply(change.key, change.value)
            self._planner.problems.tables.changed(change.key)
            if (
                self._acts(turn) and self.pipelines.planned != planned
            ):  # deployed, or ended: now and not at the next review
                return [*self.pipelines.review(self._leaving, turn), *self._plan(turn)]
        elif change.key == LEADER:
            self.lease.changed(decode_kept(LeaderRecord, change.value), envelope.now)
        else:
            self.pipelines.stored.change(change.key, change.value)
            worker = worker_of_key(change.key)
            if self.lease.epoch:  # the leader itself has written the others, and knows more
                return NOTHING
            self.drift.stored(change.key, change.value)
            if worker is not None:
                self.fleet.record_changed(worker, decode_kept(MachineRecord, change.value), envelope.now)
        return NOTHING

    def _synced(self, envelope: Envelope) -> Iterable[Effect]:
        if envelope.message.bucket != self._subjects.control_bucket:
            self.pipelines.known = True
            return NOTHING
        self.lease.known(envelope.now)
        return self._claim(envelope.now)

    def _begin_epoch(self, turn: Turn) -> None:
        """This controller leads in a new epoch. What it believed to be under way was an earlier leader's."""
        self._led, self._led_since, self._late = turn.epoch, turn.now, []
        self._machines.forget(turn)
        self._planner.forget()
        self._moves.forget()
        self._drain.forget()
        self._inventory.forget()
        self._growth.forget()
        self.pipelines.forget()
        self.drift.forget()

    # -- answers of the edge

    def _edge_answered(self, envelope: Envelope) -> Iterable[Effect]:
        message: Done | Failed | TimedOut = envelope.message
        what, *rest = message.id
        error = None if isinstance(message, TimedOut) else message.error if isinstance(message, Failed) else ""
        turn = self._turn(envelope.now)
        if what == "claim":
            return self._claimed(message, turn)
        if what == "inventory" and rest == [str(self._led)]:
            failed = Inventory(error=error or "the provider did not answer in time")
            self._inventory.listed(message.result if isinstance(message, Done) else failed)
            return NOTHING
        if not turn.epoch or turn.epoch != self._led or not rest:
            self._late += (envelope,) if rest and not turn.epoch else ()
            return NOTHING
        if what == "plan":
            return self._planned(message, turn) if rest == [str(self._led)] else NOTHING
        worker = rest[0]
        if what == "replicas" and error != "":
            self.pipelines.not_saved(worker)
        if what == "distribution":
            return self.drift.fetched(worker, message.result if isinstance(message, Done) else None, error, turn)
        if what == "start":
            return self._machines.started(worker, error, turn)
        if what == "stop":
            return [*self._machines.stopped(worker, error, turn), *self._drain.stopped(worker, error, turn)]
        if what == "save" and error == "":
            return [*self._machines.saved(worker, turn), *self._drain.saved(worker, turn)]
        if what == "save":
            return self._machines.not_saved(worker, error or "the bucket did not answer in time", turn)
        return NOTHING

    def _claimed(self, message: Done | Failed | TimedOut, turn: Turn) -> Iterable[Effect]:
        before = self.lease.epoch
        self.lease.claimed(message.result if isinstance(message, Done) else None, turn.now)
        if before or not self.lease.leads(turn.now):
            return NOTHING
        return self._review(Turn(turn.now, self.lease.epoch))

    # -- decisions

    def _review_again(self, envelope: Envelope) -> Iterable[Effect]:
        return [self._next_review(), *self._review(self._turn(envelope.now))]

    def _review(self, turn: Turn) -> list[Effect]:
        """In this order: which machines exist, what of them is under way, the plan, and which machines come and go."""
        self.fleet.forget_gone(turn.now)
        if not turn.epoch:
            return []
        if turn.epoch != self._led:
            self._begin_epoch(turn)
        late, self._late = self._late, []
        found = [effect for one in late for effect in self._edge_answered(Envelope(turn.now, one.message))]
        if turn.now - self._started_at < FIRST_REVIEW_S:
            return found
        found += self._inventory.refresh(turn)
        if not self._inventory.ready:
            return found
        if self._dry_run is None:
            found += self._machines.adopt(turn)
            found += self._machines.advance(turn)
            self._drain.adopt(turn)
        closed = self._inventory.closed()
        found += self.pipelines.review(self._leaving, turn)
        found += self.drift.review(turn) if self.pipelines.known else []
        found += self._plan(turn)
        planned = self._planner.current(turn.now)  # it says which machines there are (`_planned`); else the rules do
        needs = [] if planned else hardware_needs(self._summaries(turn), self._limits)
        lacking = [] if planned else self._planner.machine_needs()
        wanted = {need.hardware for need in (*needs, *lacking)} | self._moves.hardware()
        stays, effects = self._drain.advance(wanted, turn, closed)
        found += effects
        found += self._moves.advance(lambda need: self._growth.for_need(need, turn), turn)
        for need in lacking:
            found += self._growth.for_need(need, turn)[1]
        if not stays:
            for need in needs:
                found += self._growth.new_for(need, turn, self.fleet.troubled(need.hardware, turn.now))[1]
        self._growth.still_blocked(wanted)
        if (self._inventory.known and self._dry_run is None) or turn.now - self._led_since > APPEAR_S:
            found += self._growth.keep_minimum(closed, turn)
        if not self._drain.worker:
            found += self._remove(closed, turn, idle=not needs and not planned)
        return found

    # -- the plan

    @property
    def _leaving(self) -> Collection[str]:
        return (self._drain.worker,) if self._drain.worker else ()

    def _plan(self, turn: Turn) -> list[Effect]:
        return self._planner.plan(turn, self._leaving) if self._plans else []

    def _planned(self, message: Done | Failed | TimedOut, turn: Turn) -> list[Effect]:
        if not isinstance(message, Done):
            self._planner.not_solved()
            return []
        leaving = self._leaving
        found = self._planner.solved(message.result, turn)
        found += self._growth.follow(self._planner.wanted_machines, self._planner.expected, self._planner.weight, turn)
        return found if self._leaving == leaving else [*found, *self._planner.plan(turn, self._leaving, at_once=True)]

    def _summaries(self, turn: Turn) -> list[WorkerSummary]:
        return self.fleet.summaries(turn.now, self._limits.settle_s)

    def _remove(self, closed: Mapping[str, str], turn: Turn, *, idle: bool) -> list[Effect]:
        """Remove a machine that the operator wants empty; else an idle one, if no hardware is needed."""
        workers = self._summaries(turn)
        going = next((worker for worker in workers if worker.name in closed and self._may_leave(worker)), None)
        if going is not None:
            chosen: Remove | None = Remove(worker=going.name, reason=f"its node is set to {closed[going.name]}")
        else:
            chosen = (
                removal(
                    workers,
                    self._limits,
                    lambda name: self._drain.spared(name, turn.now) or bool(self._planner.kept_only_on(name, turn.now)),
                )
                if idle
                else None
            )
        if chosen is None:
            return []
        if self._dry_run is not None:
            return self._dry_run.remove(chosen, turn)
        return self._drain.begin(chosen, turn, closed)

    def _may_leave(self, worker: WorkerSummary) -> bool:
        """Whether there is anything to drain: the worker has come up and is heard."""
        known = self.fleet.workers[worker.name]
        ordered = known.record is not None and known.record.state == "Booting"
        return worker.kind in self._limits.kinds and worker.state in ("Ready", "Booting") and not ordered


def changes_machines(settings: Settings) -> bool:
    """Whether machines are added and removed at all. A static system keeps the ones that it has."""
    return settings.autoscaler.policy != "static"


def make_controller(
    settings: Settings,
    subjects: Subjects,
    name: str,
    kinds: Mapping[str, PricedKind],
    traits: ProviderTraits | None = None,
    policy: GuardedPolicy | None = None,
) -> Controller:
    """A candidate for the lead. kinds: of machines that may be started; ignored in a static system. traits: of the provider.

    policy: a user's own, if the settings name one.
    """
    limits = FleetLimits(
        kinds=kinds if changes_machines(settings) else {},
        settings=settings.machines,
        budget_per_hour=settings.autoscaler.budget_per_hour or inf,
    )
    return Controller(name, subjects, limits, settings.monitor, traits, settings.autoscaler, settings.goal, policy)


# -- metrics


OBJECTIVES = (  # metric, field of AppObjective, help
    ("infaas_objective_slo_target", "slo_target", "By app: share of its queries to be answered in time."),
    ("infaas_objective_reached", "reached", "By app: share of its queries in time in the last two minutes."),
    ("infaas_objective_forecast", "forecast", "By app: items/s for which the leader plans."),
    ("infaas_objective_headroom", "headroom", "By app: what its instances carry in time, over the forecast."),
)


def families(actor: Controller) -> Iterable[MetricFamily]:
    leads = gauge("infaas_controller_leads", "1 while this VM-autoscaler leads the cluster.")
    workers = gauge("infaas_controller_workers", "Workers that this VM-autoscaler knows.")
    found = [leads.add(int(actor.lease.epoch > 0)), workers.add(len(actor.fleet.workers))]
    for name, field, about in OBJECTIVES:
        family = gauge(name, about)
        for one in actor._planner.objectives:
            value = getattr(one, field)
            if value is not None:
                family.add(value, app=one.app)
        found.append(family)
    failures = policy_failures(actor._policy.failures if actor._policy is not None else {})
    drifted = actor.drift.families() if actor.lease.epoch > 0 else ()
    return [*found, failures, *drifted, *actor.pipelines.families(leads=actor.lease.epoch > 0)]


def missing(_actor: Controller, _now: float) -> str:
    return ""
