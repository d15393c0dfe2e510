"""What seeds draw: scenarios that a file can say."""

import tomllib
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.public import Feedback, QueryHead
from services.core.toml import toml_of
from services.dispatcher.contexts import read_value
from services.simulation.fuzz.draw import BESIDE, KINDS, RECOVERS_S, document_of
from services.simulation.fuzz.trial import FaultTrial, scenario_of
from services.simulation.fuzz.violations import last_end
from services.simulation.scenario.read import derive, read_scenario

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
    assert {fault["kind"] for one in drawn for fault in one["fault"]} == {
        *KINDS,
        *BESIDE,
        "query-cancelled",
        "labels-late",
    }
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


# -- Feedback that is sent again and again while dispatchers die and connections fail counts once, whatever it names.
# Virtual time.
AGAIN_S = (0.05, 0.4, 3.0, 12.0)


def test_a_feedback_that_comes_again_counts_once_whatever_fails() -> None:
    trial = FaultTrial(scenario_of(2125))  # two dispatchers die, one after the other
    kernel, publish = trial.kernel, trial.kernel.publish
    inputs: list[Any] = []
    sent: dict[str, set[tuple[str, int]]] = defaultdict(set)

    def published(
        subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Any = None
    ) -> None:
        if type(message) is QueryHead and not inputs:
            inputs.append(message.inputs)
        if type(message) is not Feedback or message.query is None:
            publish(subject, message, reply, body, by, headers)
            return
        named = sent[subject.rpartition(".")[2]]
        number = len(named)
        named.add((message.query, message.item))
        if number % 2:
            message = replace(message, retry_key=number.to_bytes(16, "big"))
        if number % 3 == 0:
            message = replace(message, inputs=inputs[0])  # then it counts although its prediction is forgotten
        publish(subject, message, reply, body, by, headers)
        for delay in AGAIN_S[: 1 + number % 4]:
            kernel.at(delay, partial(_call, publish, subject, message))

    kernel.publish = published  # type: ignore[method-assign]
    verdict = trial.verdict()
    assert not [one for one in verdict.violations if one.invariant == "no-error"]
    counted: dict[str, int] = defaultdict(int)
    for key, stored in trial.system.contexts.items():
        value = None if key.endswith(".counted") else read_value(stored.value)
        counted[key.partition(".")[0]] += 0 if value is None else value.n
    assert sum(counted.values()) > 50
    assert all(counted[app] <= len(named) for app, named in sent.items())


def _call(publish: Any, subject: str, message: Any, _: Any) -> None:
    publish(subject, message)
