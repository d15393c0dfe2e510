"""What holds of machines, orders, money and feedback while faults go on, and what is well again some time after the last one: nothing is open, queries
are served, one process leads, planned models are loaded.

It also looks at the actors while they run: what they hold is bounded.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from bus.messages.events import CostEvent, FeedbackEvent, OutcomeEvent, PipelineEvent, SelectionEvent
from bus.messages.public import Accepted, Answer
from bus.messages.scaling import LeaderRecord
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.machines import BOOT_S, LOST_S
from services.core.cost import price_per_hour
from services.dispatcher.actor import Dispatcher
from services.dispatcher.answered import ANSWERS
from services.dispatcher.commands import StoredContext
from services.dispatcher.contexts import COUNTS, context_key, read_value
from services.executor.actor import Executor
from services.simulation.clients import QueryTemplate
from services.simulation.composites import told
from services.simulation.faults import NEWER
from services.simulation.fuzz.queries import AskedQuery
from services.simulation.fuzz.violations import RETURNS_S, Violations
from services.simulation.hardware import SimulatedDevice
from services.simulation.scenario.model import Scenario
from services.simulation.system import SimulatedSystem

_SHARE = 1e-6  # that sums of floats may differ by
_LEAST = 1e-12  # US$


class MachineChecks:
    """The machines of one run. system: whose they are."""

    def __init__(self, scenario: Scenario, system: SimulatedSystem, violations: Violations) -> None:
        self._system = system
        self._violations = violations
        joins = [fault for fault in scenario.faults if fault.kind == "worker-joins"]  # which nobody ordered
        self._most = {
            one.kind: max(one.start, one.maximum) + sum(fault.hardware in ("", one.kind) for fault in joins)
            for one in scenario.policies[0].machines
        }
        self._share = scenario.policies[0].settings.monitor.memory_share
        self._prices = scenario.prices
        # by worker and kind of device: the closing, and its rows' cost
        self._rows: dict[tuple[str, str], tuple[float, float]] = {}
        self._billed: defaultdict[str, float] = defaultdict(float)  # US$ by worker
        self._charged: defaultdict[str, float] = defaultdict(float)
        self._leader: LeaderRecord | None = None

    # -- at intervals

    def look(self, now: float) -> None:
        """At all devices."""
        kinds: defaultdict[str, int] = defaultdict(int)
        for worker, machine in self._system.machines.items():
            kinds[machine.spec.kind] += 1
            for name, device in machine.devices.items():
                self._device(f"{worker}/{name}", device, now)
        for kind, count in kinds.items():
            if count > self._most[kind]:
                self._violations.add(
                    "machines", now, f"{count} machines of kind {kind}, which may have {self._most[kind]}"
                )

    def _device(self, name: str, device: SimulatedDevice, now: float) -> None:
        used, room = device.memory_mb, self._share * device.spec.memory_mb
        if used > room * (1.0 + _SHARE):
            self._violations.add("memory", now, f"{name} holds {used:.0f} MB of {room:.0f}")
        computing = sum(cores for end, cores in device._open if end > now)
        if computing > device.spec.cores:
            self._violations.add("cores", now, f"{name} computes on {computing} cores of {device.spec.cores}")

    # -- what is recorded

    def cost(self, row: CostEvent, now: float) -> None:
        """A part of the bill of one device's period. The last row of a period is what nobody used."""
        key = row.worker, row.hardware
        at, cost = self._rows.get(key, (row.time, 0.0))
        cost = row.cost + (cost if at == row.time else 0.0)
        self._rows[key] = row.time, cost
        self._billed[row.worker] += row.cost
        if row.variant is not None or row.app is not None:
            return
        del self._rows[key]
        machine = self._system.machines.get(row.worker)
        devices = (
            [] if machine is None else [one.spec for one in machine.devices.values() if one.spec.kind == row.hardware]
        )
        if len(devices) != 1:
            return
        bill = row.seconds * price_per_hour(row.hardware, self._prices, devices[0].cores) / 3600.0
        if abs(cost - bill) > _SHARE * bill + _LEAST:
            words = f"{row.worker}'s {row.hardware} cost {bill:.6g} US$ in {row.seconds:.1f} s, its rows add up to {cost:.6g}"
            self._violations.add("bill", now, words)

    def charged(self, row: OutcomeEvent) -> None:
        """A query, or a part, that a worker computed."""
        if row.worker is not None and not row.cached:
            self._charged[row.worker] += row.cost

    def ended(self, now: float) -> None:
        for worker, charged in self._charged.items():
            billed = self._billed[worker]
            if worker in self._system.machines and charged > billed * 1.01 + _LEAST:
                words = f"queries paid {charged:.6g} US$ for {worker}, which cost {billed:.6g}"
                self._violations.add("bill", now, words)

    def replicas(self, event: PipelineEvent, now: float) -> None:
        """Other replicas of a vertex are wanted."""
        if event.action != "end" and event.to_replicas < 1:
            words = f"{event.pipeline}'s {event.vertex} is to have {event.to_replicas} replicas: {event.reason}"
            self._violations.add("replicas", now, words)

    # -- who leads

    def leads(self, record: LeaderRecord, now: float) -> None:
        """The bucket names this leader now."""
        before, self._leader = self._leader, record
        if before is not None and (
            record.epoch < before.epoch or (record.epoch == before.epoch and record.holder not in ("", before.holder))
        ):
            words = f"{record.holder} leads in epoch {record.epoch}, after {before.holder} in epoch {before.epoch}"
            self._violations.add("epoch", now, words)


