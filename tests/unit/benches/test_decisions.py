"""The scoreboard: its scenarios are sound, its bounds are those that one can compute by hand, and no policy is better than them."""

import gzip
import re
import tomllib
from argparse import Namespace
from datetime import datetime, timedelta

import pytest
from msgspec.structs import replace

from benches.decisions import Task, cases, ordered, run, tasks
from benches.scoreboard.scenarios import AZURE, TWITTER, Built, azure, toml, twitter, write
from benches.scoreboard.table import by_scenario, cells, table
from services.simulation.oracle import best, bound, demand_of, targets_of
from services.simulation.report import RunReport
from services.simulation.run import simulate
from services.simulation.scenario.read import read_scenario
from tests.support.servers.processes import ROOT

OWN = [case for case in cases() if case.trace is None]


@pytest.fixture(scope="module")
def traces(tmp_path_factory):
    """A folder with short traces of the right form."""
    folder = tmp_path_factory.mktemp("traces")
    with gzip.open(folder / TWITTER, "wt") as file:
        file.writelines(f"{day}\n" for day in range(7) for _ in range(86_400))
    began = datetime(2023, 11, 16, 18, 15, 46, 680590)
    stamps = [f"{(began + timedelta(seconds=5 * i)).isoformat(' ')}0" for i in range(10)]
    (folder / AZURE).write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"{at},1,2\n" for at in stamps))
    return folder


def options(traces, **given):
    return Namespace(
        **{"only": [], "traces": traces, "policies": ["infaas"], "quick": None, "seed": None, "set": []} | given
    )


def small(objective="cost", **more):
    """One kind of machine with one device that takes 0.1 s for an item."""
    return {
        "scenario": {"name": "small", "duration_s": 60, "objective": objective},
        "app": [{"name": "a", "latency_ms": 300}],
        "variant": [{"app": "a", "model": "m", "name": "slow", "hardware": "one", "latency_ms": 100, "accuracy": 1.0, "cost_per_s": 0.01}],
        "worker": [{"kind": "w", "devices": {"one": 1}, "price_per_hour": 36.0, "boot_s": 20.0, "start": 1, "min": 1, "max": 4}],
        "load": [{"app": "a", "arrivals": "uniform", "rate": 15}],
        **more,
    }  # fmt: skip


def read(document, tmp_path):
    return read_scenario(write(Built(document), tmp_path))


@pytest.mark.parametrize("case", OWN, ids=lambda case: case.name)
def test_the_scenarios_are_sound(case, tmp_path):
    built = case.build(tmp_path)
    assert tomllib.loads(toml(built.document)) == built.document
    scenario = read_scenario(write(built, tmp_path))
    assert scenario.name == case.name
    assert demand_of(scenario).queries.sum() > 1000


def test_those_with_traces_too(traces, tmp_path):
    found = tasks(options(traces), tmp_path)
    assert [task.scenario for task in found] == [case.name for case in cases()]
    days = [read_scenario(task.path) for task in found if task.scenario in ("twitter-3", "twitter-3-999")]
    assert [one.duration_s for one in days] == [1440, 1440]
    assert [one.apps[0].slo_target for one in days] == [None, 0.999]
    assert twitter(traces, 3) == [2 * 60] * 1440
    assert twitter(traces, 3, real=True) == [2] * 7200
    assert azure(traces) == [5.0 * i for i in range(10)]


def test_a_missing_trace_leaves_its_scenarios_out_with_a_sentence(tmp_path, capsys):
    found = tasks(
        options(tmp_path, only=["twitter-*", "azure", "step-20"], set=["autoscaler.hold_s=7"]), tmp_path / "out"
    )
    assert [task.scenario for task in found] == ["step-20"]
    assert f"azure is left out: there is no {tmp_path / AZURE} (--traces)" in capsys.readouterr().err
    assert read_scenario(found[0].path).policies[0].settings.autoscaler.hold_s == 7.0


# -- bounds


