"""Queries in flight, and how each ends: its reply, its recorded outcome, its span."""

from collections import deque
from collections.abc import Callable

from bus.messages.catalog import VariantRecord
from bus.messages.flow import DoneBatch, Route
from bus.messages.public import Error, Refusal
from services.core.actor import Effect, Envelope, Publish
from services.core.outcomes import OutcomeLog, answered, refused
from services.core.selection.instances import Instance
from services.dispatcher.default_output import default_answer, falls_back
from services.dispatcher.query import Query, spans_of


class InFlight:
    """The in-flight table. Each query is in exactly one of `flying`, `waiting`, `retries`."""

    def __init__(self) -> None:
        self.flying: dict[bytes, Query] = {}
        self.waiting: dict[bytes, Query] = {}
        self.retries: deque[Query] = deque()
        self.retrying: bytes | None = None
        self.tried: dict[bytes, int] = {}  # suspects that an executor has begun alone, and their attempt

    def __contains__(self, uid: bytes) -> bool:
        if uid in self.flying or uid in self.waiting:
            return True
        return bool(self.retries) and any(q.uid == uid for q in self.retries)

    def __len__(self) -> int:
        return len(self.flying) + len(self.waiting) + len(self.retries)

    def depart(self, query: Query, instance: Instance) -> None:
        query.instance = instance
        query.attempt += 1
        instance.take(query.items)
        self.flying[query.uid] = query

    def land(self, uid: bytes) -> Query | None:
        """Take a query out of the air; None when it is not (or no longer) ours."""
        query = self.flying.pop(uid, None)
        if query is not None and query.instance is not None:
            query.instance.own -= query.items
            query.instance = None
        if uid == self.retrying:
            self.retrying = None
        return query

    def returned(self, reply_subject: str) -> Query | None:
        """What flies and was sent with this reply subject (its last token: uid and attempt); None when it is elsewhere by now."""
        token = reply_subject.rpartition(".")[2]
        try:
            query = self.flying.get(bytes.fromhex(token[:32]))
            return query if query is not None and query.attempt == int(token[33:]) else None
        except ValueError:
            return None

    def aboard(self, lost: list[Instance], worker: str = "", device: str = "") -> list[Query]:
        """Take out, in order of arrival, what was dispatched to these instances, or to a device that is gone as a whole.

        Instances count by name: the view may have dropped one and met it again since.
        """
        gone = {instance.id for instance in lost}
        found = [
            query
            for query in self.flying.values()
            if (on := query.instance) is not None
            and (on.id in gone or (on.worker.name == worker and on.device == device))
        ]
        for query in found:
            self.land(query.uid)
        return found

    def guilty(self, query: Query) -> bool:
        """Whether the death of the executor that it was aboard counts against it.

        The first one does, whoever was in the batch. Then it travels alone, and only a death while it ran does.
        """
        return self.tried.pop(query.uid, None) == query.attempt or not query.crashes

    def expired(self, now: float, grace: float) -> list[Query]:
        """Take out what waits beyond its deadline, and what should have landed `grace` seconds after it."""
        late = [q for q in self.waiting.values() if q.ask.deadline <= now]
        for query in late:
            del self.waiting[query.uid]
        kept = [q for q in self.retries if q.ask.deadline > now]
        if len(kept) < len(self.retries):
            late += [q for q in self.retries if q.ask.deadline <= now]
            self.retries = deque(kept)
        if self.tried:
            self.tried = {uid: attempt for uid, attempt in self.tried.items() if uid in self.flying}
        lost = [q for q in self.flying.values() if q.ask.deadline + grace <= now]
        for query in lost:
            self.land(query.uid)
        return late + lost


# -- How queries end: what the client is told, and the outcome that is recorded.


class Outcomes:
    """Every end of a query passes here, and is counted in `history`."""

    def __init__(self, dispatcher: str, policy: str, new_uid: Callable[[], bytes]) -> None:
        self.history = OutcomeLog()
        self._dispatcher = dispatcher
        self._policy = policy
        self._new_uid = new_uid

    def refused(self, query: Query, error: Error, now: float) -> list[Effect]:
        """It ends here, without an answer, or with its app's default output."""
        route = query.route(self._dispatcher, "", self._policy)
        default = default_answer(query, error, now) if falls_back(query, error) else None
        told = Refusal(id=query.head.id, error=error) if default is None else default
        return [
            Publish(query.reply, told, "", query.headers),
            self.history.record(refused(route, error.code, now, default=default is not None)),
            *spans_of(query, now, error.code if default is None else ""),
        ]

    def turned_away(self, app: str, envelope: Envelope, label: str | None, error: Error) -> list[Effect]:
        """Refuse what never became a query of ours; it is counted all the same. label: the client's id for it."""
        now = envelope.now
        route = Route(self._new_uid(), 0, 0, envelope.reply, now, now, self._dispatcher, "", app[:64], 1, label)
        return [
            Publish(envelope.reply, Refusal(id=label, error=error)),
            self.history.record(refused(route, error.code, now)),
        ]

    def done(
        self, batch: DoneBatch, record: VariantRecord | None, land: Callable[[bytes], Query | None]
    ) -> list[Effect]:
        """An executor ended these, and told their clients: record how. land: takes a query out of the air."""
        effects: list[Effect] = []
        codes = batch.codes
        for i, uid in enumerate(batch.uids):
            query = land(uid)
            if query is None or record is None:
                continue
            assert query.sent is not None  # it was in the air
            event = answered(
                query.sent,
                record,
                worker=batch.worker,
                finished=batch.finished,
                batch=batch.batch,
                cost_per_item=batch.cost,
                code=codes[i] if codes is not None else "",
            )
            effects.append(self.history.record(event))
            if query.trace is not None:
                effects.extend(spans_of(query, batch.finished, codes[i] if codes is not None else ""))
        self.history.covers(batch)
        return effects
