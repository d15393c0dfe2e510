"""The model-autoscaler of one worker: every second it checks whether what runs here carries the load, and orders what should."""

from collections.abc import Iterable, Mapping
from typing import Literal

from msgspec import Struct

from bus.messages.fleet import EnsureLoaded, FleetDigest, FleetRoster, LoadReply, PlannedBy, Release, WorkerHeartbeat
from bus.messages.scaling import AskForCapacity, DemandReport
from bus.subjects import Subjects
from services.autoscaler.models.accuracy import roomy
from services.autoscaler.models.baselines import Choices, FixedVariant, static_changes
from services.autoscaler.models.demand import ClassLoad, LoadEstimator
from services.autoscaler.models.policy import CapacityRequest, InfaasScaling, InstanceChange, ScalingDecision
from services.autoscaler.models.problem import Knobs, Situation, situation
from services.autoscaler.models.supply import OtherWorkers, ProfileCache
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Publish,
    Started,
    Synced,
    TimedOut,
    Watch,
)
from services.core.catalog import Catalog
from services.core.cost import load_seconds
from services.core.planning.plan import Plan
from services.core.planning.problem import PlanningProblem


class Solve(Struct, frozen=True):
    """Plan for this problem; the answer is `Solved`."""

    problem: PlanningProblem


class Solved(Struct, frozen=True):
    """The plan, and how long it took in milliseconds."""

    plan: Plan
    milliseconds: float


# -- The model-autoscaler of one worker: every second it looks whether what runs here carries the load, and orders
# what should.

ScalingPolicy = Literal["infaas", "replicate", "static", "off"]

GONE = 2.0  # s without our monitor's heartbeat, or a dispatcher's digest: the last one says nothing any more
BARRED = 5.0  # s for which a variant that was refused here is not ordered again; doubles
BARRED_MOST = 60.0
PATIENCE = 5.0  # s for a solver, whatever its own limit
SAVING = 5  # periods between searches for savings while everything is carried
JUMP = 1.3  # a load grown by this factor is not left to wait for the next look, one fallen by it not for the next search for savings
ASK_AGAIN = 5.0  # s before the controller is asked for the same again, beside the load time ...
GROWN = 1.5  # ... unless it is for so many times the load


class ReviewLoad(Struct, frozen=True):
    """Timer: is the load carried?"""


