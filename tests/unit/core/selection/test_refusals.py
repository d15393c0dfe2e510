"""What is on offer instead of an unsatisfiable query is served, and keeps as many of its needs as it can."""

from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bus.messages.public import Closest
from services.core.selection.eligibility import Ask
from services.core.selection.instances import OVERHEAD
from services.core.selection.policy import BruteForce, InfaasPolicy, RoundRobin
from tests.support.data.examples import examples
from tests.unit.core.selection.test_policy import NOW, ask, view_of

facts = st.fixed_dictionaries(
    {
        "accuracy": st.floats(0.3, 1.0),
        "base_ms": st.floats(0.001, 90.0),
        "per_item_ms": st.floats(0.0001, 9.0),
        "threads": st.sampled_from([1, 2, 4]),
    }
)


def needs_of(wish: dict[str, Any]) -> Ask:
    return ask(wish["latency"], accuracy=wish["accuracy"], cost=wish["cost"], model=wish.get("model"), priority=5)


wishes = st.fixed_dictionaries(
    {
        "latency": st.one_of(st.floats(1e-6, 0.2), st.just(5.0)),
        "accuracy": st.one_of(st.just(0.0), st.floats(0.3, 1.0)),
        "cost": st.one_of(st.just(float("inf")), st.floats(1e-10, 1e-2)),
    }
)


@settings(max_examples=examples(200))
@given(st.lists(st.tuples(st.sampled_from(["Active", None]), facts), min_size=1, max_size=8), wishes)
def test_exactly_what_is_offered_is_dispatched_or_loaded_on_an_idle_fleet(
    variants: list[tuple[str | None, dict[str, Any]]], wish: dict[str, Any]
) -> None:
    """In figures as people see and type them."""
    view = view_of(variants, cores=64)
    for policy in (InfaasPolicy(probe_share=0.0), BruteForce(), RoundRobin()):
        refusal = policy.select(needs_of(wish), NOW, view).refusal
        assume(refusal is not None and refusal.code == "unsatisfiable")
        closest = refusal.closest
        again = {"accuracy": float(f"{closest.accuracy:.4g}"), "cost": float(f"{closest.cost:.3g}")}
        served = policy.select(needs_of(again | {"latency": float(f"{closest.latency_ms:.3g}") / 1000.0}), NOW, view)
        assert served.instance or (served.load and served.refusal is None), (wish, closest)


@settings(max_examples=examples(200))
@given(st.lists(facts, min_size=1, max_size=8), wishes)
def test_the_offer_misses_as_few_needs_as_any_variant(variants: list[dict[str, Any]], wish: dict[str, Any]) -> None:
    view = view_of([("Active", one) for one in variants], cores=64)
    refusal = InfaasPolicy().select(needs_of(wish), NOW, view).refusal
    assume(refusal is not None and refusal.code == "unsatisfiable")
    assert refusal is not None
    app = view.apps["app"]

    def missed(i: int) -> int:
        return (
            bool(app.accuracy[i] < wish["accuracy"])
            + bool(app.latency(1)[i] + OVERHEAD > wish["latency"])
            + bool(app.charge(1)[i] > wish["cost"])
        )

    assert isinstance(refusal.closest, Closest)
    assert missed(app.index[refusal.closest.variant]) == min(missed(i) for i in range(len(variants)))


@pytest.mark.parametrize(
    ("needs", "offered"),
    [
        ({"latency": 0.01, "accuracy": 0.9}, "v0"),  # the accurate one misses the time, the fast one the accuracy
        ({"latency": 0.0001, "accuracy": 0.9}, "v0"),  # nobody is so fast: one that keeps the accuracy
        ({"latency": 0.0001, "accuracy": 0.6}, "v1"),
        ({"latency": 1.0, "accuracy": 0.99}, "v0"),
    ],
)
def test_the_offer_keeps_the_accuracy_where_it_can(needs: dict[str, Any], offered: str) -> None:
    view = view_of([("Active", {"accuracy": 0.95, "base_ms": 40.0}), ("Active", {"accuracy": 0.7, "base_ms": 2.0})])
    refusal = InfaasPolicy().select(ask(**needs), NOW, view).refusal
    assert isinstance(refusal.closest, Closest)
    assert refusal.closest.variant == offered


def test_an_objective_that_leaves_no_time_for_the_way_is_unsatisfiable() -> None:
    """Inference takes 2.5 ms."""
    view = view_of([("Active", {"base_ms": 2.0})])
    refusal = InfaasPolicy().select(ask(0.0025 + OVERHEAD / 2), NOW, view).refusal
    assert refusal.code == "unsatisfiable"
