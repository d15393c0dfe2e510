"""Event batches into the database: all of a fetch in one transaction, each batch and each query's outcome once.

A batch's id is registered in the transaction that writes its rows: a batch that is delivered again is skipped. Outcomes and feedback are also
unique by uid (schema/0001_events.sql says how). Rows that the database refuses are found by halving and set aside in infaas_internal.rejected
with the reason; the rows around them are written.
"""

import hashlib
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec
import psycopg

from bus.codec import DECODE_ERRORS, explain
from bus.messages.events import (
    ClientError,
    Event,
    FeedbackEvent,
    JobEvent,
    OutcomeEvent,
    RegistrationEvent,
    StateEvent,
    WorkerEvent,
    WorkerSample,
)
from bus.messages.scaling import DemandHistory
from bus.subjects import WITHOUT_APP
from services.core.catalog import UNREAD
from services.core.outcomes import is_client_error, meaning
from services.recorder.tables import TABLES, Batch, EventTable, moment, printable
from services.shell.store import Store, copy, uuid_array

log = logging.getLogger(__name__)

NAME_LENGTH = 64  # characters of an app's name
STRANGE_NAMES = 100  # different names of apps that do not exist which are kept of a minute
NAMED_MINUTES = 10  # for which a recorder remembers those names
MINUTE = 60.0  # s
HOUR = 3600.0  # s; two outcomes of one query are not further apart (schema/hypertables.sql)
# Errors of the rows. All others (no connection, no disk, no such table) are the database's: the write is tried again.
BAD_ROWS = (psycopg.DataError, psycopg.IntegrityError, ValueError, OverflowError, TypeError)


class EventMessage(NamedTuple):
    """One event message as it was delivered."""

    subject: str
    data: bytes


class BatchPart(NamedTuple):
    """Rows of one batch that are written together or not at all. id: of the batch, or of a piece of it."""

    id: str
    subject: str
    table: EventTable
    rows: Sequence[Event]


class KnownOutcome(NamedTuple):
    """What the database keeps of a query: what its client got."""

    outcome: str
    code: str | None
    worker: str | None
    cost: float


class Rejected(NamedTuple):
    """A message that cannot be written, and why."""

    subject: str
    reason: str
    body: bytes


