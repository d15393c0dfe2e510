"""What the ledger promises: every event is written once, whatever is delivered again; nothing is lost silently."""

import asyncio
import gc
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import UTC, datetime
from typing import Any

import msgspec
import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.events import (
    EVENTS,
    AppObjective,
    ClientError,
    FeedbackEvent,
    JobEvent,
    OutcomeEvent,
    RegistrationEvent,
    StateEvent,
    WorkerEvent,
)
from bus.natsbus import NatsBus
from bus.subjects import Subjects
from services.core.settings import BusSettings
from services.recorder.__main__ import streams
from services.recorder.actor import WriteCatalog
from services.recorder.catalog import CatalogWriter
from services.recorder.edge import Counter, RecorderEdge
from services.recorder.edge_copies import FileCopies
from services.recorder.events import EventMessage, EventWriter, Maintenance
from services.recorder.tables import TABLES
from services.shell.store import Store
from tests.support.clients.responders import until
from tests.support.data.events import FOLDED, event, message, outcome
from tests.support.data.examples import examples


@pytest.fixture
def ledger(database_dsn: str) -> Iterator[EventWriter]:
    store = Store(database_dsn, "test")
    yield EventWriter(store)
    store.close()


@pytest.fixture
def ask(superuser_dsn: str) -> Iterator[Any]:
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as connection:
        yield lambda query, *values: connection.execute(query.encode(), values).fetchall()


def test_a_batch_that_is_delivered_again_is_written_once(ledger: EventWriter, ask: Any) -> None:
    for kind in EVENTS:
        table = TABLES[kind.kind].name or FOLDED[kind.kind]
        once = message(event(kind), id=f"{kind.kind}-1")
        ledger.write([once, once])
        ledger.write([once])
        assert ask(f"SELECT count(*) FROM {table}") == [(1,)], kind
        if kind.kind not in FOLDED:
            ledger.write([message(event(kind), id=f"{kind.kind}-2")])
            assert ask(f"SELECT count(*) FROM {table}") == [(2,)], kind


def test_what_clients_did_wrong_is_counted_apart_by_second(ledger: EventWriter, ask: Any) -> None:
    at = 1_700_000_000.0
    wrong = {"outcome": "refused", "variant": None, "code": "unknown_app"}
    ledger.write(
        [
            message(
                outcome(time=at + 0.1, app="nobody", **wrong),
                outcome(time=at + 0.9, app="nobody", **wrong),
                outcome(time=at + 1.5, app="_", **{**wrong, "code": "unknown_model"}),
                outcome(time=at, app="kept", outcome="refused", code="overloaded", variant=None),
                outcome(time=at, app="kept", outcome="default", code="unknown_model"),
                outcome(time=at, app="part", parent=bytes(16), stage="m", **{**wrong, "code": "bad_request"}),
            ),
            message(ClientError(time=at + 0.5, app="nobody", code="unknown_app", count=5)),
        ]
    )
    assert ask("SELECT extract(epoch FROM time)::bigint, app, code, count FROM infaas.client_errors ORDER BY 1") == [
        (at, "nobody", "unknown_app", 7),
        (at + 1, None, "unknown_model", 1),
    ]
    assert ask("SELECT app, outcome FROM infaas.query_outcomes ORDER BY 1, 2") == [
        ("kept", "default"),
        ("kept", "refused"),
        ("part", "refused"),
    ]
    assert ask("SELECT DISTINCT app FROM infaas.slo_by_app_minutely") == [("kept",)]


def test_names_that_clients_make_up_are_bounded_and_those_of_apps_stay(
    ledger: EventWriter, ask: Any, superuser_dsn: str
) -> None:
    at = 1_700_000_000.0
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as administrator:
        administrator.execute(
            "INSERT INTO infaas_internal.apps (app, min_instances, created) VALUES ('real', 0, now())"
        )
    made_up = [outcome(time=at, app=f"{i:05}" + "x" * 80, outcome="refused", code="unknown_app") for i in range(500)]
    ledger.write([message(*made_up, outcome(time=at, app="real", outcome="refused", code="bad_request"))])
    assert ask("SELECT count(DISTINCT app), max(length(app)), sum(count) FROM infaas.client_errors") == [(101, 64, 501)]
    assert ask("SELECT sum(count) FROM infaas.client_errors WHERE app IS NULL") == [(400,)]
    assert ask("SELECT sum(count) FROM infaas.client_errors WHERE app = 'real'") == [(1,)]
    ledger.write([message(outcome(time=at + 60, app="later", outcome="refused", code="unknown_app"))])
    assert ask("SELECT sum(count) FROM infaas.client_errors WHERE app = 'later'") == [(1,)]


