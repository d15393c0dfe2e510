"""One run in which everything is checked that must always hold; of one seed, or of many on all cores."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from copy import deepcopy
from functools import partial
from math import ceil
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec import Struct

from bus.codec import decode
from bus.messages.events import CostEvent, Event, FeedbackEvent, OutcomeEvent, PipelineEvent, SelectionEvent
from bus.messages.fleet import LoadInstance, MoveInstance, UnloadInstance
from bus.messages.flow import Execute, HandBack, Route
from bus.messages.public import Answer, Feedback, Refusal
from bus.messages.scaling import LeaderRecord
from services.autoscaler.vms.commands import LEADER
from services.core.actor import Actor, Changed, Effect, Envelope, Publish, Undelivered
from services.core.toml import TomlError
from services.monitor.actor import MonitorActor
from services.simulation.clients import INBOX, QueryTemplate
from services.simulation.connections import Connections
from services.simulation.fuzz.draw import RECOVERS_S, document_of
from services.simulation.fuzz.liveness import FeedbackChecks, Liveness, MachineChecks
from services.simulation.fuzz.queries import QueryChecks
from services.simulation.fuzz.violations import Violation, Violations, last_end
from services.simulation.hosts import RunningActor, SimulatedEdge
from services.simulation.kernel import ActorHalted, Headers, as_read
from services.simulation.report import RunReport
from services.simulation.run import STEP, Run, seldom_collected
from services.simulation.scenario.model import BEGINS, Scenario
from services.simulation.scenario.read import derive
from services.simulation.system import process_of

LOOKS_S = 0.25  # s between two looks at machines and actors
FORGET_S = 8.0  # s after the last query's end, in which all forget it
DRAIN_S = 45.0  # s in which queries under way must end

Wrap = Callable[[str, Actor], Actor]


class Verdict(Struct, frozen=True, kw_only=True):
    """What a run showed. seconds: simulated. queries: of clients."""

    seconds: float
    queries: int
    faults: int
    violations: list[Violation]


class WatchedKernel(Connections):
    """A kernel whose actors are known by name, and whose leader is. wrap: called with each actor that enters, before it does."""

    def __init__(self, start: float, recorded: Callable[[str, Event], None], **more: Any) -> None:
        super().__init__(start, recorded, **more)
        self.actors: dict[str, Actor] = {}
        self.wrap: Wrap | None = None
        self.leads: Callable[[LeaderRecord, float], None] = lambda _record, _now: None
        self.obeyed: Callable[[str, float], None] = lambda _words, _now: None
        self.said: Callable[[Publish], None] = lambda _: None
        self.sent: Callable[[Route, str], None] = lambda _route, _executor: None
        self.killed: Callable[[str], None] = lambda _name: None

    def enter(self, name: str, actor: Actor, edge: SimulatedEdge | None = None) -> None:
        self.actors[name] = actor
        wrapped = actor if self.wrap is None else self.wrap(name, actor)
        super().enter(name, self._overseen(name, wrapped) if isinstance(actor, MonitorActor) else wrapped, edge)

    def _overseen(self, name: str, monitor: Actor) -> Actor:
        """A monitor that tells when it does what an order of an older epoch says than it has heard of."""
        latest = 0

        def overseen(envelope: Envelope) -> Iterable[Effect]:
            nonlocal latest
            message = envelope.message
            effects = monitor.handle(envelope)
            if type(message) is Changed:
                if message.key == LEADER and message.value is not None:
                    latest = max(latest, decode(LeaderRecord, message.value).epoch)
                return effects
            epoch: int = getattr(message, "epoch", 0)
            if 0 < epoch < latest:
                effects = list(effects)
                for one in effects:
                    if isinstance(one, Publish) and isinstance(
                        one.message, LoadInstance | UnloadInstance | MoveInstance
                    ):
                        words = f"{name} obeys {type(message).__name__} of epoch {epoch}, and knows of epoch {latest}"
                        self.obeyed(words, self.now)
            latest = max(latest, epoch)
            return effects

        return Wrapped(monitor, overseen)

    def _publish(self, member: RunningActor, effect: Publish) -> None:
        if effect.subject.startswith(INBOX):
            self.said(as_read(effect))
        elif type(effect.message) is Execute:
            self.sent(effect.message.route, "/".join(effect.subject.rsplit(".", 2)[1:]))
        super()._publish(member, effect)

    def leave(self, name: str, *, goodbye: bool) -> None:
        self.actors.pop(name, None)
        if not goodbye:
            self.killed(name)
        super().leave(name, goodbye=goodbye)

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        if key == LEADER and value is not None:
            self.leads(decode(LeaderRecord, value), self.now)
        super().put(bucket, key, value)


class FaultTrial(Run):
    """A checked run of a scenario's first policy. wrap: may put something around each actor, for tests and traces."""

    kernel: WatchedKernel

    def __init__(self, scenario: Scenario, wrap: Wrap | None = None) -> None:
        policy = scenario.policies[0]
        super().__init__(
            scenario,
            policy,
            RunReport.of(scenario, policy),
            partial(WatchedKernel, seed=scenario.seed, process_of=process_of),
        )
        kernel = self.kernel
        kernel.wrap = wrap
        found = self.violations = Violations(BEGINS)
        self.queries = QueryChecks(scenario, found, BEGINS)
        self.machines = MachineChecks(scenario, self.system, found)
        self.feedback = FeedbackChecks(found, scenario, self.queries.asked)
        self.liveness = Liveness(scenario, self.system, kernel.actors, self.queries.asked, found)
        self.quiet = last_end(scenario.faults)  # from which on nothing goes wrong
        kernel.leads = self.machines.leads
        kernel.obeyed = lambda words, now: found.add("epoch", now, words)
        kernel.stored = self._stored
        kernel.unread = self._unread
        kernel.sent = lambda route, executor: self.queries.dispatched(_number(route), route, executor, kernel.now)
        kernel.killed = lambda name: self.queries.killed(name, kernel.now)
        kernel.said = lambda reply: self.queries.said(reply.subject.removeprefix(INBOX), reply.message, kernel.now)
        self._batches: set[str] = set()
        self.clients.named = True
        self.clients.asked = self._asked
        self.clients.left = lambda inbox, said: self.queries.left(inbox.removeprefix(INBOX), said, kernel.now)
        self.clients.labelled = self.feedback.labelled
        self._take = kernel.received
        kernel.received = self._received
        publish = kernel.publish

        def published(
            subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Headers = None
        ) -> None:
            if type(message) is Feedback and message.query is not None:
                self.feedback.sent(message.query, message.item)
            publish(subject, message, reply, body, by, headers)

        kernel.publish = published  # type: ignore[method-assign]

    def verdict(
        self, *, until: Callable[[list[Violation]], bool] | None = None, progress: Callable[[float], None] | None = None
    ) -> Verdict:
        """Run to the end, or until `until` says that the violations so far are enough."""
        try:
            self._check(until or (lambda _: False), progress)
        except ActorHalted as error:
            self.violations.add("no-error", self.kernel.now, str(error))
        return Verdict(
            seconds=self.kernel.now - BEGINS,
            queries=len(self.queries.asked),
            faults=len(self.scenario.faults),
            violations=self.violations.found,
        )

    def _check(self, enough: Callable[[list[Violation]], bool], progress: Callable[[float], None] | None) -> None:
        kernel, found = self.kernel, self.violations.found
        self.begin()
        kernel.at(0.0, self._look)
        end = BEGINS + self.scenario.duration_s
        while kernel.now < end:
            kernel.run(min(end, kernel.now + STEP))
            if progress is not None:
                progress(kernel.now - BEGINS)
            if enough(found):
                return
        quiet = self.scenario.duration_s - self.quiet >= RECOVERS_S
        if quiet:
            self.liveness.well(kernel.now)
        while self.clients.open and kernel.now < end + DRAIN_S:
            kernel.run(kernel.now + STEP)
        kernel.run(kernel.now + FORGET_S)
        self.queries.ended(kernel.now)
        self.machines.ended(kernel.now)
        self.feedback.ended(self.system.contexts, kernel.now)
        if quiet:
            self.liveness.served(BEGINS + self.quiet + RECOVERS_S, end)
            self.liveness.empty(kernel.now)

    # -- what is seen

    def _asked(self, inbox: str, kind: QueryTemplate) -> None:
        self.queries.sent(inbox.removeprefix(INBOX), kind, self.kernel.now)

    def _received(self, reply: Publish) -> None:
        subject, message = reply.subject, reply.message
        if subject.startswith(INBOX):
            if isinstance(message, Answer | Refusal):
                self.queries.replied(subject.removeprefix(INBOX), message, self.kernel.now)
            elif isinstance(message, Undelivered):
                self.queries.unheard(subject.removeprefix(INBOX))
        self._take(reply)

    def _unread(self, message: Envelope) -> None:
        """A message was lost, or its process died before it read it. Of a query or its reply, or of one that is handed back, its client's time-out says
        so.
        """
        if message.reply.startswith(INBOX):
            self.queries.unheard(message.reply.removeprefix(INBOX))
        elif type(message.message) is HandBack:
            self.queries.unheard(_number(message.message.route))

    def _stored(self, _whose: str, batch: str, events: list[Event]) -> None:
        """The stream has a batch of events, perhaps again. The recorder stores each once."""
        if batch in self._batches:
            return
        self._batches.add(batch)
        now = self.kernel.now
        for event in events:
            match event:
                case OutcomeEvent():
                    self.queries.recorded(event, now)
                    self.machines.charged(event)
                case CostEvent():
                    self.machines.cost(event, now)
                case SelectionEvent():
                    self.feedback.taught(event, now)
                case FeedbackEvent():
                    self.feedback.stored(event, now)
                case PipelineEvent():
                    self.machines.replicas(event, now)

    def _look(self, _argument: Any = None) -> None:
        self.machines.look(self.kernel.now)
        self.liveness.look(self.kernel.now)
        self.kernel.at(LOOKS_S, self._look)


