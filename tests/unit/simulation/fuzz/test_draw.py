"""What seeds draw: scenarios that a file can say."""

import tomllib
from pathlib import Path

import pytest

from services.simulation.fuzz.draw import RECOVERS_S, document_of
from services.simulation.fuzz.kinds import BESIDE, KINDS
from services.simulation.fuzz.violations import last_end
from services.simulation.scenario.read import derive, read_scenario
from services.simulation.scenario.toml import toml_of

SEEDS = range(1, 120)


def test_each_is_a_valid_scenario_that_its_text_says(tmp_path: Path) -> None:
    for seed in SEEDS:
        document = document_of(seed)
        text = toml_of(document)
        assert tomllib.loads(text) == document == document_of(seed)
        scenario = derive(document, Path("drawn.toml"))
        assert scenario.checked
        assert scenario.duration_s - last_end(scenario.faults) >= RECOVERS_S, seed
        assert sum(machine.start for machine in scenario.policies[0].machines) in range(1, 5)
    file = tmp_path / "drawn.toml"
    file.write_text(text)
    assert read_scenario(file).faults == scenario.faults


def test_everything_is_drawn() -> None:
    drawn = [document_of(seed) for seed in range(1, 400)]
    assert {fault["kind"] for one in drawn for fault in one["fault"]} == {*KINDS, *BESIDE}
    for key in ("pipeline", "job"):
        assert any(key in one for one in drawn) and not all(key in one for one in drawn)
    needs = {key for one in drawn for load in one["load"] for key in load}
    assert needs >= {
        "latency_ms",
        "accuracy",
        "cost",
        "model",
        "variant",
        "priority",
        "confidence",
        "context",
        "feedback",
        "repeats",
        "deadline",
    }
    assert {fault.get("what") for one in drawn for fault in one["fault"]} >= {"version", "target"}
    assert any("default_output" in app for one in drawn for app in one["app"])
    assert {one["settings"]["dispatcher"]["count"] for one in drawn} == {1, 2, 3}
    assert any("cache_mb" in app.get("selection", ()) for one in drawn for app in one["app"])
    assert {one["scenario"]["policies"][0] for one in drawn if "pipeline" in one} == {"infaas", "inferline"}


@pytest.mark.parametrize(
    "value", [1, -2.5, 1e-6, True, 'a "quoted" text\\', [1, [2.0, "x"]], {"a": {"b c": [1]}, "d": {}}, []]
)  # fmt: skip
def test_any_value_is_written_as_it_is_read(value: object) -> None:
    document = {"table": {"key": value}, "block": [{"key": value}, {"other key": value}]}
    assert tomllib.loads(toml_of(document)) == document
