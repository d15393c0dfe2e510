"""Twelve bugs, put around the services' actors from outside: what a search for faults must find."""

from collections.abc import Callable, Iterable
from math import inf
from typing import Any, NamedTuple

from msgspec.structs import replace

from bus.messages.events import FeedbackEvent, OutcomeEvent, SelectionEvent
from bus.messages.flow import DoneBatch, Execute, Route
from bus.messages.public import Error, QueryCancelled, QueryHead, Refusal
from services.autoscaler.vms.actor import Controller
from services.autoscaler.vms.commands import LEADER, ClaimLease, LeaseClaimed
from services.core.actor import Actor, After, Changed, Do, Done, Effect, Envelope, Publish, Record
from services.dispatcher.actor import Dispatcher
from services.executor.actor import Executor
from services.executor.commands import UnloadModel
from services.executor.queue import QueuedQuery
from services.simulation.fuzz.trial import Wrapped

KEPT = 1000  # added to a part's number

Handle = Callable[[Envelope], Iterable[Effect]]
Bug = Callable[[Any], Handle]  # makes the bugged `handle` of an actor


class PlantedBug(NamedTuple):
    """breaks: invariants, any of which it may break. of: the actors that have it."""

    breaks: frozenset[str]
    of: type
    bug: Bug

    def wrap(self, name: str, actor: Actor) -> Actor:
        del name
        return Wrapped(actor, self.bug(actor)) if isinstance(actor, self.of) else actor


def double_reply(actor: Dispatcher) -> Handle:
    """A notice that crosses the deadline is taken for a query without an end, which is refused."""
    sent: dict[bytes, Route] = {}

    def handle(envelope: Envelope) -> Iterable[Effect]:
        effects = list(actor.handle(envelope))
        sent.update({one.message.route.uid: one.message.route for one in effects if _executes(one)})
        message = envelope.message
        if type(message) is DoneBatch:
            routes = [route for uid in message.uids if (route := sent.pop(uid, None)) and route.parent is None]
            for route in routes:
                if envelope.now > route.deadline:
                    refusal = Refusal(id=route.id, error=Error(code="deadline", message="planted"))
                    effects.append(Publish(route.reply_to, refusal))
        return effects

    return handle


def charged_twice(actor: Dispatcher) -> Handle:
    """A query that was dispatched again pays for both."""
    again: set[bytes] = set()

    def handle(envelope: Envelope) -> Iterable[Effect]:
        effects = list(actor.handle(envelope))
        again.update(one.message.route.uid for one in effects if _executes(one) and one.message.route.attempt > 0)
        return [_row(one, lambda row: replace(row, cost=2 * row.cost) if row.uid in again else row) for one in effects]

    return handle


def ok_for_a_refusal(actor: Dispatcher) -> Handle:
    """The row of a query that was refused for its deadline says ok."""

    def ok(row: OutcomeEvent) -> OutcomeEvent:
        return replace(row, outcome="ok", code=None) if row.code == "deadline" else row

    return lambda envelope: [_row(one, ok) for one in actor.handle(envelope)]


def lost_on_a_kill(actor: Dispatcher) -> Handle:
    """A query whose executor died is forgotten."""
    lost: set[str] = set()

    def handle(envelope: Envelope) -> Iterable[Effect]:
        kept = []
        for one in actor.handle(envelope):
            if _executes(one) and one.message.route.attempt > 0:
                lost.add(one.message.route.reply_to)
            elif not (type(one) is Publish and one.subject in lost):
                kept.append(one)
        return kept

    return handle


def feedback_counted_twice(actor: Dispatcher) -> Handle:
    """A feedback that comes from the bucket after another dispatcher's is taught again."""
    last: dict[str, bytes] = {}

    def handle(envelope: Envelope) -> Iterable[Effect]:
        effects: list[Effect] = []
        for one in actor.handle(envelope):
            effects.append(one)
            if type(one) is Record and type(one.event) is SelectionEvent:
                if len(last) == 7:
                    effects.append(one)
                    last.clear()
                last[f"{one.event.query.hex()} {one.event.member}"] = one.event.query
        return effects

    return handle


def label_scored_again(actor: Dispatcher) -> Handle:
    """Another word about an item that has its label is scored, too."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        for one in actor.handle(envelope):
            event = one.event if type(one) is Record else None
            again = type(event) is FeedbackEvent and event.variant is not None and event.score is None
            yield Record(replace(event, score=1.0)) if again else one

    return handle


def memory_kept(actor: Executor) -> Handle:
    """A model that is unloaded keeps its memory."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        return [
            After(("planted", one.id), 0.01, Done(one.id, None)) if type(one) is Do and type(one.command) is UnloadModel else one
            for one in actor.handle(envelope)
        ]  # fmt: skip

    return handle


