"""The dashboard's pages on a database in a known state: what is shown."""

import re
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from streamlit.testing.v1 import AppTest

from bus.codec import encode
from bus.login import SystemAddress
from bus.messages.events import (
    AppObjective,
    CostEvent,
    InstanceEventSample,
    JobEvent,
    OutcomeEvent,
    RegistrationEvent,
    ScalingEvent,
    ShadowEvent,
    StateEvent,
    WorkerEvent,
    WorkerSample,
)
from dashboard import series, store
from dashboard.serve import set_system_address
from dashboard.window import between
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventWriter
from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.store import READER, WRITER, Store
from tests.support.data.events import VARIANT, app_record, event, message, model_record, variant_record
from tests.support.servers.dashboard_pages import APP, NOWHERE, looking, metric, page, sound, table, text
from tests.support.servers.postgres import READER_PASSWORD, WRITER_PASSWORD, clone, drop
from tests.support.servers.processes import eventually

__all__ = ["looking"]  # a fixture that every test uses

GPU = "mlp-v1-simgpu-fp32-t1-b64"
UNMET = "no instance meets a query's needs"


@pytest.fixture(scope="module")
def pasts(postgres: EmbeddedPostgres, looking: None) -> Iterator[Callable[[], str]]:
    """A past of two minutes, made anew once it is a minute old: the pages show the last minutes, and a slow machine needs some for each."""
    made: list[tuple[str, float]] = []

    def latest() -> str:
        if not made or time.time() > made[-1][1] + 60.0:
            made.append((clone(postgres), time.time()))
            fill(postgres.dsn("postgres", postgres.password, made[-1][0]), made[-1][1])
        return role_dsn(postgres.dsn("postgres", postgres.password, made[-1][0]), READER, READER_PASSWORD)

    yield latest
    for name, _ in made:
        drop(postgres, name)


@pytest.fixture
def past(pasts: Callable[[], str]) -> str:
    return pasts()


