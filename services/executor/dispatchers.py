"""The dispatchers that an executor works for: it reports to the living, and writes the outcomes that a dead one may not have."""

from collections import deque
from collections.abc import Iterable

from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch, Route
from bus.subjects import Subjects
from services.core.actor import Effect, Publish, Record
from services.core.outcomes import answered
from services.executor.instances import Loaded

BATCHES = 20_000  # unacknowledged done batches kept per dispatcher
FORGET = 120.0  # s after which a dead dispatcher is forgotten


class KnownDispatcher:
    """One dispatcher. seq: of the last done batch; pending: done batches whose outcomes it has not reported as stored."""

    __slots__ = ("alive", "pending", "seen", "seq", "subject")

    def __init__(self, now: float, subject: str) -> None:
        self.alive = True
        self.seen = now
        self.seq = 0
        self.subject = subject
        self.pending: deque[tuple[DoneBatch, list[Route], Loaded]] = deque(maxlen=BATCHES)


class KnownDispatchers:
    """All dispatchers heard of. queue: this executor's name in done batches."""

    def __init__(self, subjects: Subjects, queue: str, worker: str, silence_s: float) -> None:
        self._subjects = subjects
        self._queue = queue
        self._worker = worker
        self._silence = silence_s
        self._known: dict[str, KnownDispatcher] = {}

    def _of(self, name: str, now: float) -> KnownDispatcher:
        owner = self._known.get(name)
        if owner is None:
            owner = self._known[name] = KnownDispatcher(now, self._subjects.done(name))
        return owner

    def alive(self, name: str) -> bool:
        owner = self._known.get(name)
        return owner is None or owner.alive

    @property
    def any_alive(self) -> bool:
        """Whether a dispatcher is there that could end a query in its way."""
        return not self._known or any(owner.alive for owner in self._known.values())

    def tell(
        self, name: str, loaded: Loaded, routes: list[Route], batch: int, span: tuple[float, float], cost: float,
        codes: list[str] | None, now: float,
    ) -> Iterable[Effect]:  # fmt: skip
        """Report queries as done to their dispatcher; record their outcomes here when it is dead. span: start and end."""
        owner = self._of(name, now)
        owner.seq += 1
        done = DoneBatch(
            self._queue,
            self._worker,
            owner.seq,
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
        if not owner.alive:
            return self._outcomes(done, routes, loaded)
        owner.pending.append((done, routes, loaded))
        return (Publish(owner.subject, done),)

    def heard(self, beat: DispatcherHeartbeat, now: float) -> list[Effect]:
        """A heartbeat: it lives, and so much is stored. A dispatcher that leaves is inherited from at once."""
        owner = self._of(beat.dispatcher, now)
        owner.seen = now
        seq = beat.flushed.get(self._queue)
        if seq is not None:
            while owner.pending and owner.pending[0][0].seq <= seq:
                owner.pending.popleft()
        if beat.leaving:
            return self._inherit(owner)
        owner.alive = True
        return []

    def check(self, now: float) -> list[Effect]:
        """Look for dispatchers that fell silent."""
        effects: list[Effect] = []
        for name, owner in list(self._known.items()):
            if owner.alive and now - owner.seen > self._silence:
                effects.extend(self._inherit(owner))
            elif not owner.alive and now - owner.seen > FORGET:
                del self._known[name]
        return effects

    def excuse(self, now: float) -> None:
        """It was this process that was away: nobody is blamed for the silence."""
        for owner in self._known.values():
            owner.seen = now

    def _inherit(self, owner: KnownDispatcher) -> list[Effect]:
        """Record what may be missing; the database keeps one outcome a uid."""
        owner.alive = False
        effects: list[Effect] = []
        for done, routes, loaded in owner.pending:
            effects.extend(self._outcomes(done, routes, loaded))
        owner.pending.clear()
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
