"""The recorder: copies events from the streams, and records from the catalogue, into the database.

The actor only says what comes next. Each stream has one command under way or one timer running, never both: batches are written in
order, and a database that is away is tried at a bounded rate. Nothing is acknowledged before it is committed.
"""

from collections.abc import Iterable
from typing import NamedTuple

from msgspec import Struct

from bus.messages.scaling import AskForHistory, DemandHistory
from bus.subjects import RECORDERS, Subjects
from services.core.actor import (
    NOTHING,
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Handler,
    Inlet,
    Publish,
    Started,
    Stopping,
    Synced,
    TableActor,
    Tick,
    TimedOut,
    Watch,
)
from services.core.metric import MetricFamily

TIDY_EVERY = 3600.0  # s
TIDY_FIRST = 60.0  # s
MAINTAIN_EVERY = 30.0  # s
CATCH_UP = 0.2  # s between pieces of maintenance while there is more: events are written in between
MOST = 32  # messages of a fetch; at the outbox's 512 rows each, about 16,000 rows a transaction
GATHER = 0.4  # s to let messages gather after a fetch that emptied the stream: fewer, larger transactions
FIRST_PAUSE = 0.25  # s before the first repeat after a failure, then doubled
READING = 20.0  # s that reading the history of an app's demand may take
LONGEST_PAUSE = 2.0  # s; well within the 5 s after which events are in SQL once the database is back


class Ingest(Struct, frozen=True):
    """Fetch from this stream, write, acknowledge. Result: `Ingested`. stream: "outcomes" or "events"."""

    stream: str


class Ingested(NamedTuple):
    """messages: how many were written. differing: outcomes that say something else than the one of the same query that is in the database."""

    messages: int
    differing: int = 0


class WriteCatalog(Struct, frozen=True):
    """Write these catalogue entries (None: deleted). present: all keys of the catalogue, if known; rows of other keys are deleted."""

    changes: dict[str, bytes | None]
    present: frozenset[str] | None


class Tidy(Struct, frozen=True):
    """Delete bookkeeping that has become useless."""


class Maintain(Struct, frozen=True):
    """Bring the rollups up to date and delete old rows, a bounded piece of both. Result: whether there is more."""


class ReadDemand(Struct, frozen=True):
    """Read what this app was asked for lately. Result: `DemandHistory`."""

    app: str


STREAMS = ("outcomes", "events")
CATALOG = "mirror"  # the name that metrics show
TIDY = "tidy"
MAINTAIN = "maintain"
_COMMANDS = {TIDY: Tidy(), MAINTAIN: Maintain(), **{stream: Ingest(stream) for stream in STREAMS}}


