"""What is well again some time after the last fault: nothing is open, queries are served, one process leads, planned models are loaded.

It also looks at the actors while they run: what they hold is bounded.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from bus.messages.public import Answer
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.machines import BOOT_S, LOST_S
from services.dispatcher.actor import Dispatcher
from services.executor.actor import Executor
from services.simulation.clients import QueryTemplate
from services.simulation.fuzz.queries import AskedQuery
from services.simulation.fuzz.violations import RETURNS_S, Violations
from services.simulation.scenario.model import Scenario
from services.simulation.system import SimulatedSystem

SERVED = 0.99  # of the queries in time
FEW = 2  # late ones that chance may bring
FORGETS_S = 5.0  # s after its deadline until all have forgotten a query
PARTS = 8  # of one query, at most
EASY_MS = 25.0  # of an objective that machines without faults keep


@dataclass(slots=True, eq=False)
class Liveness:
    """actors: all that run now, by name. begins: the clock at the scenario's time 0."""

    scenario: Scenario
    system: SimulatedSystem
    actors: Mapping[str, Any]
    asked: Mapping[str, AskedQuery]
    violations: Violations
    _recent: list[tuple[float, int]] = field(default_factory=list)  # when, and how many queries had been sent
    # The kind of each machine that ever was, and when it was last seen.
    _there: dict[str, tuple[str, float]] = field(default_factory=dict)
    _ordered: dict[str, float] = field(default_factory=dict)  # machines that boot, and since when
    _longest: float = field(init=False)

    def __post_init__(self) -> None:
        self._longest = max((one.latency_ms or 0.0 for one in self.scenario.needs.values()), default=0.0) / 1000.0

    # -- at intervals

    def look(self, now: float) -> None:
        """What dispatchers and executors hold belongs to queries that were sent of late."""
        sent = len(self.asked)
        self._there.update({name: (machine.spec.kind, now) for name, machine in self.system.machines.items()})
        self._ordered = {name: self._ordered.get(name, now) for name in self.system.booting}
        self._recent.append((now, sent))
        while self._recent[0][0] < now - self._longest - FORGETS_S:
            self._recent.pop(0)
        most = PARTS * (sent - self._recent[0][1] + 50)
        for name, held in self._held():
            if held > most:
                self.violations.add(
                    "bounded", now, f"{name} holds {held} queries, and {most // PARTS} were sent of late"
                )

    def _held(self) -> list[tuple[str, int]]:
        found = []
        for name, actor in self.actors.items():
            if isinstance(actor, Dispatcher):
                found += [(name, len(actor.in_flight)), (f"{name}'s joins", len(actor.composites.joins.open))]
                found.append((f"{name}'s central queues", sum(actor.central.depths().values())))
            elif isinstance(actor, Executor):
                found.append((name, len(actor.pending)))
        return found

    # -- at the end

    def served(self, since: float, until: float) -> None:
        """The queries of this time were answered in time."""
        asked = [one for one in self.asked.values() if since <= one.sent < until and self._easy(one.kind)]
        missed = [one for one in asked if not _in_time(one)]
        if len(missed) > max(FEW, (1.0 - SERVED) * len(asked)):
            one = missed[0]
            first = "no reply" if not one.replies else _word(one.first)
            words = (
                f"{len(missed)} of {len(asked)} queries were not answered in time, the first ({one.kind.app}): {first}"
            )
            self.violations.add("served", until, words, one.number)

    def _easy(self, kind: QueryTemplate) -> bool:
        """Whether the machines can do what such a query asks for: it states nothing but what its app says."""
        needs = kind.needs
        of_app = self.scenario.needs.get(kind.app)
        return of_app is not None and (needs.latency_ms, needs.accuracy, needs.cost, needs.model, needs.variant, needs.confidence) == (
            of_app.latency_ms, of_app.accuracy, of_app.cost, None, None, None
        )  # fmt: skip

    def well(self, now: float) -> None:
        """One leads, plans are loaded, everybody knows who is there."""
        leaders = [name for name, one in self.actors.items() if isinstance(one, Controller) and one.lease.leads(now)]
        if len(leaders) != 1:
            self.violations.add("one-leader", now, f"{', '.join(leaders) or 'nobody'} leads")
        loaded = {
            resident.record.variant
            for machine in self.system.machines.values()
            for device in machine.devices.values()
            for resident in device.residents.values()
        }
        for pipeline, plan in self.scenario.policies[0].plans.items():
            missing = sorted({stage.variant for stage in plan.vertices.values()} - loaded)
            if missing:
                self.violations.add(
                    "plan-loaded", now, f"{pipeline} is planned with {', '.join(missing)}, which nobody has loaded"
                )
        there = set(self.system.machines)
        gone = {name for name, (_, last) in self._there.items() if last > now - RETURNS_S} - there
        for name, actor in self.actors.items():
            if isinstance(actor, Dispatcher) and set(actor.view.workers) - gone != there:
                known, running = ", ".join(sorted(actor.view.workers)), ", ".join(sorted(there))
                self.violations.add(
                    "nobody-paused", now, f"{name} knows the workers {known or 'none'}; there are {running}"
                )
        died = {fault.worker for fault in self.scenario.faults if fault.kind == "worker-dies"} - there
        for one in self.scenario.policies[0].machines:
            count = sum(machine.spec.kind == one.kind for machine in self.system.machines.values())
            # A machine that is silent may be there, and paid for: for so long it counts against the most that there may be.
            silent = sum(kind == one.kind and last > now - LOST_S for kind, last in self._there.values()) - count
            # One that was ordered for one that died is waited for: nobody can know that it never comes.
            waits = now - BOOT_S - one.boot_s
            coming = sum(
                spec.kind == one.kind and self._ordered.get(name, now) > waits
                for name, spec in self.system.booting.items()
            )
            lost = sum(self._there[name][0] == one.kind for name in died if name in self._there)
            if count + min(coming, lost) < one.minimum and count + silent < one.maximum:
                self.violations.add(
                    "replicas", now, f"{count} machines of kind {one.kind}, which must have {one.minimum}"
                )

    def empty(self, now: float) -> None:
        """All queries have ended: nobody holds one."""
        for name, held in self._held():
            if held:
                self.violations.add("nothing-open", now, f"{name} still holds {held} queries")


def _in_time(query: AskedQuery) -> bool:
    if not query.replies or not isinstance(query.first, Answer) or query.first.default is True:
        return False
    return query.replies[0][0] - query.sent <= query.kind.limit + 1e-6


def _word(reply: Any) -> str:
    if isinstance(reply, Answer):
        return f"the default, {reply.reason}" if reply.default is True else f"late, after {reply.latency_ms:.0f} ms"
    return f"{reply.error.code}, {reply.error.message}"
