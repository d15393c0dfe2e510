"""Who has gone is not served: a client takes its query back (`infaas.cancel.<app>`). Pure.

What only this dispatcher has ends here, with its parts. What an executor has, that one ends if it has not begun, so that one process speaks: what
runs is answered, recorded and charged like any other. A query that is not here may be with another dispatcher: all are asked.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bus.messages.flow import Echo, ResentKnown, ResentSought
from bus.messages.public import CancelQuery, Error, QueryCancelled, Refusal
from bus.subjects import DISPATCHERS, Subjects
from services.core.actor import NOTHING, Effect, Envelope, Handler, Inlet, Publish
from services.core.outcomes import CANCELLED
from services.core.requests import answer, refuse
from services.dispatcher.inflight import OutcomeRecorder
from services.dispatcher.query import Join, Query
from services.dispatcher.resent import KEPT, Resent

MOST_S = 1.0  # s after which another dispatcher that has not answered is not waited for
NO_KEY = Error(code="bad_request", message="retry_key: give the 16 bytes with which the query was sent")


@dataclass(eq=False)
class Cancelling:
    """resent: knows which queries are here or have ended, and the other dispatchers; what those say is heard here first. end: ends a query here."""

    name: str
    subjects: Subjects
    resent: Resent
    outcomes: OutcomeRecorder
    end: Callable[[Query, Error, float], list[Effect]]

    def __post_init__(self) -> None:
        self.inlets = (Inlet(subject=self.subjects.cancel(), message=CancelQuery, queue=DISPATCHERS),)
        self.handlers: dict[type, Handler] = {
            CancelQuery: self._cancel,
            ResentSought: self._sought,
            ResentKnown: self._known,
            Echo: lambda envelope: (*self.resent.handlers[Echo](envelope), *self._overdue(envelope.now)),
        }
        self._prefix = len(self.subjects.cancel(""))
        self._known_as = self.resent.known_as
        self._in_flight = self.resent.in_flight
        self._composites = self.resent.composites
        self._withdraw = self.resent.silence.cancelled
        # By uid: where clients wait for an answer; of what others were asked for, since when, and those that do not have it.
        self._replies: dict[bytes, str] = {}
        self._asked: dict[bytes, tuple[str, float, set[str]]] = {}

    def _cancel(self, envelope: Envelope) -> Iterable[Effect]:
        asked: CancelQuery = envelope.message
        reply, now = envelope.reply, envelope.now
        if not reply:
            return NOTHING  # whose query it is, its reply subject tells
        uid = self._known_as(envelope.subject[self._prefix :], asked, reply)
        if uid is None:
            return refuse(reply, NO_KEY)
        if (effects := self._take_back(uid, reply, now)) is not None:
            return effects
        if not self.resent.known and not self.resent.sought(uid):
            return self._answer(reply, uid)
        self._asked[uid] = reply, now, set()
        return (Publish(self.subjects.resent(), ResentSought(self.name, uid, reply, again=True, cancelled=True)),)

    def _answer(self, reply: str, uid: bytes) -> tuple[Effect, ...]:
        return answer(reply, QueryCancelled(cancelled=uid in self.resent.cancelled))

    def _take_back(self, uid: bytes, reply: str, now: float) -> Iterable[Effect] | None:
        """End this query, and answer. None: it is not here."""
        join = self._composites.joins.open.get(uid)
        if join is not None:
            self.resent.note_cancelled(uid)
            return (*self._answer(reply, uid), *self._whole(join, now))
        query = self._in_flight.find(uid)
        if query is not None:
            return self._one(query, reply, now)
        if self.resent.has_ended(uid):
            return self._answer(reply, uid)
        if self.resent.sought(uid):
            self.resent.note_cancelled(uid)  # others are asked; if nobody has it, it is not begun
        return None

    def _one(self, query: Query, reply: str, now: float) -> Iterable[Effect]:
        """Of a query, or a part, without parts of its own."""
        if (
            query.lent is not None or query.moved
        ):  # a silent executor may have answered it: it goes on as if nothing were
            return answer(reply, QueryCancelled(cancelled=False))
        if reply:
            if len(self._replies) >= KEPT:
                del self._replies[next(iter(self._replies))]
            self._replies[query.uid] = reply
        query.why = CANCELLED  # so that it ends if it comes back
        if query.instance is not None:
            return (self._withdraw(query, reply),)
        self._in_flight.forget(query.uid)
        return self.end(query, CANCELLED, now)

    def _whole(self, join: Join, now: float) -> list[Effect]:
        """A query with parts: those that have not begun end with it. Of what runs or has run, the row says the cost."""
        query, joins = join.query, self._composites.joins
        effects = [
            *joins.end(join, now),
            *self.outcomes.refused(query, CANCELLED, now, cost=join.cost, missing=len(join.parts) - len(join.answered)),
        ]
        for part in join.parts:
            if part.uid in joins.open:
                effects += self._whole(joins.open[part.uid], now)
            elif (found := self._in_flight.find(part.uid)) is not None and not self._composites.cached.equal.followed(
                part.uid
            ):
                effects += self._one(found, "", now)
        return effects

    def again(self, query: Query, now: float) -> list[Effect]:
        """It was taken back, and comes again. Nothing is recorded if that was done before."""
        if self.resent.has_ended(query.uid):
            return [Publish(query.reply, Refusal(id=query.head.id, error=CANCELLED))]
        return self.end(query, CANCELLED, now)

    def ended(self, query: Query) -> tuple[Effect, ...]:
        """It was taken back, and has ended here."""
        self.resent.note_cancelled(query.uid)
        return answer(self._replies.pop(query.uid, ""), QueryCancelled(cancelled=True))

    # -- what dispatchers tell each other

    def _sought(self, envelope: Envelope) -> Iterable[Effect]:
        asked: ResentSought = envelope.message
        if not asked.cancelled:
            return self.resent.handlers[ResentSought](envelope)
        if asked.dispatcher == self.name:
            return NOTHING
        effects = self._take_back(asked.uid, asked.reply, envelope.now)
        known = ResentKnown(self.name, asked.uid, "no" if effects is None else "has")
        return (*(effects or ()), Publish(self.subjects.resent(asked.dispatcher), known))

    def _known(self, envelope: Envelope) -> Iterable[Effect]:
        known: ResentKnown = envelope.message
        effects = self.resent.handlers[ResentKnown](envelope)
        waits = self._asked.get(known.uid)
        if waits is None or known.what == "taken":
            return effects
        reply, _, heard = waits
        heard.add(known.dispatcher)
        if known.what != "no":  # that one says what became of it
            self.resent.cancelled.pop(known.uid, None)
        elif not self.resent.others(envelope.now) <= heard:
            return effects
        if known.what in ("has", "no"):
            del self._asked[known.uid]
        return (*effects, *self._answer(reply, known.uid)) if known.what == "no" else effects

    def _overdue(self, now: float) -> list[Effect]:
        """Others have not answered: they have died, or are silent, and may have answered it. Then it goes on as if nothing were."""
        over = [uid for uid, (_, since, _) in self._asked.items() if now >= since + MOST_S]
        for uid in over:
            if not self.resent.has_ended(uid):
                self.resent.cancelled.pop(uid, None)
        return [effect for uid in over for effect in self._answer(self._asked.pop(uid)[0], uid)]
