"""What the recorder does when: one command a stream at a time, a pause after failures, no change lost or reversed."""

from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.events import EVENTS, Event
from bus.messages.scaling import AskForHistory, DemandHistory
from bus.port import BusError
from bus.subjects import Subjects
from services.core.actor import (
    After,
    Changed,
    Do,
    Done,
    Envelope,
    Failed,
    Publish,
    Started,
    Stopping,
    Synced,
    Tick,
    TimedOut,
)
from services.core.settings import BusSettings
from services.recorder.__main__ import streams
from services.recorder.actor import (
    CATALOG,
    CATCH_UP,
    COUNT,
    DAY,
    DAY_H,
    DAY_S,
    FILES,
    FIRST_PAUSE,
    GATHER,
    LAST_H,
    LONGEST_PAUSE,
    MAINTAIN,
    MAINTAIN_EVERY,
    MOST,
    NIGHT,
    NIGHT_S,
    STREAMS,
    TIDY,
    TIDY_EVERY,
    CompareDay,
    Count,
    Ingest,
    Ingested,
    KeepFiles,
    Maintain,
    ReadDemand,
    Recorder,
    Tidy,
    WriteCatalog,
    families,
    pause_after_failure,
    pause_after_fetch,
)
from services.recorder.events import latest
from services.recorder.tables import TABLES
from tests.support.data.events import event, outcome
from tests.support.data.examples import examples

BUCKET = Subjects().catalog_bucket
OTHERS = (Subjects().selection_bucket, Subjects().control_bucket, Subjects().status_bucket)


PAUSED = After(CATALOG, GATHER, Tick(CATALOG))


def _tell(actor: Recorder, message: Any) -> list[Any]:
    return list(actor.handle(Envelope(1.0, message)))


def _started() -> Recorder:
    """Of the buckets it has read all but the catalogue."""
    actor = Recorder(Subjects())
    for bucket in OTHERS:
        assert _tell(actor, Synced(bucket)) == []
    effects = _tell(actor, Started())
    assert [e for e in effects if isinstance(e, Do)] == [Do(stream, Ingest(stream)) for stream in STREAMS]
    return actor


def test_it_follows_the_catalogue_hears_demand_and_maintains_soon_again() -> None:
    actor = Recorder(Subjects("other"))
    assert {watch.bucket for watch in actor.watches} == {
        f"other-{name}" for name in ("catalog", "control", "selection", "status")
    }
    assert [inlet.subject for inlet in actor.inlets] == ["other.recorder.demand"]
    actor = _started()
    assert _tell(actor, Tick(MAINTAIN)) == [Do(MAINTAIN, Maintain())]
    assert _tell(actor, Done(MAINTAIN, True)) == [After(MAINTAIN, CATCH_UP, Tick(MAINTAIN))]
    assert _tell(actor, Done(MAINTAIN, False)) == [After(MAINTAIN, MAINTAIN_EVERY, Tick(MAINTAIN))]
    (after,) = _tell(actor, Failed(MAINTAIN, "the database is away"))
    assert after == After(MAINTAIN, MAINTAIN_EVERY, Tick(MAINTAIN))


def test_a_question_about_demand_is_read_and_answered_whatever_becomes_of_it() -> None:
    actor = _started()
    reply = Subjects().controller("history.vm-1")
    (do,) = actor.handle(Envelope(1.0, AskForHistory(app="faces"), reply=reply))
    assert do.command == ReadDemand("faces")
    assert do.timeout
    history = DemandHistory(app="faces", start=60.0, items=[1.0])
    assert _tell(actor, Done(do.id, history)) == [Publish(reply, history)]
    assert _tell(actor, Failed(do.id, "away")) == [Publish(reply, DemandHistory(app="faces", error="away"))]
    (publish,) = _tell(actor, TimedOut(do.id))
    assert publish.message == DemandHistory(app="faces", error="the database takes too long")
    assert actor.handle(Envelope(1.0, AskForHistory(app="faces"))) == ()


def test_fetches_follow_at_once_or_after_a_pause() -> None:
    actor = _started()
    assert _tell(actor, Done("events", Ingested(MOST))) == [Do("events", Ingest("events"))]
    assert _tell(actor, Done("events", Ingested(0))) == [Do("events", Ingest("events"))]
    assert _tell(actor, Done("events", Ingested(3))) == [After("events", GATHER, Tick("events"))]
    assert _tell(actor, Tick("events")) == [Do("events", Ingest("events"))]
    assert pause_after_fetch(0) == 0  # the next fetch itself waits for the first
    assert pause_after_fetch(MOST) == 0  # there is more
    assert all(0 < pause_after_fetch(n) < 1 for n in range(1, MOST))


