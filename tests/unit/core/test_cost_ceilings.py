"""A cost ceiling from selection to account: what is chosen under it owes, batch by batch as predicted, no more than it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.core.cost import HANDLING_MS, cost_per_1000, instance_price_per_s, query_cost
from services.core.selection import InfaasPolicy
from tests.support.simulated.fleet import PRICES, Fleet, variant
from tests.unit.core.test_selection import NOW, ask, view_of


@given(st.floats(0.001, 100.0), st.integers(1, 8))
def test_the_expected_price_is_what_queries_of_such_batches_owe(base_ms: float, batch: int) -> None:
    """For small models the handling of a batch is most of it."""
    record = variant(base_ms=base_ms, per_item_ms=0.0)
    price = instance_price_per_s(record, PRICES, 2, 8000.0)
    busy = (base_ms + HANDLING_MS) / 1000.0
    owed = 1000.0 * query_cost(price, busy, batch, 1)
    assert cost_per_1000(record, price, batch) == pytest.approx(owed)


def test_a_ceiling_passes_over_an_active_variant_that_is_dearer() -> None:
    view = view_of([("Active", {"base_ms": 40.0, "accuracy": 0.9}), ("Active", {"base_ms": 1.0, "accuracy": 0.9})])
    dear, cheap = (float(cost) for cost in view.apps["app"].cost)
    policy = InfaasPolicy(probe_share=0.0)
    assert policy.select(ask(cost=(dear + cheap) / 2), NOW, view).assignments == ("i1",)
    refusal = policy.select(ask(cost=cheap * 0.99), NOW, view).refusal
    assert refusal is not None
    assert refusal.code == "unsatisfiable"
    assert refusal.closest is not None
    assert (refusal.closest.variant, refusal.closest.cost) == ("v1", pytest.approx(cheap))


def test_a_batch_that_took_much_longer_says_that_it_missed_the_ceiling() -> None:
    fleet = Fleet()
    fleet.ask()
    fleet.stage.run(1.0)
    record = variant()
    ceiling = 1.5 * cost_per_1000(record, instance_price_per_s(record, PRICES, 2, 8000.0))
    label = fleet.ask(cost=ceiling)
    fleet.stage.run(1.0)
    (reply,) = fleet.replies(label)
    assert (reply["missed"], 1000 * reply["cost"] <= ceiling) == ([], True)
    fleet.devices["w0"].slow = 10.0
    label = fleet.ask(cost=ceiling)
    fleet.stage.run(1.0)
    (reply,) = fleet.replies(label)
    assert (reply["missed"], 1000 * reply["cost"] > ceiling) == (["cost"], True)
