"""The bench of the simulator, very small: both policies run, and what it is said to measure is there."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from scale import CORES, fleet, loop

from services.simulation.report import RunReport
from services.simulation.run import simulate


@pytest.mark.parametrize("policy", ["infaas", "static"])
def test_a_small_cluster(policy: str) -> None:
    scenario = fleet(2, 4.0, policy=policy)
    found = simulate(scenario, scenario.policies[0], RunReport.of(scenario, scenario.policies[0]))
    assert 120 < found["queries"] < 200  # 2 workers, 4 s, 20/s each on average
    assert found["answered"] + found["refused"] == found["queries"]
    assert found["answered"] > 0


def test_static_has_ten_instances_a_worker_whatever_the_number_of_apps() -> None:
    for apps in (10, 40):
        scenario = fleet(4, 1.0, policy="static", apps=apps)
        assert sum(one.instances for one in scenario.policies[0].choice.values()) == 40


def test_the_loop_answers_everything_in_time() -> None:
    scenario = loop(200.0, 2.0)
    assert scenario.policies[0].machines[0].devices[0].cores == CORES
    found = simulate(scenario, scenario.policies[0], RunReport.of(scenario, scenario.policies[0]))
    assert (found["refused"], found["late"]) == (0, 0)
