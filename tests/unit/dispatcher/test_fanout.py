"""A stage of a pipeline that is asked for each item of an answer: what it gets, what becomes of it, what it costs. Virtual time."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.catalog import PipelineRecord, Signature, TensorSpec
from tests.support.simulated.fleet import SIGNATURE, refused
from tests.unit.dispatcher.test_pipelines import Staged, edge, numbers, vertex

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
