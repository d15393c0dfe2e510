"""The recorder: what happened goes from the streams to the database, what there is from the catalogue. Pure.

It only says what comes next. Each stream has one command under way or one timer running, never both, so that batches are
written in order and a database that is away is asked again at a bounded rate. Nothing is acknowledged that is not committed.
"""

from collections.abc import Iterable

from msgspec import Struct

from bus.subjects import Subjects
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Effect,
    Envelope,
    Failed,
    Inlet,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Watch,
)
from services.core.metric import MetricFamily

TIDY_EVERY = 3600.0  # s
MAINTAIN_EVERY = 30.0  # s
CATCH_UP = 0.2  # s between pieces of maintenance while there is more: events are written in between


class Ingest(Struct, frozen=True):
    """Fetch from this stream, write, acknowledge; the result is the number of messages. stream: "outcomes" | "events"."""

    stream: str


class WriteCatalog(Struct, frozen=True):
    """Write these catalogue entries (None: deleted). present: all keys there are, when known: what else is there must go."""

    changes: dict[str, bytes | None]
    present: frozenset[str] | None


class Tidy(Struct, frozen=True):
    """Forget bookkeeping that has become useless."""


class Maintain(Struct, frozen=True):
    """Bring the rollups up to date and let old rows go, a bounded piece of it; the result: whether there is more."""


class Again(Struct, frozen=True):
    """A timer's message: this one is due."""

    what: str


STREAMS = ("outcomes", "events")
MIRROR = "mirror"
TIDY = "tidy"
MAINTAIN = "maintain"


class Recorder:
    """Keeps both streams flowing and the catalogue's mirror up to date."""

    def __init__(self, subjects: Subjects) -> None:
        self._watches = (Watch(bucket=subjects.catalog_bucket),)
        self.written = dict.fromkeys(STREAMS, 0)  # messages, by stream
        self._failures: dict[str, int] = {}
        self._changes: dict[str, bytes | None] = {}
        self._keys: set[str] = set()
        self._synced = False
        self._reconcile = False
        self._under_way: WriteCatalog | None = None
        self._mirror_due = False
        self._stopping = False

    @property
    def inlets(self) -> tuple[Inlet, ...]:
        return ()

    @property
    def watches(self) -> tuple[Watch, ...]:
        return self._watches

    def handle(self, envelope: Envelope) -> Iterable[Effect]:
        match envelope.message:
            case Changed(key=key, value=value):
                self._change(key, value)
                return self._mirror()
            case Synced():
                self._synced = self._reconcile = True
                return self._mirror()
            case Done(id=what, result=result):
                self._failures.pop(what, None)
                return self._done(what, result)
            case Failed(id=what) | TimedOut(id=what):
                return self._failed(what)
            case Again(what=what):
                return self._again(what)
            case Started():
                timers = [After(TIDY, 60.0, Again(TIDY)), After(MAINTAIN, MAINTAIN_EVERY, Again(MAINTAIN))]
                return [*(self._ingest(stream) for stream in STREAMS), *timers]
            case Stopping():
                self._stopping = True
        return ()

    def _change(self, key: str, value: bytes | None) -> None:
        self._changes[key] = value
        if value is None:
            self._keys.discard(key)
        else:
            self._keys.add(key)

    def _ingest(self, stream: str) -> Effect:
        return Do(stream, Ingest(stream))

    def _mirror(self) -> Iterable[Effect]:
        """One order at a time, since a later one may hold a newer value of the same key."""
        if not self._synced or self._under_way is not None or self._mirror_due or self._stopping:
            return ()
        if not self._changes and not self._reconcile:
            return ()
        self._under_way = WriteCatalog(self._changes, frozenset(self._keys) if self._reconcile else None)
        self._changes, self._reconcile = {}, False
        return (Do(MIRROR, self._under_way),)

    def _done(self, what: str, result: object) -> Iterable[Effect]:
        if what == MIRROR:
            self._under_way = None
            return self._mirror()
        if what == TIDY:
            return (After(TIDY, TIDY_EVERY, Again(TIDY)),)
        if what == MAINTAIN:
            return (After(MAINTAIN, CATCH_UP if result else MAINTAIN_EVERY, Again(MAINTAIN)),)
        if self._stopping:
            return ()
        count = result if isinstance(result, int) else 0
        self.written[what] += count
        pause = pause_after_fetch(count)
        return (After(what, pause, Again(what)),) if pause else (self._ingest(what),)

    def _failed(self, what: str) -> Iterable[Effect]:
        failures = self._failures[what] = self._failures.get(what, 0) + 1
        if what == MIRROR and self._under_way is not None:
            self._changes = self._under_way.changes | self._changes
            self._reconcile = self._reconcile or self._under_way.present is not None
            self._under_way = None
            self._mirror_due = True
        pause = MAINTAIN_EVERY if what == MAINTAIN else pause_after_failure(failures)  # nobody waits for maintenance
        return (After(what, pause, Again(what)),)

    def _again(self, what: str) -> Iterable[Effect]:
        if self._stopping:
            return ()
        if what == MIRROR:
            self._mirror_due = False
            return self._mirror()
        if what == TIDY:
            return (Do(TIDY, Tidy()),)
        return (Do(MAINTAIN, Maintain()) if what == MAINTAIN else self._ingest(what),)


# -- pauses

MOST = 32  # messages a fetch; at the outbox's 512 rows each, about 16,000 rows a transaction
GATHER = 0.4  # s to let messages gather after a fetch that emptied the stream: fewer, larger transactions
FIRST_PAUSE = 0.25  # s before the first repeat after a failure, then doubled
LONGEST_PAUSE = 2.0  # s; well within the 5 s in which what happened is to be in SQL once the database is back


def pause_after_fetch(messages: int) -> float:
    """Seconds until the next fetch: none while there is more, or nothing (the fetch itself waits for the first)."""
    return GATHER if 0 < messages < MOST else 0.0


def pause_after_failure(failures: int) -> float:
    """Seconds before the next try, after so many failures in a row."""
    return float(min(FIRST_PAUSE * 2.0 ** (failures - 1), LONGEST_PAUSE))


# -- metrics


def families(actor: Recorder) -> Iterable[MetricFamily]:
    failing = MetricFamily(
        "infaas_recorder_failures_in_a_row", "gauge", "Tries since the last success, by what is tried."
    )
    for what in {*STREAMS, *actor._failures}:
        failing.add(actor._failures.get(what, 0), what=what)
    written = MetricFamily(
        "infaas_recorder_batches_total", "counter", "Batches of events that are in the database, by stream."
    )
    for stream, count in actor.written.items():
        written.add(count, stream=stream)
    return failing, written


def missing(actor: Recorder, now: float) -> str:
    del now
    failing = [stream for stream in STREAMS if actor._failures.get(stream)]
    return f"success in writing {', '.join(failing)}" if failing else ""
