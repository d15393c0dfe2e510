"""Runs a policy beside the live system: it hears what the system publishes, and records what the policy would have done. Pure.

It publishes nothing. Its events go to `infaas.event.shadow` alone. It first listens for a while, then starts a simulated system with the
workers and instances that are there, and gives it all further demand.
"""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np

from bus.messages.events import ScalingEvent, ShadowEvent
from bus.messages.fleet import WorkerHeartbeat
from bus.messages.scaling import DemandReport, PipelineArrivals
from bus.subjects import Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Effect,
    Envelope,
    Handler,
    Inlet,
    Malformed,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TableActor,
    Tick,
    Undelivered,
    Watch,
)
from services.simulation.kernel import ActorHalted
from services.simulation.shadow.live import LiveOutcomes, LiveScaling, LiveSystem, visits_of
from services.simulation.shadow.system import ShadowSpec, ShadowSystem

LISTEN = 5.0  # s before the start; static policies choose by the demand of this time
STEP = 0.25  # s between two looks
SAMPLE = 10.0  # s between two rows that tell the cost, as a meter's
SAMPLER = "shadow"
LATE = 2.0  # s that a look may come too late
_TOLD = tuple(name for name in ScalingEvent.__struct_fields__ if name in ShadowEvent.__struct_fields__)