def test_steady_loads_and_machines_needed_later_have_a_least_cost(tmp_path) -> None:
    """1.5 devices are used: one machine until the second may be there, which is ordered at once. Windows are whole, less one where it starts."""
    document = small(app=[{"name": "a", "latency_ms": 300, "slo_target": 0.5}])
    assert bound(read(document, tmp_path)).cost == pytest.approx(0.01 * 60)
    with pytest.raises(ValueError, match="does not meet the targets"):  # none is ready in time, and too many are missed
        bound(read(small(), tmp_path))
    document["worker"][0]["start"] = 2
    assert bound(read({**document, "app": small()["app"]}, tmp_path)).cost == pytest.approx(0.01 * 120)
    document = small(load=[{"app": "a", "arrivals": "uniform", "rate": [[0, 5], [40, 5], [40.001, 15], [60, 15]]}])
    # Two windows, and 20 s of boot less the window of the start; no less while misses are few.
    assert bound(read(document, tmp_path)).cost == pytest.approx(0.01 * (60 + 20 + 10))


def test_the_most_accuracy_of_a_device(tmp_path):
    fast = {
        "app": "a",
        "model": "m",
        "name": "fast",
        "hardware": "one",
        "latency_ms": 10,
        "accuracy": 0.9,
        "cost_per_s": 0.01,
    }
    found = small(
        "accuracy",
        variant=[*small()["variant"], fast],
        worker=[{"kind": "w", "devices": {"one": 1}, "price_per_hour": 36.0, "start": 1}],
        load=[{"app": "a", "arrivals": "uniform", "rate": 20}],
    )
    answered = 20 * 0.99
    slow = (1 - 0.01 * answered) / (0.1 - 0.01)  # queries/s for which the device has time
    best = (slow + 0.9 * (answered - slow)) / answered
    one = bound(read(found, tmp_path))
    assert one.accuracy == pytest.approx(best, abs=2e-3)  # what comes at the very end may be answered later
    assert one.in_time == pytest.approx(1.0)
    found["load"][0]["rate"] = 200  # twice what the fast one carries
    assert bound(read(found, tmp_path)).in_time == pytest.approx(0.5, abs=0.01)


def joint(folder, objective="cost", *, selection=None, edge="", vertex="", rate, **load):
    """Two models, each with its own variant, as members of an app, or as the stages of a pipeline. One machine, and no other."""
    names = ("a", "b")
    first = small()["variant"][0]
    apps = names if selection is None else ("a", "a")
    variants = [
        {**first, "app": app, "model": one, "name": one, "accuracy": accuracy}
        for app, one, accuracy in zip(apps, names, (0.9, 0.7), strict=True)
    ]
    document = small(
        objective,
        app=[{"name": one, "latency_ms": 300} for one in dict.fromkeys(apps)],
        variant=variants,
        worker=[{**small()["worker"][0], "max": 1}],
        load=[{"app": "p" if selection is None else "a", "arrivals": "uniform", "rate": rate, **load}],
    )
    pipeline = f"""
[pipeline]
name = "p"
latency_ms = 300
[[vertex]]
name = "a"
app = "a"
inputs = {{ x = "$.x" }}
[[vertex]]
name = "b"
app = "b"
inputs = {{ x = "a.y" }}
{vertex}
[[edge]]
from = "a"
to = "b"
{edge}
[output]
y = "{"b.y | a.y" if "probability" in edge or vertex else "b.y"}"
"""
    if selection is None:
        document["pipeline"] = [{"file": "p.toml"}]
    else:
        document["app"][0]["selection"] = selection
    return read_scenario(write(Built(document, {"p.toml": [pipeline]}), folder))


@pytest.mark.parametrize(
    ("most", "given"),
    [  # a query takes 0.1 s of the device at each stage or member
        (5, {"selection": {"policy": "majority"}}),
        (10, {"selection": {"policy": "exp3"}}),
        (5, {}),
        (8, {"edge": "probability = 0.25"}),
        (2.5, {"edge": 'items = "y"\nitems_mean = 3.0\nitems_dispersion = 0.0'}),
        (10, {"vertex": "optional = true"}),
    ],
)
def test_several_models_take_the_time_of_all_that_a_query_needs(most, given, tmp_path):
    with pytest.raises(ValueError, match="does not meet the targets"):
        bound(joint(tmp_path, **given, rate=1.1 * most))
    assert bound(joint(tmp_path, **given, rate=0.95 * most)).cost == pytest.approx(0.01 * 60)


def test_who_misses_the_queries_with_the_most_items_has_less_to_do(tmp_path):
    edge = 'items = "y"\nitems_mean = 3.0\nitems_dispersion = '
    with pytest.raises(ValueError, match="does not meet the targets"):
        bound(joint(tmp_path, edge=f"{edge}0.0", rate=2.6))
    assert bound(joint(tmp_path, edge=f"{edge}8.0", rate=2.6)).cost == pytest.approx(0.01 * 60)


