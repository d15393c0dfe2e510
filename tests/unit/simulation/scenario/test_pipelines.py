"""The file of a pipeline: what it says, how long its sample is, and what is refused with file, key and remedy."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bus.messages.catalog import AppRecord, EdgeCondition, PipelineEdge, PipelineVertex
from services.core.pipelines.estimator import NO_HOP, MeasuredHop
from services.core.pipelines.problem import StageOption
from services.core.toml import TomlError
from services.simulation.composites import PipelineReports
from services.simulation.run import simulate_all
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.pipelines import check_pipeline, problem_of, read_pipeline, sample
from services.simulation.scenario.read import read_scenario
from tests.support.data.pipelines import SOCIAL, SOCIAL_APPS, SOCIAL_TOML

FILE = f"""{SOCIAL_TOML}
[plan]
percentile = 0.95
[[load]]
rate = 150
arrivals = "gamma"
cv = 1.0
[[option]]
vertex = "lang"
hardware = "cpu"
price_per_hour = 0.1
batch_latency_ms = {{ 1 = 20.0, 8 = 80.0 }}
"""


@pytest.fixture
def changed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The file with texts replaced."""

    def write(*changes: tuple[str, str], more: str = "") -> Path:
        text = FILE
        for old, new in changes:
            assert old in text
            text = text.replace(old, new)
        path = tmp_path_factory.mktemp("pipeline") / "social.toml"
        path.write_text(text + more)
        return path

    return write


def test_the_file_of_the_contract(changed: Any) -> None:
    file = read_pipeline(changed())
    assert (file.name, file.latency_ms, file.slo_target, file.percentile) == ("social", 350.0, None, 0.95)
    assert file.pipeline == SOCIAL
    assert file.options == (
        StageOption(vertex="lang", hardware="cpu", price_per_hour=0.1, batch_latency_ms={1: 20.0, 8: 80.0}),
    )
    check_pipeline(file)
    check_pipeline(file, SOCIAL_APPS)
    problem = problem_of(file, file.options * 1 + (option("translate"),), MeasuredHop(0.5))
    assert (problem.percentile, problem.hop.ms, problem.latency_ms) == (0.95, 0.5, 350.0)


def option(vertex: str) -> StageOption:
    return StageOption(vertex=vertex, hardware="gpu", price_per_hour=1.0, batch_latency_ms={1: 5.0}, accuracy=0.95)


def test_what_only_planning_needs_is_read_only_for_it(changed: Any) -> None:
    path = changed(("rate = 150", "rate = -1"), ('vertex = "lang"\nhardware', "vertex = 7\nhardware"))
    file = read_pipeline(path, planning=False)
    assert file.pipeline == SOCIAL
    assert file.loads == file.options == ()
    with pytest.raises(TomlError, match="rate: must be at least 0"):
        read_pipeline(path)


def test_options_and_edges_may_say_more_or_less(changed: Any) -> None:
    path = changed(
        ("price_per_hour = 0.1", 'price_per_hour = 0.1\nvariant = "fast"\naccuracy = 0.8'),
        ('reduce = "argmax", ', ""),
        ("probability = 0.4", ""),
        ("latency_ms = 350", "latency_ms = 350\nslo_target = 0.9"),
        ("percentile = 0.95", "hop_ms = 2.0\nseed = 3\nseconds = 60"),
    )
    file = read_pipeline(path)
    assert (file.options[0].variant, file.options[0].accuracy) == ("fast", 0.8)
    when = EdgeCondition(output="label", op="!=", value=0)
    assert file.pipeline.edges == [PipelineEdge(source="lang", target="translate", when=when)]
    assert (file.slo_target, file.hop_ms, file.seed, file.seconds) == (0.9, 2.0, 3, 60.0)
    assert file.pipeline.vertices[0] == PipelineVertex(name="lang", app="language-id", inputs={"text": "$.text"})