class Shadow(TableActor):
    """rng: draws the arrivals within a report's time. fault: why it cannot go on, as a sentence; "" while it can."""

    def __init__(self, subjects: Subjects, spec: ShadowSpec, rng: np.random.Generator) -> None:
        self.fault = ""
        self.began = 0.0
        self._subjects = subjects
        self._spec = spec
        self._rng = rng
        self._live = LiveSystem()
        self._system: ShadowSystem | None = None
        self._synced = False
        self._started = self._looked = self._sampled = 0.0
        self._heard: list[tuple[float, DemandReport]] = []
        self._pipelines: set[str] = set()  # whose visits are sent to the apps of their stages
        self._actions: Counter[str] = Counter()
        self._late = 0
        self._apps_cost = self._real_cost = self._real_apps_cost = 0.0  # US$
        self._on: dict[type, Handler] = {
            WorkerHeartbeat: self._heartbeat,
            DemandReport: self._demand,
            PipelineArrivals: self._arrivals,
            LiveOutcomes: self._ended,
            LiveScaling: self._scaled,
            Changed: self._changed,
            Synced: self._synced_all,
            Started: self._start,
            Tick: self._look,
            Stopping: self._stop,
            Malformed: lambda _: (
                NOTHING
            ),  # a refusal would go to the one who publishes events, in place of the stream's answer
            Undelivered: lambda _: NOTHING,
            Recorded: lambda _: NOTHING,
        }
        s = self._subjects
        self.inlets = (
            Inlet(subject=s.worker_heartbeat(), message=WorkerHeartbeat, malformed=True),
            Inlet(subject=s.demand(), message=DemandReport, malformed=True),
            Inlet(subject=s.pipeline("arrivals"), message=PipelineArrivals, malformed=True),
            Inlet(subject=s.event("outcome"), message=LiveOutcomes, malformed=True),
            Inlet(subject=s.event("scaling"), message=LiveScaling, malformed=True),
        )
        self.watches = (Watch(bucket=self._subjects.catalog_bucket),)

    # -- what is heard

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        self._live.heartbeat(envelope.message, envelope.now)
        return NOTHING

    def _demand(self, envelope: Envelope) -> Iterable[Effect]:
        self._offer(envelope.message, envelope.now)
        return NOTHING

    def _arrivals(self, envelope: Envelope) -> Iterable[Effect]:
        report: PipelineArrivals = envelope.message
        if self._system is not None:
            self._system.arrived(report)
        visits = visits_of(report, self._live.catalog, self._rng.random)
        if visits.rows:
            self._pipelines.add(report.pipeline)
            self._offer(visits, envelope.now)
        return NOTHING

    def _offer(self, report: DemandReport, now: float) -> None:
        if self._system is None:
            self._heard.append((now, report))
        else:
            self._system.offer(report, now)

    def _ended(self, envelope: Envelope) -> Iterable[Effect]:
        if self._system is not None:
            self._live.ended(envelope.message)
        return NOTHING

    def _scaled(self, envelope: Envelope) -> Iterable[Effect]:
        if self._system is not None:
            self._live.scaled(envelope.message)
        return NOTHING

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        change: Changed = envelope.message
        self._live.changed(change.key, change.value)
        if self._system is not None:
            self._system.entry(change.key, change.value)
        return NOTHING

    def _synced_all(self, _envelope: Envelope) -> Iterable[Effect]:
        self._synced = True
        return NOTHING

    # -- the policy's system

    def _start(self, envelope: Envelope) -> Iterable[Effect]:
        self._started = envelope.now
        return (After("look", STEP, Tick()),)

    def _look(self, envelope: Envelope) -> Iterable[Effect]:
        now = envelope.now
        listens = self._system is None and now - self._started < LISTEN
        effects = [] if self.fault or listens else self._advance(now)
        return NOTHING if self.fault else [After("look", STEP, Tick()), *effects]

    def _advance(self, now: float, *, last: bool = False) -> list[Effect]:
        try:
            system = self._system or self._begin(now)
            if system is None:
                return []
            events = system.advance(now, last=last)
        except ActorHalted as error:
            self.fault = f"the policy failed: {error}"
            return []
        elapsed, self._looked = now - self._looked, now
        self._late += elapsed > LATE
        live = self._live
        self._apps_cost += elapsed * system.apps_cost_rate / 3600.0
        self._real_cost += elapsed * live.cost_rate(now) / 3600.0
        self._real_apps_cost += elapsed * live.apps_cost_rate(now) / 3600.0
        self._actions.update(event.action for event in events if event.count)
        effects: list[Effect] = [self._row(event) for event in events]
        if last or now - self._sampled >= SAMPLE:
            self._sampled = now
            effects.append(self._row(self._sample(now)))
        return effects

    def _begin(self, now: float) -> ShadowSystem | None:
        """Start the simulated system. None, with a fault, if there is nothing to start it with."""
        if not self._synced or not any(True for _ in self._live.catalog.apps):
            self.fault = "nothing is registered there: register a model first (infaas register)"
        elif not self._live.workers(now):
            self.fault = "no worker sends heartbeats: see what is missing with infaas doctor"
        if self.fault:
            return None
        system = self._system = ShadowSystem(self._spec, self._live, self._heard, now, self._rng)
        self._heard = []
        self.began = self._looked = now
        return system

    def _stop(self, envelope: Envelope) -> Iterable[Effect]:
        return NOTHING if self._system is None or self.fault else self._advance(envelope.now, last=True)

    # -- what is recorded

    def _sample(self, now: float) -> ScalingEvent:
        system = self._system
        assert system is not None
        share, real = (
            f"{one.in_time / one.items:.2%} of {one.items} items" if one.items else "no items"
            for one in (system, self._live)
        )
        machines = ", ".join(f"{count} {kind}" for kind, count in sorted(system.machines.items())) or "no machine"
        instances = f"{system.instances} instance{'s' * (system.instances != 1)}"
        said = f"{share} in time (the system: {real}); {machines}, {instances}"
        return ScalingEvent(
            now, scaler=SAMPLER, worker=None, app=None, model=None, variant=None, action="sample", count=0, reason=said
        )

    def _row(self, event: ScalingEvent) -> Record:
        system, told = self._system, {name: getattr(event, name) for name in _TOLD}
        assert system is not None
        rates = system.cost_rate, system.apps_cost_rate
        return Record(ShadowEvent(policy=self._spec.name, cost_rate=rates[0], apps_cost_rate=rates[1], **told))

    # -- the result

    def document(self) -> dict[str, Any]:
        """What happened since `began`, as `infaas shadow --json` prints it. Rates are means, in US$ per hour."""
        system, live = self._system, self._live
        seconds = self._looked - self.began
        if system is None or seconds <= 0:
            return {}
        hours = seconds / 3600.0
        return {
            "policy": self._spec.name,
            "seconds": seconds,
            "shadow": {
                "items": system.items,
                "in_time": system.in_time / system.items if system.items else None,
                "cost_rate": system.cost / hours,
                "apps_cost_rate": self._apps_cost / hours,
                "actions": dict(sorted(self._actions.items())),
                "machines": dict(sorted(system.machines.items())),
                "instances": system.instances,
            },
            "real": {
                "items": live.items,
                "in_time": live.in_time / live.items if live.items else None,
                "cost_rate": self._real_cost / hours,
                "apps_cost_rate": self._real_apps_cost / hours,
                "actions": dict(sorted(live.actions.items())),
                "machines": dict(
                    sorted(Counter(one.kind or one.hardware for one in live.workers(self._looked)).items())
                ),
                "instances": sum(live.loaded(one).total() for one in live.workers(self._looked)),
            },
            "notes": self._notes(),
        }

    def _notes(self) -> list[str]:
        found = []
        if self._pipelines:
            found.append(
                f"each visit of a stage of {', '.join(sorted(self._pipelines))} counts as a query in the shadow, with its share of the"
                " objective: shares in time compare, numbers of queries do not"
            )
        if self._late:
            found.append(
                f"this machine was too slow to follow the demand {self._late} times: what it says about latency is too good or too bad"
            )
        return found


def make_shadow(subjects: Subjects, spec: ShadowSpec) -> Shadow:
    """A policy beside the system whose subjects these are."""
    return Shadow(subjects, spec, np.random.default_rng(0))