def fill(owner: str, now: float) -> None:
    """Two minutes until now: 240 queries, of which 6 were late and 6 refused; one instance, overloaded for a while; a simulated GPU."""
    store_ = Store(role_dsn(owner, WRITER, WRITER_PASSWORD), "test")
    catalogue = {
        "app.digits": encode(app_record()),
        "model.mlp.1": encode(model_record()),
        f"variant.{VARIANT}": encode(variant_record(accuracy_low=0.951, accuracy_high=0.982)),
        f"variant.{GPU}": encode(variant_record(variant=GPU, hardware="gpu", simulated=True, accuracy=0.98)),
    }
    CatalogWriter(store_, {"cpu": 0.048, "gpu": 3.0}, 0.99).write(catalogue, frozenset(catalogue))
    outcomes = []
    for i in range(240):
        fields: dict[str, Any] = {"time": now - 140 + i / 2}
        if i % 40 == 1:
            fields |= {"outcome": "late", "latency_ms": 80.0}
        if i % 40 == 2:
            fields |= {"outcome": "refused", "code": "overloaded", "variant": None, "latency_ms": 1.0}
        outcomes.append(event(OutcomeEvent, **fields))
    wrong = {"outcome": "refused", "code": "bad_request", "variant": None, "latency_ms": 1.0}
    outcomes += [event(OutcomeEvent, time=now - 40 + i, **wrong) for i in range(3)]
    core = 0.048 / 3600
    nobody = dict.fromkeys(("app", "model", "variant"))
    bills = [
        each
        for i in range(24)  # some of it in the future, for a slow machine
        for each in (
            event(CostEvent, time=now - 115 + 10 * i, cost=10 * core),
            event(CostEvent, time=now - 115 + 10 * i, cost=10 * core, **nobody),
            event(CostEvent, time=now - 115 + 10 * i, cost=30 * core, hardware="gpu", simulated=True, **nobody),
        )
    ]
    states = [
        event(StateEvent, time=now - 120, from_state="Inactive", to_state="Loading", reason=UNMET),
        event(StateEvent, time=now - 119, from_state="Loading", to_state="Active", reason="loaded in 5 ms"),
        event(StateEvent, time=now - 60, from_state="Active", to_state="Overloaded", reason="80 items wait for 0.4 s"),
    ]
    sample = {"scaler": "shadow", "worker": None, "app": None, "variant": None, "action": "sample", "count": 0}
    sample |= {"cost_rate": 0.048, "apps_cost_rate": 0.012}
    job = {"created": now - 60, "started": now - 50, "state": "failed", "reason": "item 7 is no number"}
    goal = {"slo_target": 0.99, "load": 2.0, "forecast": 2.5, "headroom": 1.6}
    kinds: list[list[Any]] = [
        outcomes,
        bills,
        [
            event(WorkerEvent, time=now - 125, from_state="None", to_state="Booting", reason="the monitor started"),
            event(WorkerEvent, time=now - 124, from_state="Booting", to_state="Ready", reason="its executor runs"),
        ],
        states,
        [event(ScalingEvent, time=now - 120, reason=UNMET)],
        [
            *(
                event(
                    ShadowEvent,
                    **sample,
                    time=now - 130 + 10 * i,
                    reason=f"99.00% of {100 * i} items in time (the system: 82.00% of {90 * i} items); 1 cpu",
                )
                for i in range(12)
            ),
            event(
                ShadowEvent, **sample, time=now - 600, reason="7.00% of 9 items in time (the system: no items); 1 cpu"
            ),
            event(
                ShadowEvent,
                time=now - 75,
                action="unload",
                reason="nobody needs it",
                cost_rate=0.048,
                apps_cost_rate=0.0,
            ),
        ],
        [
            event(WorkerSample, time=now - 20 + 5 * i, device=device, hardware=hardware)
            for i in range(30)
            for device, hardware in (("cpu", "cpu"), ("gpu-0", "gpu"))
        ],
        [event(InstanceEventSample, time=now + 100, queue=80, reclaimable=True)],
        [event(JobEvent, **job, total=500, done=250)],
        [event(AppObjective, **goal, time=now - 30 + 10 * i, capacity=4.0 + i) for i in range(3)],
        [event(RegistrationEvent, state="done", progress=1.0, version="1")],
    ]
    ledger = EventWriter(store_)
    for rows in kinds:
        ledger.write([message(*rows)])
    store_.close()


# ---- what is shown


def test_the_overview_says_what_runs_how_well_at_what_cost(past: str) -> None:
    test = sound("overview", past)
    assert metric(test, "Load")[1] == "240 queries"
    assert metric(test, "In time") == ("95.0 %", "12 missed")
    assert metric(test, "Cost now, US$/h") == ("0.096", "50.0 % idle")
    assert metric(test, "Workers") == ("1 ready", "2 devices")
    assert metric(test, "Instances") == ("1", "1 in trouble")
    running = table(test, "why")
    assert running["variant"].tolist() == [VARIANT]
    assert [list(each) for each in running["state"]] == [["Overloaded", "reclaimable"]]
    assert running["why"].tolist() == [f"load: {UNMET}"]
    assert "1 offline job failed in the last day" in text(test)
    assert "**digits**: 95.0 % of the queries" not in text(test)  # the least that needs no attention
    assert "without simulated devices" in text(test)


def test_variants_and_workers_tell_their_changes_with_reasons(past: str) -> None:
    test = sound("variants", past)
    assert table(test, "queue")["queue"].tolist() == [80]
    assert table(test, "queue")["interval"].tolist() == ["0.951..0.982"]
    changes = table(test, "change")
    assert changes["change"].tolist() == ["Active → Overloaded", "Loading → Active", "Inactive → Loading"]
    assert changes["reason"].tolist()[0] == "80 items wait for 0.4 s"
    assert [list(each) for each in table(test, "profiled_ms")["state"]] == [["Overloaded", "reclaimable"]]
    assert test.selectbox(key="variant").value == VARIANT  # of which an instance is loaded
    assert "without other load" in text(test)
    test = sound("workers", past)
    devices = table(test, "device")
    assert devices["device"].tolist() == ["cpu", "gpu-0 (simulated)"]
    assert devices["state"].tolist() == [["Ready"], ["Ready"]]
    assert table(test, "change")["change"].tolist() == ["Booting → Ready", "new → Booting"]


