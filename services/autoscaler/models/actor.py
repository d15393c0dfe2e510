"""The model-autoscaler of one worker: every second it checks whether the load here is carried, and orders what should run. Pure.

It plans only the load that this worker serves. It asks the controller for what does not fit here or needs hardware of others.
Loading and unloading are orders to this worker's monitor, so nothing here waits for them.
"""

from collections.abc import Iterable, Mapping

from msgspec import Struct

from bus.messages.fleet import EnsureLoaded, FleetDigest, FleetRoster, LoadReply, PlannedBy, Release, WorkerHeartbeat
from bus.messages.scaling import AskForCapacity, DemandReport, ObjectiveReport
from bus.subjects import Subjects
from services.autoscaler.models.accuracy import with_headroom
from services.autoscaler.models.baselines import Choices, static_changes
from services.autoscaler.models.demand import ClassLoad, LoadEstimator
from services.autoscaler.models.policy import (
    CapacityRequest,
    InfaasScaling,
    InstanceChange,
    ScalingDecision,
    decision_of,
)
from services.autoscaler.models.problem import ProblemBuilder, Situation
from services.autoscaler.models.supply import OtherWorkers
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
    Publish,
    Recorded,
    Started,
    Stopping,
    Synced,
    Tick,
    TimedOut,
    Undelivered,
    Watch,
)
from services.core.catalog import Catalog
from services.core.cost import Goal, load_seconds
from services.core.metric import MetricFamily
from services.core.planning.plan import Plan
from services.core.planning.problem import PlanningProblem
from services.core.policy import GuardedPolicy, policy_failures
from services.core.settings import AutoscalerSettings, Settings

GONE = 2.0  # s without a heartbeat of this worker's monitor, or without a dispatcher's digest, after which the last is ignored
BARRED = 5.0  # s for which a variant that was refused here is not ordered again; doubles
BARRED_MOST = 60.0  # s
SOLVE_S = 5.0  # s that a solver may take, whatever its own limit
SAVING = 5  # periods between searches for savings while all load is carried
JUMP = 1.3  # a load that grows by this factor is checked at once; one that falls by it is searched for savings at once
ASK_AGAIN = 5.0  # s, beside the load time, before the controller is asked for the same again ...
GROWN = 1.5  # ... unless it is for so many times the load
LED_S = 14.0  # s after a plan of the leader for which this worker leaves the plan to it; there is one each 10 s, and it may take 2.5 s


class Solve(Struct, frozen=True):
    """Command to the edge: make a plan for this problem. The answer is `Solved`."""

    problem: PlanningProblem


class Solved(Struct, frozen=True):
    """The plan, and how many milliseconds it took."""

    plan: Plan
    milliseconds: float