def test_every_field_arrives_as_it_was_sent(ledger: EventWriter, ask: Any) -> None:
    sent = OutcomeEvent(
        time=1_700_000_000.25, uid=bytes(range(16)), id="ä", app="digits", outcome="late", model="mlp", variant="v", worker="w",
        hardware="cpu", code="deadline", latency_ms=1.5, slo_ms=1.0, accuracy=0.5, accuracy_required=0.25, cost_limit=0.125,
        priority=3, items=7, batch=9, cached=True, simulated=True, cost=1e-12, version="2", policy="p", context="c",
        input_digest="d", parent=bytes(range(16, 32)), stage="s",
    )  # fmt: skip
    ledger.write([message(sent)])
    columns = TABLES["outcome"].columns
    (row,) = ask(f"SELECT {', '.join(columns)} FROM infaas.query_outcomes")
    found = dict(zip(columns, row, strict=True))
    expected = msgspec.structs.asdict(sent)
    del expected["mistake"]  # the table says it
    expected["time"] = datetime.fromtimestamp(sent.time, UTC)
    assert {**found, "uid": found["uid"].bytes, "parent": found["parent"].bytes} == expected


def test_an_objective_without_queries_or_forecast_has_neither_share_nor_headroom(ledger: EventWriter, ask: Any) -> None:
    busy = event(AppObjective, time=1_700_000_000.0)
    idle = event(AppObjective, time=1_700_000_001.0, app="idle", reached=None, load=0.0, forecast=0.0, headroom=None)
    ledger.write([message(busy, idle)])
    columns = "app, slo_target, reached, load, forecast, capacity, headroom"
    assert ask(f"SELECT {columns} FROM infaas.objective_events ORDER BY time") == [
        ("digits", 0.99, 0.995, 100.0, 120.0, 150.0, 1.25),
        ("idle", 0.99, None, 0.0, 0.0, 150.0, None),
    ]


# ---- one outcome a uid


def test_the_same_uid_has_one_outcome_whoever_records_it_and_when(ledger: EventWriter, ask: Any) -> None:
    first = outcome(outcome="ok", cost=1.0)
    again = msgspec.structs.replace(first, outcome="late", cost=2.0)
    later = msgspec.structs.replace(first, time=first.time + 29.5, cost=4.0)
    earlier = msgspec.structs.replace(first, time=first.time - 29.5, cost=8.0)
    ledger.write([message(first)])
    ledger.write([message(again, outcome()), message(later)])
    ledger.write([message(earlier), message(outcome(), later)])
    assert ask("SELECT cost FROM infaas.query_outcomes WHERE uid = %s::uuid", first.uid.hex()) == [(1.0,)]
    assert ask("SELECT count(*) FROM infaas.query_outcomes") == [(3,)]


def test_the_same_uid_twice_in_one_fetch_has_one_outcome(ledger: EventWriter, ask: Any) -> None:
    one = outcome(worker="first")
    other = msgspec.structs.replace(one, time=one.time + 1.0, worker="second")
    ledger.write([message(one, other), message(other)])
    assert ask("SELECT worker FROM infaas.query_outcomes") == [("first",)]


def test_a_clients_strange_id_does_not_cost_the_record_of_its_query(ledger: EventWriter, ask: Any) -> None:
    ledger.write([message(outcome(id="a\0b", context="\0", input_digest="\0"))])
    assert ask("SELECT id, context FROM infaas.query_outcomes") == [("a\ufffdb", "\ufffd")]
    assert ask("SELECT count(*) FROM infaas_internal.rejected") == [(0,)]


def test_a_feedback_that_is_recorded_again_is_one_row_and_those_of_before_are_kept(
    ledger: EventWriter, ask: Any
) -> None:
    one, other, old = (
        FeedbackEvent(time=1_700_000_000.0, app="a", id=None, context=None, label="1", input_digest=None, uid=uid)
        for uid in (b"1" * 16, b"2" * 16, None)
    )
    later = msgspec.structs.replace(one, time=one.time + 60.0)
    ledger.write([message(one, one, old, id="b1")])
    ledger.write([message(later, other, old, id="b2"), message(other, id="b3")])
    assert ask("SELECT count(*), count(DISTINCT uid), min(time) = max(time) FROM infaas.feedback") == [(4, 2, True)]


