"""`infaas plan`: the paper's example, what is refused and how, and what it prints."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.messages.catalog import PipelinePlan
from infaas.cli import main
from infaas.cli.pipeline import hop_of, serving_now
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.problem import HOP
from tests.support.clients.commands import ran, refused
from tests.support.data.pipelines import TOML
from tests.support.servers.processes import ROOT, infaas

EXAMPLE = ROOT / "examples" / "plan.toml"
FEW, TIGHT = ("qps = 1000", "qps = 10"), ("latency_ms = 300", "latency_ms = 50")


def edits(text: str, file: Path) -> Callable[..., str]:
    """Writes the text, some of it replaced, into the file."""

    def write(*changes: tuple[str, str]) -> str:
        made = text
        for old, new in changes:
            assert old in made
            made = made.replace(old, new)
        file.write_text(made)
        return str(file)

    return write


@pytest.fixture
def changed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The example."""
    return edits(EXAMPLE.read_text(), tmp_path_factory.mktemp("plan") / "plan.toml")


@pytest.fixture
def edited(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The file of a pipeline."""
    return edits(TOML, tmp_path_factory.mktemp("pipeline") / "social.toml")


@pytest.mark.parametrize(
    ("changes", "instances", "cost"),
    [
        ([FEW], {"A": 2, "B": 0, "C": 0}, 2.0),
        ([FEW, TIGHT], {"A": 0, "B": 1, "C": 0}, 3.0),
        ([], {"A": 0, "B": 2, "C": 1}, 22.0),
    ],
)
def test_tables_2_and_3_of_the_paper(
    changes: list[tuple[str, str]],
    instances: dict[str, int],
    cost: float,
    changed: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = ran(capsys, ["plan", changed(*changes), "--json"])
    document = json.loads(said.out)
    assert said.err == ""
    assert (document["status"], document["solver"]) == ("optimal", "ilp")
    assert document["instances"] == instances
    assert document["cost_per_s"] == cost
    assert document["actions"] == [{"variant": v, "delta": n, "kind": "load"} for v, n in instances.items() if n]
    assert document["solve_ms"] > 0
    assert "reason" not in document


def test_the_example_as_a_process_for_people() -> None:
    done = infaas("plan", str(EXAMPLE))
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["variant", "hardware"]
    assert lines[2].split() == ["B", "inferentia", "0", "2", "load", "+2", "200", "6"]
    assert lines[-1].startswith("optimal, by ilp in ")
    assert lines[-1].endswith(" ms: 22 US$/s")


def test_greedy_by_name_and_exact_until_its_time_limit(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    document = json.loads(ran(capsys, ["plan", changed(), "--policy", "greedy", "--json"]).out)
    # of one variant
    assert (document["status"], document["solver"], document["cost_per_s"]) == ("feasible", "greedy", 30.0)
    # The plan is then the greedy one; greedy has no limit to take.
    found = json.loads(ran(capsys, ["plan", changed(SCARCE), "--json", "--time-limit", "0.000001"]).out)
    assert (found["status"], found["solver"]) == ("feasible", "greedy")
    assert "exact solver" in found["reason"]
    assert main(["plan", str(EXAMPLE), "--policy", "greedy", "--time-limit", "1"]) == 2
    assert "--time-limit: greedy" in capsys.readouterr().err


def test_a_mean_accuracy_and_what_accuracy_is_worth(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A takes a US$ for 10/s at 0.6, B for 5/s at 0.9: half of each is 0.75."""
    file = tmp_path / "plan.toml"

    def plan(*lines: str, of_app: str = "") -> dict[str, Any]:
        variants = (
            f'[[variant]]\napp = "a"\nname = "{name}"\nlatency_ms = 10\nsaturation_qps = {rate}\ncost_per_s = 1\naccuracy = {accuracy}'
            for name, rate, accuracy in (("A", 10, 0.6), ("B", 5, 0.9))
        )
        app = f'[[app]]\nname = "a"\nqps = 100\n{of_app}'
        file.write_text("\n".join(["slack = 1.0", *lines, app, *variants, ""]))
        found: dict[str, Any] = json.loads(ran(capsys, ["plan", str(file), "--json"]).out)
        return found

    assert plan()["instances"] == {"A": 10, "B": 0}
    for found in (plan("accuracy_mean = 0.75"), plan("accuracy_mean = 0.9", of_app="accuracy_mean = 0.75")):
        assert (found["instances"], found["accuracy"]) == ({"A": 5, "B": 10}, {"a": pytest.approx(0.75)})
    for worth, count in ((4.0, 20), (3.0, 0)):  # ten more for 30 points more of 100 answers/s: 12 or 9 US$ a second
        assert plan(of_app=f"worth = {worth}")["instances"]["B"] == count
    assert main(["plan", str(file), "--policy", "greedy"]) == 2
    assert "greedy knows no accuracy_mean" in capsys.readouterr().err
    file.write_text(file.read_text() + '[[app]]\nname = "a"\nqps = 1\naccuracy_mean = 0.8')
    assert main(["plan", str(file)]) == 2
    assert "accuracy_mean: is another one than in the first block of 'a'" in capsys.readouterr().err


SCARCE = ("slack = 1.0 ", "resources = { inferentia_cores = 1.5, cpu_cores = 100, gpus = 1 }\nslack = 1.0 ")


def test_a_plan_that_takes_searching_prints_json_and_nothing_else(changed: Any) -> None:
    """HiGHS prints by itself at times; stdout is for the document."""
    done = infaas("plan", changed(SCARCE), "--json")
    assert done.returncode == 0
    document = json.loads(done.stdout)
    assert (document["status"], document["solver"]) == ("optimal", "ilp")
    assert document["instances"] == {"A": 20, "B": 1, "C": 1}
    assert document["cost_per_s"] == 39.0


@pytest.mark.parametrize("policy", ["ilp", "greedy"])
def test_infeasible_is_printed_and_exits_1(policy: str, changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    path = changed(("latency_ms = 300", "latency_ms = 10"))
    said = ran(capsys, ["plan", path, "--json", "--policy", policy], 1)
    document = json.loads(said.out)
    assert document["status"] == "infeasible"
    assert document["instances"] == {"A": 0, "B": 0, "C": 0}
    assert document["actions"] == []
    assert document["reason"] == "app classify: no variant answers within 10 ms: C takes 15 ms"
    assert document["unmet"][0]["missing_qps"] == pytest.approx(1000)
    assert said.err == f"infaas: infeasible: {document['reason']}\n"
    assert "infeasible, by" in ran(capsys, ["plan", path, "--policy", policy], 1).out


def test_byte_order_marks_are_no_harm_and_defaults_those_of_the_contract(
    changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Slack 1.05: 1,000 queries/s need 1,050; lambda 0.1; running 0; accuracies optional; nothing scarce."""
    path = changed(("slack = 1.0 ", "# "), ("lambda = 0.0 ", "# "))
    document = json.loads(ran(capsys, ["plan", path, "--json"]).out)
    assert document["instances"] == {"A": 0, "B": 3, "C": 1}
    assert document["objective"] == pytest.approx(3 * 3 * 1.4 + 16 * 1.8)
    path = Path(changed())
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    assert main(["plan", str(path), "--json"]) == 0


def test_more_than_the_contract_asks(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    """Several apps a variant, several classes an app, a budget, a cost ceiling."""
    path = changed(
        ("slack = 1.0 ", 'objective = "additive"\nbudget_per_hour = 3600\nslack = 1.0 '),
        (
            'app = "classify"\nmodel = "resnet50"\nname = "C"',
            'app = ["classify", "other"]\nmodel = "resnet50"\nname = "C"',
        ),
        ("qps = 1000", 'qps = 10\ncost = 25.0\n[[app]]\nname = "other"\nqps = 10\n[[app]]\nname = "classify"\nqps = 0'),
    )
    assert "the budget of 3,600 US$/h" in json.loads(ran(capsys, ["plan", path, "--json"], 1).out)["reason"]
    Path(path).write_text(Path(path).read_text().replace("= 3600\n", "= 57600\n"))
    assert json.loads(ran(capsys, ["plan", path, "--json"]).out)["instances"] == {"A": 0, "B": 0, "C": 1}


KEYS = "budget_per_hour, lambda, objective, resources, slack, variant, worth"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            ("cost_per_s = 3.0", "cost_per_s = -3"),
            "variant[1].cost_per_s: must be at least 0 and at most 1e+15, not -3",
        ),
        (("cost_per_s = 3.0", ""), "variant[1].cost_per_s: is missing: it must be at least 0 and at most 1e+15"),
        (("load_s = 4.0", "running = 1.5"), "variant[1].running: must be a whole number, not 1.5"),
        (("load_s = 4.0", "load_s = nan"), "variant[1].load_s: must be at least 0 and at most 1e+15, not nan"),
        (("load_s = 4.0", "latency = 4.0"), "variant[1].latency: there is no such key; did you mean latency_ms?"),
        (("{ gpus = 1 }", "{ gpus = -1 }"), "variant[2].uses.gpus: must be at least 0 and at most 1e+15, not -1"),
        (("{ gpus = 1 }", "[1]"), "variant[2].uses: must be a table, not [1]"),
        (('name = "B"', 'name = "A"'), "variant[1].name: 'A' is there twice"),
        (
            ('app = "classify"', 'app = "clasify"'),
            "variant[0].app: there is no [[app]] 'clasify'; did you mean classify?",
        ),
        (('name = "B"', 'name = "B\\u001b[31m"'), "variant[1].name: must be some printable text, not 'B\\x1b[31m'"),
        (("qps = 1000", "qps = inf"), "app[0].qps: must be at least 0 and at most 1e+15, not inf"),
        (("qps = 1000", f"qps = {10**300}"), "app[0].qps: must be at least 0 and at most 1e+15, not 1e+300"),
        (("qps = 1000", "qps = true"), "app[0].qps: must be a number, not true"),
        (("qps = 1000", "qps = 1979-05-27"), "app[0].qps: must be a number, not 1979-05-27"),
        (("qps = 1000", "qps = 1e14"), "app[0].qps: needs more than 1000000 instances of any variant"),
        (("[[app]]", "[app]"), "app: must be written [[app]], one block for each"),
        (
            ("slack = 1.0 ", "application = 1 "),
            f"application: there is no such key; there are accuracy_mean, app, {KEYS}",
        ),
        (("slack = 1.0 ", "slack = -1 "), "slack: must be above 0 and at most 1e+15, not -1"),
        (("slack = 1.0 ", "slak = 1.0 "), "slak: there is no such key; did you mean slack?"),
        (("slack = 1.0 ", "resources = { gpus = 'x' } "), "resources.gpus: must be a number, not 'x'"),
        (
            ("slack = 1.0 ", "objective = 'least' "),
            "objective: there is no objective 'least'; there are additive, multiplicative",
        ),
        (
            ("[[app]]", '[[app]]\nname = "classify"\nqps = 3\nlatency_ms = 300\n[[app]]'),
            "app[1].name: 'classify' is there twice with the same requirements",
        ),
    ],
)
def test_bad_files_are_refused_with_file_key_and_reason(
    change: tuple[str, str], said: str, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(change)
    assert refused(capsys, ["plan", path, "--json"]) == f"infaas: {path}: {said}\n"


@pytest.mark.parametrize(
    ("app", "said"),
    [
        ("[]", "must name at least one app"),
        ('["classify", "classify"]', "names an app twice"),
        ("[1]", "must be some printable text, not 1"),
    ],
)
def test_apps_of_a_variant(app: str, said: str, changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    block = ('app = "classify"\nmodel = "resnet50"\nname = "C"', f'app = {app}\nmodel = "resnet50"\nname = "C"')
    assert re.search(rf"variant\[2\]\.app.*{re.escape(said)}", refused(capsys, ["plan", changed(block)]))


def test_files_that_are_none(tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]) -> None:
    place = tmp_path_factory.mktemp("plan")
    for name, body, reason in (
        ("absent.toml", None, "No such file or directory"),
        ("broken.toml", b"slack = \n", "not valid TOML"),
        ("empty.toml", b"variant = []\n", "app: is missing"),
        ("idle.toml", b"variant = []\napp = []\n", "variant: there must be at least one [[variant]]"),
    ):
        if body is not None:
            (place / name).write_bytes(body)
        said = refused(capsys, ["plan", str(place / name)])
        assert name in said
        assert reason in said
    assert "larger than" in ran(capsys, ["plan", "/dev/zero"], 2).err
    assert "Is a directory" in ran(capsys, ["plan", str(place)], 2).err
    assert main(["plan"]) == 2
    assert main(["plan", str(EXAMPLE), "--policy", "gurobi"]) == 2
    assert main(["plan", str(EXAMPLE), "--time-limit", "0"]) == 2


def test_wide_shows_what_the_terminal_has_no_room_for(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    for wide in ([], ["--wide"]):
        assert ("instances now" in ran(capsys, ["plan", str(EXAMPLE), *wide]).out) is bool(wide)


# -- `infaas pipeline`: plans of a file's load, and usage that is refused. What a running system answers is in
# tests/live/test_pipelines.py.
@pytest.mark.parametrize(
    "policy", ["inferline", "cg-mean", "cg-peak", pytest.param("model-less", marks=pytest.mark.slow)]
)
def test_a_plan_is_printed_as_the_contract_says(policy: str, edited: Any, capsys: pytest.CaptureFixture[str]) -> None:
    said = ran(capsys, ["pipeline", "plan", edited(), "--policy", policy, "--json"])
    found = json.loads(said.out)
    assert said.err.startswith(f"planning by {policy}: ")
    assert (found["status"] in ("optimal", "feasible"), found["policy"], found["pipeline"]) == (True, policy, "social")
    assert found["cost_per_s"] > 0
    assert found["p99_ms"] <= 350
    assert set(found["vertices"]) == {"lang", "translate"}
    for stage in found["vertices"].values():
        assert {"hardware", "batch", "replicas", "scale", "service_ms", "rho"} <= stage.keys()
        assert 0 < stage["rho"] < 1
    assert found["vertices"]["translate"]["scale"] == pytest.approx(0.4, abs=0.02)
    assert all(len(pair) == 2 for pair in found["envelope"])
    assert isinstance(found["steps"], list)
    assert "reason" not in found
    assert decode(PipelinePlan, encode(found)).policy == policy, "what deploy sends"


@pytest.mark.slow
def test_a_file_with_the_goal_accuracy_spends_its_budget_on_the_whole_pipeline(
    edited: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    accuracies = {}
    for budget in (0.6, 4.0):
        more = "".join(
            f'[[option]]\nvertex = "translate"\nhardware = "cpu"\nprice_per_hour = 0.1\nvariant = "{name}"\n'
            f"batch_latency_ms = {{ 1 = {ms} }}\naccuracy = {accuracy}\n"
            for name, ms, accuracy in (("small", 30.0, 0.92), ("large", 90.0, 0.97))
        )
        path = edited(("[[load]]", f'[plan]\ngoal = "accuracy"\nbudget_per_hour = {budget}\n{more}[[load]]'))
        found = json.loads(ran(capsys, ["pipeline", "plan", path, "--json"]).out)
        assert (found["policy"], 3600 * found["cost_per_s"] <= budget) == ("model-less", True)
        accuracies[budget] = found["vertices"]["translate"]["accuracy"]
    assert accuracies == {0.6: 0.92, 4.0: 0.97}
    path = edited(("[[load]]", '[plan]\ngoal = "speed"\n[[load]]'))
    assert (
        "plan.goal: there is no goal 'speed'; there are accuracy, cost"
        in ran(capsys, ["pipeline", "plan", path], 2).err
    )


def test_the_way_between_stages_is_what_was_measured() -> None:
    """Of several variants the mean, also of what varies."""
    one, other = ({"hop_ms": ms, "hop_quantiles_ms": [ms - 1.0, ms, ms + 3.0]} for ms in (2.0, 4.0))
    unknown = {"hop_ms": None, "hop_quantiles_ms": None}
    assert hop_of([unknown, one, other]) == MeasuredHop(3.0, (2.0, 3.0, 6.0))
    assert hop_of([one]) == MeasuredHop(2.0, (1.0, 2.0, 5.0))
    assert hop_of([unknown]) == hop_of([]) == HOP


@pytest.mark.slow
def test_plans_say_which_way_between_stages_they_reckon_with_and_cost_less_than_copies(
    edited: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    for change, hop_ms in (
        (("rate = 150", "rate = 20"), HOP.ms),
        (("[[load]]", "[plan]\nhop_ms = 20.0\n[[load]]"), 20.0),
    ):
        found = json.loads(ran(capsys, ["pipeline", "plan", edited(change), "--json"]).out)
        assert found["hop_ms"] == hop_ms
    cost = {}
    for policy in ("inferline", "cg-peak"):
        main(["pipeline", "plan", edited(), "--policy", policy, "--json"])
        cost[policy] = json.loads(capsys.readouterr().out)["cost_per_s"]
    assert cost["inferline"] < cost["cg-peak"]


def test_a_table_names_each_stage_with_its_cost(edited: Any, capsys: pytest.CaptureFixture[str]) -> None:
    header, *rows, last = ran(capsys, ["pipeline", "plan", edited(), "--wide"]).out.splitlines()
    for title in ("stage", "hardware", "variant", "batch", "replicas", "load", "of objective", "US$/h"):
        assert title in header
    assert [row.split()[0] for row in rows] == ["lang", "translate"]
    assert "by inferline: 1.3 US$/h; 99 % of queries in" in last


def test_an_infeasible_plan_is_printed_and_says_which_path_and_by_how_much(
    edited: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(("latency_ms = 350", "latency_ms = 30"))
    said = ran(capsys, ["pipeline", "plan", path, "--json"], 1)
    found = json.loads(said.out)
    assert found["status"] == "infeasible"
    for text in (found["reason"], said.err):
        assert "path lang -> translate takes 20 + 20 + 3 messages of 3 = 49 ms" in text
        assert "19 ms more than latency_ms (30)" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("latency_ms = 350", "latency = 350"), "pipeline.latency: there is no such key; did you mean latency_ms?"),
        (("rate = 150", "rate = 0"), "load: the sample trace has no queries"),
        (('to = "translate"', 'to = "lang"'), "lang -> lang is a cycle"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    change: tuple[str, str], message: str, edited: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = edited(change)
    said = refused(capsys, ["pipeline", "plan", path])
    assert said.startswith(f"infaas: {path}: ")
    assert message in said


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is no JSON"),
        ("[1]", "is no plan: deploy takes what `infaas pipeline plan FILE.toml --json` prints"),
        ("{}", "pipeline: is missing; deploy takes what"),
    ],
)
def test_what_is_no_plan_is_not_sent(
    content: str, message: str, tmp_path_factory: pytest.TempPathFactory, capsys: pytest.CaptureFixture[str]
) -> None:
    path: Path = tmp_path_factory.mktemp("plan") / "plan.json"
    path.write_text(content)
    assert message in refused(capsys, ["pipeline", "deploy", str(path)])


def test_a_plan_names_no_new_version_of_a_release() -> None:
    rows = [
        {"variant": f"{model}-{of}", "model": model, "version": of}
        for model, of in (("a", "1"), ("a", "2"), ("b", "3"))
    ]
    assert [one["variant"] for one in serving_now(rows, {"a": "1", "b": "3"})] == ["a-1", "b-3"]
