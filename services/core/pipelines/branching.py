"""Which edges a query follows: by conditions on answers, or by a hash of the query. Pure.

An edge without a condition draws from hash(uid, edge), so that each retry of a query and each dispatcher draw alike. The estimator draws
by the same function for the queries of its sample, and for conditions too, whose outcome it can only know by their probability. So do
dispatchers where a simulated device has made up the outputs.
"""

from collections.abc import Collection, Mapping
from hashlib import blake2b
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bus.messages.catalog import EdgeCondition, PipelineEdge
from bus.messages.public import Tensor
from services.core.pipelines.graph import PipelineGraph, complementary
from services.core.pipelines.items import Counts, Rows, drawn_items, fan_of

REDUCTIONS = ("first", "max", "argmax")
OPERATORS = ("==", "!=", "<", ">", "in")
SMALL = 65_536  # bytes of an output
MOST_WAYS = 64
_MASK = (1 << 64) - 1
# of splitmix64 (Steele et al., 2014)
_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

Bools = NDArray[np.bool_]
Uids = NDArray[np.uint64]


def follows(uid: bytes, edge: PipelineEdge, outputs: Mapping[str, NDArray[Any]]) -> bool:
    """Whether this query follows the edge. outputs: of the source's answer. Raises ValueError where they do not suit the condition."""
    if edge.when is not None:
        return holds(edge.when, outputs)
    if edge.probability is None or edge.probability >= 1.0:
        return True
    return draw(uid, f"{edge.source}>{edge.target}") < edge.probability


def holds(condition: EdgeCondition, outputs: Mapping[str, NDArray[Any]]) -> bool:
    """Raises ValueError: the output is not there, or is empty, or is no number where one is needed."""
    tensor = outputs.get(condition.output)
    if tensor is None or not tensor.size:
        raise ValueError(f"when.output: the answer has no {condition.output!r} with an element")
    value = _reduced(tensor, condition.reduce)
    wanted = condition.value
    try:
        match condition.op:
            case "==":
                return bool(value == wanted)
            case "!=":
                return bool(value != wanted)
            case "<":
                return bool(value < wanted)
            case ">":
                return bool(value > wanted)
            case "in":
                return value in wanted
    except TypeError as error:
        raise ValueError(f"when: {condition.output} {condition.op} {wanted!r}: {error}") from error
    raise ValueError(f"when.op: {condition.op!r} is none of {', '.join(OPERATORS)}")