@pytest.mark.parametrize(
    ("best", "given"),
    [
        (0.8, {"selection": {"policy": "majority"}}),
        (0.9, {"selection": {"policy": "exp3"}}),
        (1.0, {"selection": {"policy": "majority"}, "feedback": 0.5}),
        (1.0, {"selection": {"policy": "majority", "cache_mb": 1}}),
        (0.7, {}),
        (0.9, {"edge": "probability = 0.25"}),
    ],
)
def test_answers_of_several_models_are_as_accurate_as_they_may_say(best, given, tmp_path):
    one = bound(joint(tmp_path, "accuracy", **given, rate=4))
    assert one.accuracy == pytest.approx(best)
    assert one.in_time == pytest.approx(1.0)
    assert one.left_out == (
        ("app a is left out: it keeps answers, and what has one takes no work",) if "cache" in str(given) else ()
    )


SEEDS = sorted((ROOT / "tests" / "faults").glob("seed-*.toml"))
SEVERAL = [path for path in SEEDS if re.search(r"selection|\[\[pipeline", path.read_text())]
QUICK = ("seed-20361-in-time", "seed-511-lost-row")  # each has a pipeline and ensembles
FAULTS = ("seed-13386-replicas", "seed-3002-ordered")  # with fewer machines than the least, since some die


@pytest.mark.parametrize(
    "path",
    [pytest.param(one, marks=() if one.stem in QUICK else pytest.mark.slow, id=one.stem) for one in SEVERAL],
)
def test_no_policy_is_beyond_the_bounds_while_it_meets_the_targets(path):
    scenario = replace(read_scenario(path), checked=False)
    scenario = scenario if path.stem in FAULTS else replace(scenario, faults=())
    most, policy = best(scenario), scenario.policies[0]
    run = simulate(scenario, policy, RunReport.of(scenario, policy))
    lacking = [one["ensemble"]["missing"] for one in run["apps"].values() if "ensemble" in one]
    targets = targets_of(scenario)
    met = all(one["slo_violation_ratio"] <= 1 - targets[app] for app, one in run["apps"].items() if one["queries"])
    if any(lacking) or not met:
        assert path.stem not in (*QUICK, *FAULTS)
        return
    assert most.cost <= run["cost"] + 1e-9
    assert run["effective_accuracy"] <= most.accuracy + 1e-9


# -- runs


@pytest.mark.slow
@pytest.mark.parametrize(("name", "seconds"), [("cold-flash", 60.0), ("accuracy-40-gamma", 4.0)])
def test_a_short_run_and_its_table(name, seconds, tmp_path):
    case = next(case for case in cases() if case.name == name)
    path = write(case.build(tmp_path), tmp_path)
    todo = [Task(name, policy, path, seconds, None) for policy in ("clipper+", "oracle")]
    rows = ordered([run(task) for task in reversed(todo)], todo)
    policy, oracle = rows
    assert [row["policy"] for row in rows] == ["clipper+", "oracle"]
    assert policy["duration_s"] == seconds
    assert policy["queries"] > 0
    if policy["goal"] == "cost":
        assert policy["to_oracle"] == policy["cost"] / oracle["cost"] >= 1
        assert policy["met"] == 1
    else:
        assert policy["to_oracle"] == policy["accuracy"] - oracle["accuracy"] <= 0
    assert policy["cheaper"] == 1
    assert ordered([run(todo[0])], todo[:1], rows)[0]["to_oracle"] == policy["to_oracle"]
    lines = table(rows).splitlines()
    assert len(lines) == 4
    assert len({len(line) for line in lines}) == 1
    assert by_scenario(rows).splitlines()[0].split() == ["|", "scenario", "|", "clipper+", "|", "oracle", "|"]
    assert f"| {policy['violations']:.2%}, " in by_scenario(rows)
    before = {**policy, "cost": policy["cost"] + 1}
    assert "->" not in table(rows, {(name, "clipper+"): policy})
    assert sum("->" in cell for cell in cells(policy, before)) == 1


def test_the_oracle_counts_the_queries_that_the_simulator_sends(tmp_path):
    path = write(Built(small()), tmp_path)
    scenario = read_scenario(path)
    assert demand_of(scenario).queries.sum() == run(Task("small", "infaas", path, None, None))["queries"]
