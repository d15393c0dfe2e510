"""Edges that hand items on: how many items there are, which they are, and what is refused."""

from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, EdgeCondition, PipelineEdge, PipelineRecord, PipelineVertex
from bus.tensors import BadTensor, from_array, to_array
from services.core.pipelines.branching import items_key, visits
from services.core.pipelines.checks import pipeline_errors
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.items import TooManyItems, drawn_items, joined, split
from tests.support.data.pipelines import app


def edge(source: str, target: str, items: str = "boxes", **more: Any) -> PipelineEdge:
    return PipelineEdge(source=source, target=target, **({"items": items} if items else {}), **more)


def vertex(name: str, of: str, text: str, **inputs: str) -> PipelineVertex:
    return PipelineVertex(name=name, app=of, inputs={"x": text, **inputs})


def app_of(name: str, given: tuple[int, ...], made: dict[str, tuple[int, ...]], more: str = "") -> AppRecord:
    record = app(name, {"x": "FP32", **({more: "FP32"} if more else {})}, dict.fromkeys(made, "FP32"), given)
    outputs = [replace(spec, shape=list(made[spec.name])) for spec in record.signature.outputs]
    return replace(record, signature=replace(record.signature, outputs=outputs))


APPS = {
    one.app: one
    for one in (
        app_of("find", (9,), {"boxes": (-1, 4), "sizes": (-1,), "best": (4,), "pair": (2,)}),
        app_of("name", (4,), {"y": (3,), "sure": (1,), "boxes": (-1, 4)}),
        app_of("pair", (4,), {"y": (3,)}, more="whole"),
        app_of("after", (3,), {"y": (2,)}),
    )
}
FIND, NAME, AFTER = (
    vertex("find", "find", "$.x"),
    vertex("name", "name", "find.boxes"),
    vertex("after", "after", "name.y"),
)
PLAIN = PipelineRecord(vertices=[FIND, NAME], edges=[edge("find", "name")], output={"y": "name.y"})
BEHIND = PipelineRecord(
    vertices=[FIND, NAME, AFTER], edges=[edge("find", "name"), edge("name", "after", "")], output={"y": "after.y"}
)
DEEP = PipelineRecord(
    vertices=[FIND, NAME, vertex("deep", "name", "name.boxes")],
    edges=[edge("find", "name"), edge("name", "deep")],
    output={"y": "deep.y"},
)


def errors(record: PipelineRecord, **more: AppRecord) -> list[str]:
    return pipeline_errors("p", 350.0, record, APPS | more)


@pytest.mark.parametrize("record", [PLAIN, BEHIND, DEEP])
def test_boxes_boxes_of_boxes_and_what_follows_them_are_allowed(record: PipelineRecord) -> None:
    assert errors(record) == []


