"""What is asked of the photograph family follows what was measured of it."""

from hypothesis import given
from hypothesis import strategies as st

from examples.photos import query_kinds

MEASURED = st.fixed_dictionaries({"accuracy": st.floats(0.3, 0.99), "cost_per_1000": st.floats(1e-6, 1e-2)})


@given(variants=st.lists(MEASURED, min_size=1, max_size=12))
def test_what_is_called_possible_some_variant_can(variants: list[dict[str, float]]) -> None:
    made = query_kinds(variants)
    assert len({kind.name for kind in made}) >= len(made) - 1  # the best and the middling accuracy may be one
    for kind in made:
        accuracy, cost = kind.needs.get("accuracy") or 0.0, kind.needs.get("cost") or float("inf")
        can = any(row["accuracy"] >= accuracy and row["cost_per_1000"] <= cost for row in variants)
        if kind.needs.get("latency_ms") != 0.1:
            assert can is kind.possible
