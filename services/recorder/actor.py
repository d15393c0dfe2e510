"""The recorder: copies events from the streams, and records and files of the catalogue, into the database.

The actor only says what comes next. Each stream has one command under way or one timer running, never both: batches are written in
order, and a database that is away is tried at a bounded rate. Nothing is acknowledged before it is committed.
"""

from collections.abc import Iterable
from itertools import islice
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
from services.core.catalog import LASTING_BUCKETS, lasting, variant_key
from services.core.metric import MetricFamily

TIDY_EVERY = 3600.0  # s
TIDY_FIRST = 60.0  # s
MAINTAIN_EVERY = 30.0  # s
CATCH_UP = 0.2  # s between pieces of maintenance while there is more: events are written in between
MOST = 32  # messages of a fetch; at the outbox's 512 rows each, about 16,000 rows a transaction
GATHER = 0.4  # s to let messages gather after a fetch that emptied the stream: fewer, larger transactions
FIRST_PAUSE = 0.25  # s before the first repeat after a failure, then doubled
RECORDS = 5000  # of a command
DAY_S, NIGHT_S = 24 * 3600.0, 3.5 * 3600.0  # s after midnight UTC at which files are read through
DAY_H = 25.0  # hours that a count looks back: the first one, that of the night, and the one after a count that failed
LAST_H = 3.0  # the others
CAUGHT_UP = 60.0  # s; a stream that was not emptied within this time is behind, and what it holds is not missing
READING = 20.0  # s that reading the history of an app's demand may take
LONGEST_PAUSE = 2.0  # s; well within the 5 s after which events are in SQL once the database is back


class Ingest(Struct, frozen=True):
    """Fetch from this stream, write, acknowledge. Result: `Ingested`. stream: "outcomes" or "events"."""

    stream: str


class Ingested(NamedTuple):
    """messages: how many were written. differing: outcomes that say something else than the one of the same query that is in the database.

    unread: variants whose file a worker could not read.
    """

    messages: int
    differing: int = 0
    unread: frozenset[str] = frozenset()


class WriteCatalog(Struct, frozen=True):
    """Write these entries, by bucket and key (None: deleted).

    present: all keys of the catalogue, if known; rows of other keys are deleted, but not from the mirror that `infaas catalog restore` reads.
    """

    changes: dict[tuple[str, str], bytes | None]
    present: frozenset[str] | None


class KeepFiles(Struct, frozen=True):
    """Copy the files that the mirrored records name. Result: how many cannot be read.

    check: keys of the catalogue whose files are to be read through, on both sides; what is damaged on one is mended from the other.
    """

    check: frozenset[str] = frozenset()


class Count(Struct, frozen=True):
    """Look for what was sent, or written in these last hours, and is in no row. Result: how many of the last day, by `COUNTED`."""

    hours: float


class CompareDay(Struct, frozen=True):
    """Compute what one who knew the load of a day could have paid at best, beside what was paid, and write it, where that is not done. began: of the day,
    Unix seconds.
    """

    began: float


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
FILES = "files"
NIGHT = "night"
DAY = "day"
COUNT = "count"
COUNTED = ("batches", "outcomes")
MAINTAIN = "maintain"
_COMMANDS = {TIDY: Tidy(), MAINTAIN: Maintain(), **{stream: Ingest(stream) for stream in STREAMS}}