@pytest.mark.parametrize(
    ("percentile", "in_file", "registered", "planned"),
    [("0.95", "0.9", 0.8, 0.95), (None, "0.9", 0.8, 0.9), (None, None, 0.8, 0.8), (None, None, None, 0.99)],
)
def test_a_plan_is_for_the_target_of_the_app(
    percentile: str | None, in_file: str | None, registered: float | None, planned: float, changed: Any
) -> None:
    """Unless the file says a percentile: its slo_target, else that of the registered pipeline."""
    target = "" if in_file is None else f"\nslo_target = {in_file}"
    said = "seed = 1" if percentile is None else f"percentile = {percentile}"
    file = read_pipeline(changed(("latency_ms = 350", f"latency_ms = 350{target}"), ("percentile = 0.95", said)))
    more = {} if registered is None else {"target": registered}
    assert problem_of(file, (*file.options, option("translate")), MeasuredHop(0.5), **more).percentile == planned


# -- the sample


def test_the_sample_lasts_ten_minutes_and_is_the_same_each_time(changed: Any) -> None:
    file = read_pipeline(changed())
    times = sample(file)
    assert 590 < times[-1] < 600
    assert len(times) == pytest.approx(150 * 600, rel=0.03)
    assert np.all(np.diff(times) >= 0)
    assert np.array_equal(times, sample(file))
    other = read_pipeline(changed(("percentile = 0.95", "seed = 2")))
    assert not np.array_equal(times[:100], sample(other)[:100])


@pytest.mark.parametrize(
    ("load", "plan", "least", "most"),
    [
        ("rate = 150", "seconds = 30", 28, 30),
        ("rate = 0.1", "", 15_000, 20_000),  # some thousand queries
        ("rate = [[0, 1], [1000, 20]]", "", 990, 1000),
        ('arrivals = "trace"\nfile = "counts"', "", 2, 3),
        ('arrivals = "times"\nfile = "times"', "", 7.5, 7.5),
        ('arrivals = "times"\nfile = "times"\n[[load]]\nrate = 5', "", 590, 600),
    ],
)
def test_the_sample_is_as_long_as_it_says(load: str, plan: str, least: float, most: float, changed: Any) -> None:
    path = changed(('rate = 150\narrivals = "gamma"\ncv = 1.0', load), ("percentile = 0.95", plan))
    (path.parent / "counts").write_text("5\n7\n6\n")
    (path.parent / "times").write_text("1.0\n7.5\n")
    assert least <= sample(read_pipeline(path))[-1] <= most


def test_loads_add_up_and_planners_need_a_pipeline(changed: Any, tmp_path: Path) -> None:
    one = sample(read_pipeline(changed()))
    two = sample(read_pipeline(changed(more='[[load]]\nrate = 50\narrivals = "uniform"\napp = "social"\n')))
    assert len(two) == pytest.approx(len(one) + 30_000, rel=0.01)
    assert np.all(np.diff(two) >= 0)
    text = SCENARIO.replace('[[pipeline]]\nfile = "social.toml"', "").replace('app = "social"', 'app = "nmt"')
    with pytest.raises(TomlError, match=r"inferline plans pipelines, and there is no \[\[pipeline\]\]"):
        read_scenario(write(tmp_path, text))


# -- refusals


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            ("latency_ms = 350", "latency_ms = 350\nlatency = 3"),
            "pipeline.latency: there is no such key; did you mean latency_ms?",
        ),
        (("latency_ms = 350", ""), "pipeline.latency_ms: is missing"),
        (('name = "social"', 'name = "so cial"'), "pipeline.name: must be 1 to 64 letters"),
        (('app = "nmt"', ""), "vertex[1].app: is missing"),
        (('inputs = { text = "$.text" }', "inputs = [1]"), "vertex[0].inputs: must be a table"),
        (('text = "$.text", lang', "text = 3, lang"), "vertex[1].inputs.text: must be some printable text"),
        (("probability = 0.4", "probability = 1.4"), "edge[0].probability: must be above 0 and at most 1, not 1.4"),
        (('op = "!=", ', ""), "edge[0].when.op: is missing"),
        (("value = 0", "valu = 0"), "edge[0].when.valu: there is no such key; did you mean value?"),
        (("percentile = 0.95", "seconds = 0"), "plan.seconds: must be above 0"),
        (("rate = 150", "rate = 150\nrats = 3"), "load[0].rats: there is no such key"),
        (("rate = 150", 'rate = 150\napp = "other"'), "load[0].app: there is no app 'other'"),
        (("cv = 1.0", 'file = "x"'), "load[0].file: means nothing with arrivals 'gamma'"),
        (("1 = 20.0", "0 = 20.0"), "option[0].batch_latency_ms.0: must be at least 1 and at most 1024"),
        (("1 = 20.0", "one = 20.0"), "option[0].batch_latency_ms.one: must be a whole number"),
        (("price_per_hour = 0.1", ""), "option[0].price_per_hour: is missing"),
        (("[plan]", "[plant]"), "plant: there is no such key; did you mean plan?"),
    ],
)
def test_a_wrong_value_is_refused(change: tuple[str, str], message: str, changed: Any) -> None:
    path = changed(change)
    with pytest.raises(TomlError) as caught:
        read_pipeline(path)
    assert str(caught.value).startswith(f"{path}: {message}")


