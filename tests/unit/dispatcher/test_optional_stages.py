"""A stage that may fail or be late, and several of which the first answers. Virtual time."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, Ensemble, PipelineEdge, PipelineRecord, PipelineVertex, Signature
from bus.messages.public import Requirements
from services.core.pipelines.checks import pipeline_errors
from services.core.pipelines.graph import PipelineGraph
from tests.support.simulated.fleet import SIGNATURE, refused
from tests.unit.dispatcher.test_fanout import FAN, fanned
from tests.unit.dispatcher.test_join import holders
from tests.unit.dispatcher.test_pipelines import SLO_MS, UNSURE, Staged, alone, edge, numbers, vertex

# `extra` looks first, if it can; `main` takes what it says, else the picture itself.
SPARED = PipelineRecord(
    vertices=[vertex("extra", optional=True), vertex("main", "extra.y | $.x")],
    edges=[edge("extra", "main")],
    output={"y": "main.y"},
)
LAST = replace(SPARED, vertices=[vertex("main"), vertex("extra", "main.y", optional=True)],
               edges=[edge("main", "extra")], output={"y": "extra.y | main.y"})  # fmt: skip
RACE = PipelineRecord(
    vertices=[vertex("one"), vertex("other"), vertex("last", "any(one.y, other.y)")],
    edges=[edge("one", "last"), edge("other", "last")],
    output={"y": "last.y"},
)
ENDS = PipelineRecord(
    vertices=[vertex("first"), vertex("one", "first.y"), vertex("other")],
    edges=[edge("first", "one")],
    output={"y": "any(one.y, other.y)"},
)
ALIKE = Signature(inputs=SIGNATURE.inputs, outputs=[replace(SIGNATURE.inputs[0], name="y")])
SAYS = {"extra": 1.0, "main": 2.0, "first": 3.0, "one": 4.0, "other": 5.0, "last": 6.0}


def served(record: PipelineRecord, fails: tuple[str, ...] = (), **options: Any) -> Staged:
    fleet = Staged(record, says=SAYS, **options)
    for device in fleet.devices.values():
        device.fails = {f"{name}@1" for name in fails}
    return fleet


def answered(fleet: Staged, seconds: float = 5.0) -> dict[str, Any]:
    reply = fleet.one(fleet.ask("p"), seconds)
    assert "outputs" in reply, reply
    assert fleet.query().outcome == "ok"
    return reply


def test_an_optional_stage_that_answers_counts_like_any_other() -> None:
    reply = answered(served(SPARED))
    assert (reply["members"], reply.get("missing")) == (["extra@1", "main@1"], None)


@pytest.mark.parametrize("record", [SPARED, LAST])
def test_a_query_goes_on_without_an_optional_stage_that_fails(record: PipelineRecord) -> None:
    reply = answered(served(record, ("extra",)))
    assert (numbers(reply)[0], reply["members"], reply["missing"]) == (2.0, ["main@1"], 1)


@pytest.mark.parametrize("record", [SPARED, LAST])
def test_a_query_goes_on_without_an_optional_stage_that_is_late(record: PipelineRecord) -> None:
    fleet = served(record, late={"extra": 1000.0})
    reply = answered(fleet)
    assert (numbers(reply)[0], reply["members"], reply["missing"]) == (2.0, ["main@1"], 1)
    assert reply["latency_ms"] < SLO_MS
    fleet.stage.run(10.0)
    assert fleet.query().outcome == "ok", "what comes late changes nothing"


def test_an_app_that_answers_nothing_now_holds_up_no_query_that_can_do_without() -> None:
    fleet = served(SPARED)
    fleet.change("extra", links={})
    assert answered(fleet)["missing"] == 1
    assert "refusal" not in fleet.request(fleet.subjects.explain("p"), Requirements())
    fleet.change("main", links={})
    refused(fleet.one(fleet.ask("p")), "unknown_model", "vertex main")


def test_the_default_output_of_an_optional_stages_app_stands_for_its_answer() -> None:
    record = replace(SPARED, vertices=[vertex("extra", optional=True), vertex("main", "extra.y"), vertex("dear", "extra.y")],
                     edges=[edge("extra", "main"), edge("extra", "dear", when=UNSURE)], output={"y": "dear.y | main.y"})  # fmt: skip
    fleet = served(record, ("extra",))
    fleet.change("extra", default_output=0.9, signature=ALIKE)
    reply = answered(fleet)
    assert (reply["members"], reply["missing"]) == (["main@1", "dear@1"], 1), "the condition reads the default"
    fleet.change("extra", default_output=0.1)
    assert fleet.one(fleet.ask("p"))["members"] == ["main@1"]


def test_a_query_ends_with_the_optional_stages_refusal_where_nothing_stands_for_it() -> None:
    record = replace(SPARED, vertices=[vertex("extra", optional=True), vertex("main", "extra.y")])
    fleet = served(record, ("extra",))
    error = refused(fleet.one(fleet.ask("p")), "model_error")
    assert error["message"].startswith("vertex extra: ")
    assert error["message"].endswith("; nothing stands for it in vertex main")
    chained = replace(record, vertices=[*record.vertices[:1], vertex("main", "extra.y", optional=True)],
                      output={"y": "main.y | $.x"})  # fmt: skip
    assert numbers(answered(served(chained, ("extra",)))) == (0.0, 0.0)


@pytest.mark.parametrize(("record", "slow", "says", "members"), [
    (RACE, "one", 6.0, ["other@1", "last@1"]), (RACE, "other", 6.0, ["one@1", "last@1"]),
    (ENDS, "one", 5.0, ["first@1", "other@1"]), (ENDS, "first", 5.0, ["other@1"]), (ENDS, "other", 4.0, ["first@1", "one@1"]),
])  # fmt: skip
def test_of_several_stages_the_first_answer_counts(
    record: PipelineRecord, slow: str, says: float, members: list[str]
) -> None:
    fleet = served(record, late={slow: 10.0}, changes={name: {"base_ms": 10.0} for name in SAYS})
    fleet.change("p", latency_ms=20_000.0)
    reply = answered(fleet)
    assert (numbers(reply)[0], reply["members"], reply.get("missing")) == (says, members, None)
    assert reply["latency_ms"] < 60.0
    fleet.stage.run(10.0)
    assert len([one for one in fleet.outcomes() if one.parent is None]) == 1


@pytest.mark.parametrize("record", [RACE, ENDS])
def test_one_that_fails_leaves_the_answer_to_the_others(record: PipelineRecord) -> None:
    reply = answered(served(record, ("one",), late={"other": 3.0}))
    assert "other@1" in reply["members"]
    assert "one@1" not in reply["members"]
    assert reply["missing"] == 1
    fleet = served(record, ("one", "other"))
    assert "nothing stands for it in" in refused(fleet.one(fleet.ask("p")), "model_error")["message"]


def test_what_something_else_takes_too_is_waited_for() -> None:
    record = replace(RACE, output={"y": "last.y", "slow": "one.y"})
    assert PipelineGraph(record).spared == {"other"}
    reply = answered(served(record, late={"one": 5.0}))
    assert (numbers(reply, "slow")[0], reply["members"]) == (4.0, ["one@1", "other@1", "last@1"])
    record = replace(
        record, vertices=record.vertices[:2], edges=[], output={"y": "any(one.y, other.y)", "slow": "one.y"}
    )
    reply = answered(served(record, late={"one": 5.0}))
    assert (numbers(reply)[0], numbers(reply, "slow")[0]) == (5.0, 4.0), "the first one counts, though both are there"


@pytest.mark.parametrize("inner", [False, True])
def test_an_ensemble_and_a_pipeline_within_may_be_spared_too(inner: bool) -> None:
    """Of both, no part can be answered."""
    fleet = served(SPARED, ("extra",))
    if inner:
        fleet.add(AppRecord(app="whole", links={}, signature=SIGNATURE, pipeline=alone("extra")))
        vertices = [replace(SPARED.vertices[0], app="whole"), SPARED.vertices[1]]
        fleet.change("p", pipeline=replace(SPARED, vertices=vertices))
    else:
        fleet.change("extra", selection=Ensemble(policy="majority"))
    reply = answered(fleet)
    assert (numbers(reply)[0], reply["members"], reply["missing"]) == (2.0, ["main@1"], 1)


def test_what_would_tell_the_items_has_none_where_it_may_fail() -> None:
    record = replace(FAN, vertices=[replace(FAN.vertices[0], optional=True), *FAN.vertices[1:]])
    fleet = fanned(record, boxes={"find": 3})
    assert answered(fleet)["outputs"]["y"]["shape"][0] == 3
    for device in fleet.devices.values():
        device.fails = {"find@1"}
    reply = fleet.one(fleet.ask("p"))
    assert (reply["outputs"]["y"]["shape"][0], reply["missing"]) == (0, 1)


def test_another_dispatcher_goes_on_without_it_too() -> None:
    fleet = served(SPARED, dispatchers=2, late={"main": 100.0}, fails=("extra",))
    fleet.change("p", latency_ms=20_000.0)
    label = fleet.ask("p", seconds=0.1)
    [taken] = holders(fleet)
    fleet.stage.kill(taken)
    assert numbers(fleet.one(label, 15.0))[0] == 2.0


@pytest.mark.parametrize(("text", "says"), [
    ("any(one.y, two.y)", "there is no vertex 'two'"), ("any(one.y other.y)", "is neither"), ("any()", "is neither"),
])  # fmt: skip
def test_what_is_no_race_is_refused(text: str, says: str) -> None:
    wrong = pipeline_errors("p", None, replace(RACE, output={"y": text}), None)
    assert any(says in one for one in wrong), wrong


def test_an_optional_stage_needs_something_that_stands_for_it() -> None:
    vertices = [PipelineVertex(name="a", app="a", inputs={"x": "$.x"}, optional=True), vertex("b", "a.y")]
    record = PipelineRecord(vertices=vertices, edges=[PipelineEdge(source="a", target="b")], output={"y": "b.y"})
    apps = {name: AppRecord(app=name, links={name: "1"}, signature=ALIKE) for name in "ab"}
    [wrong] = pipeline_errors("p", None, record, apps)
    assert wrong == (
        "vertex[b].inputs.x: a is optional: name what stands for it, as a.y | $.NAME, or give the app a a default output"
    )
    apps["a"] = replace(apps["a"], default_output=0.0)
    assert not pipeline_errors("p", None, record, apps)