class Recorder(TableActor):
    """Keeps both streams flowing and the database's copy of the catalogue up to date, and tells the controller of earlier demand.

    written: messages by stream. differing: as of `Ingested`. damaged: files that could not be read in the last night, or since. missing: as of `Count`.
    """

    def __init__(self, subjects: Subjects) -> None:
        self.inlets = (Inlet(subject=subjects.recorder("demand"), message=AskForHistory, queue=RECORDERS),)
        self._buckets: dict[str, str] = {getattr(subjects, f"{name}_bucket"): name for name in LASTING_BUCKETS}
        self.watches = tuple(Watch(bucket=bucket) for bucket in self._buckets)
        self.written = dict.fromkeys(STREAMS, 0)
        self.differing = self.damaged = 0
        self.missing = dict.fromkeys(COUNTED, 0)
        self._hours = DAY_H  # that the next count looks back
        self._emptied = dict.fromkeys(STREAMS, -CAUGHT_UP)  # when a fetch from it last found less than it might have
        self._failures: dict[str, int] = {}  # in a row
        self._changes: dict[tuple[str, str], bytes | None] = {}
        self._keys: set[str] = set()
        self._unsynced = set(self._buckets)
        self._files: KeepFiles | None = None  # under way, or to be done again
        self._files_next: KeepFiles | None = None
        self._all_keys_due = False  # whether the next command says all keys
        self._under_way: WriteCatalog | None = None
        self._catalog_paused = False
        self._stopping = False
        self._on: dict[type, Handler] = {
            AskForHistory: self._asked,
            Changed: self._changed,
            Synced: self._bucket_synced,
            Done: self._done,
            Failed: self._failed,
            TimedOut: self._failed,
            Tick: self._due,
            Started: self._started,
            Stopping: self._stop,
        }

    def _started(self, envelope: Envelope) -> Iterable[Effect]:
        timers = (After(TIDY, TIDY_FIRST, Tick(TIDY)), After(MAINTAIN, MAINTAIN_EVERY, Tick(MAINTAIN)))
        return (*map(_command, STREAMS), *timers, _next_night(envelope.now))

    def _stop(self, _: Envelope) -> Iterable[Effect]:
        self._stopping = True
        return NOTHING

    # -- the catalogue

    def _changed(self, envelope: Envelope) -> Iterable[Effect]:
        changed: Changed = envelope.message
        bucket = self._buckets[changed.bucket]
        if lasting(bucket, changed.key) is None:
            return NOTHING
        self._changes[bucket, changed.key] = changed.value
        if bucket == "catalog":
            (self._keys.discard if changed.value is None else self._keys.add)(changed.key)
        return self._write_catalog()

    def _bucket_synced(self, envelope: Envelope) -> Iterable[Effect]:
        self._unsynced.discard(envelope.message.bucket)
        self._all_keys_due = True
        return self._write_catalog()

    def _write_catalog(self) -> Iterable[Effect]:
        """One command at a time, because a later one may hold a newer value of the same key."""
        if self._unsynced or self._under_way is not None or self._catalog_paused or self._stopping:
            return NOTHING
        if not self._changes and not self._all_keys_due:
            return NOTHING
        some = dict(islice(self._changes.items(), RECORDS))
        for key in some:
            del self._changes[key]
        self._under_way = WriteCatalog(some, frozenset(self._keys) if self._all_keys_due else None)
        self._all_keys_due = False
        return (Do(CATALOG, self._under_way),)

    def _written(self) -> Iterable[Effect]:
        """What is learnt changes often: the next command waits for more of it."""
        written, self._under_way = self._under_way, None
        if self._stopping:
            return NOTHING
        self._catalog_paused = True
        of_files = written is not None and any(bucket == "catalog" for bucket, _ in written.changes)
        return (After(CATALOG, GATHER, Tick(CATALOG)), *(self._keep_files(KeepFiles()) if of_files else NOTHING))

    def _keep_files(self, command: KeepFiles) -> Iterable[Effect]:
        if self._files is not None:
            waits = self._files_next or command
            self._files_next = KeepFiles(waits.check | command.check)
            return NOTHING
        self._files = command
        return (Do(FILES, command),)

    def _files_kept(self, damaged: int) -> Iterable[Effect]:
        done, self._files = self._files, None
        if done is not None and done.check:
            self.damaged = damaged if done.check >= self._keys else max(self.damaged, damaged)
        command, self._files_next = self._files_next, None
        return NOTHING if command is None or self._stopping else self._keep_files(command)

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
            return self._written()
        if what == FILES:
            return self._files_kept(result)
        if what == DAY:
            return NOTHING
        if what == TIDY:
            return (After(TIDY, TIDY_EVERY, Tick(TIDY)), *self._look_back(envelope.now))
        if what == COUNT:
            self.missing = result
            self._hours = LAST_H
            return NOTHING
        if what == MAINTAIN:
            return (After(MAINTAIN, CATCH_UP if result else MAINTAIN_EVERY, Tick(MAINTAIN)),)
        if self._stopping:
            return NOTHING
        ingested: Ingested = result
        self.written[what] += ingested.messages
        self.differing += ingested.differing
        if ingested.messages < MOST:
            self._emptied[what] = envelope.now
        pause = pause_after_fetch(ingested.messages)
        unread = frozenset(map(variant_key, ingested.unread))
        mends = self._keep_files(KeepFiles(unread)) if unread else NOTHING
        return (After(what, pause, Tick(what)) if pause else _command(what), *mends)

    def _look_back(self, now: float) -> Iterable[Effect]:
        """Every hour, as what fails then is done again: a day is compared once, from the night after it on."""
        hours, self._hours = self._hours, DAY_H
        if self._stopping or min(self._emptied.values()) < now - CAUGHT_UP:
            return NOTHING
        return Do(COUNT, Count(hours)), Do(DAY, CompareDay(((now - NIGHT_S) // DAY_S - 1) * DAY_S))

    def _failed(self, envelope: Envelope) -> Iterable[Effect]:
        what = envelope.message.id
        if isinstance(what, tuple):
            reply, app = what
            error = envelope.message.error if isinstance(envelope.message, Failed) else "the database takes too long"
            return (Publish(reply, DemandHistory(app=app, error=error)),)
        failures = self._failures[what] = self._failures.get(what, 0) + 1
        if what in (COUNT, DAY):
            return NOTHING  # there is another hour
        if what == CATALOG and self._under_way is not None:
            self._changes = self._under_way.changes | self._changes
            self._all_keys_due = self._all_keys_due or self._under_way.present is not None
            self._under_way = None
            self._catalog_paused = True
        pause = MAINTAIN_EVERY if what in (MAINTAIN, FILES) else pause_after_failure(failures)  # nobody waits for these
        return (After(what, pause, Tick(what)),)

    def _due(self, envelope: Envelope) -> Iterable[Effect]:
        what = envelope.message.of
        if self._stopping:
            return NOTHING
        if what == CATALOG:
            self._catalog_paused = False
            return self._write_catalog()
        if what == NIGHT:
            self._hours = DAY_H
            return (_next_night(envelope.now), *self._keep_files(KeepFiles(frozenset(self._keys))))
        return (Do(FILES, self._files),) if what == FILES else (_command(what),)


def _command(what: str) -> Do:
    return Do(what, _COMMANDS[what])


def _next_night(now: float) -> After:
    return After(NIGHT, (NIGHT_S - now) % DAY_S or DAY_S, Tick(NIGHT))


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
        MetricFamily(
            "infaas_damaged_files",
            "gauge",
            "Files of models that can be read neither on NATS nor from their copy in the database, of the last night or since.",
        ).add(actor.damaged),
        MetricFamily(
            "infaas_rows_missing",
            "gauge",
            "Batches of events that were sent and are in no row, and outcomes that were written and are gone, found in the last day.",
        ).add_all(actor.missing, "what"),
    )


def missing(actor: Recorder, now: float) -> str:
    del now
    failing = [stream for stream in STREAMS if actor._failures.get(stream)]
    return f"success in writing {', '.join(failing)}" if failing else ""
