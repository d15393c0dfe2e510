"""What is wrong with a pipeline is refused with the field's name and the remedy."""

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from bus.messages.catalog import EdgeCondition, PipelineEdge, PipelineRecord, PipelineVertex
from services.core.pipelines.checks import pipeline_errors, signature_of
from services.core.pipelines.graph import PipelineGraph
from tests.support.data.pipelines import SOCIAL, SOCIAL_APPS, TRANSLATED, app


def errors(record: PipelineRecord, **other: Any) -> list[str]:
    given: dict[str, Any] = {"name": "social", "latency_ms": 350.0, "apps": SOCIAL_APPS} | other
    return pipeline_errors(given["name"], given["latency_ms"], record, given["apps"], given.get("hop_ms", 0.0))


def edge(source: str, target: str, **more: Any) -> PipelineEdge:
    return PipelineEdge(source=source, target=target, **more)


def vertex(name: str, text: str = "$.text") -> PipelineVertex:
    return PipelineVertex(name=name, app="language-id", inputs={"text": text})


def test_a_pipeline_has_the_signature_of_its_references_and_cannot_contain_itself() -> None:
    assert errors(SOCIAL) == []
    signature = signature_of(SOCIAL, SOCIAL_APPS)
    assert [(spec.name, spec.datatype, spec.shape) for spec in signature.inputs] == [("text", "BYTES", [1])]
    assert [(spec.name, spec.datatype) for spec in signature.outputs] == [("text", "BYTES")]
    inner = replace(SOCIAL_APPS["nmt"], pipeline=PipelineRecord(vertices=[PipelineVertex(name="v", app="social")]))
    assert errors(SOCIAL, apps=SOCIAL_APPS | {"nmt": inner}) == [
        "vertex[translate].app: the pipeline contains itself by way of nmt -> social; name another app"
    ]
    assert "vertex[lang].app: the pipeline contains itself;" in errors(first(app="social"))[0]


def test_its_names_on_the_wire_are_those_of_the_file() -> None:
    wire = msgspec.to_builtins(SOCIAL)
    assert wire.keys() == {"vertex", "edge", "output"}
    assert wire["edge"][0] == {
        "from": "lang",
        "to": "translate",
        "when": {"output": "label", "reduce": "argmax", "op": "!=", "value": 0},
        "probability": 0.4,
    }
    assert msgspec.convert(wire, PipelineRecord) == SOCIAL


TWO = [vertex("a"), vertex("b", "a.text")]


def first(**more: Any) -> PipelineRecord:
    """SOCIAL with another first vertex."""
    return replace(SOCIAL, vertices=[replace(SOCIAL.vertices[0], **more), SOCIAL.vertices[1]])


def when(**more: Any) -> PipelineRecord:
    """SOCIAL with another condition."""
    return replace(SOCIAL, edges=[edge("lang", "translate", when=replace(TRANSLATED, **more))])


def likely(probability: float) -> PipelineRecord:
    return replace(SOCIAL, edges=[replace(SOCIAL.edges[0], probability=probability)])


