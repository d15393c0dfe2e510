"""`infaas container`: what is wrong is said before anything is started, and what the class does wrong before anybody is asked."""

import json
from pathlib import Path

import numpy as np
import pytest

from infaas.cli import main

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
