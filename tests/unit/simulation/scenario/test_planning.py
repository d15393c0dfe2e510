"""Pipelines of a scenario: what is read of them, their plans, refusals, and runs of them."""

from pathlib import Path
from typing import Any

import pytest

from bus.messages.catalog import AppRecord
from services.simulation.pipelines import PipelineReports
from services.simulation.run import simulate_all
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario
from services.simulation.scenario.toml import ScenarioError

PIPELINE = """
[pipeline]
name = "social"
latency_ms = 200
[[vertex]]
name = "lang"
app = "language-id"
inputs = { text = "$.text" }
[[vertex]]
name = "translate"
app = "nmt"
inputs = { text = "$.text", lang = "lang.label" }
[[edge]]
from = "lang"
to = "translate"
when = { output = "label", op = "!=", value = "en" }
probability = 0.4
[output]
text = "translate.y | lang.text"
"""
SCENARIO = """
[scenario]
duration_s = 20
policies = ["inferline"]
[[pipeline]]
file = "social.toml"
[[variant]]
app = "language-id"
name = "lang-cpu"
hardware = "cpu"
base_ms = 5
per_item_ms = 5
max_batch = 8
accuracy = 0.9
[[variant]]
app = "nmt"
name = "nmt-cpu"
hardware = "cpu"
base_ms = 20
per_item_ms = 20
max_batch = 4
accuracy = 0.8
[[worker]]
kind = "cpu"
devices = { cpu = 8 }
price_per_hour = 0.4
start = 2
[[load]]
app = "social"
rate = 60
"""


def write(folder: Path, scenario: str = SCENARIO, pipeline: str = PIPELINE) -> Path:
    (folder / "social.toml").write_text(pipeline)
    file = folder / "s.toml"
    file.write_text(scenario)
    return file


def app(scenario: Scenario, name: str) -> AppRecord:
    [found] = [one for one in scenario.apps if one.app == name]
    return found


def test_vertices_take_and_give_the_tensors_that_the_pipeline_names(tmp_path: Path) -> None:
    scenario = read_scenario(write(tmp_path))
    names = {
        one.app: ([spec.name for spec in one.signature.inputs], [spec.name for spec in one.signature.outputs])
        for one in scenario.apps
        if one.signature is not None
    }
    assert names == {
        "language-id": (["text"], ["label", "text"]),
        "nmt": (["text", "lang"], ["y"]),
        "social": (["text"], ["text"]),
    }
    assert all(one.signature == app(scenario, "nmt").signature for one in scenario.variants if one.model == "nmt-cpu")
    assert scenario.needs["social"].latency_ms == app(scenario, "social").latency_ms == 200.0


def test_a_pipeline_may_be_a_vertex_of_one_that_is_named_before_it(tmp_path: Path) -> None:
    outer = PIPELINE.replace('"social"', '"outer"').replace('app = "nmt"', 'app = "social"')
    outer = outer.replace('{ text = "$.text", lang = "lang.label" }', '{ text = "lang.text" }').replace(
        ".y |", ".text |"
    )
    (tmp_path / "outer.toml").write_text(outer)
    text = SCENARIO.replace("[[pipeline]]", '[[pipeline]]\nfile = "outer.toml"\n[[pipeline]]', 1)
    scenario = read_scenario(write(tmp_path, text.replace('app = "social"', 'app = "outer"')), policies=["infaas"])
    [run] = simulate_all(scenario)["policies"]
    assert run["apps"]["outer"]["attainment"] > 0.95
    assert run["apps"]["outer"]["pipeline"]["vertices"]["translate"]["visits"] > 0


def test_the_plan_is_made_of_the_variants_for_the_load_with_another_seed(tmp_path: Path) -> None:
    found = [read_scenario(write(tmp_path), seed=seed).policies[0].plans["social"] for seed in (1, 2)]
    assert found[0] == found[1], "it does not know the run's seed"
    plan = found[0]
    assert plan.policy == "inferline"
    assert plan.rate == pytest.approx(60.0, rel=0.1)
    assert {name: stage.variant for name, stage in plan.vertices.items()} == {
        "lang": "lang-cpu",
        "translate": "nmt-cpu",
    }