@pytest.mark.parametrize("together", [True, False])
def test_an_outcome_that_says_something_else_than_the_first_one_is_told_and_changes_nothing(
    ledger: EventWriter, ask: Any, caplog: pytest.LogCaptureFixture, together: bool
) -> None:
    first = outcome(outcome="refused", code="deadline", cost=0.0, worker=None)
    late = msgspec.structs.replace(first, outcome="late", code=None, cost=4.0, worker="w1")
    again = msgspec.structs.replace(first, time=first.time + 1.0, code="overloaded")
    batches = [message(first), message(late), message(again)]
    assert (ledger.write(batches) if together else sum(ledger.write([one]) for one in batches)) == 1
    assert ask("SELECT outcome, cost FROM infaas.query_outcomes") == [("refused", 0.0)]
    [line] = [record for record in caplog.records if "differ" in record.message]
    assert (line.levelname, line.uid) == ("ERROR", first.uid.hex())  # type: ignore[attr-defined]
    assert ("refused" in line.kept, "late" in line.dropped) == (True, True)  # type: ignore[attr-defined]


def test_two_recorders_at_once_leave_one_outcome_a_uid(database_dsn: str, ask: Any) -> None:
    """Both are handed the same uids under other batch ids and times, and start together, many times over."""
    rounds, size = 20, 50
    rows = [[outcome() for _ in range(size)] for _ in range(rounds)]
    gate = threading.Barrier(2)

    def recorder(shift: float) -> None:
        store = Store(database_dsn, "test")
        ledger = EventWriter(store)
        for batch in rows:
            mine = message(*(msgspec.structs.replace(row, time=row.time + shift) for row in batch))
            gate.wait(60)
            ledger.write([mine])
        store.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(recorder, (0.0, 0.001)))
    assert ask("SELECT count(*), count(DISTINCT uid) FROM infaas.query_outcomes") == [(rounds * size, rounds * size)]


def test_two_recorders_with_the_same_batches_in_another_order_write_each_once(database_dsn: str, ask: Any) -> None:
    batches = [message(outcome(), outcome()) for _ in range(30)]

    def recorder(mine: list[EventMessage]) -> None:
        store = Store(database_dsn, "test")
        EventWriter(store).write(mine)
        store.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(recorder, (batches, batches[::-1])))
    assert ask("SELECT count(*) FROM infaas.query_outcomes") == [(60,)]


# ---- what cannot be written


@pytest.mark.parametrize(
    ("subject", "body", "reason"),
    [
        ("infaas.event.outcome", b"\xc1 not MessagePack", "not valid MessagePack"),
        ("infaas.event.outcome", b"", "not valid MessagePack"),
        (
            "infaas.event.outcome",
            encode({"id": "b", "rows": [{"time": "noon"}]}),
            "field `rows[0].time` must be a number, not a text",
        ),
        ("infaas.event.state", encode({"rows": []}), "field `id` is missing"),
        ("infaas.event.party", encode({"id": "b", "rows": []}), "no such kind of event"),
    ],
)
def test_what_cannot_be_read_is_set_aside_with_the_reason(
    ledger: EventWriter, ask: Any, subject: str, body: bytes, reason: str
) -> None:
    good = message(outcome())
    ledger.write([EventMessage(subject, body), good, EventMessage(subject, body)])
    ledger.write([EventMessage(subject, body)])
    ((found_subject, found_reason, found_body),) = ask("SELECT subject, reason, body FROM infaas_internal.rejected")
    assert (found_subject, bytes(found_body)) == (subject, body)
    assert reason in found_reason
    assert ask("SELECT count(*) FROM infaas.query_outcomes") == [(1,)]
    assert ask("SELECT bytes FROM infaas.rejected_events") == [(len(body),)]