def test_cost_leaves_simulated_devices_out_and_is_compared_with_an_earlier_time(past: str) -> None:
    test = sound("cost", past)
    assert metric(test, "Idle")[0] == "50.0 %"
    assert "would have cost" in text(test)
    test.toggle(key="simulated").set_value(True).run()
    assert table(test, "share").set_index("app")["share"]["(idle) (simulated)"] == pytest.approx(60)
    assert metric(test, "Idle")[0] == "80.0 %"
    test = page("cost", past, range="5m")
    test.selectbox(key="compare").set_value("the time before").run()
    assert not test.exception and not test.error
    assert metric(test, "Spent, US$")[1] == "nothing then"
    assert table(test, "before")["before"].tolist() == [0.0, 0.0]


def test_cost_says_how_the_last_day_compares_with_the_best_possible(database_dsn: str, reader_dsn: str) -> None:
    bill = event(CostEvent, time=time.time() - 60, cost=0.25)
    day = {"policy": "oracle", "scaler": "oracle", "action": "sample", "worker": None, "app": None, "variant": None}
    days = [
        event(ShadowEvent, **day, time=86400.0 * n, count=0, reason=said, cost_rate=0.1, apps_cost_rate=0.0)
        for n, said in ((20_000, "not computed: it takes more than 900 s"), (20_001, "1.25 times the least cost"))
    ]
    store_ = Store(database_dsn, "test")
    EventWriter(store_).write([message(bill), message(*days)])
    store_.close()
    assert "Beside the best possible, 05 October 2024 (UTC): 1.25 times the least cost." in text(
        page("cost", reader_dsn)
    )
    assert "oracle" not in text(page("shadow", reader_dsn, range="all"))


def test_the_time_before_is_as_long_as_the_time_it_is_compared_with(database_dsn: str, reader_dsn: str) -> None:
    bills = [event(CostEvent, time=time.time() - 10 * i, cost=0.25) for i in range(-60, 80)]
    store_ = Store(database_dsn, "test")
    EventWriter(store_).write([message(*bills)])
    store_.close()
    test = page("cost", reader_dsn, range="5m", compare="the time before")
    spent, change = metric(test, "Spent, US$")
    assert change == f"+0.0% against US$ {spent}"


def test_violations_have_reasons_and_clients_mistakes_lower_nothing(past: str) -> None:
    test = sound("slo", past)
    assert [metric(test, name)[0] for name in ("In time", "Late", "Refused", "Errors")] == ["95.0 %", "6", "6", "0"]
    reasons = table(test, "meaning")
    assert dict(zip(reasons["reason"], reasons["queries"], strict=True)) == {"late": 6, "overloaded": 6}
    assert all(reasons["meaning"])
    assert "strictest objective 50 ms" in text(test)
    test = page("slo", past)
    assert metric(test, "In time") == ("95.0 %", "of 240 queries")
    told = [each.value for each in test.dataframe if "reason" in each.value]
    assert {(row.reason, row.queries) for rows in told for row in rows.itertuples()} == {
        ("late", 6),
        ("overloaded", 6),
        ("bad_request", 3),
    }