def test_failures_are_repeated_later_and_later_and_success_forgets_them() -> None:
    actor = _started()
    pauses = []
    for failure in (Failed("outcomes", "away"), TimedOut("outcomes"), Failed("outcomes", "away")):
        (after,) = _tell(actor, failure)
        assert after.message == Tick("outcomes")
        pauses.append(after.delay)
        _tell(actor, Tick("outcomes"))
    assert pauses == sorted(set(pauses))
    _tell(actor, Done("outcomes", Ingested(MOST)))
    assert _tell(actor, Failed("outcomes", "away"))[0].delay == pauses[0]


def test_the_first_write_waits_for_the_whole_catalogue_and_says_which_keys_there_are() -> None:
    actor = _started()
    assert _tell(actor, Changed(BUCKET, "app.a", b"1")) == []
    assert _tell(actor, Changed(BUCKET, "app.b", b"2")) == []
    assert _tell(actor, Changed(BUCKET, "app.b", None)) == []
    assert _tell(actor, Changed(OTHERS[0], "a._", b"4")) == []
    for bucket, key in ((OTHERS[1], "controller"), (OTHERS[2], "work.r")):
        assert _tell(actor, Changed(bucket, key, b"5")) == []  # that may be lost
    changes = {("catalog", "app.a"): b"1", ("catalog", "app.b"): None, ("selection", "a._"): b"4"}
    assert _tell(actor, Synced(BUCKET)) == [Do(CATALOG, WriteCatalog(changes, frozenset({"app.a"})))]
    assert _tell(actor, Changed(BUCKET, "app.a", b"3")) == []  # one order at a time
    assert _tell(actor, Done(CATALOG, None)) == [PAUSED, Do(FILES, KeepFiles())]
    assert _tell(actor, Tick(CATALOG)) == [Do(CATALOG, WriteCatalog({("catalog", "app.a"): b"3"}, None))]
    assert _tell(actor, Done(CATALOG, None)) == [PAUSED]  # files are looked at again when they have been
    assert _tell(actor, Done(FILES, 0)) == [Do(FILES, KeepFiles())]
    assert _tell(actor, Tick(CATALOG)) == []


def test_files_are_tried_again_and_read_through_in_the_night() -> None:
    actor = _started()
    assert isinstance(_tell(actor, Changed(BUCKET, "app.a", b"1")), list)
    assert _tell(actor, Tick(NIGHT)) == [
        After(NIGHT, 3.5 * 3600 - 1, Tick(NIGHT)),
        Do(FILES, KeepFiles(frozenset({"app.a"}))),
    ]
    assert _tell(actor, Failed(FILES, "away")) == [After(FILES, MAINTAIN_EVERY, Tick(FILES))]
    assert _tell(actor, Tick(FILES)) == [Do(FILES, KeepFiles(frozenset({"app.a"})))]
    assert _tell(actor, Done(FILES, 2)) == []
    assert actor.damaged == 2
    unread = Ingested(0, unread=frozenset({"a"}))
    assert _tell(actor, Done("events", unread)) == [
        Do("events", Ingest("events")),
        Do(FILES, KeepFiles(frozenset({"variant.a"}))),
    ]
    assert _tell(actor, Done("events", unread))[1:] == []
    _tell(actor, Tick(NIGHT))
    assert _tell(actor, Done(FILES, 1)) == [Do(FILES, KeepFiles(frozenset({"app.a", "variant.a"})))]
    assert actor.damaged == 2
    assert _tell(actor, Done(FILES, 1)) == []
    assert actor.damaged == 1
    assert "infaas_damaged_files" in {family.name for family in families(actor)}


def test_tidying_comes_back_and_an_empty_catalogue_empties_the_tables() -> None:
    actor = _started()
    assert _tell(actor, Tick(TIDY)) == [Do(TIDY, Tidy())]
    (after,) = _tell(actor, Done(TIDY, None))
    assert (after.key, after.message) == (TIDY, Tick(TIDY))
    assert _tell(_started(), Synced(BUCKET)) == [Do(CATALOG, WriteCatalog({}, frozenset()))]


