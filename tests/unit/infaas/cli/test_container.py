"""`infaas container`: what is wrong is said before anything is started, and what the class does wrong before anybody is asked."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.public import Register
from infaas.cli import main
from infaas.cli.container import without_effect
from tests.support.simulated.registrations import app_record, model_record, variant_record

CLASSES = """
import numpy as np

class Sums:
    def predict_batch(self, inputs):
        return {"scores": inputs["x"] @ np.eye(3, dtype=np.float32)}

class Crowd:
    def predict_batch(self, inputs):
        return {"scores": inputs["x"] + len(inputs["x"]) * np.arange(3)}

class Two:
    def predict_batch(self, inputs):
        return {"scores": inputs["a"] + inputs["b"]}

class Nan:
    def predict_batch(self, inputs):
        return {"scores": inputs["x"] * np.nan}

class Words:
    def predict_batch(self, inputs):
        return {"words": ["no"] * len(inputs["x"])}
"""
WHERE = ["--app", "a", "--model", "m"]


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "classes.py").write_text(CLASSES)
    x = np.random.default_rng(0).normal(size=(50, 3)).astype(np.float32)
    np.savez(tmp_path / "v.npz", x=x, y=x.argmax(axis=1), **{"p.a": x, "p.b": 0 * x})
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (["classes", *WHERE, "--validation", "v.npz"], "MODULE:CLASS"),
        (["classes.py:Sums;x", *WHERE, "--validation", "v.npz"], "MODULE:CLASS"),
        (["classes:Sums", *WHERE, "--validation", "none.npz"], "no such file"),
        (["classes:Sums", "--app", "a b", "--model", "m", "--validation", "v.npz"], "--app a b"),
        (["classes:Sums", *WHERE, "--version", "1.0", "--validation", "v.npz"], "--version 1.0"),
        (["classes:Sums", *WHERE, "--max-batch", "0", "--validation", "v.npz"], "--max-batch 0"),
        (["classes:Sums", *WHERE], "--validation"),
    ],
)
def test_bad_usage_exits_2_with_one_line(
    place: Path, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["container", *arguments]) == 2
    assert word in capsys.readouterr().err


REGISTERED = Register(
    app="digits", model="mlp", format="container", object="", validation="", task="reading", metric="top5",
    labels=["no", "yes"], latency_ms=20.0, slo_target=0.9, default_output=[0],
)  # fmt: skip
RECORD = model_record(task="reading", metric="top5", labels=["no", "yes"])
APP = app_record(latency_ms=20.0, slo_target=0.9, default_output=[0])


@pytest.mark.parametrize(
    ("changes", "option"),
    [
        ({}, None),
        ({"task": None, "labels": [], "latency_ms": None, "slo_target": None, "default_output": None}, None),
        ({"task": "writing"}, "task"),
        ({"metric": "mae"}, "metric"),
        ({"labels": ["yes", "no"]}, "labels"),
        ({"latency_ms": 30.0}, "latency-ms"),
        ({"slo_target": 0.99}, "slo-target"),
        ({"default_output": [1]}, "default-output"),
        ({"accuracy": "any"}, "accuracy"),
    ],
)
def test_the_same_command_adds_a_replica_and_another_one_says_what_has_no_effect(
    changes: dict[str, Any], option: str | None
) -> None:
    asked = replace(REGISTERED, **changes)
    wrong = without_effect(asked, {"metric", "max_batch"}, 8, RECORD, APP, variant_record())
    assert [one.partition(":")[0] for one in wrong] == ([] if option is None else [f"--{option}"])


def test_only_what_was_given_of_the_options_with_a_default_counts_for_a_replica() -> None:
    other = replace(REGISTERED, metric="mae")
    for given, options in (
        ((), []),
        (("metric",), ["--metric"]),
        (("metric", "max_batch"), ["--metric", "--max-batch"]),
    ):
        wrong = without_effect(other, given, 16, RECORD, APP, variant_record())
        assert [one.partition(":")[0] for one in wrong] == options


def tried(capsys: pytest.CaptureFixture[str], name: str, *more: str) -> dict[str, object]:
    assert main(["container", f"classes:{name}", *WHERE, "--validation", "v.npz", "--dry-run", "--json", *more]) == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)
    return found


def test_a_dry_run_prints_what_would_be_registered(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tried(capsys, "Sums", "--max-batch", "12")
    assert found["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [3]}]
    assert found["outputs"] == [{"name": "scores", "datatype": "FP32", "shape": [3]}]
    assert (found["accuracy"], found["samples"], found["max_batch"]) == (1.0, 50, 12)
    latency = found["latency_ms"]
    assert isinstance(latency, dict)
    assert list(latency) == ["1", "2", "4", "8", "12"]


def test_a_class_that_batches_wrongly_gets_one_item_at_a_time(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tried(capsys, "Crowd")["max_batch"] == 1


def test_several_inputs(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tried(capsys, "Two", "--inputs-key", "p")
    assert [spec["name"] for spec in found["inputs"]] == ["a", "b"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "more", "word"),
    [
        ("Nan", [], "NaN"),
        ("Words", [], "no output can be scored"),
        ("Sums", ["--labels-key", "labels"], "labels"),
        ("Sums", ["--inputs-key", "pictures"], "pictures"),
        ("Missing", [], "Missing"),
        ("Two", [], "KeyError: 'a'"),
    ],
)
def test_what_the_class_does_wrong_is_said_and_exits_1(
    place: Path, name: str, more: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["container", f"classes:{name}", *WHERE, "--validation", "v.npz", "--dry-run", *more]
    assert main(command) == 1
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith(f"infaas: classes:{name}: ")
    assert word in last