def test_objectives_stand_beside_what_was_reached_and_is_expected(past: str) -> None:
    for chosen in ({}, {"app": "digits"}):
        test = sound("slo", past, **chosen)
        row = table(test, "target").iloc[0]
        assert (row["app"], row["target"], row["reached"], row["verdict"]) == ("digits", 99.0, 95.0, "missed")
        assert (row["queries"], row["allowed"], row["missed"]) == (240, 2.4, 12)
        assert row["left"] == pytest.approx(-400)  # five times as many as may
        row = table(test, "forecast").iloc[0]
        assert (row["load"], row["forecast"], row["spare"]) == (2.0, 2.5, "+60 %")
        assert row["capacity"] in (4.0, 5.0, 6.0)  # the last one of the range, which ends some seconds ago
    assert "dashed: the target" in text(test)
    test = sound("slo", past, range="7d")
    assert table(test, "target")["target"].tolist() == [99.0]


def test_what_was_done_is_marked_once_however_near_and_by_app(past: str) -> None:
    set_system_address(SystemAddress(NOWHERE, past))
    now = datetime.now(UTC)
    found = series.marks(between(now - timedelta(hours=1), now))
    marks = dict(zip(found["kind"], found["mark"], strict=True))
    assert marks.keys() == {"deployment", "scaling"} and len(found) == 2
    assert marks["deployment"].endswith("version 1 was registered")
    assert marks["scaling"] == f"load {VARIANT}: {UNMET}"
    assert series.marks(between(now - timedelta(hours=1), now), "another").empty
    assert "Thin lines" in text(page("overview", past))


def test_apps_without_queries_have_a_whole_budget_that_nobody_needs(past: str) -> None:
    set_system_address(SystemAddress(NOWHERE, past))
    start = datetime(2020, 1, 1, tzinfo=UTC)
    for long in (timedelta(hours=1), timedelta(days=3)):
        window = between(start, start + long)
        by_app, by_bucket = series.budgets(window)
        assert by_app.empty and by_bucket.empty
        assert series.objectives(window).merge(by_app, on="app", how="left")["left"].isna().all()


def test_an_address_may_name_the_range_and_the_app(past: str) -> None:
    test = AppTest.from_file(str(APP), default_timeout=120)
    set_system_address(SystemAddress(NOWHERE, past))
    test.query_params["range"] = "1h"
    test.run()
    assert test.segmented_control(key="range").value == "1h"
    test.switch_page("views/slo.py")
    test.query_params["app"] = "digits"
    test.run()
    assert test.selectbox(key="app").value == "digits"


def test_applications_show_what_variants_trade(past: str) -> None:
    test = sound("applications", past)
    variants = table(test, "saturation_qps")
    assert set(variants["hardware"]) == {"cpu", "gpu (simulated)"}
    assert dict(zip(variants["variant"], variants["interval"], strict=True)) == {VARIANT: "0.951..0.982", GPU: "–"}
    assert metric(test, "Best accuracy")[0] == "0.98"
    test.toggle(key="simulated").set_value(False).run()
    assert metric(test, "Best accuracy")[0] == "0.97"


def test_a_shadows_actions_and_cost_are_beside_the_systems(past: str) -> None:
    test = sound("shadow", past)
    assert "**static would have cost 78.0 % less than was paid and missed 1.00 % of the queries instead of" in text(
        test
    )
    ours, real, earlier, _ = table(test, "ran").to_dict("records")
    assert (round(earlier["percent"]), earlier["actions"]) == (7, 0)  # an earlier run of the same policy
    assert [(one["policy"], one["actions"]) for one in (ours, real)] == [("static", 1), ("the system", 1)]
    assert ours["reached"] == "99.00% of 1100 items in time (the system: 82.00% of 990 items); 1 cpu"
    assert ours["cost_rate"] == pytest.approx(0.048)
    assert real["cost_rate"] == pytest.approx(0.24 * 10 / 11)  # ten bills in 110 s, with the simulated GPU
    assert real["apps_cost_rate"] == pytest.approx(0.048 * 10 / 11)
    assert real["percent"] == pytest.approx(82.0)  # as the command counts
    action = table(test, "reason").iloc[0]
    assert (action["action"], action["reason"]) == ("unload", "nobody needs it")


