"""How queries end: what the client is told, and the outcome that is recorded."""

from collections.abc import Callable

from bus.messages.catalog import VariantRecord
from bus.messages.flow import DoneBatch, Route
from bus.messages.public import Error, Refusal
from services.core.actor import Effect, Envelope, Publish
from services.core.history import History
from services.core.outcome import answered, refused
from services.dispatcher.fallback import default_answer, falls_back
from services.dispatcher.query import Query
from services.dispatcher.tracing import span_of


class Endings:
    """Every end of a query passes here, and is counted in `history`."""

    def __init__(self, dispatcher: str, policy: str, new_uid: Callable[[], bytes]) -> None:
        self.history = History()
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
            *span_of(query, now, error.code if default is None else ""),
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
                effects.extend(span_of(query, batch.finished, codes[i] if codes is not None else ""))
        self.history.covers(batch)
        return effects