@pytest.mark.parametrize(
    "bad",
    [
        {"uid": b"short"},
        {"time": float("nan")},
        {"time": 1e300},
        {"time": 1e18},
        {"time": -1e12},
        {"items": 2**64 - 1},
        {"variant": "nul\0"},
    ],
    ids=str,
)
def test_a_row_that_the_database_cannot_take_costs_only_itself(
    ledger: EventWriter, ask: Any, bad: dict[str, Any]
) -> None:
    rows = [outcome(id=str(i), **(bad if i == 5 else {})) for i in range(12)]
    messages = [message(*rows, id="b1"), message(outcome(id="12"), id="b2")]
    ledger.write(messages)
    ledger.write(messages)
    assert ask("SELECT array_agg(id ORDER BY id::int) FROM infaas.query_outcomes") == [
        ([str(i) for i in range(13) if i != 5],)
    ]
    ((body,),) = ask("SELECT body FROM infaas_internal.rejected")
    kept = msgspec.msgpack.decode(bytes(body))
    assert [row["id"] for row in kept["rows"]] == ["5"]


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(body=st.one_of(st.binary(max_size=40), st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**63), 2**63 - 1), st.floats(), st.text(max_size=5)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(
        st.one_of(st.text(max_size=3), st.sampled_from(["id", "rows", "time"])), inner, max_size=3)),
).map(encode)))  # fmt: skip
def test_no_message_whatever_stops_the_ledger(ledger: EventWriter, body: bytes) -> None:
    ledger.write([EventMessage(f"infaas.event.{kind}", body) for kind in TABLES])


def test_a_missing_table_is_the_databases_fault_and_costs_no_row(
    superuser_dsn: str, ledger: EventWriter, ask: Any
) -> None:
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as administrator:
        administrator.execute("ALTER TABLE infaas.query_outcomes RENAME TO away")
        batch = message(outcome())
        with pytest.raises(psycopg.errors.UndefinedTable):
            ledger.write([batch])
        administrator.execute("ALTER TABLE infaas.away RENAME TO query_outcomes")
    ledger.write([batch])
    assert ask("SELECT count(*) FROM infaas.query_outcomes") == [(1,)]
    assert ask("SELECT count(*) FROM infaas_internal.rejected") == [(0,)]


# ---- folded facts and housekeeping


def test_a_registration_shows_its_latest_status(ledger: EventWriter, ask: Any) -> None:
    now = time.time()
    ledger.write([message(event(RegistrationEvent, time=now + 2, state="done", version="1", progress=1.0))])
    ledger.write(
        [
            message(event(RegistrationEvent, time=now, state="accepted")),
            message(event(RegistrationEvent, time=now + 1, state="building", progress=0.5)),
            message(event(RegistrationEvent, registration="r2", state="failed", reason="not a model")),
        ]
    )
    assert ask("SELECT registration, version, state, progress, reason FROM infaas.registrations ORDER BY 1") == [
        ("r1", "1", "done", 1.0, None),
        ("r2", None, "failed", 0.0, "not a model"),
    ]


def test_a_job_shows_its_latest_status(ledger: EventWriter, ask: Any) -> None:
    now = time.time()
    ledger.write(
        [message(event(JobEvent, time=now + 2, state="failed", done=217, failed=1, reason="item\0 217", finished=now))]
    )
    ledger.write([message(event(JobEvent, time=now, done=100), event(JobEvent, job="j2", time=now, total=None))])
    assert ask(
        "SELECT job, state, total, done, failed, reason, cost, finished IS NULL FROM infaas.jobs ORDER BY 1"
    ) == [
        ("j1", "failed", 500, 217, 1, "item\ufffd 217", 1e-6, False),
        ("j2", "running", None, 32, 0, None, 1e-6, True),
    ]


def test_tidying_forgets_only_what_is_old(ledger: EventWriter, ask: Any, superuser_dsn: str) -> None:
    ledger.write(
        [message(outcome(), id="young"), message(outcome(), id="old"), EventMessage("infaas.event.party", b"")]
    )
    with closing(psycopg.connect(superuser_dsn, autocommit=True)) as administrator:
        administrator.execute(
            "UPDATE infaas_internal.batches SET recorded = now() - interval '8 days' WHERE id = 'old'"
        )
    days = 86400.0
    for worker, ago in (("gone", 91.0), ("here", 89.0)):
        ledger.write([message(event(WorkerEvent, worker=worker, time=time.time() - ago * days), id=worker)])
    ledger.tidy()
    assert ask("SELECT id FROM infaas_internal.batches WHERE id NOT IN ('gone', 'here')") == [("young",)]
    assert ask("SELECT worker FROM infaas_internal.workers") == [("here",)]
    assert ask("SELECT count(*) FROM infaas_internal.rejected") == [(1,)]
    assert ask("SELECT count(*) FROM infaas.query_outcomes") == [(2,)]


