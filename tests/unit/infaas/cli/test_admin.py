"""What is wrong is said before anybody is asked or anything started: operators' verbs, `infaas container`, options of `infaas bench`."""

import json
from pathlib import Path

import numpy as np
import pytest

from bus.fields import fields_of
from bus.messages.verbs import ADMIN_VERBS
from infaas.cli import main
from infaas.cli.admin import VERBS
from infaas.cli.load_options import CLOSED, LoadOptions
from services.simulation.workload import at_once, mean_rate, peak_rate, zipf
from tests.support.clients.commands import ran


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["explode"], ["explode", "set-version"]),
        (["set-version", "--app", "a"], ["set-version needs", "--model", "--version"]),
        (["add-app", "--app", "a", "--model", "m"], ["add-app has no option --model"]),
        (["set-replicas", "--app", "a", "--count", "1.5"], ["--count", "whole number"]),
        (["set-target", "--app", "a"], ["set-target needs --slo-target: write --slo-target VALUE"]),
        (["set-target", "--app", "a", "--slo-target", "most"], ["--slo-target", "most"]),
        (["set-selection", "--policy", "exp4"], ["set-selection needs", "--app"]),
        (["set-selection", "digits", "--policy", "exp4", "--members"], ["--members needs a value"]),
        (["set-selection", "digits", "--eta", "much"], ["--eta", "much"]),
        (["set-target", "digits", "--slo-target", "0.9", "--contextual"], ["set-target has no option --contextual"]),
        (["set-batching", "--policy", "aimd"], ["set-batching needs", "--app", "--model", "--variant"]),
        (["set-batching", "--app", "a", "--model", "m"], ["exactly one"]),
        (["set-batching", "--app", "a", "--batch", "1.5"], ["--batch", "whole number"]),
        (["add-app", "a", "--no-latency-ms"], ["add-app has no option --no-latency-ms"]),
        (["set-app", "a", "--slo-target", "0.9", "--no-slo-target"], ["--no-slo-target", "one of both"]),
    ],
)
def test_bad_usage_exits_2_with_one_line(
    arguments: list[str], words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    told = ran(capsys, ["admin", *arguments], 2)
    assert told.out == ""
    assert told.err.count("\n") == 1
    for word in words:
        assert word.lower() in told.err.lower()


def test_each_verb_that_options_can_say_is_a_command_of_its_noun(capsys: pytest.CaptureFixture[str]) -> None:
    assert {*ADMIN_VERBS} - {*VERBS} == {"set-pipeline", "deploy-pipeline"}, "of `infaas pipeline`"
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
    assert word in ran(capsys, ["container", *arguments], 2).err


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
    last = ran(capsys, command, 1).err.strip().splitlines()[-1]
    assert last.startswith(f"infaas: classes:{name}: ")
    assert word in last


# -- The options of `infaas bench` that say what is sent.
ONE = ("a",)


def test_a_closed_loop_unless_times_are_given(tmp_path) -> None:
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
    told, load, shares = LoadOptions(**options).spec(ONE, 20)
    assert (told, shares) == (name, (1.0,))
    assert mean_rate(load, 20) == pytest.approx(mean)
    assert peak_rate(load, 20) == pytest.approx(peak)


def test_traces_are_scaled_to_a_mean_or_a_range(tmp_path):
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
    assert load.shares == found == wanted
    assert load.apps == ("a", "b", "c")


BAD = [
    (["--closed", "4", "--rate", "5"], "--closed and --rate are different kinds of load"),
    (["--closed", "4", "--trace", "{good}"], "--closed and --trace are different kinds of load"),
    (["--rate", "5", "--rate-points", "0:1"], "--rate-points and --rate are different kinds of load"),
    (["--times", "{good}", "--trace", "{good}"], "--times and --trace are different kinds of load"),
    (["--arrivals", "mmpp", "--rates", "1,2"], "--arrivals mmpp needs --rates and --dwell"),
    (["--rates", "1,2", "--dwell", "1,2"], "add --arrivals mmpp"),
    (["--arrivals", "mmpp", "--rates", "1,2", "--dwell", "1"], "--dwell: 1 stays for 2 rates"),
    (["--arrivals", "mmpp", "--rates", "1,2", "--dwell", "1,0"], "--dwell: a stay must last more than 0 s"),
    (["--arrivals", "mmpp", "--rates", "1,-2", "--dwell", "1,1"], "--rates: '1,-2': write numbers of at least 0"),
    (["--arrivals", "mmpp", "--rates", "0,0", "--dwell", "1,1"], "--rates: no query would be sent"),
    (["--arrivals", "mmpp", "--rates", "1,1e9", "--dwell", "1e9,1"], "--rates: the peak is above 200,000 queries/s"),
    (["--arrivals", "gamma"], "--arrivals gamma needs --rate"),
    (["--arrivals", "uniform", "--trace", "{good}"], "--arrivals uniform needs --rate"),
    (["--arrivals", "gamma", "--rate", "5"], "--arrivals gamma needs --cv"),
    (["--seed", "1.5"], "--seed: must be a whole number, not '1.5'"),
    (["--seed", "-1"], "for --seed. Must be >= 0"),
    (["--closed", "2.5"], "--closed: must be a whole number, not '2.5'"),
    (["--items", "1.5"], "--items: must be a whole number, not '1.5'"),
    (["--priority", "1.5"], "--priority: must be a whole number, not '1.5'"),
    (["--latency-ms", "fast"], "--latency-ms must be a number, not 'fast'"),
    (["--priority", "0"], '"0" for --priority. must be at least 1 and at most 9'),
    (["--priority", "10"], '"10" for --priority. must be at least 1 and at most 9'),
    (["--cv", "2", "--rate", "5"], "--cv describes gamma gaps"),
    (["--rate-points", "0:4,60"], "--rate-points: '60': write two numbers of at least 0, separated by a colon"),
    (["--rate-points", "0:4,nan:5"], "--rate-points: 'nan:5'"),
    (["--rate-points", "5:4,0:5"], "--rate-points: '5:4,0:5': sort the points"),
    (["--rate-points", "0:0"], "--rate-points: no query would be sent in 11 s"),
    (["--range-qps", "1:5"], "--range-qps scales a --trace"),
    (["--range-qps", "1:5", "--rate", "3", "--trace", "{good}"], "--range-qps scales a --trace"),
    (["--range-qps", "5:1", "--trace", "{good}"], "--range-qps: '5:1': the lower rate comes first"),
    (["--range-qps", "5", "--trace", "{good}"], "--range-qps: '5': write two numbers"),
    (["--seconds-per-line", "2"], "--seconds-per-line describes a --trace"),
    (["--trace", "{bad}"], "--trace: {bad}, line 2: 'x' is no count of queries"),
    (["--times", "{bad}"], "--times: {bad}, line 2: 'x' is no time"),
    (["--trace", "nowhere.txt"], "--trace: cannot read the trace nowhere.txt: No such file"),
    (["--rate", "100000", "--seconds", "3000"], "--rate: more than 20,000,000 queries in 3001 s"),
    (["--app", "b", "--shares", "0.5,0.4"], "--shares: they add up to 0.9"),
    (["--app", "b", "--shares", "1"], "--shares: 1 shares for 2 apps"),
    (["--shares", "zipf:x"], "--shares: 'x'"),
    (["--shares", "zipf:1,2"], "--shares: 'zipf:1,2': write one exponent"),
    (["--app", "a"], "--app: an app is named twice"),
]


@pytest.mark.parametrize(("arguments", "reason"), BAD)
def test_bad_usage_names_the_option_in_one_line(arguments, reason, tmp_path, capsys):
    files = {"good": tmp_path / "good.txt", "bad": tmp_path / "bad.txt"}
    files["good"].write_text("1\n2\n")
    files["bad"].write_text("1\nx\n")
    said = ran(capsys, ["bench", "--app", "a", *(argument.format(**files) for argument in arguments)], 2)
    assert said.out == ""
    assert said.err.count("\n") == 1
    assert reason.format(**files) in said.err