def test_a_file_without_a_pipeline_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.toml"
    for content, message in (
        ("", "pipeline: is missing"),
        ("[", "is not valid TOML"),
        ("x = 1", "x: there is no such"),
    ):
        path.write_text(content)
        with pytest.raises(TomlError, match=message):
            read_pipeline(path)
    with pytest.raises(TomlError, match="cannot be read: No such file"):
        read_pipeline(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ([('[[load]]\nrate = 150\narrivals = "gamma"\ncv = 1.0', "")], "load: there must be at least one [[load]]"),
        ([("rate = 150", "rate = 0")], "load: the sample trace has no queries"),
        ([("rate = 150", "rate = 1e6")], "load: the sample trace of 600 s would have 6e+08 queries, more than 1e+07: set"),
        ([("percentile = 0.95", "seconds = 1e-6")], "load: the sample trace has no queries; give it a rate above 0"),
        ([('vertex = "lang"\nhardware', 'vertex = "long"\nhardware')], "option[0].vertex: there is no vertex 'long'"),
        ([], "option: vertex translate has none; add [[option]]"),
        ([("price_per_hour = 0.1", "price_per_hour = 0.1\naccuracy = 0.5"), ('"lang"\nhardware', '"translate"\nhardware')],
         "vertex[translate].accuracy: no option has 0.9; the best has 0.5"),
    ],
)  # fmt: skip
def test_what_cannot_be_planned_is_refused(changes: list[tuple[str, str]], message: str, changed: Any) -> None:
    file = read_pipeline(changed(*changes))
    with pytest.raises(TomlError) as caught:
        problem_of(file, file.options, NO_HOP)
    assert message in str(caught.value)


def test_a_graph_that_is_wrong_is_refused(changed: Any) -> None:
    for change, message in (
        (('from = "lang"\nto = "translate"', 'from = "translate"\nto = "translate"'), "is a cycle; leave this edge"),
        (('text = "translate.y | lang.text"', ""), "output: must name at least one tensor"),
        (('app = "nmt"', 'app = "social"'), "vertex[translate].app: the pipeline contains itself"),
    ):
        with pytest.raises(TomlError) as caught:
            check_pipeline(read_pipeline(changed(change)))
        assert message in str(caught.value)
    with pytest.raises(TomlError, match="there is no app 'nmt'; register a model for it"):
        check_pipeline(read_pipeline(changed()), {"language-id": SOCIAL_APPS["language-id"]})


# -- Pipelines of a scenario: what is read of them, their plans, refusals, and runs of them.
PIPELINE = (
    SOCIAL_TOML.replace("350", "200")
    .replace('reduce = "argmax", op = "!=", value = 0', 'op = "!=", value = "en"')
    .replace("accuracy = 0.9\n", "")
)
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
    with pytest.raises(TomlError) as refused:
        read_scenario(write(tmp_path, text), policies=policies)
    assert message in str(refused.value)


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


def test_without_plans_or_pipelines_vertices_are_apps_and_nothing_is_reported(tmp_path: Path) -> None:
    [run] = simulate_all(read_scenario(write(tmp_path), policies=["infaas"]))["policies"]
    social = run["apps"]["social"]
    assert social["attainment"] > 0.95
    assert social["pipeline"]["plan"] is None
    assert social["pipeline"]["vertices"]["translate"]["visits"] > 300
    assert not PipelineReports({})