@pytest.mark.parametrize(
    ("policies", "change", "message"),
    [
        ((), ('file = "social.toml"', 'file = "other.toml"'), "other.toml: cannot be read"),
        ((), ('file = "social.toml"', 'path = "social.toml"'), "pipeline[0].path: there is no such key"),
        ((), ('"nmt"', '"social"'), "pipeline[0].file: social is the name of another app"),
        ((), ('"nmt"', '"nmt2"'), "vertex[translate].app: there is no app 'nmt'"),
        ((), ("rate = 60", "rate = 60\nitems = 2"), "load[0].items: must be 1, not 2: social is a pipeline"),
        ((), ('app = "social"', 'app = "nmt"'), "scenario.policies: inferline plans social for its queries"),
        ((), ('[[pipeline]]\nfile = "social.toml"', ""), "load[0].app: there is no app 'social'"),
        ((), ("per_item_ms = 20", "per_item_ms = 500"), "scenario.policies: inferline finds no plan for social: path lang"),
        (("static",), ("", ""), "scenario.policies: static chooses for [[app]]s"),
        (("inferlin",), ("", ""), "policies[0]: there is no policy 'inferlin'; did you mean inferline?"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused(
    tmp_path: Path, policies: tuple[str, ...], change: tuple[str, str], message: str
) -> None:
    text = SCENARIO.replace(*change) if change[0] else SCENARIO
    with pytest.raises(ScenarioError) as refused:
        read_scenario(write(tmp_path, text), policies=policies)
    assert message in str(refused.value)


def test_planners_need_a_pipeline(tmp_path: Path) -> None:
    text = SCENARIO.replace('[[pipeline]]\nfile = "social.toml"', "").replace('app = "social"', 'app = "nmt"')
    with pytest.raises(ScenarioError, match=r"inferline plans pipelines, and there is no \[\[pipeline\]\]"):
        read_scenario(write(tmp_path, text))


@pytest.mark.parametrize("policy", ["inferline", "model-less", "cg-mean", "cg-peak"])
def test_planned_replicas_are_there_from_the_start_and_serve(tmp_path: Path, policy: str) -> None:
    scenario = read_scenario(write(tmp_path), policies=[policy])
    [run] = simulate_all(scenario)["policies"]
    social = run["apps"]["social"]
    found: dict[str, Any] = social["pipeline"]
    plan = scenario.policies[0].plans["social"]
    assert social["queries"] == run["queries"] > 1000
    assert social["attainment"] >= 0.98
    for name, vertex in found["vertices"].items():
        stage = plan.vertices[name]
        assert vertex["plan"]["replicas"] == stage.replicas
        assert vertex["instances"][0] == stage.replicas, "loaded before the first query"
        assert vertex["mean_batch"] <= stage.batch
    assert found["vertices"]["lang"]["visits"] == social["queries"]
    assert found["vertices"]["translate"]["share"] == pytest.approx(0.4, abs=0.05), "conditions follow by probability"
    assert found["plan"]["cost"] == pytest.approx(plan.cost_per_s * 20.0)
    assert found["cost"] >= 0.99 * found["plan"]["cost"]


def test_without_a_plan_vertices_are_served_like_any_app(tmp_path: Path) -> None:
    [run] = simulate_all(read_scenario(write(tmp_path), policies=["infaas"]))["policies"]
    social = run["apps"]["social"]
    assert social["attainment"] > 0.95
    assert social["pipeline"]["plan"] is None
    assert social["pipeline"]["vertices"]["translate"]["visits"] > 300


def test_a_scenario_without_pipelines_reports_none() -> None:
    assert not PipelineReports({})
