"""Several models that answer together in the simulator: on the services' own actors, with feedback, and the same in each run."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.messages.public import Answer, TensorView
from services.simulation.composites import CLASSES, QueryItems, SimulatedModels, said, truth, wrong_items
from services.simulation.report import MEASURED
from services.simulation.run import simulate_all
from services.simulation.scenario.read import derive
from tests.support.data.small_scenarios import variant

ACCURACIES = {"a": 0.95, "b": 0.8, "c": 0.7}


def scenario(load: dict[str, Any] | None = None, faults: list[dict[str, Any]] | None = None, **selection: Any) -> Any:
    """Three models that answer within milliseconds, for 20 s."""
    content: dict[str, Any] = {
        "scenario": {"duration_s": 20, "metrics_every_s": 1.0},
        "app": [{"name": "digits", "latency_ms": 200, "selection": {"policy": "exp4", "eta": 0.5} | selection}],
        "variant": [
            {"app": "digits", "name": name, "hardware": "cpu", "latency_ms": 4.0, "accuracy": accuracy}
            for name, accuracy in ACCURACIES.items()
        ],
        "worker": [{"kind": "cpu", "devices": {"cpu": 8}, "price_per_hour": 0.2, "start": 1}],
        "load": [{"app": "digits", "rate": 30, "feedback": 1.0} | (load or {})],
    }
    return derive(content | ({"fault": faults} if faults else {}), Path("s.toml"))


def run(*args: Any, **selection: Any) -> Any:
    (found,) = simulate_all(scenario(*args, **selection))["policies"]
    return {key: value for key, value in found.items() if key not in MEASURED}


def test_models_are_right_as_often_as_their_accuracy_says_and_err_independently() -> None:
    items = range(4000)
    right = {m: np.array([said(m, share, item) == truth(item) for item in items]) for m, share in ACCURACIES.items()}
    for model, share in ACCURACIES.items():
        assert abs(right[model].mean() - share) < 0.02
    assert abs(np.corrcoef(right["b"], right["c"])[0, 1]) < 0.05
    assert {truth(item) for item in items} == set(range(CLASSES)) == {said("z", 0.0, item) for item in items}


def test_outputs_are_those_of_the_accuracy_and_all_wrong_while_the_model_errs() -> None:
    models, record = SimulatedModels(), variant("v", "m", "cpu", 5.0, accuracy=1.0)
    tensor = TensorView("INT64", [50], memoryview(np.arange(50).tobytes()))
    labels = np.array([truth(item) for item in range(50)])

    def wrong() -> int:
        answer = Answer(None, models.outputs(record, tensor), *"mvvhw", 1.0, 1.0, 0.0, 0.0, 1, False, True, 0.0, [])
        return wrong_items(answer, labels)

    assert wrong() == 0
    models.wrong = lambda one: one is record
    assert wrong() == 50
    assert models.outputs(record, TensorView("BOOL", [1], memoryview(b"\0"))) == {} == models.outputs(record, None)


def test_repeats_are_the_items_of_earlier_queries() -> None:
    def inputs(repeats: float) -> list[bytes]:
        items = QueryItems(7, 2, {}, repeats=repeats)
        return [bytes(items.next(f"_INBOX.c.{n}")[0].inputs) for n in range(2000)]

    assert len(set(inputs(0.0))) == 2000
    assert 900 < len(set(inputs(0.5))) < 1100
    assert inputs(0.5) == inputs(0.5)
    assert len(set(inputs(1.0))) == 1


def test_several_models_answer_together_and_feedback_tells_them_apart() -> None:
    found = run()
    several = found["apps"]["digits"]["ensemble"]
    assert found["answered"] == found["queries"] > 500
    assert several["missing"] == 0
    assert several["error"] < 0.08  # near the best one's 5 %, though the others err on 20 % and 30 %
    members = several["members"]
    assert all(one["answers"] == found["answered"] for one in members.values())
    assert all(one["feedbacks"] > 0.95 * found["answered"] for one in members.values())
    for name, accuracy in ACCURACIES.items():
        assert members[name]["error"] == pytest.approx(1 - accuracy, abs=0.06)
    assert members["a"]["weight"] > 0.9
    assert set(found["variants"]) == set()  # no variant answers alone


def test_a_model_that_errs_for_a_while_loses_its_weight_and_gets_it_back() -> None:
    series = run({}, [{"kind": "model-errs", "model": "a", "at_s": 6, "until_s": 12}])["apps"]["digits"]["ensemble"][
        "series"
    ]
    assert len(series["error"]) == len(series["weights"]["a"]) >= 20
    weights = series["weights"]["a"]
    assert weights[5] > 0.8
    assert max(weights[8:12]) < 0.1
    assert weights[19] > 0.5


def test_feedback_teaches_by_context_or_nothing() -> None:
    members = run({"feedback": 0.0})["apps"]["digits"]["ensemble"]["members"]
    assert {one["weight"] for one in members.values()} == {None}
    assert {one["feedbacks"] for one in members.values()} == {0}
    members = run({"context": "north"}, contextual=True)["apps"]["digits"]["ensemble"]["members"]
    assert members["north/a"]["weight"] > 0.9


@pytest.mark.slow
def test_exp3_asks_one_member_and_repeats_come_from_the_cache() -> None:
    found = run(policy="exp3", eta=0.1)
    members = found["apps"]["digits"]["ensemble"]["members"]
    assert sum(one["answers"] for one in members.values()) == found["answered"]
    assert members["a"]["answers"] > max(members["b"]["answers"], members["c"]["answers"])
    cached = run({"repeats": 0.5}, cache_mb=1)["apps"]["digits"]
    assert 0.4 < (cached["ensemble"]["cached"] / cached["answered"]) < 0.6
    assert run({"repeats": 0.5})["apps"]["digits"]["ensemble"]["cached"] == 0
    assert SimulatedModels().outputs(variant("v", "m", "cpu", 5.0), [1, 2]) == {}


def test_the_same_scenario_gives_the_same_result_with_feedback_and_a_fault() -> None:
    def text() -> str:
        fault = {"kind": "model-errs", "model": "b", "at_s": 3, "until_s": 8}
        return json.dumps(run({"feedback": 0.5, "repeats": 0.3, "items": 2}, [fault], cache_mb=1))

    assert text() == text()
