"""Whatever the load does and whichever solver decides: what goes is not needed, and nobody is left without an instance."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.catalog import VariantRecord
from services.autoscaler.models.supply import throughput
from services.core.cost import LatencyTable
from tests.support.simulated.autoscaled_fleet import CPU, GPU, ScalingFleet
from tests.support.simulated.fleet import variant

LATENCY_MS = 300.0
SETTLED = 1.5  # s after a change of load in which it may not be known yet


def made(i: int, hardware: str, base_ms: float, per_item_ms: float, load_ms: float) -> VariantRecord:
    return variant(
        f"m-v1-x{i}-fp32-t1-b8",
        hardware=hardware,
        base_ms=base_ms,
        per_item_ms=per_item_ms,
        load_ms=load_ms,
        framework=f"x{i}",
    )


variants = st.lists(
    st.tuples(
        st.sampled_from(["cpu", "cpu", "gpu"]),
        st.integers(1, 20),
        st.integers(2, 25),
        st.sampled_from([50.0, 800.0, 3000.0]),
    ),
    min_size=2,
    max_size=4,
).map(lambda found: [made(i, hw, float(base), float(per), load) for i, (hw, base, per, load) in enumerate(found)])
loads = st.lists(st.tuples(st.sampled_from([0, 2, 20, 60, 120]), st.sampled_from([3.0, 6.0])), min_size=4, max_size=7)


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["greedy", "ilp"])
@settings(max_examples=15)
@given(variants, loads)
def test_what_goes_is_not_needed(solver: str, records: list[VariantRecord], steps: list[tuple[int, float]]) -> None:
    fleet = ScalingFleet(*records, solver=solver, hold_s=2.0, devices={"w0": (CPU, GPU)})
    rates = {r.variant: throughput(LatencyTable(r), LATENCY_MS / 1000.0) for r in records}
    changed = fleet.stage.now
    before: dict[str, Any] = {}
    for rate, seconds in steps:
        fleet.counts.clear()
        changed = fleet.stage.now
        fleet.load(rate, seconds, latency_ms=LATENCY_MS)
        for at, counts in fleet.counts:
            after = _serving(counts)
            gone = [name for name, n in before.items() if after.get(name, 0) < n]
            if gone and at - changed > SETTLED:
                capacity = sum(rates[name] * n for name, n in after.items())
                assert capacity >= rate, (gone, after, rate)
                assert sum(after.values()) >= 1
            before = after


def _serving(counts: dict[str, dict[str, int]]) -> dict[str, int]:
    return {
        name: sum(n for state, n in states.items() if state in ("Active", "Overloaded", "Interfered"))
        for name, states in counts.items()
    }
