"""`infaas pipeline`: plans of a file's load, and usage that is refused. What a running system answers is in tests/live/test_pipelines.py."""

import json
from pathlib import Path
from typing import Any

import pytest

from bus.codec import decode, encode
from bus.messages.catalog import PipelinePlan
from infaas.cli import main
from infaas.cli.pipeline import hop_of
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.problem import HOP
from tests.support.data.pipelines import TOML

POLICIES = ("inferline", "model-less", "cg-mean", "cg-peak")


@pytest.fixture
def changed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file with texts replaced."""

    def write(*changes: tuple[str, str]) -> str:
        text = TOML
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path_factory.mktemp("pipeline") / "social.toml"
        path.write_text(text)
        return str(path)

    return write


@pytest.mark.parametrize("policy", POLICIES)
def test_a_plan_is_printed_as_the_contract_says(policy: str, changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "plan", changed(), "--policy", policy, "--json"]) == 0
    said = capsys.readouterr()
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


def test_the_way_between_stages_is_what_was_measured() -> None:
    """Of several variants the mean, also of what varies."""
    one, other = ({"hop_ms": ms, "hop_quantiles_ms": [ms - 1.0, ms, ms + 3.0]} for ms in (2.0, 4.0))
    unknown = {"hop_ms": None, "hop_quantiles_ms": None}
    assert hop_of([unknown, one, other]) == MeasuredHop(3.0, (2.0, 3.0, 6.0))
    assert hop_of([one]) == MeasuredHop(2.0, (1.0, 2.0, 5.0))
    assert hop_of([unknown]) == hop_of([]) == HOP


def test_a_plan_says_which_way_between_stages_it_reckons_with(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for change in (("rate = 150", "rate = 20"),), (("[[load]]", "[plan]\nhop_ms = 20.0\n[[load]]"),):
        assert main(["pipeline", "plan", changed(*change), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert [one["hop_ms"] for one in found] == [HOP.ms, 20.0]


def test_the_planner_is_cheaper_than_copies_of_the_whole(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cost = {}
    for policy in ("inferline", "cg-peak"):
        main(["pipeline", "plan", changed(), "--policy", policy, "--json"])
        cost[policy] = json.loads(capsys.readouterr().out)["cost_per_s"]
    assert cost["inferline"] < cost["cg-peak"]


def test_a_table_names_each_stage_with_its_cost(changed: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", "plan", changed(), "--wide"]) == 0
    header, *rows, last = capsys.readouterr().out.splitlines()
    for title in ("stage", "hardware", "variant", "batch", "replicas", "load", "of objective", "US$/h"):
        assert title in header
    assert [row.split()[0] for row in rows] == ["lang", "translate"]
    assert "by inferline: 1.3 US$/h; 99 % of queries in" in last


def test_an_infeasible_plan_is_printed_and_says_which_path_and_by_how_much(
    changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(("latency_ms = 350", "latency_ms = 30"))
    assert main(["pipeline", "plan", path, "--json"]) == 1
    said = capsys.readouterr()
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
        (("probability = 0.4", "probability = 4"), "edge[0].probability: must be above 0 and at most 1"),
        (("1 = 200.0", "1 = -200.0"), "option[1].batch_latency_ms.1: must be above 0"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(
    change: tuple[str, str], message: str, changed: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    path = changed(change)
    assert main(["pipeline", "plan", path]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(f"infaas: {path}: ")
    assert message in said.err
    assert said.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["explode"], "there is no verb 'explode': use add, list, plan, deploy, remove, trace"),
        (["add"], "add needs a pipeline's file"),
        (["list", "social"], "list takes no argument"),
        (["remove"], "remove needs the name of a pipeline"),
        (["remove", "social", "--undeploy"], "remove takes no --undeploy"),
        (["add", "x.toml", "--policy", "inferline"], "add takes no --policy"),
        (["plan", "x.toml", "--policy", "magic"], "magic"),
        (["plan", "/none/x.toml"], "/none/x.toml: cannot be read: No such file or directory"),
        (["add", "/none/x.toml"], "/none/x.toml: cannot be read: No such file or directory"),
        (["deploy", "/none/x.json"], "cannot read /none/x.json: No such file or directory"),
        (["trace", "drivers:cascade"], "trace needs --samples"),
        (["trace", "drivers", "--samples", "x.npz"], "'drivers' names no function: write MODULE:FUNCTION"),
        (["trace", "no.such:driver", "--samples", "x.npz"], "cannot import no.such:driver: ModuleNotFoundError"),
        (["trace", "json:nothing", "--samples", "x.npz"], "cannot import json:nothing: AttributeError"),
        (["trace", "json:dumps", "--samples", "x.npz"], "json:dumps is no driver: it must be an `async def` function"),
    ],
)
def test_bad_usage_exits_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["pipeline", *arguments]) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert message in said.err
    assert said.err.count("\n") == 1


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
    assert main(["pipeline", "deploy", str(path)]) == 2
    assert message in capsys.readouterr().err