class Wrapped:
    """An actor inside another one. handle: in place of its own; it may see and change what goes in and out."""

    def __init__(self, actor: Actor, handle: Callable[[Envelope], Iterable[Effect]]) -> None:
        self.actor = actor
        self.inlets = actor.inlets
        self.watches = actor.watches
        self.handle = handle


def _number(route: Route) -> str:
    """Of the client's query that this is, or is a part of. Empty: no client asked it."""
    asked = (route if route.origin is None else route.origin.route).reply_to
    return asked.removeprefix(INBOX) if asked.startswith(INBOX) else ""


def first_of(violations: Iterable[Violation]) -> Mapping[str, Violation]:
    """The first violation of each invariant."""
    found: dict[str, Violation] = {}
    for one in violations:
        found.setdefault(one.invariant, one)
    return found


class SeedResult(Struct, frozen=True, kw_only=True):
    """seconds: simulated. took: on the wall's clock. broken: the first violation of each invariant."""

    seed: int
    seconds: float
    took: float
    queries: int
    faults: int
    broken: dict[str, Violation]


def scenario_of(seed: int) -> Scenario:
    """The scenario of a seed."""
    return derive(document_of(seed), Path(f"faults-{seed}.toml"))


def tried(scenario: Scenario) -> Verdict:
    """A whole checked run."""
    with seldom_collected():
        return FaultTrial(scenario).verdict()