def test_recent_queries_are_filtered_and_one_is_shown_with_its_parts(past: str) -> None:
    test = sound("queries", past)
    rows = table(test, "ended")
    assert len(rows) == 200
    assert {each[0] for each in rows["ended"]} == {"ok", "late", "refused", "mistake"}
    test = page("queries", past, outcome="mistake", app="digits")  # of the client: counted, not among the app's queries
    assert [each.partition(": a field")[0] for each in table(test, "ended")["why"]] == ["bad_request"] * 3
    test = page("queries", past, outcome="refused", app="digits")
    rows = table(test, "ended")
    assert [list(each) for each in rows["ended"]] == [["refused"]] * 6
    assert rows["why"].tolist() == ["overloaded: all suitable instances were full"] * 6
    set_system_address(SystemAddress(NOWHERE, past))
    window = between(datetime.now(UTC) - timedelta(hours=1), datetime.now(UTC) + timedelta(hours=1))
    known = store.history("recent", window, app=None, text="OVERLOADED", outcome=None)["query"]
    assert len(known) == 6
    test = page("queries", past, query=known[0])
    assert metric(test, "Outcome") == ("refused", "overloaded")
    assert metric(test, "Latency, ms") == ("1", "50 allowed")
    assert known[0].replace("-", "") in text(test)
    test = page("queries", past, query="no uid")
    assert "is no query's name" in text(test) and not test.error
    test = page("queries", past, search="nothing has this")
    assert "meets these filters" in text(test)


def test_a_search_leaves_the_rows_that_have_it(past: str) -> None:
    for name, column, what in (
        ("variants", "queue", VARIANT),
        ("workers", "device", "gpu"),
        ("jobs", "took", "number"),
    ):
        test = sound(name, past, search=what.upper())
        assert len(table(test, column)) == 1, name
        test = page(name, past, search="nothing has this")
        assert "this search" in text(test) or "these filters" in text(test), name
        assert not test.exception and not test.error
    test = page("registrations", past, app="digits")
    assert [list(each) for each in table(test, "state")["state"]] == [["done"]]


def test_only_what_is_under_way_can_be_cancelled(database_dsn: str, reader_dsn: str) -> None:
    store_ = Store(database_dsn, "test")
    states = ("accepted", "building", "done", "failed", "refused", "cancelled")
    rows = [event(RegistrationEvent, registration=f"r-{state}", model=state, state=state) for state in states]
    EventWriter(store_).write([message(*rows)])
    test = page("registrations", reader_dsn)
    assert sorted(button.label for button in test.button) == ["Cancel accepted", "Cancel building", "Dismiss 1 failed"]
    assert set(table(test, "state")["model"]) == set(states[2:])  # those under way are above it
    assert "1 registration failed" in text(page("overview", reader_dsn))
    dismissed = event(RegistrationEvent, registration="r-failed", model="failed", state="dismissed", time=time.time())
    EventWriter(store_).write([message(dismissed)])
    store_.close()
    # A result is served to all for two seconds.
    assert eventually(lambda: "failed" not in list(table(page("registrations", reader_dsn), "state")["model"]))
    assert eventually(lambda: "registration failed" not in text(page("overview", reader_dsn)))


def test_what_needs_attention_says_where_to_look(past: str, database_dsn: str, reader_dsn: str) -> None:
    now = time.time()
    store_ = Store(database_dsn, "test")
    ledger = EventWriter(store_)
    for rows in (
        [event(OutcomeEvent, time=now - 60 - i, outcome="late" if i % 3 else "ok") for i in range(60)],
        [event(WorkerEvent, time=now - 400, from_state="Booting", to_state="Ready", reason="it runs")],
        [event(WorkerSample, time=now - 300, device="cpu", hardware="cpu")],
        [event(WorkerEvent, time=now - 120, worker="w9", from_state="Ready", to_state="Failed", reason="no heartbeat")],
        [event(RegistrationEvent, state="failed", reason="no such file", time=now)],
    ):
        ledger.write([message(*rows)])
    store_.close()
    told = text(page("overview", reader_dsn))
    assert "**digits**: only 33.3 % of the queries were in time" in told
    assert re.search(r"has sent nothing for [5-9] min", told)  # it takes a slow machine minutes to ask
    assert re.search(r"\*\*w9\*\* failed [2-6] min ago", told)
    assert "1 registration failed in the last day" in told
    assert "Nothing needs attention" not in told