async def test_what_was_sent_and_is_in_no_row_is_found_exactly_and_told_once(
    nats_url: str, prefix: str, database_dsn: str, ledger: EventWriter, ask: Any
) -> None:
    """Each look is that of a recorder which has just started. Of what comes late, and of what was refused, nothing is missing."""
    spec = streams(Subjects(prefix), BusSettings())["events"]
    store = Store(database_dsn, "test")
    bus = await NatsBus.connect(nats_url, name="test")
    found: dict[str, int] = {}

    async def counted() -> dict[str, int]:
        other = await NatsBus.connect(nats_url, name="test")
        try:
            return await Counter(other, spec.name, store, late=0.05).count(25.0)
        finally:
            await other.close()

    async def send(*messages: EventMessage) -> None:
        for number, one in enumerate(messages):
            await bus.publish_durable(one.subject, one.data, _id(one.data) or f"{len(one.data)}-{number}")

    hour = time.time() - 3600
    outcomes = [message(outcome(time=hour), id=f"d-0-a-{number}") for number in range(5, 12)]
    outcomes.append(message(outcome(time=hour), outcome(time=1e300), outcome(time=hour), id="d-0-a-12"))
    outcomes.append(message(outcome(time=1e300), id="d-0-a-13"))
    outcomes.append(message(outcome(), id="d-0-a-14"))
    states = [message(event(StateEvent), id=f"m-{number}", prefix=prefix) for number in range(1, 5)]
    states += [message(event(StateEvent, time=1e300), event(StateEvent), id="m-5", prefix=prefix)]
    states += [EventMessage(f"{prefix}.event.state", b"\xc1 nonsense")]
    try:
        await bus.ensure_stream(spec)
        await send(*states)
        assert await counted() == {"batches": 0, "outcomes": 0}  # nothing is late
        ledger.write([*outcomes, *states])
        maintenance = Maintenance(store)
        while maintenance.maintain():
            pass
        await until(
            lambda: ask("SELECT max(recorded) < now() - interval '0.1 s' FROM infaas_internal.batches") == [(True,)]
        )
        assert await counted() == {"batches": 0, "outcomes": 0}

        await send(message(event(StateEvent), id="lost-1", prefix=prefix))  # the only one of its sender
        ask("DELETE FROM infaas_internal.batches WHERE id IN ('d-0-a-7', 'd-0-a-8', 'd-0-a-10', 'm-3') RETURNING id")
        ask(
            "DELETE FROM infaas.query_outcomes WHERE uid IN (SELECT uid FROM infaas.query_outcomes ORDER BY time LIMIT 3) RETURNING uid"
        )
        for _ in range(1000):
            found = await counted()
            if found["batches"] == 5:
                break
        assert found == {"batches": 5, "outcomes": 3}
        told = ask(
            "SELECT time, subject, reason FROM infaas.rejected_events WHERE subject IN ('batches', 'outcomes') ORDER BY 2, 3"
        )
        assert [reason.split()[2] for _, subject, reason in told if subject == "batches"] == [
            "d-0-a-10",
            "d-0-a-7",
            "d-0-a-8",
            "lost-1",
            "m-3",
        ]
        assert told[-1][2].startswith("3 outcomes of the hour from ")
        assert await counted() == found
        assert ask("SELECT count(*) FROM infaas_internal.rejected WHERE time > %s", max(row[0] for row in told)) == [
            (0,)
        ]
    finally:
        await bus.close()
        store.close()


async def test_what_nobody_waits_for_any_more_leaves_no_traceback(
    database_dsn: str, superuser_dsn: str, ask: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As where the process ends, or the question has taken too long, while the database does not go on."""
    bus, store, subjects = MemoryBus(), Store(database_dsn, "test"), Subjects("t")
    parts = CatalogWriter(store, {}, 0.99), FileCopies(bus, subjects, store), Counter(bus, "none", store)
    edge = RecorderEdge(bus, store, {}, *parts)
    with closing(psycopg.connect(superuser_dsn)) as other:
        other.execute("LOCK TABLE infaas.prices")
        working = asyncio.create_task(edge.perform(WriteCatalog({}, frozenset())))
        waits = "SELECT FROM pg_stat_activity WHERE application_name = 'test' AND wait_event_type = 'Lock'"
        await until(lambda: bool(ask(waits)))
        working.cancel()
        await asyncio.wait([working])
    store.close()
    del working
    gc.collect()
    assert not [record for record in caplog.records if record.exc_info]


def _id(data: bytes) -> str:
    try:
        return str(msgspec.msgpack.decode(data)["id"])
    except msgspec.DecodeError:
        return ""