def result_of(seed: int) -> SeedResult:
    """The trial of a seed."""
    began = perf_counter()
    found = tried(scenario_of(seed))
    return SeedResult(
        seed=seed, seconds=found.seconds, took=perf_counter() - began, queries=found.queries, faults=found.faults,
        broken=dict(first_of(found.violations)),
    )  # fmt: skip


def results_of(seeds: Iterable[int]) -> Iterator[SeedResult]:
    """The trials of many seeds, one a core, in their order."""
    count = len(os.sched_getaffinity(0))
    with ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=_to_stderr) as pool:
        yield from pool.map(result_of, seeds)


def _to_stderr() -> None:
    """What a solver prints is no result."""
    os.dup2(2, 1)


# -- the smallest scenario that still breaks the same invariant: delta debugging (Zeller and Hildebrandt 2002) of its faults, loads and parts

Document = dict[str, Any]
Tried = Callable[[int, Document], None]  # number of runs so far, and the smallest document
LIVENESS = ("served", "one-leader", "plan-loaded", "nobody-paused", "replicas")  # which are looked at after the faults


def broken(document: Document, invariant: str, wrap: Wrap | None = None) -> Violation | None:
    """The first violation of this invariant in a run of the document. None: there is none, or it is no scenario."""
    try:
        scenario = derive(document, Path("shrunk.toml"))
    except TomlError:
        return None
    verdict = FaultTrial(scenario, wrap).verdict(until=lambda found: any(one.invariant == invariant for one in found))
    return next((one for one in verdict.violations if one.invariant == invariant), None)


