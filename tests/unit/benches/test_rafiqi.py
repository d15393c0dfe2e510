"""Rafiqi's shape on virtual time, by the services' own actors: a GPU that holds four models is a cache of five."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches" / "paper"))

import compare
import rafiqi

from services.simulation.scenario.read import read_scenario

SCENARIO = rafiqi.copies(read_scenario(compare.HERE / "rafiqi.toml"), 5)
QUERIES = 200


def measured(pattern: str, models: int) -> rafiqi.Measured:
    found = rafiqi.measure(SCENARIO, pattern, models, QUERIES)
    assert len(found.latencies) == QUERIES
    return found


def test_a_power_law_swaps_seldom_and_even_requests_of_five_models_each_time() -> None:
    found = measured("sequential", 5)
    assert found.swaps == QUERIES and found.demoted == QUERIES - rafiqi.CAP
    assert max(found.latencies) < 1000.0, "a model that is made again takes 30 s"
    assert measured("zipf", 5).swaps < 0.2 * QUERIES


@pytest.mark.parametrize("pattern", rafiqi.PATTERNS)
def test_four_models_come_to_the_device_once(pattern: str) -> None:
    found = measured(pattern, 4)
    assert (found.swaps, found.demoted) == (4, 0)


def test_many_queries_at_a_time_for_five_models_are_all_answered() -> None:
    found = rafiqi.measure(SCENARIO, "uniform", 5, QUERIES, clients=16)
    assert len(found.latencies) == QUERIES
    assert found.demoted > 0