class ModelAutoscaler:
    """Pure actor of one worker. choice: what the baselines serve each app with, where the operator has chosen."""

    def __init__(
        self,
        worker: str,
        subjects: Subjects,
        prices: Mapping[str, float],
        knobs: Knobs,
        *,
        policy: ScalingPolicy = "infaas",
        period_s: float = 1.0,
        choice: Mapping[str, FixedVariant] | None = None,
    ) -> None:
        self._worker = worker
        self._name = f"model-{worker}"
        self._subjects = subjects
        self._prices = prices
        self._knobs = knobs
        self._policy = policy
        self._period = period_s
        self._scaling = InfaasScaling(knobs.hold_s)
        self._choices = Choices(choice or {})
        self._catalog = Catalog()
        self._facts = ProfileCache()
        self._synced = False
        self._loads = LoadEstimator(everything=policy == "static")
        self._beat: tuple[float, WorkerHeartbeat | None] = (0.0, None)
        self._digest: tuple[float, FleetDigest | None] = (0.0, None)
        self._roster: dict[tuple[str, bool], list[str]] = {}
        self._seen: Situation | None = None  # what is being solved
        self._looks = 0
        self._rate = 0.0  # at the last look
        self._planned = 0.0  # the rate at the last solve
        self._barred: dict[str, tuple[float, float]] = {}  # variant: until when, and for how long the next time
        self._asked: dict[tuple[str, tuple[str, ...]], tuple[float, float]] = {}  # until when, and for which load

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        s, worker = self._subjects, self._worker
        mine = (
            Inlet(subject=s.worker_heartbeat(worker), message=WorkerHeartbeat),
            Inlet(subject=s.fleet("digest"), message=FleetDigest),
            Inlet(subject=s.loads(self._name), message=LoadReply),
        )
        if self._policy == "static":  # it deals out what was chosen for the load of all, in turn among all
            everybody = (
                Inlet(subject=s.demand(), message=DemandReport),
                Inlet(subject=s.fleet("roster"), message=FleetRoster),
            )
            return (*mine, *everybody)
        return (*mine, Inlet(subject=s.worker(worker, "demand"), message=DemandReport))

    @property
    def watches(self) -> tuple[Watch, ...]:
        return (Watch(bucket=self._subjects.catalog_bucket),)

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        message, now = envelope.message, envelope.now
        match message:
            case WorkerHeartbeat():
                self._beat = (now, message)
            case FleetDigest():
                self._digest = (now, message)
            case FleetRoster():
                self._roster = {(pool.kind, pool.simulated): pool.workers for pool in message.pools}
            case DemandReport():
                self._loads.take(message, now)
                if self._jumped(now):
                    return self._look(now)
            case ReviewLoad():
                self._looks += 1
                return [After("look", self._period, message), *self._look(now)]
            case Done():
                return self._solved(message.result, now)
            case Failed() | TimedOut():
                self._seen = None
            case LoadReply():
                self._answered(message, now)
            case Changed():
                self._catalog.apply(message.key, message.value)
            case Synced():
                self._synced = True
            case Started():
                return [] if self._policy == "off" else [After("look", self._period, ReviewLoad())]
        return []

    # -- looking

    def _jumped(self, now: float) -> bool:
        if self._policy == "off" or self._loads.newest((self._worker, "")) <= JUMP * self._rate:
            return False
        return self._own_rate(now) > JUMP * self._rate

    def _own_rate(self, now: float) -> float:
        mine = (self._worker, "")
        return sum(rate for load in self._loads.classes(now) for name, rate in load.by_worker.items() if name in mine)

    def _look(self, now: float) -> list[Effect]:
        self._rate = self._own_rate(now)
        heard, mine = self._beat
        if not self._synced or self._seen is not None or mine is None or now - heard > GONE or mine.draining:
            return []
        told, digest = self._digest
        others = OtherWorkers(self._worker, digest if now - told <= GONE else None)
        if self._policy == "static" and not self._choices.open(mine, self._loads.apps, self._roster, self._catalog):
            return []
        fell = JUMP * self._rate < self._planned
        if not (self._policy == "static" or self._scaling.waiting or fell or self._looks % SAVING == 0):
            glance = self._situation(mine, others, now, glance=True)
            if glance is None or not self._scaling.soon(glance):
                return []
        seen = self._situation(mine, others, now)
        if seen is not None and self._policy != "infaas":
            self._choices.learn(seen)
            seen = self._situation(mine, others, now)
        if seen is None:
            return []
        if self._policy == "static":
            changes = static_changes(self._worker, self._roster, seen, self._choices, self._catalog)
            return self._carry_out(seen, ScalingDecision(tuple(changes)))
        if not (self._scaling.soon(seen) or self._scaling.waiting or fell or self._looks % SAVING == 0):
            return []
        self._seen, self._planned = seen, self._rate
        return [Do("solve", Solve(roomy(seen.problem)), PATIENCE)]

    def _situation(
        self, mine: WorkerHeartbeat, others: OtherWorkers, now: float, *, glance: bool = False
    ) -> Situation | None:
        barred = frozenset(name for name, (until, _) in self._barred.items() if now < until)
        only = {} if self._policy == "infaas" else self._choices.variants
        loads = self._loads.classes(now)
        if self._policy == "static":  # what was chosen is dealt out to all workers, whichever of them the load goes to
            loads = [ClassLoad(load.needs, {self._worker: load.rate}, load.last, load.counted) for load in loads]
        return situation(
            mine,
            others,
            self._catalog,
            loads,
            self._prices,
            self._knobs,
            self._facts,
            now,
            barred=barred,
            only=only,
            glance=glance,
        )

    def _solved(self, solved: Solved, now: float) -> list[Effect]:
        seen, self._seen = self._seen, None
        if seen is None:
            return []
        return self._carry_out(seen, self._scaling.decide(seen, solved.plan, now), solved, now)

    # -- orders

    def _carry_out(
        self, seen: Situation, decision: ScalingDecision, solved: Solved | None = None, now: float = 0.0
    ) -> list[Effect]:
        effects: list[Effect] = [self._order(seen, change, solved) for change in decision.changes]
        for one in decision.elsewhere:
            effects.extend(self._ask(seen, one, now))
        return effects

    def _order(self, seen: Situation, change: InstanceChange, solved: Solved | None) -> Effect:
        by = PlannedBy(solved.plan.solver, solved.milliseconds, solved.plan.objective) if solved else None
        if change.kind == "unload":
            away = Release(
                variant=change.variant, keep=change.instances, orderer=self._name, reason=change.reason, planned=by
            )
            return Publish(self._subjects.worker(self._worker, "release"), away)
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

    def _answered(self, reply: LoadReply, now: float) -> None:
        """The monitor alone admits: what it refuses is planned without for a while."""
        if not reply.reason:
            self._barred.pop(reply.variant, None)
            return
        pause = self._barred.get(reply.variant, (0.0, BARRED))[1]
        self._barred[reply.variant] = (now + pause, min(BARRED_MOST, 2 * pause))

    def _ask(self, seen: Situation, one: CapacityRequest, now: float) -> list[Effect]:
        app = seen.apps[one.demand]
        key = (app, one.variants)
        until, asked = self._asked.get(key, (0.0, 0.0))
        if now < until and one.load <= GROWN * asked:
            return []
        load_s = load_seconds(seen.records[one.variants[0]])
        self._asked[key] = now + ASK_AGAIN + load_s, one.load
        self._asked = {k: ask for k, ask in self._asked.items() if ask[0] > now}
        load = seen.classes[one.demand]
        ask = AskForCapacity(
            worker=self._worker,
            at=now,
            app=app,
            why=one.why,
            variants=list(one.variants),
            load=one.load,
            instances=one.instances,
            latency_ms=load.needs.latency_ms if load is not None else None,
            accuracy=load.needs.accuracy if load is not None else 0.0,
            reason=one.reason,
        )
        return [Publish(self._subjects.controller("ask"), ask)]
