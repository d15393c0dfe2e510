"""What a query gets that states no accuracy: its model's own answers, in selection, scaling, jobs and what is said of it."""

import math

import pytest
from msgspec import UNSET

from bus.messages.catalog import AppRecord, VariantRecord
from services.core.demand import answers_as_model, meeting, variants_for
from services.core.selection import Ask, ClusterView
from services.core.selection.policy import BruteForce, InfaasPolicy
from services.jobs.policy import eligible
from tests.support.data.events import beat, catalog_of, device, instance
from tests.support.simulated.fleet import PRICES, catalogue, variant

OWN = variant("own", accuracy=0.95, model_accuracy=0.95)
NEAR = variant("near", accuracy=0.946, model_accuracy=0.95, base_ms=1.0)
FAR = variant("far", accuracy=0.94, model_accuracy=0.95, base_ms=0.5)
THREE = (OWN, NEAR, FAR)


def view(*records: VariantRecord, accuracy: str = "own") -> ClusterView:
    found = ClusterView(PRICES)
    found.set_app(AppRecord(app="app", links={"m": "1"}, accuracy=accuracy), records)
    return found


def ask(**needs: object) -> Ask:
    return Ask(app="app", items=1, deadline=1e9, **needs)  # type: ignore[arg-type]


def served(found: ClusterView, **needs: object) -> set[str]:
    app = found.apps["app"]
    mask = app.eligible(ask(**needs))
    loadable = {group.record.variant for group in app.eligibility(ask(**needs)).loadable}
    names = {record.variant for record, able in zip(app.records, mask, strict=True) if able}
    assert names == loadable
    return names


def test_half_a_point_less_than_the_model_will_do_and_by_name_or_word_any() -> None:
    assert served(view(*THREE)) == {"own", "near"}
    assert served(view(*THREE), model="m", version="1") == {"own", "near"}
    assert served(view(*THREE), variant="far") == {"far"}
    assert served(view(*THREE, accuracy="any")) == {"own", "near", "far"}


@pytest.mark.parametrize("stated", [{"accuracy": 0.01}, {"accuracy": 0.94}])
def test_a_stated_accuracy_is_all_that_counts(stated: dict[str, float]) -> None:
    assert served(view(*THREE), **stated) == {"own", "near", "far"}
    assert served(view(*THREE), accuracy=0.948) == {"own"}


def test_where_no_variant_answers_as_its_model_the_best_does_and_an_unknown_accuracy_is_no_floor() -> None:
    other = variant("other", model="n", accuracy=0.5, model_accuracy=0.5)
    worse = variant("worse", accuracy=0.9, model_accuracy=0.95)
    assert meeting((FAR, worse, other), 0.0, None) == (FAR, other)
    unknown = variant("unknown", accuracy=0.2)
    assert meeting((unknown, OWN), 0.0, None) == (unknown, OWN)
    assert answers_as_model(variant(accuracy=None, model_accuracy=0.9))


@pytest.mark.parametrize(
    ("error", "agreement", "as_model"), [(100.0, 1.0, True), (100.4, 0.996, True), (101.0, 1.0, False), (100.0, 0.99, False)]
)  # fmt: skip
def test_an_error_may_be_half_a_percent_larger_and_nearly_all_answers_agree(
    error: float, agreement: float, as_model: bool
) -> None:
    record = variant(metric="mae", accuracy=1 / (1 + error), agreement=agreement, model_accuracy=1 / 101.0)
    assert answers_as_model(record) == as_model


def test_scaling_plans_with_the_variants_that_selection_uses() -> None:
    known = catalog_of(*catalogue(*THREE))

    def named(accuracy: float, variant: str | None = None) -> set[str]:
        return {record.variant for record in variants_for("app", None, None, variant, known, accuracy)}

    assert named(0.0) == {"own", "near"}
    assert named(0.5) == {"own", "near", "far"}
    assert named(0.0, "far") == {"far"}
    jobs = {record.variant for record in eligible(known, "app", accuracy=None, model=None, variant=None)}
    assert jobs == {"own", "near"}
    assert len(eligible(known, "app", accuracy=0.5, model=None, variant=None)) == 3


def test_a_refusal_offers_the_less_accurate_variant_and_says_how_to_get_it() -> None:
    """There is an offer where a worker may load it."""
    found = view(*THREE)
    assert InfaasPolicy().select(ask(latency_s=0.0016), 0.0, found).refusal.closest is UNSET
    found.heartbeat(beat(at=1.0, devices=[device(cores=8, memory_mb=9000)]), 1.0)
    decision = InfaasPolicy().select(ask(latency_s=0.0016), 1.0, found)
    assert decision.refusal is not None and decision.refusal.closest is not UNSET
    assert decision.refusal.code == "unsatisfiable"
    assert "as accurate as its model" in decision.refusal.message
    assert "state an accuracy: far has 0.94" in decision.refusal.message
    offer = decision.refusal.closest
    assert served(found, accuracy=offer.accuracy, latency_s=(offer.latency_ms or math.inf) / 1000.0) >= {"far"}


@pytest.mark.parametrize("policy", [InfaasPolicy, BruteForce])
def test_instances_that_run_are_chosen_by_the_same_rule(policy: type[InfaasPolicy] | type[BruteForce]) -> None:
    found = view(*THREE)
    running = [instance(record.variant, record.variant) for record in THREE]
    found.heartbeat(beat(*running, at=1.0, devices=[device(cores=8, memory_mb=9000)]), 1.0)

    def chosen(**needs: object) -> list[str]:
        chosen = policy().select(ask(**needs), 1.0, found).instance
        return [chosen] if chosen is not None else []

    assert chosen() == ["near"]  # the cheapest of those that answer as their model does
    assert chosen(model="m") == ["near"]
    assert chosen(accuracy=0.5) == ["far"]
    assert chosen(accuracy=0.95) == ["own"]
    assert chosen(variant="far") == ["far"]
