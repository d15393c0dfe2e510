"""Nonsense is refused with the place and the reason; what a demand accepts."""

import pytest
from msgspec.structs import replace

from services.core.planning.problem import (
    CandidateVariant,
    InvalidPlanningProblem,
    PlanningProblem,
    RequirementClass,
    check,
)
from tests.support.data.planning_problems import TABLE_2, entangled_problem, table_3

NAN, INF = float("nan"), float("inf")
DEMAND = RequirementClass(app="classify", load=10, latency_ms=300)


@pytest.mark.parametrize(
    ("changes", "place"),
    [
        ({"slack": 0.0}, "slack"),
        ({"slack": NAN}, "slack"),
        ({"loading_weight": -0.1}, "loading_weight"),
        ({"budget_per_s": -1.0}, "budget_per_s"),
        ({"budget_per_s": NAN}, "budget_per_s"),
        ({"resources": {"gpus": -1.0}}, "resources.gpus"),
        ({"resources": {"gpus": INF}}, "resources.gpus"),
        ({"candidates": (TABLE_2[0], TABLE_2[0])}, "candidates[1].name"),
        ({"demands": (DEMAND, replace(DEMAND, load=20))}, "demands[1].app"),
        ({"demands": (replace(DEMAND, load=1e300),)}, "demands[0].load"),
    ],
)
def test_refused(changes: dict[str, object], place: str) -> None:
    with pytest.raises(InvalidPlanningProblem) as refused:
        check(table_3(10, 300, **changes))
    assert str(refused.value).startswith(f"{place}: ")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("latency_ms", 0.0),
        ("latency_ms", NAN),
        ("saturation_qps", 0.0),
        ("saturation_qps", INF),
        ("cost_per_s", -1.0),
        ("load_s", -1.0),
        ("accuracy", 1.1),
        ("running", -1),
        ("most", -1),
        ("cost_per_1000", -1.0),
    ],
)
def test_a_candidate_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidPlanningProblem, match=rf"^candidates\[1\]\.{field}: must be .*, not {value:g}$"):
        check(table_3(10, 300, candidates=(TABLE_2[0], replace(TABLE_2[1], **{field: value}))))


@pytest.mark.parametrize(("field", "value"), [("load", -1.0), ("latency_ms", 0.0), ("accuracy", -1.0), ("cost", -1.0)])
def test_a_demand_is_refused(field: str, value: float) -> None:
    with pytest.raises(InvalidPlanningProblem, match=rf"^demands\[0\]\.{field}: must be .*, not {value:g}$"):
        check(table_3(10, 300, demands=(replace(DEMAND, **{field: value}),)))


def test_sense_passes() -> None:
    check(table_3(10, 300))
    check(PlanningProblem(candidates=(), demands=()))
    for seed in range(20):
        check(entangled_problem(seed))


@pytest.mark.parametrize(
    ("demand", "accepted"),
    [
        ({}, True),
        ({"app": "other"}, False),
        ({"latency_ms": 200.0}, True),
        ({"latency_ms": 199.0}, False),
        ({"accuracy": 0.8}, True),
        ({"accuracy": 0.81}, False),
        ({"cost": 200.0}, True),
        ({"cost": 199.0}, False),
        ({"model": "resnet50"}, True),
        ({"model": "vgg"}, False),
        ({"variant": "A"}, True),
        ({"variant": "B"}, False),
    ],
)
def test_what_a_demand_accepts(demand: dict[str, object], accepted: bool) -> None:
    one: CandidateVariant = replace(TABLE_2[0], accuracy=0.8)
    assert replace(DEMAND, **demand).accepts(one) is accepted


def test_an_unmeasured_accuracy_is_held_against_nobody() -> None:
    """As in selection: the dispatcher would send such queries there."""
    assert replace(DEMAND, accuracy=1.0).accepts(TABLE_2[0])