class EventWriter:
    """Writes events. Not for several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._names = AskedNames()
        self.unread: set[str] = set()  # variants whose file a worker could not read, for who empties it

    def write(self, messages: Iterable[EventMessage]) -> int:
        """Returns after everything is committed or set aside; raises psycopg.Error when the database is not able now.

        Returns the number of outcomes that say something else than an earlier one of the same query, which stays.
        """
        parts: list[BatchPart] = []
        rejected: list[Rejected] = []
        for message in messages:
            part = _read(message)
            if isinstance(part, Rejected):
                rejected.append(part)
            else:
                parts.append(part)
                self.unread.update(
                    one.variant for one in part.rows if isinstance(one, StateEvent) and UNREAD in one.reason
                )
        if rejected:
            self._set_aside(rejected)
        return self._write(parts) if parts else 0

    def _write(self, parts: list[BatchPart]) -> int:
        try:
            with self._store.transaction() as connection:
                differing = _insert(connection, parts, self._names)
        except BAD_ROWS as error:
            first = parts[0]
            if len(parts) > 1:
                half = len(parts) // 2
                pieces = [parts[:half], parts[half:]]
            elif len(first.rows) > 1:
                # The pieces of a batch always have the same ids, so a repeat skips those that are written.
                half = len(first.rows) // 2
                pieces = [
                    [first._replace(id=f"{first.id}/{number}", rows=rows)]
                    for number, rows in enumerate((first.rows[:half], first.rows[half:]))
                ]
            else:
                body = msgspec.msgpack.encode({"id": first.id, "rows": first.rows})
                self._set_aside([Rejected(first.subject, " ".join(str(error).split()), body)])
                return 0
            return sum(self._write(piece) for piece in pieces)
        for kept, other in differing:
            log.error("two outcomes of one query differ; the first one stays", extra=_both(kept, other))
        return len(differing)

    def _set_aside(self, rejected: list[Rejected]) -> None:
        with self._store.transaction() as connection:
            set_aside(connection, rejected)
        for item in rejected:
            log.error("an event was set aside: %s", item.reason, extra={"subject": item.subject})

    def tidy(self) -> None:
        """Delete ids of batches that cannot be delivered again, instances and workers that ended long ago, and old rejects."""
        with self._store.transaction() as connection:
            connection.execute("DELETE FROM infaas_internal.batches WHERE recorded < now() - interval '7 days'")
            connection.execute("DELETE FROM infaas_internal.rejected WHERE time < now() - interval '30 days'")
            connection.execute(
                "DELETE FROM infaas_internal.instances i WHERE since < now() - interval '7 days'"
                " AND NOT EXISTS (SELECT FROM infaas_internal.live_instances l WHERE l.instance = i.instance)"
            )
            connection.execute(
                "DELETE FROM infaas_internal.workers WHERE greatest(since, seen) < now() - interval '90 days'"
            )


def set_aside(connection: psycopg.Connection[Any], rejected: Iterable[Rejected]) -> None:
    """Keep what cannot be recorded. Raises psycopg.Error."""
    connection.cursor().executemany(
        "INSERT INTO infaas_internal.rejected (digest, subject, reason, body) VALUES (%s, %s, %s, %s) ON CONFLICT DO NOTHING",
        [
            (hashlib.sha256(one.subject.encode() + b"\0" + one.body).digest(), *map(printable, one[:2]), one.body)
            for one in rejected
        ],
    )


def _read(message: EventMessage) -> BatchPart | Rejected:
    table = TABLES.get(message.subject.rpartition(".")[2])
    if table is None:
        return Rejected(message.subject, "no such kind of event", message.data)
    try:
        batch: Batch[Any] = table.decode(message.data)
    except DECODE_ERRORS as error:
        return Rejected(message.subject, explain(error), message.data)
    return BatchPart(batch.id, message.subject, table, batch.rows)


class AskedNames:
    """Which names of apps that do not exist were asked for, of the last minutes: so many different ones of each minute are kept."""

    def __init__(self) -> None:
        self._minutes: dict[int, set[str]] = {}

    def keep(self, name: str, time: float) -> bool:
        """Whether this name is one of the first of its minute. time: Unix seconds."""
        minute = int(time // MINUTE)
        names = self._minutes.get(minute)
        if names is None:
            while len(self._minutes) >= NAMED_MINUTES:
                del self._minutes[min(self._minutes)]
            names = self._minutes[minute] = set()
        if name not in names and len(names) < STRANGE_NAMES:
            names.add(name)
        return name in names


def _both(kept: KnownOutcome, other: OutcomeEvent) -> dict[str, Any]:
    """What a log says of two outcomes of one query."""
    dropped = KnownOutcome(other.outcome, other.code, other.worker, other.cost)
    return {"uid": other.uid.hex(), "query": other.id, "app": other.app, "kept": str(kept), "dropped": str(dropped)}


def _insert(
    connection: psycopg.Connection[Any], parts: list[BatchPart], names: AskedNames
) -> list[tuple[KnownOutcome, OutcomeEvent]]:
    """Write the parts that are new, in one transaction. Returns the outcomes that say something else than an earlier one of the same query."""
    differing: list[tuple[KnownOutcome, OutcomeEvent]] = []
    found = connection.execute(
        "INSERT INTO infaas_internal.batches (id) SELECT unnest(%s::text[]) ON CONFLICT DO NOTHING RETURNING id",
        (sorted({part.id for part in parts}),),  # sorted, so that two recorders cannot deadlock
    )
    new = {row[0] for row in found}
    kinds: dict[str, list[Any]] = {}
    for part in parts:
        if part.id in new:
            new.discard(part.id)
            kinds.setdefault(part.table.kind, []).extend(part.rows)
    mistakes: list[ClientError] = kinds.pop(ClientError.kind, [])
    if outcomes := kinds.get(OutcomeEvent.kind):
        mistakes.extend(_mistake(e) for e in outcomes if is_client_error(e))
        kinds[OutcomeEvent.kind] = [e for e in outcomes if not is_client_error(e)] if mistakes else outcomes
    if mistakes:
        kinds[ClientError.kind] = _by_second(connection, mistakes, names)
    for kind, events in kinds.items():
        if not events:
            continue
        table = TABLES[kind]
        if kind == OutcomeEvent.kind:
            events = _unknown(connection, events, differing)
        elif kind == FeedbackEvent.kind:
            events = _new_feedback(connection, events)
        rows = table.values(events)
        if table.name is not None and rows:
            copy(connection, table.name, table.columns, table.sent, rows)
        if fold := _FOLDS.get(kind):
            fold(connection, events)
    return differing


_LOCK = "LOCK TABLE infaas_internal.outcome_lock IN EXCLUSIVE MODE; SET LOCAL enable_seqscan = off"


def _unknown(
    connection: psycopg.Connection[Any],
    events: list[OutcomeEvent],
    differing: list[tuple[KnownOutcome, OutcomeEvent]],
) -> list[OutcomeEvent]:
    """The outcomes of queries that have none in the database; of several with one uid the first. differing: gets those that differ from it."""
    unique: dict[bytes, OutcomeEvent] = {}
    for event in events:
        first = unique.setdefault(event.uid, event)
        if first is not event:
            _compare(KnownOutcome(first.outcome, first.code, first.worker, first.cost), event, differing)
    # Until the commit nobody else may write outcomes; otherwise another recorder could do so between the query and the write. Without
    # enable_seqscan = off the planner reads the whole table, up to a million rows, which is ten times the work.
    connection.execute(_LOCK)
    known = connection.execute(
        "SELECT uuid_send(uid) FROM infaas_internal.known_uids(%b, %b) AS found (uid)",
        (uuid_array(unique), moment(min(event.time for event in events))),
        binary=True,
    )
    repeated = {uid: unique.pop(uid) for (uid,) in known if uid in unique}
    if repeated:
        earliest = moment(min(event.time for event in repeated.values()) - HOUR)
        for uid, *kept in connection.execute(
            "SELECT uuid_send(uid), outcome, code, worker, cost FROM infaas.query_outcomes WHERE uid = ANY (%b) AND time > %b",
            (uuid_array(repeated), earliest),
            binary=True,
        ):
            _compare(KnownOutcome(*kept), repeated[uid], differing)
    return list(unique.values())


def _new_feedback(connection: psycopg.Connection[Any], events: list[FeedbackEvent]) -> list[FeedbackEvent]:
    """The feedbacks that are not in the database. A dispatcher records one again if it cannot know whether another one did."""
    unique = {event.uid: event for event in reversed(events) if event.uid is not None}
    if unique:
        connection.execute(_LOCK)
        known = connection.execute(
            "SELECT uuid_send(uid) FROM infaas.feedback WHERE uid = ANY (%b)", (uuid_array(unique),), binary=True
        )
        for (uid,) in known:
            unique.pop(uid, None)
    return [event for event in events if event.uid is None or unique.get(event.uid) is event]


def _compare(kept: KnownOutcome, event: OutcomeEvent, differing: list[tuple[KnownOutcome, OutcomeEvent]]) -> None:
    if meaning(kept.outcome) != meaning(event.outcome):
        differing.append((kept, event))


def _mistake(event: OutcomeEvent) -> ClientError:
    return ClientError(
        time=event.time, app=None if event.app == WITHOUT_APP else event.app, code=event.code or "", count=1
    )


def _by_second(
    connection: psycopg.Connection[Any], mistakes: list[ClientError], names: AskedNames
) -> list[ClientError]:
    """The mistakes by second, app and code. Of names that no app has, those beyond the most of a minute become None."""
    asked = {_name(e.app) for e in mistakes if e.app is not None}
    known = {
        row[0]
        for row in connection.execute("SELECT app FROM infaas_internal.apps WHERE app = ANY (%s)", (list(asked),))
    }
    counts: Counter[tuple[int, str | None, str]] = Counter()
    for e in mistakes:
        app = None if e.app is None else _name(e.app)
        if app is not None and app not in known and not names.keep(app, e.time):
            app = None
        counts[math.floor(e.time), app, e.code] += e.count
    return [ClientError(time=second, app=app, code=code, count=n) for (second, app, code), n in counts.items()]


def _name(app: str) -> str:
    return printable(app[:NAME_LENGTH])


# -- the present state, folded from events; the later event wins, in whatever order two arrive


def _fold_states(connection: psycopg.Connection[Any], events: list[StateEvent]) -> None:
    connection.cursor().executemany(
        "INSERT INTO infaas_internal.instances AS known (instance, app, model, variant, worker, device, state, since)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (instance, app) DO UPDATE SET model = excluded.model,"
        " variant = excluded.variant, worker = excluded.worker, device = excluded.device, state = excluded.state,"
        " since = excluded.since WHERE excluded.since >= known.since",
        [
            (e.instance, e.app or "", e.model, e.variant, e.worker, e.device, e.to_state, moment(e.time))
            for e in latest(events, lambda e: (e.instance, e.app))
        ],
    )


def _fold_workers(connection: psycopg.Connection[Any], events: list[WorkerEvent]) -> None:
    events = [e for e in events if e.from_state != e.to_state]
    started = {
        e.worker: moment(e.time) for e in latest((e for e in events if e.from_state == "None"), lambda e: e.worker)
    }
    connection.cursor().executemany(
        "INSERT INTO infaas_internal.workers AS known (worker, hardware, state, since, started)"
        " VALUES (%s, %s, %s, %s, %s) ON CONFLICT (worker) DO UPDATE SET hardware = excluded.hardware,"
        " state = CASE WHEN excluded.since < known.since THEN known.state ELSE excluded.state END,"
        " since = greatest(known.since, excluded.since), started = greatest(known.started, excluded.started)",
        [
            (e.worker, e.hardware, e.to_state, moment(e.time), started.get(e.worker))
            for e in latest(events, lambda e: e.worker)
        ],
    )


def _fold_samples(connection: psycopg.Connection[Any], events: list[WorkerSample]) -> None:
    connection.cursor().executemany(
        "INSERT INTO infaas_internal.workers AS known (worker, hardware, seen) VALUES (%s, %s, %s)"
        " ON CONFLICT (worker) DO UPDATE SET seen = greatest(known.seen, excluded.seen)",
        [(e.worker, e.hardware, moment(e.time)) for e in latest(events, lambda e: e.worker)],
    )


def _fold_registrations(connection: psycopg.Connection[Any], events: list[RegistrationEvent]) -> None:
    started: dict[str, float] = {}
    for event in events:
        started[event.registration] = min(event.time, started.get(event.registration, event.time))
    connection.cursor().executemany(
        "INSERT INTO infaas.registrations AS known (registration, app, model, version, state, progress, reason, started, updated)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s) ON CONFLICT (registration) DO UPDATE SET"
        " version = coalesce(excluded.version, known.version), state = excluded.state, progress = excluded.progress,"
        " reason = excluded.reason, started = least(known.started, excluded.started), updated = excluded.updated"
        " WHERE excluded.updated >= known.updated",
        [
            (
                e.registration,
                e.app,
                e.model,
                e.version,
                e.state,
                e.progress,
                e.reason,
                moment(started[e.registration]),
                moment(e.time),
            )
            for e in latest(events, lambda e: e.registration)
        ],
    )


def _fold_jobs(connection: psycopg.Connection[Any], events: list[JobEvent]) -> None:
    connection.cursor().executemany(
        "INSERT INTO infaas.jobs AS known (job, app, model, variant, accuracy, input, output, state, total, done, failed,"
        " reason, cost, created, started, finished, updated)"
        " VALUES (%s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s, %s)"
        " ON CONFLICT (job) DO UPDATE SET state = excluded.state, total = excluded.total, done = excluded.done,"
        " failed = excluded.failed, reason = excluded.reason, cost = excluded.cost, started = excluded.started,"
        " finished = excluded.finished, updated = excluded.updated WHERE excluded.updated >= known.updated",
        [
            (
                *(e.job, e.app, e.model, e.variant, e.accuracy, e.input, e.output, e.state, e.total, e.done, e.failed),
                *(e.reason and printable(e.reason), e.cost, moment(e.created)),
                *(None if at is None else moment(at) for at in (e.started, e.finished)),
                moment(e.time),
            )
            for e in latest(events, lambda e: e.job)
        ],
    )


_FOLDS: dict[str, Any] = {
    "state": _fold_states,
    "worker": _fold_workers,
    "worker-sample": _fold_samples,
    "registration": _fold_registrations,
    "job": _fold_jobs,
}


E = TypeVar("E", bound=Event)


def latest(events: Iterable[E], key: Callable[[E], Hashable]) -> list[E]:
    """For each key the event with the greatest time; of equal times the last one."""
    found: dict[Hashable, E] = {}
    for event in events:
        before = found.get(key(event))
        if before is None or event.time >= before.time:
            found[key(event)] = event
    return list(found.values())


# -- maintenance (schema/rollups.sql says how)

_REFRESH = (b"SELECT infaas_internal.refresh_cost_events()", b"SELECT infaas_internal.refresh_query_outcomes()")


class Maintenance:
    """Brings rollups up to date and deletes rows that are old enough, piece by piece. Not for several threads at once."""

    def __init__(self, store: Store) -> None:
        self._store = store

    def maintain(self) -> bool:
        """A bounded piece of each kind of work; True when there is more. Raises psycopg.Error.

        Each piece has a transaction of its own. None holds two watermarks, so there is no deadlock.
        """
        more = False
        for refresh in _REFRESH:
            with self._store.transaction() as connection:
                row = connection.execute(refresh).fetchone()
                more |= bool(row and row[0])
        with self._store.transaction() as connection:
            kept = connection.execute(
                "SELECT relation FROM infaas_internal.retention WHERE keep IS NOT NULL ORDER BY 1"
            ).fetchall()
        for (relation,) in kept:
            more |= self.expire(relation)
        return more

    def expire(self, relation: str) -> bool:
        """Delete some of the oldest rows of a relation, as far as they are in the rollups; True when there are more."""
        with self._store.transaction() as connection:
            row = connection.execute("SELECT infaas_internal.expire(%s)", (relation,)).fetchone()
        return bool(row and row[0])


# -- questions

# The rollups by the minute count queries; what instances were asked for a query over the same days makes items of them. So the history
# has the unit of the demand that dispatchers report: each part of a query counts there, and what a cache answers does not.
_DEMAND = """
SELECT extract(epoch FROM minute)::float8, sum(queries)::float8 * (
         SELECT coalesce(sum(asked_items)::float8 / nullif(sum(queries), 0)::float8, 1.0) FROM infaas_internal.query_hourly
         WHERE app = %(app)s AND hour >= now() - %(days)s * interval '1 day')
FROM infaas_internal.slo_minutely
WHERE app = %(app)s AND minute >= now() - %(days)s * interval '1 day' AND minute < now()
GROUP BY minute ORDER BY minute"""
HISTORY_DAYS = 7


def demand_history(store: Store, app: str) -> DemandHistory:
    """What the app was asked for in the last days. Raises psycopg.Error."""
    with store.transaction() as connection:
        rows = connection.execute(_DEMAND, {"app": printable(app), "days": HISTORY_DAYS}).fetchall()
    if not rows:
        return DemandHistory(app=app)
    start = rows[0][0]
    items = [0.0] * (1 + round((rows[-1][0] - start) / MINUTE))
    for minute, count in rows:
        items[round((minute - start) / MINUTE)] = count
    return DemandHistory(app=app, start=start, items=items)
