"""The dashboard's pages and their database, many visitors and no rights; where several models or a pipeline answer together."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from queue import Queue
from typing import Any

import pytest
from msgspec.structs import replace
from streamlit.testing.v1 import AppTest

from bus.codec import encode
from bus.login import SystemAddress
from bus.messages.catalog import PipelineRecord, PipelineVertex
from bus.messages.events import (
    CostEvent,
    DriftEvent,
    OutcomeEvent,
    PipelineEvent,
    ReleaseEvent,
    SelectionEvent,
)
from dashboard import store
from dashboard.serve import set_system_address
from dashboard.window import between
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventWriter
from services.shell.store import Store
from tests.support.data.events import VARIANT, app_record, event, message, model_record, variant_record
from tests.support.servers.dashboard_pages import APP, NOWHERE, PAGES, looking, metric, page, sound, table, text
from tests.support.servers.nats import free_port
from tests.support.servers.processes import eventually

__all__ = ["looking"]  # a fixture that every test uses

# ---- nothing to show


@pytest.mark.parametrize("name", PAGES)
def test_an_empty_database_says_what_to_do(name: str, empty_dsn: str) -> None:
    test = sound(name, empty_dsn)
    assert "`infaas " in text(test)
    assert "was answered in time" not in text(test)


@pytest.mark.parametrize("name", ["overview", "slo", "explain", "jobs"])
def test_no_database_says_what_to_do(name: str) -> None:
    test = page(name, f"postgresql://infaas_reader:secret@127.0.0.1:{free_port()}/infaas")
    assert not test.exception
    assert ["the database does not answer" in each.value for each in test.error] == [True]  # once, however many parts
    assert "infaas doctor" in text(test)
    assert "secret" not in text(test)


def test_a_database_that_comes_back_is_asked_again(reader_dsn: str) -> None:
    assert page("jobs", f"postgresql://infaas_reader@127.0.0.1:{free_port()}/infaas").error
    with pytest.raises(store.NoData):
        store.query("apps")
    set_system_address(SystemAddress(NOWHERE, reader_dsn))
    assert store.query("apps").empty


@pytest.mark.parametrize(("name", "read"), [("overview", "served_long"), ("slo", "violations")])
def test_what_a_page_asks_for_over_a_long_time_is_read_ahead_and_once(name: str, read: str, reader_dsn: str) -> None:
    def took() -> float:
        return sum(
            one.value
            for one in store.STATEMENTS.collect()[0].samples
            if one.name.endswith("_count") and one.labels["statement"] == read
        )

    set_system_address(SystemAddress(NOWHERE, reader_dsn))
    window, before = between(datetime.now(UTC) - timedelta(days=30), datetime.now(UTC)), took()
    store.ahead(window, read)
    assert eventually(lambda: took() == before + 1)
    assert store.history(read, window).empty and took() == before + 1
    store.st.cache_data.clear()
    page(name, reader_dsn, range="30d")
    assert took() == before + 2


def test_a_connection_that_has_gone_silent_is_given_up(reader_dsn: str) -> None:
    """As one does whose server hangs, or to which the network swallows everything: TCP alone would wait for minutes."""
    set_system_address(SystemAddress(NOWHERE, reader_dsn))
    with store._pool(reader_dsn).connection() as connection:
        (pid,) = connection.execute("SELECT pg_backend_pid()").fetchone() or (0,)
    os.kill(pid, signal.SIGSTOP)
    try:
        # Another connection answers, or there is none just now; then the page says so, and asks anew.
        for _ in range(10):
            with suppress(store.NoData):
                assert store.query("prices").empty
                break
            time.sleep(store.CONNECT_S)
        else:
            pytest.fail("no other connection was made")
    finally:
        os.kill(pid, signal.SIGCONT)


def test_without_our_schema_pages_say_so_and_nothing_is_written_whatever_the_role(
    postgres: Any, superuser_dsn: str
) -> None:
    test = page("overview", postgres.dsn("postgres", postgres.password, "postgres"))
    assert "Roles and set-up" in text(test)
    with store._pool(superuser_dsn).connection() as connection, pytest.raises(Exception, match="read-only"):
        connection.execute("DELETE FROM infaas.query_outcomes")


def test_a_page_shows_what_is_known_while_a_question_is_not_answered() -> None:
    """As none is while NATS runs without a dispatcher: Overview and Applications ask these, and wait for none of them."""
    beside = (store.not_ready, store.unserved, store.weaknesses_of_nats, store.known_pipelines, store.releases)
    assert {type(each) for each in beside} == {store._Aside}
    asked, answers = Queue[str](), Queue[str]()

    def ask() -> str:
        asked.put("")
        return answers.get()

    set_system_address(SystemAddress(NOWHERE, ""))
    question = store._Aside(ask, "nothing", 0.0)
    assert [question(), question()] == ["nothing"] * 2
    answers.put("an answer")
    assert eventually(lambda: question() == "an answer")
    asked.get()
    asked.get()  # with that answer it is asked again, and what was known stays
    assert question() == "an answer"
    assert asked.empty(), "one thread asks"
    set_system_address(SystemAddress("nats://another", ""))
    assert question() == "nothing", "another system"
    for _ in range(2):
        answers.put("too late")


def test_the_whole_of_a_long_window_is_read_ahead(reader_dsn: str) -> None:
    set_system_address(SystemAddress(NOWHERE, reader_dsn))
    with store._pool(reader_dsn).connection() as connection:
        for whole in (True, False):
            with store._ahead(connection, whole):
                assert connection.execute("SHOW enable_indexscan").fetchone() == ("off" if whole else "on",)
    assert not any(b"LIMIT" in store.statement(name) for name in ("served_long", "violations")), "these read all of it"


# ---- many visitors, few rights


def test_many_visitors_cost_one_query(empty_dsn: str) -> None:
    set_system_address(SystemAddress(NOWHERE, empty_dsn))
    window = between(datetime(2026, 1, 1, tzinfo=UTC), datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=1))
    pool = store._pool(empty_dsn)  # other tests may have asked through it
    with pool.connection(timeout=60.0):
        pass  # it is connected, however long that takes
    before = pool.get_stats().get("requests_num", 0)
    began = time.monotonic()
    with ThreadPoolExecutor(16) as visitors:
        answers = list(visitors.map(lambda _: store.history("traffic", window), range(200)))
    assert len(answers) == 200
    spans = 1 + int((time.monotonic() - began) / store.CACHE_S)  # one, unless the machine is slow
    assert 1 <= pool.get_stats()["requests_num"] - before <= min(spans, 100)


def test_who_is_not_logged_in_sees_nothing(empty_dsn: str) -> None:
    set_system_address(SystemAddress(NOWHERE, empty_dsn))
    test = AppTest.from_file(str(APP), default_timeout=120)
    test.secrets["auth"] = {
        "redirect_uri": "http://localhost:8501/oauth2callback",
        "cookie_secret": "s",
        "client_id": "c",
    }
    test.run()
    assert [button.label for button in test.button] == ["Log in"]
    assert not test.metric and not test.dataframe


# -- The dashboard where several models answer together: the page of an app's members, and what other pages count.


@pytest.fixture
def together(database_dsn: str, reader_dsn: str) -> str:
    """Forty queries of an app whose three members differ, in two contexts; the last member comes late for each fourth one."""
    now = time.time()
    store_ = Store(database_dsn, "test")
    catalogue = {"app.digits": encode(app_record()), "model.mlp.1": encode(model_record())}
    CatalogWriter(store_, {"cpu": 0.048}, 0.99).write(catalogue, frozenset(catalogue))
    outcomes, taught = [], []
    for i in range(40):
        fields: dict[str, Any] = {"time": now - 130 + 3 * i}
        late = i % 4 == 0
        whole = event(
            OutcomeEvent, **fields, variant=None, model=None, hardware=None, worker=None, latency_ms=20.0, policy="exp4",
            confidence=0.5 if late else 0.75, missing=int(late), outcome="default" if i < 2 else "ok", cost=3e-7,
        )  # fmt: skip
        outcomes.append(whole)
        for k, member in enumerate("abc"):
            slow = late and member == "c"
            outcomes.append(
                event(
                    OutcomeEvent, **fields, variant=f"{member}-v1", model=member, parent=whole.uid, stage=member,
                    latency_ms=40.0 if slow else 10.0,
                )
            )  # fmt: skip
            taught.append(
                event(
                    SelectionEvent, **fields, context="east" if i % 2 else None, member=member, query=whole.uid,
                    loss=float(i % (k + 2) == 0), weight=(0.6, 0.3, 0.1)[k], probability=1.0,
                )
            )  # fmt: skip
    EventWriter(store_).write([message(*outcomes), message(*taught)])
    store_.close()
    return reader_dsn


def test_members_show_weights_errors_agreement_and_who_is_missing(together: str) -> None:
    test = sound("members", together)
    assert metric(test, "Queries")[0] == "40"
    assert metric(test, "Confidence")[0] == "68.8 %"
    assert metric(test, "Incomplete")[0] == "25.0 %"
    assert metric(test, "Default outputs")[0] == "2"
    assert metric(test, "Believed most") == ("a", "60.0 % of the weights")
    rows = table(test, "feedbacks").set_index("member")
    assert rows.index.tolist() == ["a", "b", "c"]
    assert rows["error"].tolist() == [pytest.approx(50.0), pytest.approx(100 * 14 / 40), pytest.approx(25.0)]
    assert rows["missing"].tolist() == [0.0, 0.0, 25.0]
    assert rows["asked"].tolist() == [40, 40, 40]
    assert set(rows["feedbacks"]) == {40}
    test.selectbox(key="context").set_value("east").run()
    assert not test.exception and not test.error
    assert set(table(test, "feedbacks")["feedbacks"]) == {20}


def test_an_ensemble_counts_as_one_query_on_every_page_and_its_members_as_those_that_answered(together: str) -> None:
    assert metric(page("overview", together), "Load")[1] == "40 queries"
    slo = page("slo", together)
    assert metric(slo, "In time") == ("100 %", "of 40 queries")
    assert dict(zip(*(table(slo, "mean_batch")[name] for name in ("variant", "queries")), strict=True)) == {
        "a-v1": 40, "b-v1": 40, "c-v1": 40,
    }  # fmt: skip


# -- The dashboard where apps answer together as a pipeline: its page, and what other pages say of it.


@pytest.fixture
def flowing(database_dsn: str, reader_dsn: str) -> str:
    """Forty queries of a pipeline of two stages, of which each fourth visits the second; its replicas changed once, and before that."""
    now = time.time()
    store_ = Store(database_dsn, "test")
    vertices = [PipelineVertex(name="lang", app="digits"), PipelineVertex(name="say", app="digits")]
    social = app_record(app="social", links={}, pipeline=PipelineRecord(vertices=vertices), latency_ms=100.0)
    catalogue = {
        "app.digits": encode(app_record()),
        "app.social": encode(social),
        "model.mlp.1": encode(model_record()),
    }
    CatalogWriter(store_, {"cpu": 0.048}, 0.99).write(catalogue, frozenset(catalogue))
    outcomes = []
    for i in range(40):
        fields: dict[str, Any] = {"time": now - 130 + 3 * i}
        whole = event(
            OutcomeEvent, **fields, app="social", variant=None, model=None, hardware=None, worker=None, policy="inferline",
            latency_ms=120.0 if i < 2 else 40.0, slo_ms=100.0, outcome="late" if i < 2 else "ok", cost=3e-7,
        )  # fmt: skip
        visited = ("lang", "say") if i % 4 == 0 else ("lang",)
        parts = [event(OutcomeEvent, **fields, parent=whole.uid, stage=name, latency_ms=20.0) for name in visited]
        outcomes += [whole, *parts]
    changes = [
        event(PipelineEvent, time=now - 5000, vertex="lang", action="deploy", from_replicas=0, to_replicas=2),
        event(PipelineEvent, time=now - 60, vertex="lang", from_replicas=2, to_replicas=6, reason="a burst"),
    ]
    bills = [event(CostEvent, time=now - 100 + 10 * i, app="social", cost=1e-4) for i in range(9)]
    EventWriter(store_).write([message(*outcomes), message(*changes), message(*bills)])
    store_.close()
    return reader_dsn


def test_the_page_shows_how_a_pipeline_keeps_its_objective_and_how_its_stages_are_visited(flowing: str) -> None:
    test = sound("pipelines", flowing, range="5m")
    assert test.selectbox(key="app").options == ["social"], "digits is none"
    assert metric(test, "Queries")[0] == "40"
    assert metric(test, "In time") == ("95.0 %", "target 99.0 %")
    assert metric(test, "p99, ms")[1] == "objective 100 ms"
    assert "How its stages are served now is not known" in text(test), (
        "no dispatcher runs; the history is shown all the same"
    )
    rows = table(test, "visits").set_index("vertex")
    assert rows["visits"].to_dict() == {"lang": 40, "say": 10}
    assert rows["of_queries"].to_dict() == {"lang": 100.0, "say": 25.0}
    [change] = table(test, "lambda_max").to_dict("records")
    assert (change["vertex"], change["from_replicas"], change["replicas"], change["reason"]) == (
        "lang",
        2,
        6,
        "a burst",
    )


def test_its_queries_count_once_on_every_page_and_those_of_its_stages_not_at_all(flowing: str) -> None:
    assert metric(page("overview", flowing), "Load")[1] == "40 queries"
    slo = page("slo", flowing)
    assert metric(slo, "In time") == ("95.0 %", "of 40 queries")
    assert table(slo, "reached").set_index("app")["queries"].fillna(0).to_dict() == {"digits": 0, "social": 40}
    shown = page("applications", flowing, app="social")
    assert not shown.exception and not shown.error
    assert "other applications answer for its stages" in text(shown)


def test_without_a_plan_the_page_says_how_to_make_one(flowing: str, database_dsn: str) -> None:
    store_ = Store(database_dsn, "test")
    with store_.transaction() as connection:
        connection.execute("DELETE FROM infaas.pipeline_events")
    store_.close()
    test = sound("pipelines", flowing)
    assert "infaas pipeline deploy" in text(test)


def test_where_there_is_no_pipeline_the_page_says_how_to_add_one(reader_dsn: str) -> None:
    test = sound("pipelines", reader_dsn)
    assert "infaas pipeline add FILE.toml" in text(test)


# -- Queries that differ from the validation set.


def with_records(dsn: str) -> Store:
    store = Store(dsn, "test")
    records = {"app.digits": app_record(), "model.mlp.1": model_record(), f"variant.{VARIANT}": variant_record()}
    changes = {key: encode(record) for key, record in records.items()}
    CatalogWriter(store, {"cpu": 0.048}, 0.99).write(changes, frozenset(records))
    return store


@pytest.mark.slow
def test_what_has_drifted_is_shown_with_both_distributions_until_it_has_ended(
    database_dsn: str, reader_dsn: str
) -> None:
    now = time.time()
    store_ = with_records(database_dsn)
    far = event(DriftEvent, time=now - 50, since=now - 60)
    near = event(DriftEvent, time=now - 50, since=now - 60, column_name="x[4]", distance=0.2)
    writer = EventWriter(store_)
    writer.write([message(far, near)])
    shown = sound("applications", reader_dsn, app="digits")
    assert "**x[3]** in the validation set and in queries" in text(shown)
    rows = table(shown, "column_name")
    assert [*rows["column_name"]] == ["x[3]", "x[4]"]
    assert "ended" not in rows, "neither has"
    assert "**digits**: 2 columns of its queries drifted" in text(sound("overview", reader_dsn))
    writer.write([message(replace(far, time=now, ended=now - 5, cells=""))])
    with store_.transaction() as connection:
        found = connection.execute(
            "SELECT column_name, extract(epoch FROM ended)::float8, cells <> '' FROM infaas.drift_events ORDER BY 1"
        ).fetchall()
    assert found == [("x[3]", pytest.approx(now - 5), True), ("x[4]", None, True)]
    store_.close()


@pytest.mark.slow
def test_releases_are_shown_with_their_share_over_time_and_reason(database_dsn: str, reader_dsn: str) -> None:
    now = time.time()
    store_ = with_records(database_dsn)
    first = event(ReleaseEvent, time=now - 60, state="mirror", share=0.0)
    back = event(ReleaseEvent, time=now - 9, state="rolled-back", share=0.0, reason="shown to be worse: agreement")
    later = event(ReleaseEvent, time=now - 5, release="digits-2", version="3")
    writer = EventWriter(store_)
    writer.write([message(first, event(ReleaseEvent, time=now - 30), back, later)])
    shown = sound("applications", reader_dsn, app="digits")
    assert "**mlp version 3**: share of the queries that it answers" in text(shown)
    rows = table(shown, "old_version")
    assert [*rows["state"]] == ["step", "rolled-back"]
    assert [*rows["reason"]] == ["an operator's order", "shown to be worse: agreement"]
    store_.close()