BAD: dict[str, tuple[PipelineRecord, str]] = {
    "no vertex": (PipelineRecord(vertices=[]), "vertex: must name at least one stage"),
    "twice": (
        replace(SOCIAL, vertices=[*SOCIAL.vertices, SOCIAL.vertices[0]]),
        "vertex[2].name: 'lang' is there twice",
    ),
    "no such end": (replace(SOCIAL, edges=[edge("lang", "there")]), "edge[0].to: there is no vertex 'there'"),
    "cycle": (
        PipelineRecord(vertices=TWO, edges=[edge("a", "b"), edge("b", "a")], output={"text": "b.text"}),
        "is a cycle; leave this edge or another of them out",
    ),
    "itself": (
        PipelineRecord(vertices=TWO[:1], edges=[edge("a", "a")], output={"text": "a.text"}),
        "a -> a is a cycle",
    ),
    "unreached": (
        PipelineRecord(vertices=TWO, output={"text": "b.text"}),
        "vertex[b]: no edge reaches it, but it needs a: add [[edge]]",
    ),
    "no path": (
        PipelineRecord(
            vertices=[vertex("a"), vertex("c"), vertex("b", "a.text")],
            edges=[edge("c", "b")],
            output={"text": "b.text", "other": "a.text"},
        ),
        "vertex[b].inputs: no path of edges leads from a to it",
    ),
    "sink": (
        PipelineRecord(vertices=TWO, edges=[edge("a", "b")], output={"text": "a.text"}),
        "vertex[b]: nothing is done with its answer; name it in [output]",
    ),
    "no output": (PipelineRecord(vertices=TWO[:1]), "output: must name at least one tensor"),
    "output of some": (
        replace(SOCIAL, output={"text": "translate.y"}),
        "output.text: some queries visit none of translate",
    ),
    "not a reference": (
        replace(SOCIAL, output={"text": "translate"}),
        "output.text: 'translate' is neither $.INPUT nor",
    ),
    "probability": (likely(1.2), "edge[lang -> translate].probability: must be above 0 and at most 1, not 1.2"),
    "never": (likely(0.0), "edge[lang -> translate].probability: must be above 0"),
    "operator": (when(op="~"), "edge[lang -> translate].when.op: must be one of == != < > in"),
    "reduction": (when(reduce="mean"), "when.reduce: must be one of first, max, argmax"),
    "list": (when(op="in"), "when.value: must be a list with at least one value"),
    "text for a number": (when(reduce="first", value="en"), "when.value: lang.label holds numbers"),
    "no such output": (when(output="score"), "when.output: language-id has no output 'score'; it has label, text"),
    "accuracy": (first(accuracy=1.5), "vertex[lang].accuracy: must be from 0 to 1"),
    "app": (first(app="gone"), "vertex[lang].app: there is no app 'gone'; register a model for it"),
    "input": (first(inputs={}), "vertex[lang].inputs: lacks text: language-id takes text"),
    "type": (
        replace(
            SOCIAL,
            vertices=[SOCIAL.vertices[0], replace(SOCIAL.vertices[1], inputs={"text": "$.text", "lang": "lang.text"})],
        ),
        "vertex[translate].inputs.lang: lang.text is BYTES[1], but lang must be INT64[1]; put an app between",
    ),
    "two types of one input": (
        replace(
            SOCIAL,
            vertices=[SOCIAL.vertices[0], replace(SOCIAL.vertices[1], inputs={"text": "$.text", "lang": "$.text"})],
        ),
        "vertex[translate].inputs.lang: $.text is BYTES[1] elsewhere, but lang is INT64[1]",
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_what_is_refused(case: str) -> None:
    record, text = BAD[case]
    assert any(text in error for error in errors(record)), errors(record)


def test_a_misspelt_vertex_of_an_output_is_all_that_is_told() -> None:
    told = "output.text: there is no vertex 'translat'; there are: lang, translate"
    assert errors(replace(SOCIAL, output={"text": "translat.y"})) == [told]


def test_shapes_must_fit() -> None:
    apps = {
        "images": app("images", {"x": "FP32"}, {"y": "FP32"}, (3, 8)),
        "rows": app("rows", {"x": "FP32"}, {"y": "FP32"}, (8,)),
        "any": app("any", {"x": "FP32"}, {"y": "FP32"}, (-1, 8)),
    }

    def of(second: str) -> list[str]:
        vertices = [
            PipelineVertex(name="a", app="images", inputs={"x": "$.x"}),
            PipelineVertex(name="b", app=second, inputs={"x": "a.y"}),
        ]
        return errors(PipelineRecord(vertices=vertices, edges=[edge("a", "b")], output={"y": "b.y"}), apps=apps)

    assert "a.y is FP32[3, 8], but x must be FP32[8]" in of("rows")[0]
    assert of("any") == []


@pytest.mark.parametrize(
    ("first", "second", "fits"),
    [
        (("FP32", (10,)), ("FP32", (10,)), True),
        (("FP32", (10,)), ("FP32", (3,)), False),
        (("FP32", (10,)), ("FP32", (10, 1)), False),
        (("FP32", (10,)), ("INT64", (10,)), False),
        (("FP32", (-1,)), ("FP32", (3,)), True),
        (("FP32", (3,)), ("FP32", (-1,)), False),
    ],
)
def test_alternatives_of_an_output_are_as_it_is_announced(first: Any, second: Any, fits: bool) -> None:
    apps = {
        "left": app("left", {"x": "FP32"}, {"y": first[0]}, first[1]),
        "right": app("right", {"x": "FP32"}, {"y": second[0]}, second[1]),
    }
    vertices = [
        PipelineVertex(name="a", app="left", inputs={"x": "$.one"}),
        PipelineVertex(name="b", app="right", inputs={"x": "$.other"}),
    ]
    wrong = errors(PipelineRecord(vertices=vertices, output={"y": "a.y | b.y"}), apps=apps)
    assert (wrong == []) == fits
    assert fits or wrong[0].startswith(f"output.y: a.y is {first[0]}{list(first[1])}, but b.y is {second[0]}")


@pytest.mark.parametrize("latency_ms", [0.0, -1.0, float("nan"), float("inf")])
def test_objectives_are_positive(latency_ms: float) -> None:
    assert errors(SOCIAL, latency_ms=latency_ms) == ["latency_ms: must be a number above 0"]


def test_an_objective_is_longer_than_the_network() -> None:
    (error,) = errors(SOCIAL, latency_ms=3.0, hop_ms=1.0)
    assert error.startswith(
        "latency_ms: must be above 3 ms, not 3: so long do the 3 messages take on the path lang -> translate"
    )
    assert errors(SOCIAL, latency_ms=3.1, hop_ms=1.0) == []


def test_edges_share_what_there_is_and_vertices_have_their_inputs() -> None:
    vertices = [vertex("a"), vertex("b"), vertex("c")]
    when = [EdgeCondition(output="label", op="==", value=n) for n in (0, 1)]
    edges = [edge("a", "b", when=when[0], probability=0.7), edge("a", "c", when=when[1], probability=0.6)]
    record = PipelineRecord(vertices=vertices, edges=edges, output={"text": "b.text | c.text | a.text"})
    assert "edge[a -> c].probability: edge[a -> b] never holds together with it" in errors(record)[0]
    assert errors(replace(record, edges=[edges[0], replace(edges[1], probability=0.3)])) == []
    # D is visited by way of b or of c. Then b.text alone may be missing.
    vertices = [vertex("a"), vertex("b"), vertex("c"), vertex("d", "b.text")]
    when = EdgeCondition(output="label", op=">", value=3)
    edges = [edge("a", "b", when=when), edge("a", "c"), edge("b", "d"), edge("c", "d")]
    record = PipelineRecord(vertices=vertices, edges=edges, output={"text": "d.text"})
    assert "vertex[d].inputs.text: some queries that visit d visit none of b" in errors(record)[0]
    assert errors(replace(record, vertices=[*vertices[:3], vertex("d", "b.text | c.text")])) == []


def test_a_condition_and_its_opposite_are_certain_together() -> None:
    """Each query visits b or c, so their output needs no further alternative; with two equalities some visit neither."""
    vertices = [vertex("a"), vertex("b"), vertex("c")]
    yes, no = EdgeCondition(output="label", op="==", value=0), EdgeCondition(output="label", op="!=", value=0)
    record = PipelineRecord(
        vertices=vertices, edges=[edge("a", "b", when=yes), edge("a", "c", when=no)], output={"text": "b.text | c.text"}
    )
    assert errors(record) == []
    other = replace(no, op="==", value=1)
    assert (
        "output.text: some queries visit none of b, c"
        in errors(replace(record, edges=[record.edges[0], edge("a", "c", when=other)]))[0]
    )


@pytest.mark.parametrize(
    ("shape", "size"),
    [([16_384], None), ([16_385], "65,540"), ([-1, 30_000], "120,000"), ([-1, -1, 30_000], "120,000"), ([-1], None)],
)
def test_conditions_read_small_outputs(shape: list[int], size: str | None) -> None:
    signature = SOCIAL_APPS["language-id"].signature
    label = next(spec for spec in signature.outputs if spec.name == "label")
    wide = replace(signature, outputs=[replace(label, datatype="FP32", shape=shape)])
    apps = SOCIAL_APPS | {"language-id": replace(SOCIAL_APPS["language-id"], signature=wide)}
    found = [error for error in errors(SOCIAL, apps=apps) if "bytes" in error]
    assert found == [
        f"edge[lang -> translate].when.output: lang.label takes {size} bytes, and conditions read at most 65,536;"
        " decide by a smaller output"
        for _ in range(size is not None)
    ]


def test_paths_and_what_is_behind_a_stage() -> None:
    record = PipelineRecord(
        vertices=[vertex(name) for name in "dabc"],
        edges=[edge("a", "b"), edge("a", "c"), edge("b", "d"), edge("c", "d")],
        output={"text": "d.text"},
    )
    graph = PipelineGraph(record)
    weights = {"a": 1.0, "b": 2.0, "c": 5.0, "d": 1.0}
    assert graph.order == ["a", "b", "c", "d"]
    assert graph.longest_path(weights) == (7.0, ["a", "c", "d"])
    assert graph.behind(weights) == {"a": 6.0, "b": 1.0, "c": 1.0, "d": 0.0}


def around(inner: str, count: int = 1) -> PipelineRecord:
    """A pipeline that asks an app so many times, side by side."""
    names = [f"v{i}" for i in range(count)]
    return PipelineRecord(
        vertices=[PipelineVertex(name=name, app=inner, inputs={"text": "$.text"}) for name in names],
        output={name: f"{name}.text" for name in names},
    )


def nested(levels: int, count: int) -> dict[str, Any]:
    """Apps p1, p2, ..., each of which asks the one before it so many times."""
    apps: dict[str, Any] = dict(SOCIAL_APPS)
    inner = "language-id"
    for level in range(1, levels + 1):
        record = around(inner, count)
        narrow = app(f"p{level}", {"text": "BYTES"}, {"text": "BYTES"})
        apps[narrow.app] = replace(narrow, pipeline=record)
        inner = narrow.app
    return apps


def test_pipelines_within_pipelines_are_bounded_and_checked_quickly() -> None:
    assert errors(around("p7"), apps=nested(7, 1)) == []
    assert errors(around("p2", 8), apps=nested(2, 8)) == []
    [deep] = errors(around("p8"), apps=nested(8, 1))
    assert deep.startswith("vertex: pipelines within pipelines, more than 8 deep")
    [deep] = errors(around("p2000"), apps=nested(2000, 1))
    assert deep.startswith("vertex: pipelines within pipelines, more than 8 deep")
    [wide] = errors(around("p3", 8), apps=nested(3, 8))
    assert wide.startswith("vertex: with those of pipelines within it, there are more than 512")
    assert errors(around("p7", 64), apps=nested(7, 64))[0].startswith("vertex: with those")
    ring = nested(7, 64) | {"language-id": replace(SOCIAL_APPS["language-id"], pipeline=around("social"))}
    found = errors(around("p7", 2), apps=ring)
    assert "the pipeline contains itself by way of p7 -> p6 -> " in found[0]
