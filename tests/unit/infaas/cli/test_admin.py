"""What is wrong is said before anybody is asked or anything started: operators' verbs, `infaas container`, options of `infaas bench`."""

import json
from pathlib import Path

import numpy as np
import pytest

from bus.fields import fields_of
from bus.messages.verbs import ADMIN_VERBS
from infaas.cli import main
from infaas.cli.admin import VERBS
from infaas.cli.bench import CLOSED, LoadOptions
from services.simulation.workload import at_once, mean_rate, peak_rate, zipf
from tests.support.clients.commands import ran, refused


def test_each_verb_that_options_can_say_is_a_command_of_its_noun(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*ADMIN_VERBS} - {*VERBS} == {"set-pipeline", "deploy-pipeline", "prune"}, "commands of their own"
    for verb, kind in VERBS.items():
        for place in (["admin", verb], [kind.noun, verb.removesuffix(f"-{kind.noun}")]):
            told = ran(capsys, ["help", *place]).out
            assert [field for field in fields_of(kind) if f"--{field.replace('_', '-')}" not in told] == []


# -- `infaas container`: what is wrong is said before anything is started, and what the class does wrong before anybody is asked.
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
def test_wrong_containers_exit_2_with_one_line(
    place: Path, arguments: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert word in refused(capsys, ["container", *arguments])


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


def test_one_item_at_a_time_for_what_batches_wrongly_and_several_inputs(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tried(capsys, "Crowd")["max_batch"] == 1
    found = tried(capsys, "Two", "--inputs-key", "p")
    assert [spec["name"] for spec in found["inputs"]] == ["a", "b"]  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("name", "more", "word"),
    [
        ("Nan", [], "NaN"),
        ("Words", [], "no output can be scored"),
        ("Sums", ["--labels-key", "labels"], "give metric agreement, which needs none"),
        ("Sums", ["--inputs-key", "pictures"], "pictures"),
        ("Missing", [], "classes has no Missing; it has Sums, "),
        ("Two", [], "KeyError: 'a'"),
    ],
)
def test_what_the_class_does_wrong_is_said_and_exits_1(
    place: Path, name: str, more: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["container", f"classes:{name}", *WHERE, "--validation", "v.npz", "--dry-run", *more]
    last = ran(capsys, command, 1).err.strip().splitlines()[-1]
    assert last.startswith(f"infaas: classes:{name}: ")
    assert word in last


# -- The options of `infaas bench` that say what is sent.
ONE = ("a",)


def test_a_closed_loop_unless_times_are_given(tmp_path) -> None:
    """As `infaas bench` has it without --times or another option of a load."""
    assert LoadOptions().spec(ONE, 5) == (f"closed loop of {CLOSED}", None, (1.0,))
    assert LoadOptions(closed=3, shares="zipf").spec(("a", "b"), 5) == ("closed loop of 3", None, zipf(2))
    (tmp_path / "t.txt").write_text("0.5\n1\n7\n")
    told, load, _ = LoadOptions(times=tmp_path / "t.txt").spec(ONE, 5)
    assert told == "t.txt"
    assert at_once(load, 5, np.random.default_rng(0))[0].tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("options", "name", "mean", "peak"),
    [
        ({"rate": 30.0}, "poisson", 30, 30),
        ({"rate": 30.0, "arrivals": "uniform"}, "uniform", 30, 30),
        ({"rate": 30.0, "arrivals": "gamma", "cv": 2.5}, "gamma with CV 2.5", 30, 30),
        ({"rate_points": "0:4, 10:4, 10:80,20:40"}, "poisson", (40 + 600) / 20, 80),
        ({"rate_points": "0:20", "arrivals": "gamma", "cv": 1.0}, "gamma with CV 1", 20, 20),
        ({"arrivals": "mmpp", "rates": "10,100", "dwell": "2,1"}, "mmpp with 10,100 queries/s for 2,1 s", 40, 100),
    ],
)
def test_an_open_loop_is_a_load_as_in_a_scenario(options, name, mean, peak):
    """By --rate, --rate-points or --rates."""
    told, load, shares = LoadOptions(**options).spec(ONE, 20)
    assert (told, shares) == (name, (1.0,))
    assert mean_rate(load, 20) == pytest.approx(mean)
    assert peak_rate(load, 20) == pytest.approx(peak)


def test_traces_are_scaled_to_a_mean_or_a_range(tmp_path):
    """By --rate, --range-qps and --seconds-per-line."""
    path = tmp_path / "t.txt"
    path.write_text("# counts\n10\n30\n20\n500\n")
    told, load, _ = LoadOptions(trace=path).spec(ONE, 3)
    assert (told, len(at_once(load, 3, np.random.default_rng(0))[0])) == ("t.txt", 60)
    load = LoadOptions(trace=path, rate=5.0, seconds_per_line=10.0).spec(ONE, 30)[1]
    assert mean_rate(load, 30) == pytest.approx(5)
    assert peak_rate(load, 30) == pytest.approx(7.5)
    load = LoadOptions(trace=path, range_qps="1:50", seconds_per_line=0.5).spec(ONE, 2)[1]
    assert (peak_rate(load, 2), load.range_qps) == (50, (1, 50))


@pytest.mark.parametrize(
    ("shares", "wanted"),
    [(None, (1 / 3,) * 3), ("zipf", zipf(3)), ("zipf:2", zipf(3, 2)), ("0.7,0.2,0.1", (0.7, 0.2, 0.1))],
)
def test_apps_have_shares(shares, wanted):
    _, load, found = LoadOptions(rate=1.0, shares=shares).spec(("a", "b", "c"), 5)
    assert load.shares == found == pytest.approx(wanted)
    assert load.apps == ("a", "b", "c")
