"""The dispatchers that an executor works for. It reports to the living ones, and records the outcomes that a dead one may not have
recorded. Pure.
"""

from collections import deque
from collections.abc import Collection, Iterable
from hashlib import blake2b
from itertools import islice
from typing import Any

from msgspec import Raw, Struct, field
from msgspec.structs import replace

from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch, HandBack, PartsEnded, Route
from bus.messages.jobs import SYSTEM
from bus.messages.public import Answer, Refusal
from bus.subjects import Subjects
from services.core.actor import NOTHING, Effect, Publish, Record
from services.core.outcomes import GRACE, SILENT, answered
from services.executor.instances import REPORT, HeldInstance
from services.executor.queue import QueuedQuery

BATCHES = 20_000  # unacknowledged done batches kept per dispatcher
AGAIN = 1000  # of them that are said again
NO_BODY = Raw(b"\xc0")  # nil
HEARD = 1.0  # s in which a dispatcher that is alive is heard (its heartbeats come twice as often): else this executor may be cut off
TOLD = HEARD + REPORT + 0.1  # s after a silence in which heartbeats, or their absence, say whether a dispatcher lives
WAITED = (
    0.25  # s after a silence in which heartbeats may have waited: they say that a dispatcher lived, not that it lives
)
FORGET = 120.0  # s after which a dead dispatcher is forgotten
OVER = 8192  # queries with parts that have ended, of which is known here, at least; at most twice as many


class KnownDispatcher(Struct, eq=False):
    """One dispatcher. seen: from when its silence counts. heard, since: when it was last heard, and first after a silence. at: of its last heartbeat, by its own
    clock. seq: of the last done batch. pending: done batches whose outcomes it has not reported as stored. recorded: seq of the last one whose outcomes were
    recorded here, as it was silent: it may only have been cut off, and then hears of them again.

    parents: queries of which parts came here and that have not ended, each with its body. adopts: it takes over such queries of others. unheard: what was
    handed back to it while it was not there. given: what others got in its stead, and which one a query with parts.
    """

    subject: str
    seen: float
    heard: float
    since: float
    alive: bool = True
    at: float = float("-inf")
    seq: int = 0
    recorded: int = 0
    adopts: bool = False
    parents: dict[bytes, tuple[Route, Raw]] = {}
    unheard: list[tuple[HandBack, Any]] = []
    given: deque[tuple[Route, str]] = field(default_factory=lambda: deque(maxlen=AGAIN))
    pending: deque[tuple[DoneBatch, list[Route], HeldInstance]] = field(default_factory=lambda: deque(maxlen=BATCHES))

    def hears(self, at: float, now: float, least: float) -> None:
        """A heartbeat of this time by its own clock is read. least: since when its silence counts then, if what is read may have waited: a living one is
        heard again.
        """
        if now - self.heard > HEARD:
            self.since = now
        waited = now - self.since < WAITED
        self.seen = max(self.seen, min(now, at), least) if waited else now
        self.heard, self.at = now, at

    def has_ended(self, route: Route) -> bool:
        """Whether it has refused a query that executors did not end: it still heard itself when the time to do so was over."""
        return self.at > route.deadline + GRACE + SILENT