def old_epoch_obeyed(actor: Controller) -> Handle:
    """Who takes the lead over goes on in its predecessor's epoch, so that orders of both are obeyed."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        effects = []
        for one in actor.handle(envelope):
            if type(one) is Do and type(one.command) is ClaimLease:
                claim = one.command
                if claim.expected is not None and claim.expected.holder != claim.by:
                    one = replace(one, command=replace(claim, record=replace(claim.record, epoch=claim.expected.epoch)))
            effects.append(one)
        return effects

    return handle


def need_dropped(actor: Dispatcher) -> Handle:
    """A query's least accuracy gets lost where it also names a latency; so does the limit of its cost."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        message = envelope.message
        if type(message) is QueryHead and message.accuracy is not None and message.latency_ms is not None:
            envelope = replace(envelope, message=replace(message, accuracy=None))
        return actor.handle(envelope)

    return handle


def never_forgets(actor: Executor) -> Handle:
    """What has ended stays in the table of what is pending."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        before = list(actor.pending.items())
        effects = actor.handle(envelope)
        for (uid, part), query in before:
            if (uid, part) not in actor.pending and part < KEPT:
                route = replace(query.route, deadline=inf, fallback=False, parent=None)
                actor.pending[uid, part + KEPT] = QueuedQuery(
                    route, query.body, None, query.items, query.shape, query.alone
                )
        return effects

    return handle


def never_lets_go(actor: Controller) -> Handle:
    """A leader goes on that has lost its lease, or whose claim was refused."""

    def handle(envelope: Envelope) -> Iterable[Effect]:
        message = envelope.message
        if type(message) is Changed and message.key == LEADER and actor.lease.epoch:
            return ()
        if type(message) is Done and type(message.result) is LeaseClaimed:
            envelope = replace(envelope, message=replace(message, result=LeaseClaimed(ok=True)))
        return actor.handle(envelope)

    return handle


def computed_though_cancelled(actor: Executor) -> Handle:
    """A client is told that its query is cancelled, though it is computed and charged."""

    def told(effect: Effect) -> Effect:
        said = type(effect) is Publish and type(effect.message) is QueryCancelled
        return replace(effect, message=QueryCancelled(cancelled=True)) if said else effect

    return lambda envelope: [told(one) for one in actor.handle(envelope)]


PLANTED: dict[str, PlantedBug] = {
    "a query computed though cancelled": PlantedBug(frozenset({"cancelled"}), Executor, computed_though_cancelled),
    "double reply after a crossing notice": PlantedBug(
        frozenset({"one-meaning", "one-reply"}), Dispatcher, double_reply
    ),
    "a charge twice": PlantedBug(frozenset({"charged-once"}), Dispatcher, charged_twice),
    "a row ok for a refusal": PlantedBug(frozenset({"row-as-told"}), Dispatcher, ok_for_a_refusal),
    "lost query on kill": PlantedBug(frozenset({"nothing-open"}), Dispatcher, lost_on_a_kill),
    "feedback counted twice": PlantedBug(frozenset({"feedback-once"}), Dispatcher, feedback_counted_twice),
    "a label scored again": PlantedBug(frozenset({"feedback-once"}), Dispatcher, label_scored_again),
    "memory over the device": PlantedBug(frozenset({"memory"}), Executor, memory_kept),
    "an old epoch obeyed": PlantedBug(frozenset({"epoch"}), Controller, old_epoch_obeyed),
    "a need dropped silently": PlantedBug(frozenset({"needs"}), Dispatcher, need_dropped),
    "a queue without bound": PlantedBug(frozenset({"bounded", "nothing-open"}), Executor, never_forgets),
    "a leader that never lets go": PlantedBug(frozenset({"one-leader", "epoch"}), Controller, never_lets_go),
}


def _executes(effect: Effect) -> bool:
    return type(effect) is Publish and type(effect.message) is Execute


def _row(effect: Effect, change: Callable[[OutcomeEvent], OutcomeEvent]) -> Effect:
    """The effect, with another row if it records one."""
    return Record(change(effect.event)) if type(effect) is Record and type(effect.event) is OutcomeEvent else effect
