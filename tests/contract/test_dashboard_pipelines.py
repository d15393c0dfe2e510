"""The dashboard where apps answer together as a pipeline: its page, and what other pages say of it."""

import time
from typing import Any

import pytest

from bus.codec import encode
from bus.messages.catalog import PipelineRecord, PipelineVertex
from bus.messages.events import CostEvent, OutcomeEvent, PipelineEvent
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventWriter
from services.shell.store import Store
from tests.support.data.events import app_record, event, message, model_record
from tests.support.servers.dashboard_pages import looking, metric, page, table, text

__all__ = ["looking"]  # a fixture that every test uses


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
    test = page("pipelines", flowing, range="5m")
    assert not test.exception and not test.error
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
    test = page("pipelines", flowing)
    assert not test.exception and not test.error
    assert "infaas pipeline deploy" in text(test)


def test_where_there_is_no_pipeline_the_page_says_how_to_add_one(reader_dsn: str) -> None:
    test = page("pipelines", reader_dsn)
    assert not test.exception and not test.error
    assert "infaas pipeline add FILE.toml" in text(test)
