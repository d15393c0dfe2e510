"""Whether instances carry demands: against a linear programme."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from services.autoscaler.models.coverage import shortfall
from services.core.planning.problem import CandidateVariant, RequirementClass

APPS = ("a", "b", "c", "d")


def candidate(i: int, apps: tuple[str, ...], rate: float, latency_ms: float) -> CandidateVariant:
    return CandidateVariant(
        name=f"v{i}", apps=apps, model="m", hardware="cpu", latency_ms=latency_ms, saturation_qps=rate, cost_per_s=1.0
    )


candidates = st.lists(
    st.tuples(
        st.sets(st.sampled_from(APPS), min_size=1).map(sorted).map(tuple), st.integers(1, 50), st.sampled_from([5, 50])
    ),
    min_size=1,
    max_size=6,
).map(lambda found: [candidate(i, apps, float(rate), float(ms)) for i, (apps, rate, ms) in enumerate(found)])
demands = st.lists(
    st.builds(
        RequirementClass,
        app=st.sampled_from(APPS),
        load=st.integers(0, 100).map(float),
        latency_ms=st.sampled_from([10.0, 100.0]),
    ),
    min_size=1,
    max_size=6,
)


@given(candidates, demands, st.lists(st.integers(0, 3), min_size=6, max_size=6))
def test_what_is_missing_is_as_little_as_can_be(
    found: list[CandidateVariant], asked: list[RequirementClass], numbers: list[int]
) -> None:
    counts = {one.name: n for one, n in zip(found, numbers, strict=False)}
    short = shortfall(found, asked, counts, 1.05)
    pairs = [(c, k) for c, one in enumerate(found) for k, demand in enumerate(asked) if demand.accepts(one)]
    served = 0.0
    if pairs:
        rows = [[float(c == i) for c, _ in pairs] for i in range(len(found))]
        rows += [[float(k == i) for _, k in pairs] for i in range(len(asked))]
        limits = [one.saturation_qps * counts[one.name] for one in found] + [1.05 * d.load for d in asked]
        served = -linprog(-np.ones(len(pairs)), A_ub=np.array(rows), b_ub=np.array(limits)).fun
    needed = sum(1.05 * demand.load for demand in asked)
    assert abs(sum(short.values()) - (needed - served)) < 1e-4 * max(1.0, needed)


def test_too_few_instances_are_missing_too() -> None:
    one = candidate(0, ("a",), 10.0, 5.0)
    asked = [RequirementClass(app="a", load=0.0, least=2)]
    assert shortfall([one], asked, {"v0": 1}, 1.05) == {0: 0.0}
    assert shortfall([one], asked, {"v0": 2}, 1.05) == {}