class ModelAutoscaler:
    """One worker's. prices: US$ per hour by device kind. memory_share: the part of devices' memory that instances may take.

    policy: a user's own, which decides where it can.
    """

    def __init__(
        self,
        worker: str,
        subjects: Subjects,
        prices: Mapping[str, float],
        settings: AutoscalerSettings | None = None,
        *,
        memory_share: float = 0.8,
        goal: Goal = "cost",
        policy: GuardedPolicy | None = None,
    ) -> None:
        self._worker = worker
        self._name = f"model-{worker}"
        self._subjects = subjects
        self._settings = settings = settings or AutoscalerSettings()
        self._static = settings.policy == "static"
        self._chooses = settings.policy in ("static", "replicate")
        self._policy = policy
        self._scaling = InfaasScaling(settings.hold_s)
        self._choices = Choices(settings.choice)
        self._catalog = Catalog()
        self._problems = ProblemBuilder(self._catalog, prices, settings, memory_share, goal)
        self._synced = False
        self._loads = LoadEstimator(everything=self._static)
        self._heartbeat: tuple[float, WorkerHeartbeat | None] = (0.0, None)
        self._digest: tuple[float, FleetDigest | None] = (0.0, None)
        self._roster: dict[tuple[str, bool], list[str]] = {}
        self._solving: Situation | None = None
        self._periods = 0
        self._rate = 0.0  # items/s of this worker at the last check
        self._led_at = float("-inf")  # when the leader has planned last
        self._planned_rate = 0.0  # the same when the solver was asked last
        self._barred: dict[str, tuple[float, float]] = {}  # variant: until when, and for how long the next time
        self._asked: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}  # until when, and for which load
        self._on: dict[type, Handler] = {
            WorkerHeartbeat: self._heard,
            FleetDigest: self._digested,
            FleetRoster: self._roster_changed,
            ObjectiveReport: self._led,
            DemandReport: self._demand,
            Tick: self._check_again,
            Done: self._solved,
            Failed: self._not_solved,
            TimedOut: self._not_solved,
            LoadReply: self._load_answered,
            Changed: self._changed,
            Synced: self._synced_all,
            Started: self._start,
            Stopping: lambda _: NOTHING,
            Undelivered: lambda _: NOTHING,
            Recorded: lambda _: NOTHING,
        }

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s, worker = self._subjects, self._worker
        mine = (
            Inlet(subject=s.worker_heartbeat(worker), message=WorkerHeartbeat),
            Inlet(subject=s.fleet("digest"), message=FleetDigest),
            Inlet(subject=s.loads(self._name), message=LoadReply),
        )
        if self._static:  # the choice is for the load of all, and goes in turn to all workers
            return (
                *mine,
                Inlet(subject=s.demand(), message=DemandReport),
                Inlet(subject=s.fleet("roster"), message=FleetRoster),
            )
        return (
            *mine,
            Inlet(subject=s.worker(worker, "demand"), message=DemandReport),
            Inlet(subject=s.controller("objectives"), message=ObjectiveReport),
        )

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        return self._on[type(envelope.message)](envelope)

    # -- what is known

    def _start(self, envelope: Envelope) -> Iterable[Effect]:
        del envelope
        return NOTHING if self._settings.policy == "off" else (self._next_check(),)

    def _next_check(self) -> Effect:
        return After("check", self._settings.period_s, Tick())

    def _heard(self, envelope: Envelope) -> Iterable[Effect]:
        self._heartbeat = (envelope.now, envelope.message)
        return NOTHING

    def _digested(self, envelope: Envelope) -> Iterable[Effect]:
        self._digest = (envelope.now, envelope.message)
        return NOTHING

    def _roster_changed(self, envelope: Envelope) -> Iterable[Effect]:
        self._roster = {(pool.kind, pool.simulated): pool.workers for pool in envelope.message.pools}
        return NOTHING

    def _led(self, envelope: Envelope) -> Iterable[Effect]:
        self._led_at = envelope.now
        return NOTHING

    def _demand(self, envelope: Envelope) -> Iterable[Effect]:
        self._loads.take(envelope.message, envelope.now)
        return self._check(envelope.now) if self._jumped(envelope.now) else NOTHING

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        self._catalog.apply(envelope.message.key, envelope.message.value)
        return NOTHING

    def _synced_all(self, envelope: Envelope) -> Iterable[Effect]:
        del envelope
        self._synced = True
        return NOTHING

    def _load_answered(self, envelope: Envelope) -> Iterable[Effect]:
        """The monitor alone admits loads. For a while, plans do without what it refuses."""
        reply: LoadReply = envelope.message
        if not reply.reason:
            self._barred.pop(reply.variant, None)
            return NOTHING
        pause = self._barred.get(reply.variant, (0.0, BARRED))[1]
        self._barred[reply.variant] = (envelope.now + pause, min(BARRED_MOST, 2 * pause))
        return NOTHING

    # -- checks

    def _jumped(self, now: float) -> bool:
        if self._settings.policy == "off" or self._loads.newest((self._worker, "")) <= JUMP * self._rate:
            return False
        return self._own_rate(now) > JUMP * self._rate

    def _own_rate(self, now: float) -> float:
        mine = (self._worker, "")
        return sum(rate for load in self._loads.classes(now) for name, rate in load.by_worker.items() if name in mine)

    def _check_again(self, envelope: Envelope) -> Iterable[Effect]:
        self._periods += 1
        return [self._next_check(), *self._check(envelope.now)]

    def _check(self, now: float) -> list[Effect]:
        """Have the solver plan if load is not carried, or if it is time to search for savings."""
        self._rate = self._own_rate(now)
        heard, mine = self._heartbeat
        if self._settings.policy == "infaas" and now - self._led_at <= LED_S:
            return []  # the leader plans for all workers
        if not self._synced or self._solving is not None or mine is None or now - heard > GONE or mine.draining:
            return []
        digested, digest = self._digest
        others = OtherWorkers(self._worker, digest if now - digested <= GONE else None)
        if self._static:
            return self._check_static(mine, others, now)
        if self._policy is not None:
            seen = self._situation(mine, others, now)
            if seen is None:
                return []
            wanted = self._policy.scale(seen.problem, now)
            if wanted is not None:
                return self._carry_out(seen, decision_of(seen, wanted, self._policy.name), now)
        fell = JUMP * self._rate < self._planned_rate
        search = self._scaling.waiting or fell or self._periods % SAVING == 0
        if not search:
            running = self._situation(mine, others, now, running_only=True)
            if running is None or not self._scaling.soon(running):
                return []
        seen = self._chosen_situation(mine, others, now)
        if seen is None or not (self._scaling.soon(seen) or search):
            return []
        self._solving, self._planned_rate = seen, self._rate
        return [Do("solve", Solve(with_headroom(seen.problem)), SOLVE_S)]

    def _check_static(self, mine: WorkerHeartbeat, others: OtherWorkers, now: float) -> list[Effect]:
        if not self._choices.incomplete(mine, self._loads.apps, self._roster, self._catalog):
            return []
        seen = self._chosen_situation(mine, others, now)
        if seen is None:
            return []
        changes = static_changes(self._worker, self._roster, seen, self._choices, self._catalog)
        return self._carry_out(seen, ScalingDecision(tuple(changes)), now)

    def _chosen_situation(self, mine: WorkerHeartbeat, others: OtherWorkers, now: float) -> Situation | None:
        """The situation, with the one variant of each app that a baseline has chosen for it."""
        seen = self._situation(mine, others, now)
        if seen is not None and self._chooses:
            self._choices.learn(seen)
            seen = self._situation(mine, others, now)
        return seen

    def _situation(
        self, mine: WorkerHeartbeat, others: OtherWorkers, now: float, *, running_only: bool = False
    ) -> Situation | None:
        barred = frozenset(name for name, (until, _) in self._barred.items() if now < until)
        only = self._choices.variants if self._chooses else {}
        loads = self._loads.classes(now)
        if self._static:  # the choice is made from the load of all workers
            loads = [ClassLoad(load.needs, {self._worker: load.rate}, load.last, load.counted) for load in loads]
        return self._problems.build(mine, others, loads, now, barred=barred, only=only, running_only=running_only)

    def _solved(self, envelope: Envelope) -> Iterable[Effect]:
        solved: Solved = envelope.message.result
        seen, self._solving = self._solving, None
        if seen is None:
            return NOTHING
        decision = self._scaling.decide(seen, solved.plan, envelope.now)
        return self._carry_out(seen, decision, envelope.now, solved)

    def _not_solved(self, envelope: Envelope) -> Iterable[Effect]:
        del envelope
        self._solving = None
        return NOTHING

    # -- orders

    def _carry_out(
        self, seen: Situation, decision: ScalingDecision, now: float, solved: Solved | None = None
    ) -> list[Effect]:
        effects = [self._order(seen, change, solved) for change in decision.changes]
        for request in decision.requests:
            effects += self._ask(seen, request, now)
        return effects

    def _order(self, seen: Situation, change: InstanceChange, solved: Solved | None) -> Effect:
        by = PlannedBy(solved.plan.solver, solved.milliseconds, solved.plan.objective) if solved else None
        if change.kind == "unload":
            release = Release(
                variant=change.variant, keep=change.instances, orderer=self._name, reason=change.reason, planned=by
            )
            return Publish(self._subjects.worker(self._worker, "release"), release)
        order = EnsureLoaded(
            variant=seen.records[change.variant],
            at_least=change.instances,
            app=seen.app_of(change.variant) or None,
            orderer=self._name,
            reason=change.reason,
            action=change.kind,
            planned=by,
        )
        return Publish(self._subjects.worker(self._worker, "load"), order, self._subjects.loads(self._name))

    def _ask(self, seen: Situation, request: CapacityRequest, now: float) -> tuple[Effect, ...]:
        app = seen.apps[request.demand]
        key = (app, request.variants)
        until, asked = self._asked.get(key, (0.0, 0.0))
        if now < until and request.load <= GROWN * asked:
            return NOTHING
        load_s = load_seconds(seen.records[request.variants[0]])
        self._asked[key] = now + ASK_AGAIN + load_s, request.load
        self._asked = {k: ask for k, ask in self._asked.items() if ask[0] > now}
        load = seen.classes[request.demand]
        ask = AskForCapacity(
            worker=self._worker,
            at=now,
            app=app,
            why=request.why,
            variants=list(request.variants),
            load=request.load,
            instances=request.instances,
            latency_ms=load.needs.latency_ms if load is not None else None,
            accuracy=load.needs.accuracy if load is not None else 0.0,
            reason=request.reason,
        )
        return (Publish(self._subjects.controller("ask"), ask),)


