"""Edges follow conditions, or a hash of the query and the edge."""

from hashlib import blake2b
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.catalog import EdgeCondition, PipelineEdge, PipelineRecord, PipelineVertex
from services.core.pipelines.branching import MOST_WAYS, draw, draws, follows, holds, visits, ways
from services.core.pipelines.graph import PipelineGraph
from tests.support.data.pipelines import SOCIAL

SCORES = {"score": np.array([[0.1, 0.7, 0.2]], np.float32), "word": np.array([b"fr"], object), "empty": np.empty(0)}


@pytest.mark.parametrize(
    ("output", "reduce", "op", "value", "held"),
    [
        ("score", "argmax", "==", 1, True),
        ("score", "argmax", "!=", 1, False),
        ("score", "argmax", "in", [0, 2], False),
        ("score", "max", "<", 0.8, True),
        ("score", "max", ">", 0.8, False),
        ("score", "first", "<", 0.2, True),
        ("word", "first", "==", "fr", True),
        ("word", "first", "in", ["de", "fr"], True),
    ],
)
def test_conditions(output: str, reduce: str, op: str, value: Any, held: bool) -> None:
    assert holds(EdgeCondition(output=output, reduce=reduce, op=op, value=value), SCORES) is held


@pytest.mark.parametrize("output", ["missing", "empty"])
def test_a_condition_on_what_is_not_there(output: str) -> None:
    with pytest.raises(ValueError, match=f"the answer has no '{output}'"):
        holds(EdgeCondition(output=output, op="==", value=1), SCORES)


def test_cascades_are_visited_by_share_and_argmax_needs_numbers() -> None:
    with pytest.raises(ValueError, match="argmax needs numbers"):
        holds(EdgeCondition(output="word", reduce="argmax", op="==", value=1), SCORES)
    found = visits(PipelineGraph(SOCIAL), np.arange(20_000, dtype=np.uint64))
    assert found["lang"].all()
    assert found["translate"].mean() == pytest.approx(0.4, abs=0.01)


def uid_of(number: int) -> bytes:
    return blake2b(number.to_bytes(8, "little"), digest_size=16).digest()


def test_draws_are_of_query_and_edge_in_dispatchers_and_estimator() -> None:
    """Trap 31: a retry draws alike, another edge of the same query independently."""
    uids = [uid_of(n) for n in range(4000)]
    edge = PipelineEdge(source="a", target="b", probability=0.3)
    first = [follows(uid, edge, {}) for uid in uids]
    assert first == [follows(uid, edge, {}) for uid in uids]
    assert np.mean(first) == pytest.approx(0.3, abs=0.03)
    other = [draw(uid, "a>c") < 0.3 for uid in uids]
    assert np.mean(np.array(first) & np.array(other)) == pytest.approx(0.09, abs=0.02)
    uids = [uid_of(n) for n in range(100)]
    numbers = np.array([int.from_bytes(uid[:8], "little") for uid in uids], np.uint64)
    assert draws(numbers, "a>b").tolist() == [draw(uid, "a>b") for uid in uids]
    graph = PipelineGraph(
        PipelineRecord(
            vertices=[PipelineVertex(name=name, app="app") for name in "ab"],
            edges=[PipelineEdge(source="a", target="b", probability=0.3)],
        )
    )
    assert visits(graph, numbers)["b"].tolist() == [follows(uid, graph.into["b"][0], {}) for uid in uids]


def test_branches_that_exclude_each_other_are_never_both_taken() -> None:
    """With draws of their own, 16 % of queries would take both and 36 % none, and what is behind would be planned too small."""
    when = EdgeCondition(output="label", op="==", value=0)
    edges = [
        PipelineEdge(source="a", target="b", when=when, probability=0.4),
        PipelineEdge(source="a", target="c", when=EdgeCondition(output="label", op="!=", value=0)),
        PipelineEdge(source="b", target="d"),
        PipelineEdge(source="c", target="d"),
    ]
    graph = PipelineGraph(PipelineRecord(vertices=[PipelineVertex(name=n, app="app") for n in "abcd"], edges=edges))
    found = visits(graph, np.arange(20_000, dtype=np.uint64))
    assert found["b"].mean() == pytest.approx(0.4, abs=0.01)
    assert (found["b"] ^ found["c"]).all()
    assert found["d"].all()


# -- which vertices one query may visit


def graph_of(*edges: PipelineEdge) -> PipelineGraph:
    names = dict.fromkeys(name for edge in edges for name in (edge.source, edge.target))
    vertices = [PipelineVertex(name=name, app=name, inputs={"x": "$.x"}) for name in names]
    return PipelineGraph(PipelineRecord(vertices=vertices, edges=list(edges), output={}))


def when(arrow: str, op: str = "==", value: Any = 1, output: str = "y") -> PipelineEdge:
    return PipelineEdge(source=arrow[0], target=arrow[2], when=EdgeCondition(output=output, op=op, value=value))


@pytest.mark.parametrize(
    ("edges", "found"),
    [
        ([when("a>b", "<", 0.5), when("a>c", ">", 0.5)], {"ab", "ac"}),
        ([when("a>b", value=1), when("a>c", value=2), when("a>d", value=2)], {"ab", "acd"}),
        ([when("a>b", "<", 0.5), when("a>c", ">", 0.4)], {"abc"}),
        ([when("a>b", "<", 0.5), when("a>c", ">", 0.5, output="z")], {"abc"}),
        ([PipelineEdge(source="a", target=one, probability=0.5) for one in "bc"], {"abc"}),  # each by a draw of its own
        ([when("a>b"), when("a>c", "!="), PipelineEdge(source="b", target="d"), PipelineEdge(source="c", target="d")], {"abd", "acd"}),
        ([when("a>b"), when("a>c", "!="), when("b>d"), when("b>e", "!=")], {"abd", "abe", "ac"}),
        ([PipelineEdge(source="a", target="b"), when("b>c"), when("b>d", "!=")], {"abc", "abd"}),
    ],
)  # fmt: skip
def test_of_edges_that_exclude_each_other_a_query_follows_one(edges: list[PipelineEdge], found: set[str]) -> None:
    assert {"".join(sorted(way)) for way in ways(graph_of(*edges))} == found


def test_edges_exclude_each_other_by_probabilities_until_there_are_very_many_ways() -> None:
    b, c = when("a>b"), when("a>c", "!=")
    for probability, found in ((None, ["abc"]), (0.3, ["ab", "ac"])):
        graph = graph_of(replace(b, probability=probability), c)
        assert sorted("".join(way) for way in ways(graph, "a")) == found
    edges = [when(f"a>{target}", op, output=str(n)) for n in range(8) for target, op in ((chr(98 + 2 * n), "=="), (chr(99 + 2 * n), "!="))]  # fmt: skip
    few, many = ways(graph_of(*edges[:8])), ways(graph_of(*edges))
    deep = ways(graph_of(*edges[:8], *(replace(edge, source="b") for edge in edges[8:])))
    assert [(len(found), len(found[0])) for found in (few, many, deep)] == [(16, 5), (1, 17), (1, 17)]
    assert MOST_WAYS < 2**8