class KnownDispatchers(Struct, eq=False):
    """All dispatchers that sent something. queue: this executor's name in done batches. silence: s after which a dispatcher is dead. inbox: where NATS
    says that nobody heard what was handed back; a token follows.
    """

    subjects: Subjects
    queue: str
    worker: str
    silence: float
    inbox: str
    _leaves: bool = False
    _known: dict[str, KnownDispatcher] = {}
    _seq: int = 0  # the highest of those that are forgotten: one that comes back takes no seq for an earlier one
    _over: set[bytes] = set()
    _over_before: set[bytes] = set()
    _handed: dict[str, tuple[HandBack, Any]] = {}
    _handed_before: dict[str, tuple[HandBack, Any]] = {}

    def _of(self, name: str, now: float) -> KnownDispatcher:
        dispatcher = self._known.get(name)
        if dispatcher is None:
            subject, seq = self.subjects.done(name), self._seq
            dispatcher = self._known[name] = KnownDispatcher(subject, now, now, now, seq=seq, recorded=seq)
        return dispatcher

    def alive(self, name: str) -> bool:
        dispatcher = self._known.get(name)
        return dispatcher is None or dispatcher.alive

    def may_move(self, route: Route) -> bool:
        """Whether its dispatcher has not yet been asked for another instance that can do this query in time."""
        return not route.attempt and self.alive(route.dispatcher)

    @property
    def any_alive(self) -> bool:
        """Whether there is a dispatcher that could end a query instead of this executor."""
        return not self._known or any(dispatcher.alive for dispatcher in self._known.values())

    def report_done(
        self, name: str, loaded: HeldInstance, routes: list[Route], batch: int, span: tuple[float, float], cost: float,
        codes: list[str] | None, now: float, *, counted: bool = False, storing: list[Route] | None = None,
        said: list[list[Any] | None] | None = None,
    ) -> Iterable[Effect]:  # fmt: skip
        """Report queries as done to their dispatcher. If it is dead, record their outcomes here. span: start and end.

        counted: it does not know their items. storing: those that end later, with their outputs in the object store. said: as in `DoneBatch`.
        """
        dispatcher = self._of(name, now)
        dispatcher.seq += 1
        done = DoneBatch(
            self.queue,
            self.worker,
            dispatcher.seq,
            loaded.id,
            loaded.record.variant,
            batch,
            span[0],
            span[1],
            cost,
            loaded.queued,
            [route.uid for route in routes],
            codes,
            loaded.queue.mixed,
            [route.items for route in routes] if counted else None,
            [route.uid for route in storing] if storing else None,
            loaded.queue.levels,
            said,
        )
        dispatcher.pending.append((done, routes, loaded))
        if self._leaves or not dispatcher.alive:  # or stopped: then it hears when it goes on that these have ended
            dispatcher.recorded = done.seq
            return (*self._outcomes(done, routes, loaded), Publish(dispatcher.subject, done))
        return (Publish(dispatcher.subject, done),)

    def say_again(self, name: str) -> Iterable[Effect]:
        """The last batches whose outcomes this dispatcher has not stored, and what others got in its stead: its connection may have broken. All of them, so
        that none is missing.
        """
        dispatcher = self._known.get(name)
        if dispatcher is None:
            return NOTHING
        last = [done for done, _, _ in islice(reversed(dispatcher.pending), AGAIN)]
        again = (replace(done, started=done.finished, storing=None) for done in reversed(last))
        gone = [route for route, other in dispatcher.given if not other]
        return [*(self._taken(name, route) for route in gone), *(Publish(dispatcher.subject, done) for done in again)]

    def report_batch(
        self, loaded: HeldInstance, queries: list[QueuedQuery], batch: int, span: tuple[float, float], cost: float,
        code: str, now: float,
    ) -> Iterable[Effect]:  # fmt: skip
        """Report a batch to all who sent its queries. A part has ended before its outputs are stored. code: of all; empty: they were computed."""
        if not queries:
            return NOTHING
        name, codes = queries[0].route.dispatcher, [code] * len(queries) if code else None
        routes = []
        for query in queries:
            route = query.route
            if route.dispatcher != name or query.storing or query.fetched or query.also:
                break
            routes.append(route)
        else:  # as nearly always
            known = [query.said for query in queries] if any(query.said for query in queries) else None
            return self.report_done(name, loaded, routes, batch, span, cost, codes, now, said=known)
        effects: list[Effect] = []
        ended: dict[str, list[Route]] = {}
        storing: dict[str, list[Route]] = {}
        counted = False
        answers = {query.route.uid: query.said for query in queries}
        for query in queries:
            to, route = ended, query.route
            if query.storing:
                to, query.reported = (storing, 0) if route.parent is None else (ended, len(query.routes))
            counted |= query.fetched
            to.setdefault(route.dispatcher, []).append(route)
            for other in query.also:
                to.setdefault(other.dispatcher, []).append(other)
        for name in ended | storing if storing else ended:
            routes, later = ended.get(name, []), storing.get(name)
            codes = [code] * len(routes) if code else None
            known = [answers.get(route.uid) for route in routes]
            effects.extend(
                self.report_done(
                    name, loaded, routes, batch, span, cost, codes, now, counted=counted, storing=later, said=known
                )
            )
        return effects

    def report_ended(
        self, loaded: HeldInstance, query: QueuedQuery, said: Answer | Refusal, now: float
    ) -> Iterable[Effect]:
        """Report to all who sent a query, and do not know it yet, that it has ended as its client was told: without a batch, or some time after it."""
        batch, finished, cost = query.items, now, 0.0
        codes: list[str] | None = None
        if isinstance(said, Refusal):
            codes = [said.error.code]
        else:
            batch, cost = said.batch, said.cost / query.items
            finished = query.route.arrived + said.latency_ms / 1000.0
        span = (finished, finished)
        for route in query.routes[query.reported :]:
            yield from self.report_done(
                route.dispatcher, loaded, [route], batch, span, cost, codes, now, counted=query.fetched
            )

    def leave(self) -> list[Effect]:
        """This executor ends, and a dispatcher may have died unheard: record what none has stored yet. The database keeps one row a uid."""
        self._leaves = True
        return [effect for dispatcher in self._known.values() for effect in self._record_missing(dispatcher)]

    def heartbeat(self, heartbeat: DispatcherHeartbeat, now: float) -> Iterable[Effect]:
        """A dispatcher lives, and has stored so much. If it leaves, its outcomes are taken over at once."""
        dispatcher = self._of(heartbeat.dispatcher, now)
        dispatcher.hears(heartbeat.at, now, self._least(now))
        seq = heartbeat.flushed.get(self.queue)
        if seq is not None:
            while dispatcher.pending and dispatcher.pending[0][0].seq <= seq:
                dispatcher.pending.popleft()
        dispatcher.adopts = heartbeat.adopts
        if dispatcher.given and now - dispatcher.since > HEARD:
            dispatcher.given.clear()  # it has asked for what it missed, if it missed anything
        if heartbeat.leaving:
            return self._take_over(heartbeat.dispatcher, dispatcher, now)
        dispatcher.alive = True
        return NOTHING

    def missed(self, name: str) -> list[tuple[HandBack, Any]]:
        """What was handed back to this dispatcher while it was not there, unless it is known to be dead: it is there again, or its last words have come."""
        dispatcher = self._known[name]
        found, dispatcher.unheard = dispatcher.unheard, []
        return found

    def check(self, now: float) -> list[Effect]:
        """Find dispatchers that are silent for too long, and take over their outcomes."""
        effects: list[Effect] = []
        for name, dispatcher in list(self._known.items()):
            if dispatcher.alive and now - dispatcher.seen > self.silence:
                effects.extend(self._take_over(name, dispatcher, now))
            elif not dispatcher.alive and now - dispatcher.seen > FORGET:
                del self._known[name]
                self._seq = max(self._seq, dispatcher.seq)
            elif not dispatcher.alive:
                effects.extend(self._hand_on(name, dispatcher, now))
            elif dispatcher.parents:
                over = [uid for uid, (route, _) in dispatcher.parents.items() if route.deadline + FORGET < now]
                for uid in over:
                    del dispatcher.parents[uid]
        return effects

    def keep(self, part: Route, body: Raw, now: float) -> None:
        """A part of a query came: its query is handed on if its dispatcher dies before it has ended it."""
        origin = part.origin
        assert origin is not None
        self._of(part.dispatcher, now).parents[origin.route.uid] = (
            origin.route,
            body if origin.body is None else Raw(origin.body),
        )

    def has_parts_of(self, uid: bytes) -> bool:
        """Whether parts of this query came here, and it is handed on in time if its dispatcher turns out to be dead. Without that time, who asks ends it."""
        for dispatcher in self._known.values():
            parent = dispatcher.parents.get(uid)
            if parent is not None:
                if parent[0].deadline > dispatcher.seen + self.silence:
                    return True
                del dispatcher.parents[uid]
        return False

    def parts_ended(self, name: str, ended: PartsEnded) -> Iterable[Effect]:
        """These queries have got their answers. If their dispatcher was taken for dead when it had just said so, who has them now hears
        of it.
        """
        self._over.update(ended.parents)
        if len(self._over) >= OVER:
            self._over_before, self._over = self._over, set()
        for dispatcher in self._known.values():  # also one that they were taken from
            if dispatcher.parents:
                for uid in ended.parents:
                    dispatcher.parents.pop(uid, None)
        given = self._known[name].given if name in self._known else ()
        return [
            Publish(self.subjects.resubmit(other), HandBack(route, "taken", NO_BODY))
            for route, other in given
            if other and route.uid in ended.parents
        ]

    def is_over(self, uid: bytes) -> bool:
        """Whether a dispatcher has said of late that this query with parts has got its answer."""
        return uid in self._over or uid in self._over_before

    def hand(self, to: str, back: HandBack, headers: Any = None) -> Publish:
        """Hand a query to this dispatcher. NATS says if nobody is there."""
        token = _token(back.route.uid, back.route.attempt)
        self._handed[token] = back, headers
        return Publish(self.subjects.resubmit(to), back, f"{self.inbox}{token}", headers)

    def settle(self) -> None:
        """To be called now and then: what nobody has missed since the last time but one was heard."""
        self._handed, self._handed_before = {}, self._handed

    def unheard(self, token: str) -> list[Effect]:
        """Nobody got this, which has this token: the heartbeats of its dispatcher, or their absence, will say who does."""
        found = self._handed.pop(token, None) or self._handed_before.pop(token, None)
        if found is None:
            return []
        back, headers = found
        dispatcher = self._known.get(back.route.dispatcher)
        if back.reason == "orphaned" and dispatcher is not None:
            if dispatcher.alive:
                return [self.hand(back.route.dispatcher, back)]
            dispatcher.parents[back.route.uid] = (
                back.route,
                back.body,
            )  # its heir was away: with the next check it is handed on
            return []
        if dispatcher is None or (not dispatcher.alive and not dispatcher.has_ended(back.route)):
            return self.to_any(back, headers)
        if dispatcher.alive:
            dispatcher.unheard.append((back, headers))
        return []

    def withdrawn(self, name: str, uids: Collection[bytes], attempt: int) -> None:
        """This dispatcher has given these to another executor, and did so before it died: what it has not heard is not said to another one."""
        for uid in uids:
            token = _token(uid, attempt)
            self._handed.pop(token, None)
            self._handed_before.pop(token, None)
        if (dispatcher := self._known.get(name)) is not None and dispatcher.unheard:
            dispatcher.unheard = [one for one in dispatcher.unheard if one[0].route.uid not in uids]

    def stood_still(self, now: float) -> None:
        """This process was stopped, or its connection clogged: the silence may not have been the dispatchers'. Those that live are heard soon."""
        for dispatcher in self._known.values():
            dispatcher.seen = max(dispatcher.seen, self._least(now))

    def _least(self, now: float) -> float:
        """Since when the silence of a dispatcher counts at least that may have been heard in vain until now."""
        return now - self.silence + HEARD

    def _take_over(self, name: str, dispatcher: KnownDispatcher, now: float) -> list[Effect]:
        """Record the outcomes that may be missing, of which the database keeps one a uid, and hand its queries with parts to others."""
        dispatcher.alive = False
        effects = self._hand_on(name, dispatcher, now)
        for back, headers in dispatcher.unheard:
            if not dispatcher.has_ended(back.route):
                effects.extend(self.to_any(back, headers))
        dispatcher.unheard.clear()
        return [*effects, *self._record_missing(dispatcher)]

    def _record_missing(self, dispatcher: KnownDispatcher) -> list[Effect]:
        found = [one for one in dispatcher.pending if one[0].seq > dispatcher.recorded]
        dispatcher.recorded = dispatcher.seq
        return [effect for one in found for effect in self._outcomes(*one)]

    def _hand_on(self, name: str, dispatcher: KnownDispatcher, now: float) -> list[Effect]:
        """Give a dead dispatcher's queries with parts to others, as soon as any are heard. It has ended those that were over when it last heard itself."""
        effects: list[Effect] = []
        heard = [other for other, one in self._known.items() if one.adopts and one.since <= now - HEARD < one.heard]
        adopting = [other for other in heard if self._known[other].alive and other != name]
        if not adopting:
            return effects
        for uid, (route, body) in dispatcher.parents.items():
            if route.deadline + GRACE > dispatcher.at and not self.is_over(uid):
                other = heir(uid, adopting)
                effects.append(self.hand(other, HandBack(route, "orphaned", body)))
                dispatcher.given.append((route, other))  # that one asks it, and tells it when it begins it
        dispatcher.parents.clear()
        return effects

    def to_any(self, back: HandBack, headers: Any) -> list[Effect]:
        """Hand back a query of a dispatcher that is dead. It is told, as it may only have been stopped."""
        name = back.route.dispatcher
        if (dispatcher := self._known.get(name)) is not None:
            dispatcher.given.append((back.route, ""))
        return [Publish(self.subjects.resubmit(), back, "", headers), self._taken(name, back.route)]

    def _taken(self, name: str, route: Route) -> Publish:
        """Tell a dispatcher that is silent, if it only was stopped, that another one has this query now."""
        return Publish(self.subjects.resubmit(name), HandBack(route, "taken", NO_BODY))

    def _outcomes(self, done: DoneBatch, routes: list[Route], loaded: HeldInstance) -> list[Effect]:
        return [
            Record(
                answered(
                    route,
                    loaded.record,
                    worker=self.worker,
                    started=done.started,
                    finished=done.finished,
                    batch=done.batch,
                    cost_per_item=done.cost,
                    code=done.codes[i] if done.codes is not None else "",
                )
            )
            for i, route in enumerate(routes)
            if route.payer != SYSTEM  # a copy has no row
        ]


def heir(uid: bytes, dispatchers: Iterable[str]) -> str:
    """The one of these dispatchers that takes over a query: the same at every executor (rendezvous hashing)."""
    return max(dispatchers, key=lambda name: blake2b(name.encode(), key=uid, digest_size=8).digest())


def _token(uid: bytes, attempt: int) -> str:
    return f"{uid.hex()}-{attempt}"