def shrink(
    document: Document, violation: Violation, over: Callable[[], bool], tried: Tried, wrap: Wrap | None = None
) -> tuple[Document, Violation]:
    """The smallest document found before `over` says that the time is up, and its violation. wrap: as of Trial."""
    invariant, runs = violation.invariant, 0
    again = True
    while again and not over():
        again = False
        for smaller in _smaller(document, violation):
            if over():
                break
            runs += 1
            found = broken(smaller, invariant, wrap)
            if found is not None:
                document, violation, again = smaller, found, True
                tried(runs, document)
                break
            tried(runs, document)
    return document, violation


def _smaller(document: Document, violation: Violation) -> Iterator[Document]:
    """Documents with less, the boldest first."""
    scenario = document["scenario"]
    if violation.invariant not in LIVENESS and violation.time + 2.0 < scenario["duration_s"]:
        shorter = deepcopy(document)
        end = shorter["scenario"]["duration_s"] = shorter["scenario"]["metrics_every_s"] = float(
            ceil(violation.time + 1.0)
        )
        for key in ("fault", "job"):
            if key in shorter:
                shorter[key] = [one for one in shorter[key] if one["at_s"] < end]
        yield _tidy(shorter)
    yield from _fewer(document, "fault")
    for key in ("job", "load"):
        yield from _fewer(document, key)
    yield from _without_apps(document)
    yield from _fewer(document, "variant")
    for section in document.get("settings", {}):
        plain = deepcopy(document)
        del plain["settings"][section]
        yield _tidy(plain)
    yield from _fewer_machines(document)
    for i, load in enumerate(document.get("load", ())):
        for key in sorted(load.keys() - {"app", "rate"}):
            plain = deepcopy(document)
            del plain["load"][i][key]
            yield plain
        if load["rate"] > 1.0:
            calmer = deepcopy(document)
            calmer["load"][i]["rate"] = round(load["rate"] / 2, 2)
            yield calmer
    for i, app in enumerate(document["app"]):
        for key in ("batching", "default_output"):
            if key in app:
                plain = deepcopy(document)
                del plain["app"][i][key]
                yield plain


def _fewer(document: Document, key: str) -> Iterator[Document]:
    """Without parts of this list: halves, quarters, ..., single ones."""
    items = document.get(key, [])
    size = ceil(len(items) / 2)
    while items and size:
        for first in range(0, len(items), size):
            less = deepcopy(document)
            less[key] = items[:first] + items[first + size :]
            yield _tidy(less)
        size = 0 if size == 1 else ceil(size / 2)


def _without_apps(document: Document) -> Iterator[Document]:
    """Without an app, or a pipeline, and all that is for it."""
    for pipeline in document.get("pipeline", ()):
        name = pipeline["pipeline"]["name"]
        less = deepcopy(document)
        less["pipeline"] = [one for one in less["pipeline"] if one["pipeline"]["name"] != name]
        if less["scenario"]["policies"] == ["inferline"]:
            less["scenario"]["policies"] = ["infaas"]
        yield _of_others(less, name)
    for app in document["app"]:
        less = deepcopy(document)
        less["app"] = [one for one in less["app"] if one["name"] != app["name"]]
        less["variant"] = [one for one in less["variant"] if one["app"] != app["name"]]
        yield _of_others(less, app["name"])


def _of_others(document: Document, app: str) -> Document:
    for key in ("load", "job", "fault"):
        document[key] = [one for one in document.get(key, ()) if one.get("app") != app]
    return _tidy(document)


def _fewer_machines(document: Document) -> Iterator[Document]:
    for i, worker in enumerate(document["worker"]):
        for start in range(worker["start"] - 1, -1, -1):
            less = deepcopy(document)
            if start:
                less["worker"][i] |= {"start": start, "min": start}
            else:
                del less["worker"][i]
            yield less


def _tidy(document: Document) -> Document:
    """Without empty parts."""
    return {key: value for key, value in document.items() if value}
