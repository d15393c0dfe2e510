"""What a demand accepts."""

import pytest
from msgspec.structs import replace

from services.core.planning.problem import CandidateVariant, RequirementClass
from tests.support.data.planning_problems import TABLE_2

DEMAND = RequirementClass(app="classify", load=10, latency_ms=300)


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