class Recorder(TableActor):
    """Keeps both streams flowing and the database's copy of the catalogue up to date, and tells the controller of earlier demand.

    written: messages by stream. differing: as of `Ingested`.
    """

    def __init__(self, subjects: Subjects) -> None:
        self.inlets = (Inlet(subject=subjects.recorder("demand"), message=AskForHistory, queue=RECORDERS),)
        self.watches = (Watch(bucket=subjects.catalog_bucket),)
        self.written = dict.fromkeys(STREAMS, 0)
        self.differing = 0
        self._failures: dict[str, int] = {}  # in a row
        self._changes: dict[str, bytes | None] = {}
        self._keys: set[str] = set()
        self._synced = False
        self._all_keys_due = False  # whether the next command says all keys
        self._under_way: WriteCatalog | None = None
        self._catalog_paused = False
        self._stopping = False
        self._on: dict[type, Handler] = {
            AskForHistory: self._asked,
            Changed: self._changed,
            Synced: self._catalog_synced,
            Done: self._done,
            Failed: self._failed,
            TimedOut: self._failed,
            Tick: self._due,
            Started: self._started,
            Stopping: self._stop,
        }

    def _started(self, _: Envelope) -> Iterable[Effect]:
        timers = (After(TIDY, TIDY_FIRST, Tick(TIDY)), After(MAINTAIN, MAINTAIN_EVERY, Tick(MAINTAIN)))
        return (*map(_command, STREAMS), *timers)

    def _stop(self, _: Envelope) -> Iterable[Effect]:
        self._stopping = True
        return NOTHING

    # -- the catalogue

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        changed: Changed = envelope.message
        self._changes[changed.key] = changed.value
        if changed.value is None:
            self._keys.discard(changed.key)
        else:
            self._keys.add(changed.key)
        return self._write_catalog()

    def _catalog_synced(self, _: Envelope) -> Iterable[Effect]:
        self._synced = self._all_keys_due = True
        return self._write_catalog()

    def _write_catalog(self) -> Iterable[Effect]:
        """One command at a time, because a later one may hold a newer value of the same key."""
        if not self._synced or self._under_way is not None or self._catalog_paused or self._stopping:
            return NOTHING
        if not self._changes and not self._all_keys_due:
            return NOTHING
        self._under_way = WriteCatalog(self._changes, frozenset(self._keys) if self._all_keys_due else None)
        self._changes, self._all_keys_due = {}, False
        return (Do(CATALOG, self._under_way),)

    # -- questions

    def _asked(self, envelope: Envelope) -> Iterable[Effect]:
        """The reply's subject and the app are the command's id, so nothing is remembered meanwhile."""
        app = envelope.message.app
        return (Do((envelope.reply, app), ReadDemand(app), READING),) if envelope.reply else NOTHING

    # -- commands

    def _done(self, envelope: Envelope) -> Iterable[Effect]:
        done: Done = envelope.message
        what, result = done.id, done.result
        if isinstance(what, tuple):
            return (Publish(what[0], result),)
        self._failures.pop(what, None)
        if what == CATALOG:
            self._under_way = None
            return self._write_catalog()
        if what == TIDY:
            return (After(TIDY, TIDY_EVERY, Tick(TIDY)),)
        if what == MAINTAIN:
            return (After(MAINTAIN, CATCH_UP if result else MAINTAIN_EVERY, Tick(MAINTAIN)),)
        if self._stopping:
            return NOTHING
        ingested: Ingested = result
        self.written[what] += ingested.messages
        self.differing += ingested.differing
        pause = pause_after_fetch(ingested.messages)
        return (After(what, pause, Tick(what)),) if pause else (_command(what),)

    def _failed(self, envelope: Envelope) -> Iterable[Effect]:
        what = envelope.message.id
        if isinstance(what, tuple):
            reply, app = what
            error = envelope.message.error if isinstance(envelope.message, Failed) else "the database takes too long"
            return (Publish(reply, DemandHistory(app=app, error=error)),)
        failures = self._failures[what] = self._failures.get(what, 0) + 1
        if what == CATALOG and self._under_way is not None:
            self._changes = self._under_way.changes | self._changes
            self._all_keys_due = self._all_keys_due or self._under_way.present is not None
            self._under_way = None
            self._catalog_paused = True
        pause = MAINTAIN_EVERY if what == MAINTAIN else pause_after_failure(failures)  # nobody waits for maintenance
        return (After(what, pause, Tick(what)),)

    def _due(self, envelope: Envelope) -> Iterable[Effect]:
        what = envelope.message.of
        if self._stopping:
            return NOTHING
        if what == CATALOG:
            self._catalog_paused = False
            return self._write_catalog()
        return (_command(what),)


def _command(what: str) -> Do:
    return Do(what, _COMMANDS[what])


def pause_after_fetch(messages: int) -> float:
    """Seconds until the next fetch: none while there is more, and none after an empty fetch, which has waited for a message itself."""
    return GATHER if 0 < messages < MOST else 0.0


def pause_after_failure(failures: int) -> float:
    """Seconds before the next attempt, after so many failures in a row."""
    return float(min(FIRST_PAUSE * 2.0 ** (failures - 1), LONGEST_PAUSE))


def make_recorder(subjects: Subjects) -> Recorder:
    """A recorder; no setting concerns it."""
    return Recorder(subjects)


# -- metrics


def families(actor: Recorder) -> Iterable[MetricFamily]:
    failures = dict.fromkeys(STREAMS, 0) | actor._failures
    return (
        MetricFamily(
            "infaas_recorder_failures_in_a_row", "gauge", "Tries since the last success, by what is tried."
        ).add_all(failures, "what"),
        MetricFamily(
            "infaas_recorder_batches_total", "counter", "Batches of events that are in the database, by stream."
        ).add_all(actor.written, "stream"),
        MetricFamily(
            "infaas_differing_outcomes_total",
            "counter",
            "Outcomes that say something else than the one of the same query that is in the database, which stays.",
        ).add(actor.differing),
    )


def missing(actor: Recorder, now: float) -> str:
    del now
    failing = [stream for stream in STREAMS if actor._failures.get(stream)]
    return f"success in writing {', '.join(failing)}" if failing else ""