def make_model_autoscaler(
    settings: Settings,
    subjects: Subjects,
    worker: str,
    prices: Mapping[str, float],
    policy: GuardedPolicy | None = None,
) -> ModelAutoscaler:
    """The model-autoscaler of this worker. prices: US$ per hour by device kind. policy: a user's own, if the settings name one."""
    return ModelAutoscaler(
        worker,
        subjects,
        prices,
        settings.autoscaler,
        memory_share=settings.monitor.memory_share,
        goal=settings.goal,
        policy=policy,
    )


# -- metrics


def families(actor: ModelAutoscaler) -> Iterable[MetricFamily]:
    load = MetricFamily("infaas_autoscaler_load_items_per_second", "gauge", "Load of this worker when last looked at.")
    load.add(actor._rate, worker=actor._worker)
    barred = MetricFamily(
        "infaas_autoscaler_barred_variants", "gauge", "Variants that were refused here, planned without for now."
    )
    barred.add(len(actor._barred), worker=actor._worker)
    return load, barred, policy_failures(actor._policy.failures if actor._policy is not None else {})


def missing(actor: ModelAutoscaler, now: float) -> str:
    if not actor._synced:
        return "the catalogue"
    return "" if now - actor._heartbeat[0] <= GONE else "a heartbeat of its worker's monitor"