class FeedbackChecks:
    """What feedback taught and what labels scored, against what clients sent. asked: their queries."""

    def __init__(self, violations: Violations, scenario: Scenario, asked: Mapping[str, AskedQuery]) -> None:
        self._asked = asked
        self._violations = violations
        self._variants = {one.variant: one for one in scenario.variants}
        self._plain = {app.app for app in scenario.apps if app.selection is None and app.pipeline is None}
        self._apps: defaultdict[str, set[tuple[bytes, int]]] = defaultdict(set)
        self._accepted: set[tuple[bytes, int]] = set()
        self._rows: set[bytes | None] = set()
        self._stored: set[tuple[bytes | str | None, int]] = set()  # by its query, and by the id
        self._scored: set[tuple[bytes | None, int]] = set()
        self._ids: dict[bytes, str] = {}
        self._sent: dict[bytes, set[int]] = {}
        self._taught: defaultdict[tuple[bytes, str], int] = defaultdict(int)

    def sent(self, query: str, item: int) -> None:
        """A client sent feedback, perhaps again. query: the uid that its answer named."""
        self._sent.setdefault(bytes.fromhex(query), set()).add(item)

    def labelled(self, app: str, answer: Answer, item: int, said: object) -> None:
        """A client sends a label (None), or hears what became of it."""
        uid = bytes.fromhex(str(answer.query))
        self.sent(str(answer.query), item)
        self._apps[app].add((uid, item))
        self._ids[uid] = answer.id or ""
        if isinstance(said, Accepted):
            self._accepted.add((uid, item))

    def stored(self, event: FeedbackEvent, now: float) -> None:
        """A feedback's row: what it says is said once of an item, and of who answered."""
        if event.uid in self._rows:
            return  # of which the recorder keeps one
        self._rows.add(event.uid)
        at = event.query, event.item
        self._stored.update((at, (event.id, event.item)))
        if event.score is None:
            return
        if at in self._scored:
            self._violations.add("feedback-once", now, f"{event.app}: item {at[1]} of a query is scored again")
        self._scored.add(at)
        query = self._asked.get(self._ids.get(event.query or b"", ""))
        if event.app not in self._plain or query is None:
            return
        answered, name = {one[1] for _, one in query.said if one[0] == "answer"}, event.variant or ""
        record = self._variants.get(name.removesuffix(NEWER))
        if name not in answered or record is None:
            words = f"{event.app}: a label of what {', '.join(answered)} answered scores {name}"
            self._violations.add("feedback-once", now, words, query.number)
        elif event.score != (event.label == str(told(replace(record, variant=name), event.query or b"", event.item))):
            words = f"{event.app}: {name} is scored by another answer than its own"
            self._violations.add("feedback-once", now, words, query.number)

    def ended(self, values: Mapping[str, StoredContext], now: float) -> None:
        """The run has ended. values: of the selection bucket."""
        for uid, item in self._accepted:
            if (uid, item) not in self._stored and (self._ids[uid], item) not in self._stored:
                self._violations.add("lost-row", now, f"item {item} of a query: its label was accepted, and has no row")
        for app in self._plain:
            value = read_value(getattr(values.get(context_key(app, COUNTS, None)), "value", None))
            one = None if value is None else value.scores.get(ANSWERS)
            if one is not None and one.observed.count > len(self._apps[app]):
                words = f"{app}: {one.observed.count:g} labels count of {len(self._apps[app])} that came"
                self._violations.add("feedback-once", now, words)

    def taught(self, event: SelectionEvent, now: float) -> None:
        """A feedback taught about a member."""
        times = self._taught[event.query, event.member] = self._taught[event.query, event.member] + 1
        items = len(self._sent.get(event.query, ()))
        if times > items:
            words = f"{event.app}: {items} feedbacks came for query {event.query.hex()}, {event.member} learnt {times} times"
            self._violations.add("feedback-once", now, words)


SERVED = 0.99  # of the queries in time
BY_CHANCE = 0.999  # of all runs in which exactly so many are, that chance excuses
FORGETS_S = 5.0  # s after its deadline until all have forgotten a query
PARTS = 8  # of one query, at most


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
        """The queries of this time were answered in time, but for those that chance may bring."""
        from scipy.stats import binom  # noqa: PLC0415  (slow to import)

        asked = [
            one
            for one in self.asked.values()
            if since <= one.sent < until and one.left is None and self._easy(one.kind)
        ]
        missed = [one for one in asked if not _in_time(one)]
        if len(missed) > binom.ppf(BY_CHANCE, len(asked), 1.0 - SERVED):
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
