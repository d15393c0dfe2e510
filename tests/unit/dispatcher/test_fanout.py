"""A stage of a pipeline that is asked for each item of an answer: what it gets, what becomes of it, what it costs. Virtual time."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import Ensemble, PipelineRecord, PipelineVertex, Signature, TensorSpec
from bus.messages.public import ListRequest, Requirements
from bus.messages.quality import AppQuality, LiveAccuracy
from services.core.settings import DispatcherSettings, Settings
from tests.support.simulated.fleet import SIGNATURE, refused
from tests.unit.dispatcher.test_pipelines import Staged, edge, nested, numbers, vertex

BOXES = Signature(inputs=SIGNATURE.inputs, outputs=[TensorSpec(name="y", datatype="FP32", shape=[-1, 2])])
FAN = PipelineRecord(
    vertices=[vertex("find"), vertex("name", "find.y")],
    edges=[edge("find", "name", items="y", items_mean=3.0, items_max=8)],
    output={"y": "name.y"},
)


THREE = {"find": 3}


def fanned(record: PipelineRecord = FAN, boxes: dict[str, int] = THREE, **options: Any) -> Staged:
    """A fleet in which these models give so many boxes of two numbers, and the others what they are asked."""
    fleet = Staged(record, **options)
    for name in boxes:
        fleet.change(name, signature=BOXES)
    for device in fleet.devices.values():
        device.boxes = dict(boxes)
        device.echoes = {one.app for one in record.vertices} - boxes.keys()
    return fleet


def parts(fleet: Staged, stage: str = "name") -> list[Any]:
    return [one for one in fleet.outcomes() if one.stage == stage]


def test_each_item_is_a_query_and_the_answers_come_in_order() -> None:
    fleet = fanned(says={})
    reply = fleet.one(fleet.ask("p"))
    assert reply["outputs"]["y"]["shape"] == [3, 2]
    assert numbers(reply) == (0, 0, 1, 1, 2, 2)
    assert [one.items for one in parts(fleet)] == [1, 1, 1]
    assert len({one.uid for one in parts(fleet)}) == 3
    cost = sum(one.cost for one in fleet.outcomes() if one.parent is not None)
    assert fleet.query().cost == pytest.approx(cost) == pytest.approx(reply["cost"])
    assert reply["members"] == ["find@1", "name@1"]


def test_what_labels_say_of_a_stage_is_said_of_its_items_together() -> None:
    fleet = fanned()
    fleet.one(fleet.ask("p"))
    live = LiveAccuracy(accuracy=0.4, low=0.3, high=0.5, labels=100, since=0.0)
    fleet.add(AppQuality(app="name", revision=1, variants={parts(fleet)[0].variant: live}))
    reply = fleet.one(fleet.ask("p"))
    assert (reply["accuracy"], reply["accuracy_source"]) == (0.4, "labels")


def test_without_an_item_the_stage_is_not_asked_and_its_answer_has_no_row() -> None:
    fleet = fanned(boxes={"find": 0})
    reply = fleet.one(fleet.ask("p"))
    assert reply["outputs"]["y"] == {"datatype": "FP32", "shape": [0, 1], "data": b""}
    assert parts(fleet) == []
    assert (reply["accuracy"], reply["members"]) == (0.9, ["find@1"]), "of what was asked"


@pytest.mark.parametrize("cut", [False, True])
def test_what_exceeds_the_bound_is_refused_or_cut(cut: bool) -> None:
    fleet = fanned(replace(FAN, edges=[replace(FAN.edges[0], items_cut=cut)]), boxes={"find": 9})
    reply = fleet.one(fleet.ask("p"))
    if cut:
        assert numbers(reply) == tuple(i for i in range(8) for _ in range(2))
    else:
        assert refused(reply, "too_large")["message"] == (
            "vertex find: y has 9 items, and items_max is 8: send less, or raise it"
        )


def test_items_share_the_cost_that_a_query_may_have() -> None:
    """It is said to have three items. What five cost is known when they are there."""
    one, five = (fanned(boxes={"find": n}) for n in (1, 5))
    each = 500.0 * one.one(one.ask("p"))["cost"]  # of a box alone, or of the detector
    found = five.one(five.ask("p", cost=6.5 * each))
    assert (len(numbers(found)), found["missed"]) == (10, [])
    for limit in (4.5 * each, 6.1 * each):  # the second is less than what is predicted by the rounding of numbers alone
        short = refused(five.one(five.ask("p", cost=limit)), "unsatisfiable")
        assert short["message"].startswith("vertex name, item 0: ")
    assert refused(five.one(five.ask("p", cost=3.5 * each)), "unsatisfiable")["message"].startswith(
        "pipeline 'p' may cost"
    )


@pytest.mark.parametrize("late", [False, True])
def test_one_item_that_is_not_answered_refuses_the_query_and_is_named(late: bool) -> None:
    fleet = fanned()
    for device in fleet.devices.values():
        device.late = {"name": 1000.0} if late else {}
        device.refuses = {} if late else {"name": "no crop"}
    label = fleet.ask("p")
    if late:
        assert (
            "name, item 0, name, item 1, name, item 2 had not answered"
            in refused(fleet.one(label), "deadline")["message"]
        )
    else:
        assert refused(fleet.one(label), "model_error")["message"] == "vertex name, item 0: no crop"
    assert fleet.query().outcome != "ok"
    assert not fleet.stage.members["d0"].actor.composites.joins.open


def test_outputs_and_items_that_no_message_holds_go_by_the_object_store() -> None:
    fleet = fanned(settings=Settings(dispatcher=DispatcherSettings(max_inline=600)))
    for device in fleet.devices.values():
        device.boxes, device.wide = {"find": 90}, {"find": 2, "name": 300}
        device.echoes = set()
    fleet.change("p", pipeline=replace(FAN, edges=[replace(FAN.edges[0], items_max=100)]))
    reply = fleet.one(fleet.ask("p"))
    assert reply["outputs"] == {}
    stored = fleet.contexts.objects[reply["outputs_ref"]["key"]]
    assert stored["y"].shape == [90, 300]
    assert len(parts(fleet)) == 90


def test_an_ensemble_a_cache_and_a_pipeline_may_answer_for_items() -> None:
    voting = fanned()
    voting.change("name", selection=Ensemble(policy="majority"))
    assert len(voting.one(voting.ask("p"))["confidences"]) == 3
    kept = fanned()
    kept.change("name", selection=Ensemble(cache_mb=1.0))
    first, again = (kept.one(kept.ask("p")) for _ in range(2))
    assert numbers(first) == numbers(again) == (0, 0, 1, 1, 2, 2)
    assert again["cost"] < first["cost"], "the second time the boxes are known"
    outer = PipelineRecord(
        vertices=[vertex("find"), PipelineVertex(name="rest", app="inner", inputs={"x": "find.y"})],
        edges=[edge("find", "rest", items="y")],
        output={"y": "rest.y"},
    )
    fleet = nested(outer)
    fleet.change("find", signature=BOXES)
    for device in fleet.devices.values():
        device.boxes = {"find": 4}
    reply = fleet.one(fleet.ask("p"))
    assert numbers(reply) == (9.0,) * 8
    assert [one.items for one in parts(fleet, "deep")] == [1] * 4


def test_boxes_of_boxes_come_one_after_the_other() -> None:
    deep = PipelineRecord(
        vertices=[vertex("find"), vertex("part", "find.y"), vertex("name", "part.y"), vertex("last", "name.y")],
        edges=[edge("find", "part", items="y"), edge("part", "name", items="y"), edge("name", "last")],
        output={"y": "last.y"},
    )
    fleet = fanned(deep, {"find": 2, "part": 3})
    reply = fleet.one(fleet.ask("p"))
    assert numbers(reply) == tuple(float(i) for _ in range(2) for i in range(3) for _ in range(2))
    assert [len(parts(fleet, name)) for name in ("find", "part", "name", "last")] == [1, 2, 6, 6]
    none = fanned(deep, {"find": 2, "part": 0})
    assert none.one(none.ask("p"))["outputs"]["y"]["shape"] == [0, 1]
    assert [len(parts(none, name)) for name in ("find", "part", "name", "last")] == [1, 2, 0, 0]


def test_another_dispatcher_asks_for_the_same_items() -> None:
    fleet = fanned(dispatchers=2)
    label = fleet.ask("p", retry_key=b"0123456789abcdef")
    fleet.one(label)
    before = {one.uid for one in parts(fleet)}
    fleet.one(fleet.ask("p", retry_key=b"0123456789abcdef"))
    assert {one.uid for one in parts(fleet)} == before


def test_explain_and_the_list_say_how_many_items_there_were() -> None:
    fleet = fanned()
    for _ in range(3):
        fleet.one(fleet.ask("p"))
    listed = fleet.request(fleet.subjects.list("pipelines"), ListRequest())["items"][0]["edges"][0]
    assert listed["items_seen"] == {"answers": 3, "mean": 3.0, "dispersion": 0.0}
    assert (listed["items"], listed["items_max"]) == ("y", 8)
    [_, stage] = fleet.request(fleet.subjects.explain("p"), Requirements())["stages"]
    assert stage["when"] == [
        "find: for each item of y, at most 8: an answer with more is refused; 3 in the mean of 3 answers, dispersion 0"
    ]


def test_when_its_dispatcher_dies_another_one_goes_on_with_the_items() -> None:
    fleet = fanned(dispatchers=2, workers=2)
    fleet.change("p", latency_ms=20_000.0)
    for device in fleet.devices.values():
        device.late = {"name": 200.0}
    label = fleet.ask("p", seconds=0.1)
    for name, member in fleet.stage.members.items():
        if name.startswith("d") and member.actor.composites.joins.open:
            fleet.stage.kill(name, seconds=10.0)
            break
    assert [numbers(reply) for reply in fleet.replies(label)] == [(0, 0, 1, 1, 2, 2)]
    assert len([one for one in fleet.outcomes() if one.parent is None]) == 1