def test_queries_of_a_model_alone_have_a_name_and_their_money_is_its_apps(database_dsn: str, reader_dsn: str) -> None:
    now = time.time()
    store_ = Store(database_dsn, "test")
    rows = [event(OutcomeEvent, time=now - 60 - i, app="_", payer="digits", outcome="late") for i in range(40)]
    EventWriter(store_).write([message(*rows), message(event(CostEvent, time=now - 60, cost=0.004))])
    store_.close()
    assert "**(by model)**: only 0 % of the queries were in time" in text(page("overview", reader_dsn))
    assert list(table(page("slo", reader_dsn), "meaning")["app"]) == ["(by model)"]
    spent = table(page("cost", reader_dsn), "cost_per_1000").set_index("app")
    assert spent.loc["digits", "items"] == 40
    assert spent.loc["digits", "cost_per_1000"] == pytest.approx(0.1)


def test_jobs_show_progress_and_explain_what_to_do_when_no_system_answers(past: str) -> None:
    test = sound("jobs", past)
    job = table(test, "progress").iloc[0]
    assert (job["progress"], job["reason"], list(job["state"])) == (50.0, "item 7 is no number", ["failed"])
    assert metric(test, "Failed jobs") == ("1", "see why below")
    test = page("explain", past)
    assert not test.exception
    assert "No data" in text(test)
    assert "infaas up" in text(test)


def test_an_address_fills_in_every_need_by_its_name(past: str, postgres: EmbeddedPostgres) -> None:
    figures = {"latency_ms": "30", "accuracy": "0.93", "cost": "0.01"}
    test = page("explain", past, app="digits", **figures)
    assert {each.key: each.value for each in test.number_input} == {key: float(one) for key, one in figures.items()}
    database = clone(postgres)
    owner = postgres.dsn("postgres", postgres.password, database)
    catalogue = {"app.digits": app_record(), f"variant.{VARIANT}": variant_record(metric="mae", accuracy=0.01)}
    encoded = {key: encode(record) for key, record in catalogue.items()}
    writer = Store(role_dsn(owner, WRITER, WRITER_PASSWORD), "test")
    CatalogWriter(writer, {}, 0.99).write(encoded, frozenset(encoded))
    writer.close()
    test = page("explain", role_dsn(owner, READER, READER_PASSWORD), app="digits", mae="60")
    assert test.number_input(key="mae").value == 60.0
    drop(postgres, database)


def test_long_ranges_refused_queries_and_single_variants_are_shown(past: str) -> None:
    for name in ("cost", "slo"):
        test = sound(name, past, range="30d")
    assert metric(test, "In time")[0].startswith("9")  # the last minute may be missing
    test = sound("cost", past, range="7d", by="hardware")
    assert table(test, "share")["hardware"].tolist() == ["cpu"]
    test = sound("members", past)
    assert "infaas admin set-selection digits" in text(test)


def test_what_long_ranges_do_not_know_is_left_out_and_numbers_stay_numbers(past: str) -> None:
    set_system_address(SystemAddress(NOWHERE, past))
    now = datetime.now(UTC)
    rows = store.history("traffic_long", between(now - timedelta(days=1), now + timedelta(hours=1)))
    assert rows["p95_ms"].isna().all()
    assert {str(rows[column].dtype) for column in ("p50_ms", "p95_ms", "p99_ms", "slo_ms")} == {"float64"}
    test = page("slo", past, range="7d")
    assert "p99_ms" not in table(test, "mean_batch")
    assert "objective" in text(test) and "no query had an objective" not in text(test)
    test = page("slo", past)
    assert "p99_ms" in table(test, "mean_batch")
