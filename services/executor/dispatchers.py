"""The dispatchers that an executor works for. It reports to the living ones, and records the outcomes that a dead one may not have
recorded. Pure.
"""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from msgspec import Raw

from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch, HandBack, PartsEnded, Route
from bus.subjects import Subjects
from services.core.actor import NOTHING, Effect, Publish, Record
from services.core.outcomes import answered
from services.executor.instances import Loaded

BATCHES = 20_000  # unacknowledged done batches kept per dispatcher
FORGET = 120.0  # s after which a dead dispatcher is forgotten


class KnownDispatcher:
    """One dispatcher. seq: of the last done batch. pending: done batches whose outcomes it has not reported as stored.

    parents: queries of which parts came here and that have not ended, each with its body. adopts: it takes over such queries of others.
    """

    __slots__ = ("adopts", "alive", "parents", "pending", "seen", "seq", "subject")

    def __init__(self, now: float, subject: str) -> None:
        self.alive = True
        self.seen = now
        self.seq = 0
        self.subject = subject
        self.adopts = False
        self.parents: dict[bytes, tuple[Route, Raw]] = {}
        self.pending: deque[tuple[DoneBatch, list[Route], Loaded]] = deque(maxlen=BATCHES)


class KnownDispatchers:
    """All dispatchers that sent something. queue: this executor's name in done batches. silence_s: after it a dispatcher is dead."""

    def __init__(self, subjects: Subjects, queue: str, worker: str, silence_s: float) -> None:
        self._subjects = subjects
        self._queue = queue
        self._worker = worker
        self._silence = silence_s
        self._known: dict[str, KnownDispatcher] = {}

    def _of(self, name: str, now: float) -> KnownDispatcher:
        dispatcher = self._known.get(name)
        if dispatcher is None:
            dispatcher = self._known[name] = KnownDispatcher(now, self._subjects.done(name))
        return dispatcher

    def alive(self, name: str) -> bool:
        dispatcher = self._known.get(name)
        return dispatcher is None or dispatcher.alive

    @property
    def any_alive(self) -> bool:
        """Whether there is a dispatcher that could end a query instead of this executor."""
        return not self._known or any(dispatcher.alive for dispatcher in self._known.values())

    def report_done(
        self, name: str, loaded: Loaded, routes: list[Route], batch: int, span: tuple[float, float], cost: float,
        codes: list[str] | None, now: float,
    ) -> Iterable[Effect]:  # fmt: skip
        """Report queries as done to their dispatcher. If it is dead, record their outcomes here. span: start and end."""
        dispatcher = self._of(name, now)
        dispatcher.seq += 1
        done = DoneBatch(
            self._queue,
            self._worker,
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
        )
        if not dispatcher.alive:
            return self._outcomes(done, routes, loaded)
        dispatcher.pending.append((done, routes, loaded))
        return (Publish(dispatcher.subject, done),)

    def heartbeat(self, heartbeat: DispatcherHeartbeat, now: float) -> Iterable[Effect]:
        """A dispatcher lives, and has stored so much. If it leaves, its outcomes are taken over at once."""
        dispatcher = self._of(heartbeat.dispatcher, now)
        dispatcher.seen = now
        seq = heartbeat.flushed.get(self._queue)
        if seq is not None:
            while dispatcher.pending and dispatcher.pending[0][0].seq <= seq:
                dispatcher.pending.popleft()
        dispatcher.adopts = heartbeat.adopts
        if heartbeat.leaving:
            return self._take_over(dispatcher, now)
        dispatcher.alive = True
        return NOTHING

    def check(self, now: float) -> list[Effect]:
        """Find dispatchers that are silent for too long, and take over their outcomes."""
        effects: list[Effect] = []
        for name, dispatcher in list(self._known.items()):
            if dispatcher.alive and now - dispatcher.seen > self._silence:
                effects.extend(self._take_over(dispatcher, now))
            elif not dispatcher.alive and now - dispatcher.seen > FORGET:
                del self._known[name]
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

    def parts_ended(self, name: str, ended: PartsEnded) -> Iterable[Effect]:
        """These queries have got their answers."""
        dispatcher = self._known.get(name)
        if dispatcher is not None:
            for uid in ended.parents:
                dispatcher.parents.pop(uid, None)
        return NOTHING

    def reset_silence(self, now: float) -> None:
        """This process was stopped: the silence was not the dispatchers'."""
        for dispatcher in self._known.values():
            dispatcher.seen = now

    def _take_over(self, dispatcher: KnownDispatcher, now: float) -> list[Effect]:
        """Record the outcomes that may be missing, of which the database keeps one a uid, and hand its queries with parts to others."""
        dispatcher.alive = False
        effects: list[Effect] = []
        adopting = [name for name, one in self._known.items() if one.alive and one.adopts]
        for uid, (route, body) in dispatcher.parents.items():
            if route.deadline > now and adopting:
                subject = self._subjects.resubmit(heir(uid, adopting))
                effects.append(Publish(subject, HandBack(route, "orphaned", body)))
        dispatcher.parents.clear()
        for done, routes, loaded in dispatcher.pending:
            effects.extend(self._outcomes(done, routes, loaded))
        dispatcher.pending.clear()
        return effects

    def _outcomes(self, done: DoneBatch, routes: list[Route], loaded: Loaded) -> list[Effect]:
        return [
            Record(
                answered(
                    route,
                    loaded.record,
                    worker=self._worker,
                    finished=done.finished,
                    batch=done.batch,
                    cost_per_item=done.cost,
                    code=done.codes[i] if done.codes is not None else "",
                )
            )
            for i, route in enumerate(routes)
        ]


def heir(uid: bytes, dispatchers: Iterable[str]) -> str:
    """The one of these dispatchers that takes over a query: the same at every executor (rendezvous hashing)."""
    return max(dispatchers, key=lambda name: blake2b(name.encode(), key=uid, digest_size=8).digest())