def small_outputs(outputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Those that go into a message beside a reference to all outputs of a stage, so that conditions can be decided."""
    return {name: tensor for name, tensor in outputs.items() if len(tensor.data) <= SMALL}


def _reduced(tensor: NDArray[Any], reduce: str) -> Any:
    if reduce == "first":
        value = tensor.flat[0]
        return value.decode(errors="replace") if isinstance(value, bytes) else getattr(value, "item", lambda: value)()
    if tensor.dtype.kind not in "biuf":
        raise ValueError(f"when.reduce: {reduce} needs numbers; use first")
    if reduce == "max":
        return tensor.max().item()
    if reduce == "argmax":
        return int(np.argmax(tensor[0])) if tensor.ndim > 1 else int(np.argmax(tensor))
    raise ValueError(f"when.reduce: {reduce!r} is none of {', '.join(REDUCTIONS)}")


# -- draws


def draw(uid: bytes, edge: str) -> float:
    """In [0, 1), the same for each retry of the query. uid: at least 8 bytes."""
    mixed = (int.from_bytes(uid[:8], "little") ^ _salt(edge)) + _GOLDEN & _MASK
    mixed = (mixed ^ mixed >> 30) * _FIRST & _MASK
    mixed = (mixed ^ mixed >> 27) * _SECOND & _MASK
    return ((mixed ^ mixed >> 31) >> 11) / 2.0**53


def draws(uids: Uids, edge: str) -> NDArray[np.float64]:
    """`draw` of many queries, each by the first 8 bytes of its uid."""
    with np.errstate(over="ignore"):
        mixed = (uids ^ np.uint64(_salt(edge))) + np.uint64(_GOLDEN)
        mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(_FIRST)
        mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(_SECOND)
        return ((mixed ^ mixed >> np.uint64(31)) >> np.uint64(11)) / 2.0**53


def _salt(edge: str) -> int:
    return int.from_bytes(blake2b(edge.encode(), digest_size=8).digest(), "little")


# -- the sample's visits


def visits(graph: PipelineGraph, uids: Uids) -> dict[str, Counts]:
    """Of each vertex, for how many items each of these queries asks it: 0 or 1 where no edge hands items on."""
    rows = Rows(graph, {}).own
    reached: dict[str, Bools] = {name: np.ones(len(uids), np.bool_) for name in graph.sources}
    asked: dict[str, Counts] = {}
    followed: dict[tuple[str, str], Bools] = {}
    for name in graph.order:
        for into in graph.into[name]:
            live = reached[into.source] & followed[into.source, name]
            reached[name] = reached[name] | live if name in reached else live
        fan = fan_of(graph, name)
        if fan is not None:
            asked[name] = drawn_items(draws(uids, items_key(fan)), fan, asked[fan.source] * reached[name])
        else:
            asked[name] = reached[name] * (asked[rows[name]] if rows[name] else 1)
        drawn: dict[str, NDArray[np.float64]] = {}
        for edge in drawn_edges(graph.out[name]):
            if edge.edge not in drawn:
                drawn[edge.edge] = draws(uids, edge.edge)
            followed[name, edge.target] = (drawn[edge.edge] >= edge.low) & (drawn[edge.edge] < edge.high)
    return asked


def items_key(edge: PipelineEdge) -> str:
    """By which it is drawn how many items an answer has."""
    return f"{edge.source}>{edge.target} items"


class DrawnEdge(NamedTuple):
    """The queries follow it whose draw for `edge` is in [low, high)."""

    target: str
    edge: str
    low: float
    high: float

    def follows(self, uid: bytes) -> bool:
        """Whether this query follows it."""
        return self.low <= draw(uid, self.edge) < self.high


def drawn_edges(edges: list[PipelineEdge]) -> list[DrawnEdge]:
    """These edges of one vertex, as draws decide on them. Edges that exclude each other divide the range of one draw."""
    shares = planned_shares(edges)
    found = []
    for group in exclusive_groups(edges, shares):
        first = group[0]
        low = 0.0
        for edge in group:
            high = low + shares[edge.target]
            if high > 1.0 - 1e-9:
                high = 1.0
            found.append(DrawnEdge(edge.target, f"{first.source}>{first.target}", low, high))
            low = high
    return found


def planned_shares(edges: list[PipelineEdge]) -> dict[str, float]:
    """The share of visits to their common source that follow each edge, by target.

    Its probability; without one, what the complementary edge leaves; else 1, which plans for the most.
    """
    shares: dict[str, float] = {}
    for edge in edges:
        share = edge.probability
        if share is None:
            twin = next((one for one in edges if complementary(edge, one) and one.probability is not None), None)
            share = 1.0 if twin is None or twin.probability is None else 1.0 - twin.probability
        shares[edge.target] = share
    return shares


def exclusive_groups(edges: list[PipelineEdge], shares: Mapping[str, float]) -> list[list[PipelineEdge]]:
    """Edges of one vertex, together where a query follows at most one of them and their shares leave room for all."""
    groups: list[list[PipelineEdge]] = []
    for edge in edges:
        for group in groups:
            total = sum(shares[one.target] for one in (*group, edge))
            if total <= 1.0 + 1e-9 and all(excluded(one.when, edge.when) for one in group):
                group.append(edge)
                break
        else:
            groups.append([edge])
    return groups


def ways(graph: PipelineGraph, drawn: Collection[str] = ()) -> list[tuple[str, ...]]:
    """The sets of vertices that one query visits at most, each in the graph's order: of edges that exclude each other it follows one.

    drawn: vertices of whose edges draws may decide (`drawn_edges`). Where there are more than MOST_WAYS sets: all vertices in one.
    """
    found = {frozenset(graph.sources)}
    for name in graph.order:
        ahead = _followed_together(graph.out[name], drawn=name in drawn)
        found = {way | more if name in way else way for way in found for more in ahead}
        if len(found) > MOST_WAYS:
            return [tuple(graph.order)]
    return [tuple(name for name in graph.order if name in way) for way in found]


def _followed_together(edges: list[PipelineEdge], *, drawn: bool) -> set[frozenset[str]]:
    """The largest sets of targets to which a query may follow these edges of one vertex."""
    draw_of = {one.target: one.edge for one in drawn_edges(edges)} if drawn else {}
    found: set[frozenset[str]] = {frozenset()}
    for edge in edges:
        rivals = {
            one.target
            for one in edges
            if one is not edge and excluded(one.when, edge.when) and draw_of.get(one.target) == draw_of.get(edge.target)
        }
        found = {way for way in found if way & rivals} | {way - rivals | {edge.target} for way in found}
        if len(found) > MOST_WAYS:
            return {frozenset(edge.target for edge in edges)}
    return {way for way in found if not any(way < other for other in found)}


def oversized(edges: list[PipelineEdge]) -> tuple[PipelineEdge, PipelineEdge] | None:
    """Two edges of one vertex that exclude each other, although their probabilities add up to more than 1."""
    for one, other in combinations(edges, 2):
        total = (one.probability or 0.0) + (other.probability or 0.0)
        if total > 1.0 + 1e-9 and excluded(one.when, other.when):
            return one, other
    return None


def excluded(one: EdgeCondition | None, other: EdgeCondition | None) -> bool:
    """Whether both can never hold for the same answer."""
    if one is None or other is None or (one.output, one.reduce) != (other.output, other.reduce):
        return False
    ops, (a, b) = (one.op, other.op), (one.value, other.value)
    try:
        match ops:
            case ("==", "=="):
                return bool(a != b)
            case ("==", "!=") | ("!=", "=="):
                return bool(a == b)
            case ("==", "in"):
                return a not in b
            case ("in", "=="):
                return b not in a
            case ("in", "in"):
                return all(value not in b for value in a)
            case ("<", ">" | "=="):
                return bool(a <= b)
            case (">" | "==", "<"):
                return bool(b <= a)
            case (">", "=="):
                return bool(b <= a)
            case ("==", ">"):
                return bool(a <= b)
    except TypeError:
        return False
    return False