def test_it_looks_back_each_hour_unless_it_is_behind() -> None:
    """At what is missing, and at the last day of which the night after it has come."""
    actor = _started()
    day = Do(DAY, CompareDay(-2 * DAY_S))

    def tidied(*fetched: int) -> list[Any]:
        for stream, messages in zip(STREAMS, fetched, strict=False):
            _tell(actor, Done(stream, Ingested(messages)))
        after, *counts = _tell(actor, Done(TIDY, None))
        assert after == After(TIDY, TIDY_EVERY, Tick(TIDY))
        return counts

    assert tidied(MOST, 3) == []  # it has not caught up since it started
    assert tidied(0) == [Do(COUNT, Count(DAY_H)), day]
    assert _tell(actor, Done(COUNT, {"batches": 2, "outcomes": 5})) == []
    assert tidied() == [Do(COUNT, Count(LAST_H)), day]
    assert _tell(actor, Failed(COUNT, "the database is away")) == _tell(actor, Failed(DAY, "away")) == []
    assert tidied() == [Do(COUNT, Count(DAY_H)), day]
    _tell(actor, Done(COUNT, {"batches": 2, "outcomes": 5}))
    _tell(actor, Tick(NIGHT))
    assert tidied() == [Do(COUNT, Count(DAY_H)), day]
    for stream in STREAMS:
        actor.handle(Envelope(NIGHT_S, Done(stream, Ingested(0))))
    assert Do(DAY, CompareDay(-DAY_S)) in actor.handle(Envelope(NIGHT_S, Done(TIDY, None)))
    (missing,) = (family for family in families(actor) if family.name == "infaas_rows_missing")
    assert missing.samples == [({"what": "batches"}, 2), ({"what": "outcomes"}, 5)]


def test_nothing_new_begins_while_stopping() -> None:
    actor = _started()
    _tell(actor, Synced(BUCKET))
    _tell(actor, Stopping(5.0))
    for message in (
        Done("outcomes", Ingested(MOST)),
        Tick("events"),
        Tick(MAINTAIN),
        Tick(CATALOG),
        Changed(BUCKET, "app.a", b"1"),
        Done(CATALOG, None),
    ):
        assert _tell(actor, message) == []


class Mirroring(RuleBasedStateMachine):
    """Whatever fails and whenever: what was carried out adds up to the catalogue, values never go back."""

    def __init__(self) -> None:
        super().__init__()
        self.actor = _started()
        self.catalogue: dict[str, bytes | None] = {}
        self.written: dict[str, bytes | None] = {}
        self.order: WriteCatalog | None = None
        self.timer = False
        self.synced = False
        self.number = 0

    def _take(self, effects: list[Any]) -> None:
        for effect in effects:
            if isinstance(effect, Do) and effect.id == CATALOG:
                assert self.order is None, "two orders at a time"
                self.order = effect.command
            elif isinstance(effect, After):
                assert not self.timer
                self.timer = True

    @rule(key=st.sampled_from(["app.a", "app.b", "model.m.1"]), deleted=st.booleans())
    def change(self, key: str, deleted: bool) -> None:
        self.number += 1
        self.catalogue[key] = None if deleted else str(self.number).encode()
        self._take(_tell(self.actor, Changed(BUCKET, key, self.catalogue[key])))

    @precondition(lambda self: not self.synced)
    @rule()
    def sync(self) -> None:
        self.synced = True
        self._take(_tell(self.actor, Synced(BUCKET)))

    @precondition(lambda self: self.order is not None)
    @rule(works=st.booleans())
    def end(self, works: bool) -> None:
        order, self.order = self.order, None
        assert order is not None
        if not works:
            self._take(_tell(self.actor, Failed(CATALOG, "the database is away")))
            return
        if order.present is not None:
            self.written = {key: value for key, value in self.written.items() if key in order.present}
        for (_, key), value in order.changes.items():
            before = self.written.get(key)
            assert before is None or value is None or int(before) <= int(value), "an older value came later"
            self.written[key] = value
        self._take(_tell(self.actor, Done(CATALOG, None)))

    @precondition(lambda self: self.timer)
    @rule()
    def ring(self) -> None:
        self.timer = False
        self._take(_tell(self.actor, Tick(CATALOG)))

    @invariant()
    def settled(self) -> None:
        if self.synced and self.order is None and not self.timer:
            present = {key: value for key, value in self.written.items() if value is not None}
            assert present == {key: value for key, value in self.catalogue.items() if value is not None}