UNSURE = EdgeCondition(output="sure", op="<", value=0.5)
INNER = replace(app_of("inner", (3,), {"y": (2,)}), pipeline=BEHIND)
BAD: dict[str, tuple[PipelineRecord, str]] = {
    "two edges into it": (
        PipelineRecord(
            vertices=[FIND, vertex("other", "find", "$.x"), NAME],
            edges=[edge("find", "name"), edge("other", "name", "")],
            output={"y": "name.y"},
        ),
        "edge[find -> name].items: name is asked for each item of one answer; leave the edges from other out",
    ),
    "nothing takes them": (
        replace(PLAIN, vertices=[FIND, vertex("name", "name", "find.best")]),
        'edge[find -> name].items: no input of name takes find.boxes; say inputs = { NAME = "find.boxes" } in its [[vertex]]',
    ),
    "no axis of items": (
        PipelineRecord(
            vertices=[FIND, vertex("name", "name", "find.best")],
            edges=[edge("find", "name", "best")],
            output={"y": "name.y"},
        ),
        "edge[find -> name].items: find.best has 1 axes in an answer, and x of name has 1; give it an axis of items",
    ),
    "no such output": (
        PipelineRecord(
            vertices=[FIND, vertex("name", "name", "find.box")],
            edges=[edge("find", "name", "box")],
            output={"y": "name.y"},
        ),
        "vertex[name].inputs.x: find has no output 'box'",
    ),
    "another shape": (
        PipelineRecord(
            vertices=[FIND, vertex("name", "after", "find.boxes")], edges=[edge("find", "name")], output={"y": "name.y"}
        ),
        "vertex[name].inputs.x: find.boxes is FP32[4], but x must be FP32[3]",
    ),
    "a bound out of range": (
        replace(PLAIN, edges=[edge("find", "name", items_max=0)]),
        "edge[find -> name].items_max: must be at least 1 and at most 1024",
    ),
    "too many together": (
        replace(DEEP, edges=[edge("find", "name"), edge("name", "deep", items_max=200)]),
        "edge[name -> deep].items_max: a query may ask deep for 20000 items, at most 10000; set a smaller items_max",
    ),
    "a mean without items": (
        replace(BEHIND, edges=[edge("find", "name"), edge("name", "after", "", items_mean=2.0)]),
        "edge[name -> after].items_mean: is for an edge with items",
    ),
    "open shapes together": (
        replace(PLAIN, output={"y": "name.boxes"}),
        "output.y: name.boxes differs in shape from item to item, so that its answers cannot be put together",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_is_refused_with_the_remedy(case: str) -> None:
    record, text = BAD[case]
    assert any(text in error for error in errors(record)), errors(record)


def test_what_is_behind_items_has_their_rows_alone() -> None:
    sure = PipelineRecord(
        vertices=[FIND, NAME, vertex("after", "after", "name.y")],
        edges=[edge("find", "name"), edge("name", "after", "", when=UNSURE)],
        output={"y": "after.y | find.pair"},
    )
    assert (
        "edge[name -> after].when: name answers for each item of name, and a condition decides once a query"
        in errors(sure)[0]
    )
    pair = app_of("pair", (3,), {"y": (3,)}, more="whole")
    mixed = PipelineRecord(
        vertices=[FIND, NAME, vertex("both", "pair", "name.y", whole="$.whole")],
        edges=[edge("find", "name"), edge("name", "both", "")],
        output={"y": "both.y"},
    )
    assert errors(mixed, pair=pair) == [], "an input without rows is the same for each"
    apart = PipelineRecord(
        vertices=[FIND, NAME, replace(NAME, name="other"), vertex("both", "pair", "name.y", whole="other.y")],
        edges=[edge("find", "name"), edge("find", "other"), edge("name", "both", ""), edge("other", "both", "")],
        output={"y": "both.y"},
    )
    [error] = errors(apart, pair=pair)
    assert error.startswith(
        "vertex[both].inputs.whole: has rows for items of other, and other inputs for those of name;"
    )
    inner = PipelineRecord(
        vertices=[FIND, NAME, vertex("in", "inner", "name.y")],
        edges=[edge("find", "name"), edge("name", "in", "")],
        output={"y": "in.y"},
    )
    assert errors(inner, inner=INNER) == [], "a pipeline with items of its own is asked for each"


@pytest.mark.parametrize(("mean", "dispersion"), [(2.6, 1.0), (18.9, 1.0), (18.9, 3.0), (2.6, 0.5), (3.0, 0.0)])
@pytest.mark.parametrize("answers", [1, 4])
def test_as_many_are_drawn_as_the_edge_says(mean: float, dispersion: float, answers: int) -> None:
    one = edge("a", "b", items_mean=mean, items_dispersion=dispersion, items_max=200)
    found = drawn_items(np.random.default_rng(1).random(100_000), one, np.full(100_000, answers))
    assert found.mean() == pytest.approx(answers * mean, rel=0.01)
    assert found.var() == pytest.approx(answers * mean * dispersion, rel=0.05, abs=0.01)
    short = drawn_items(np.random.default_rng(1).random(1000), replace(one, items_max=2), np.full(1000, answers))
    assert short.max() <= 2 * answers


def test_of_each_query_a_vertex_is_asked_for_what_was_drawn() -> None:
    record = replace(DEEP, edges=[edge("find", "name", items_mean=0.7), edge("name", "deep", items_mean=2.0)])
    graph, uids = PipelineGraph(record), np.arange(50_000, dtype=np.uint64)
    found = visits(graph, uids)
    assert (found["name"].mean(), found["deep"].mean()) == (pytest.approx(0.7, rel=0.03), pytest.approx(1.4, rel=0.03))
    assert not found["deep"][found["name"] == 0].any()
    once = visits(
        PipelineGraph(replace(BEHIND, vertices=[FIND, NAME, replace(AFTER, inputs={"x": "$.x"})])), uids[:100]
    )
    assert once["after"].tolist() == [1] * 100, "what takes nothing of the items is asked once"
    assert items_key(record.edges[0]) == "find>name items"


@pytest.mark.parametrize("dtype", ["f4", "i8", "u1", object])
def test_items_come_apart_and_together_in_their_order(dtype: Any) -> None:
    rows = np.arange(24).reshape(1, 6, 4).astype(dtype)
    if dtype is object:
        rows = np.vectorize(str, otypes=[object])(rows)
    items = split(from_array(rows), 1, edge("a", "b"))
    assert [one.shape for one in items] == [[1, 4]] * 6
    spec = replace(APPS["name"].signature.outputs[0], datatype=items[0].datatype, shape=[4])  # type: ignore[union-attr]
    assert (to_array(joined(items, spec), "y") == rows[0]).all()
    assert len(split(from_array(rows), 1, edge("a", "b", items_max=2, items_cut=True))) == 2
    with pytest.raises(TooManyItems, match="boxes has 6 items, and items_max is 2"):
        split(from_array(rows), 1, edge("a", "b", items_max=2))
    with pytest.raises(BadTensor, match="one of its items must have 3 axes"):
        split(from_array(rows), 3, edge("a", "b"))
    none = joined([], replace(spec, shape=[-1, 4]))
    assert (none.shape, to_array(none, "y", empty=True).shape) == ([0, 0, 4], (0, 0, 4))
    with pytest.raises(BadTensor, match="cannot be put together"):
        joined([items[0], from_array(rows[0, :1, :2])], spec)
