"""The dashboard where several models answer together: the page of an app's members, and what other pages count."""

import time
from typing import Any

import pytest

from bus.codec import encode
from bus.messages.events import (
    OutcomeEvent,
    SelectionEvent,
)
from services.recorder.catalog import CatalogWriter
from services.recorder.events import EventWriter
from services.shell.store import Store
from tests.support.data.events import app_record, event, message, model_record
from tests.support.servers.dashboard_pages import looking, metric, page, table

__all__ = ["looking"]  # a fixture that every test uses


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
    test = page("members", together)
    assert not test.exception and not test.error
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