TestMirroring = Mirroring.TestCase
TestMirroring.settings = settings(max_examples=examples(60), stateful_step_count=30, deadline=None)


@given(st.integers(1, 1000))
def test_pauses_grow_to_a_bound(failures: int) -> None:
    pause = pause_after_failure(failures)
    assert FIRST_PAUSE <= pause <= LONGEST_PAUSE
    assert pause <= pause_after_failure(failures + 1)
    assert failures == 1 or pause == LONGEST_PAUSE or pause == 2 * pause_after_failure(failures - 1)


class _Fact(Event, frozen=True, kw_only=True):
    key: int
    number: int


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3))))
def test_latest_is_the_maximum_of_each_key(pairs: list[tuple[int, int]]) -> None:
    facts = [_Fact(time=float(time), key=key, number=i) for i, (key, time) in enumerate(pairs)]
    found = {fact.key: fact for fact in latest(facts, lambda fact: fact.key)}
    for key in {fact.key for fact in facts}:
        assert found[key] == max((f for f in facts if f.key == key), key=lambda f: (f.time, f.number))
    assert len(found) == len({fact.key for fact in facts})


# -- How large the streams of events may become.
SUBJECTS = Subjects()
BODY = bytes(1000)


@pytest.mark.parametrize("size", [10_000, 50_000])
async def test_a_full_stream_of_outcomes_refuses_and_one_of_events_forgets_the_oldest(size: int) -> None:
    bus = MemoryBus()
    found = streams(SUBJECTS, BusSettings(outcome_bytes=size, event_bytes=size))
    for spec in found.values():
        await bus.ensure_stream(spec)
    stored = 0
    with pytest.raises(BusError):
        for stored in range(100):
            await bus.publish_durable(found["outcomes"].subjects[0], BODY, str(stored))
    assert 0.8 * size < stored * len(BODY) <= size
    for number in range(100):
        await bus.publish_durable(found["events"].subjects[0], BODY, str(number))
    kept = await (await bus.consumer(SUBJECTS.event_stream, "c")).fetch(100, 1.0)
    assert 0.8 * size < len(kept) * len(BODY) <= size
    await bus.close()


@pytest.mark.parametrize("kind", EVENTS, ids=lambda kind: kind.kind)
def test_a_batch_is_read_back_as_it_was_sent(kind: type) -> None:
    table = TABLES[kind.kind]
    rows = [event(kind), event(kind)]
    batch = table.decode(encode({"id": "b1", "rows": rows, "later": "addition"}))
    assert (batch.id, batch.rows) == ("b1", rows)
    assert len(table.values(rows)[0]) == len(table.columns) == len(table.types) == len(table.sent)


def test_rows_of_older_senders_are_read_and_texts_cut() -> None:
    row = msgspec.to_builtins(outcome(), builtin_types=(bytes,))
    row.pop("stage", None)
    assert TABLES["outcome"].decode(encode({"id": "b1", "rows": [row]})).rows[0].stage is None
    rows = TABLES["outcome"].values([outcome(id="i" * 500_000, app="a\0" * 600), outcome(id="short")])
    first, second = (dict(zip(TABLES["outcome"].columns, row, strict=True)) for row in rows)
    assert (first["id"], first["app"]) == ("i" * 1000, "a\ufffd" * 500)
    assert second["id"] == "short"


def test_times_are_sent_as_microseconds_since_2000_and_nul_goes() -> None:
    table = TABLES["outcome"]
    sent = outcome(time=1.5, uid=bytes(16), parent=None, id="a\0", context="fine")
    row = dict(zip(table.columns, table.values([outcome(), sent])[1], strict=True))
    since_2000 = datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC) - datetime(2000, 1, 1, tzinfo=UTC)
    assert (row["time"], row["uid"]) == (since_2000 / timedelta(microseconds=1), bytes(16))
    assert (row["parent"], row["id"], row["context"]) == (None, "a\ufffd", "fine")


@pytest.mark.parametrize(
    "bad", [{"uid": b"short"}, {"time": float("nan")}, {"time": float("inf")}, {"parent": b""}], ids=str
)
def test_what_is_no_time_or_uid_is_said_at_once(bad: dict[str, object]) -> None:
    with pytest.raises((ValueError, OverflowError)):
        TABLES["outcome"].values([outcome(), outcome(**bad)])
