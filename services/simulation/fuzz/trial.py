"""One run in which everything is checked that must always hold; of one seed, or of many on all cores."""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from msgspec import Struct

from bus.codec import decode
from bus.messages.events import CostEvent, Event, OutcomeEvent, PipelineEvent, SelectionEvent
from bus.messages.fleet import LoadInstance, MoveInstance, UnloadInstance
from bus.messages.flow import Execute, HandBack, Route
from bus.messages.public import Answer, Feedback, Refusal
from bus.messages.scaling import LeaderRecord
from services.autoscaler.vms.commands import LEADER
from services.core.actor import Actor, Changed, Effect, Envelope, Publish, Undelivered
from services.monitor.actor import MonitorActor
from services.simulation.clients import INBOX, QueryTemplate
from services.simulation.connections import Connections
from services.simulation.fuzz.draw import RECOVERS_S, document_of
from services.simulation.fuzz.liveness import FeedbackChecks, Liveness, MachineChecks
from services.simulation.fuzz.queries import QueryChecks
from services.simulation.fuzz.violations import Violation, Violations, last_end
from services.simulation.kernel import ActorHalted, Headers, RunningActor, SimulatedEdge, as_read
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
        self.feedback = FeedbackChecks(found)
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

    def _stored(self, whose: str, batch: str, events: list[Event]) -> None:
        """The stream has a batch of events, perhaps again. The recorder stores each once."""
        del whose
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
                case PipelineEvent():
                    self.machines.replicas(event, now)

    def _look(self, argument: Any = None) -> None:
        del argument
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
