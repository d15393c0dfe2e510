"""An accuracy in the mean, and what accuracy is worth, from a scenario's file to the answers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from services.simulation.run import simulate_all
from tests.support.data.small_scenarios import read

VARIANTS = {"small": (0.6, 40), "large": (0.9, 160)}


def document(own: Mapping[str, float], common: Mapping[str, float]) -> dict[str, Any]:
    """25 queries/s: one core with the small variant, or four with the large one, and what stands by for bursts."""
    return {
        "scenario": {"duration_s": 120, "seed": 1},
        "autoscaler": common,
        "app": [{"name": "a", "latency_ms": 1000, **own}],
        "variant": [
            {
                "app": "a", "name": name, "hardware": "cpu", "latency_ms": item, "max_batch": 1, "accuracy": accuracy,
                "load_s": 1.0, "memory_gb": 1.0,
            }
            for name, (accuracy, item) in VARIANTS.items()
        ],
        "worker": [
            {
                "kind": "w", "devices": {"cpu": 1}, "resources": {"memory_gb": 1.0}, "price_per_hour": 1.0,
                "start": 2, "min": 1, "max": 12,
            }
        ],
        "load": [{"app": "a", "rate": 25}],
    }  # fmt: skip


def answered(tmp_path: Path, own: Mapping[str, float] = {}, common: Mapping[str, float] = {}) -> dict[str, Any]:
    """The result, whose queries are in time."""
    found: dict[str, Any] = simulate_all(read(tmp_path, document(own, common)))["policies"][0]
    assert found["slo_violation_ratio"] < 0.05
    return found


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return answered(tmp_path_factory.mktemp("plain"))


@pytest.mark.parametrize("own", [True, False])
def test_answers_have_an_accuracy_in_the_mean(tmp_path: Path, plain: dict[str, Any], *, own: bool) -> None:
    """accuracy_mean: of the app, or of all that have none."""
    wanted = {"accuracy_mean": 0.75}
    found = answered(tmp_path, *((wanted, {"accuracy_mean": 0.6}) if own else ({}, wanted)))
    assert plain["effective_accuracy"] < 0.61
    assert 0.74 <= found["effective_accuracy"] < 0.88
    assert plain["cost"] < found["cost"]


@pytest.mark.slow
def test_more_accuracy_is_bought_where_it_is_worth_more(tmp_path: Path, plain: dict[str, Any]) -> None:
    """30 points of 25 answers/s for some three cores: worth 2.7 US$ an hour at 0.001 US$ for 1,000 and a point."""
    dear = answered(tmp_path, {"worth": 0.01})
    assert dear["effective_accuracy"] > 0.88
    assert answered(tmp_path, common={"worth": 0.0001})["effective_accuracy"] < 0.7
    assert answered(tmp_path, {"worth": 0.0}, {"worth": 0.01})["cost"] < dear["cost"]


@pytest.mark.slow
def test_what_is_paid_anyway_serves_the_most_accurate_answers_if_they_are_worth_anything(tmp_path: Path) -> None:
    """One machine of four cores that nobody may stop, for 10 queries/s: 1.6 cores with the large variant. The bill stays as it is."""
    found = []
    for folder, own in (("plain", {}), ("worth", {"worth": 1e-5}), ("mean", {"accuracy_mean": 0.65})):
        (tmp_path / folder).mkdir()
        scenario = document(own, {})
        scenario["load"] = [{"app": "a", "rate": 10}]
        machine = {"devices": {"cpu": 4}, "resources": {"memory_gb": 8.0}, "start": 1, "min": 1, "max": 1}
        scenario["worker"] = [scenario["worker"][0] | machine]
        result = simulate_all(read(tmp_path / folder, scenario))["policies"][0]
        assert (result["slo_violation_ratio"], result["cost"]) == (0.0, pytest.approx(120 / 3600))
        found.append(result["effective_accuracy"])
    plain, *better = found
    assert plain < 0.61
    assert min(better) > 0.85
