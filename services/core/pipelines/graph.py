"""The graph of a pipeline: its order, its paths, and what its references name. Pure."""

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from typing import NamedTuple

from bus.messages.catalog import PipelineEdge, PipelineRecord

QUERY = "$"  # in references: what the query gave
ANSWER = ""  # among the vertices: what takes the pipeline's outputs
_ANY = re.compile(r"any\((?P<parts>.*)\)\Z")
_REFERENCE = re.compile(r"(?P<vertex>\$|[A-Za-z0-9][A-Za-z0-9_-]*)\.(?P<tensor>[^\s|]+)\Z")


class Reference(NamedTuple):
    """One tensor. vertex: "$" for the query's own. tensor: the name of an input of the query, or of an output of the vertex."""

    vertex: str
    tensor: str

    def __str__(self) -> str:
        return f"{self.vertex}.{self.tensor}"


class BadReference(ValueError):
    """A text that names no tensor."""


class CyclicPipeline(ValueError):
    """The edges form a cycle. `cycle` names its vertices; the first is also the last."""

    def __init__(self, cycle: list[str]) -> None:
        super().__init__(f"{' -> '.join(cycle)} is a cycle")
        self.cycle = cycle


class Race(list[Reference]):
    """Those of "any(a.x, b.y)": the one counts that is there first."""


def references(text: str) -> list[Reference]:
    """The tensors of "a.x | b.y", or of "any(a.x, b.y)", the first one first. Raises BadReference."""
    raced = _ANY.match(text.strip())
    found: list[Reference] = [] if raced is None else Race()
    for part in text.split("|") if raced is None else raced["parts"].split(","):
        match = _REFERENCE.match(part.strip())
        if match is None:
            raise BadReference(f"{part.strip()[:80]!r} is neither $.INPUT nor VERTEX.OUTPUT")
        found.append(Reference(match["vertex"], match["tensor"]))
    return found


class PipelineGraph:
    """The vertices and edges of a record whose edges name vertices that are there.

    order: names of vertices, each after all from which an edge leads to it. into, out: the edges of each vertex, as they were declared. races: by what
    takes the first answer of several vertices, these. spared: vertices without whose answer a query goes on.
    """

    def __init__(self, record: PipelineRecord) -> None:
        """Raises CyclicPipeline."""
        names = [vertex.name for vertex in record.vertices]
        self.vertices = {vertex.name: vertex for vertex in record.vertices}
        self.into: dict[str, list[PipelineEdge]] = {name: [] for name in names}
        self.out: dict[str, list[PipelineEdge]] = {name: [] for name in names}
        for edge in record.edges:
            self.out[edge.source].append(edge)
            self.into[edge.target].append(edge)
        self.order = self._sorted(names)
        texts = {vertex.name: vertex.inputs for vertex in record.vertices} | {ANSWER: record.output}
        taken = {name: [_known(text) for text in mine.values()] for name, mine in texts.items()}
        self.races = {name: [_vertices(one) for one in mine if isinstance(one, Race)] for name, mine in taken.items()}
        self.spared = {vertex.name for vertex in record.vertices if vertex.optional} | self._racing(taken)
        self.sources = [name for name in self.order if not self.into[name]]
        self.sinks = [name for name in self.order if not self.out[name]]

    def _racing(self, taken: Mapping[str, list[list[Reference]]]) -> set[str]:
        """Those of which nothing takes the answer but the first one of several."""
        racing = {one for races in self.races.values() for race in races for one in race}
        for name, mine in taken.items():
            racing -= {edge.source for edge in self.into.get(name, ())}.difference(*self.races[name])
            racing = racing.difference(*(_vertices(one) for one in mine if not isinstance(one, Race)))
        return racing

    def _sorted(self, names: list[str]) -> list[str]:
        waits = {name: {edge.source for edge in self.into[name]} for name in names}
        order: list[str] = []
        while waits:
            ready = [name for name, before in waits.items() if not before]
            if not ready:
                raise CyclicPipeline(_cycle(waits))
            order += ready
            waits = {name: before.difference(ready) for name, before in waits.items() if before}
        return order

    def ancestors(self, name: str) -> set[str]:
        """The vertices from which a path leads to this one."""
        found: set[str] = set()
        ahead = [edge.source for edge in self.into[name]]
        while ahead:
            one = ahead.pop()
            if one not in found:
                found.add(one)
                ahead += [edge.source for edge in self.into[one]]
        return found

    def longest_path(
        self, weights: Mapping[str, float], within: Collection[str] | None = None
    ) -> tuple[float, list[str]]:
        """The path with the largest sum of weights, and its sum. within: the vertices that it may visit; None: all."""
        best: dict[str, tuple[float, list[str]]] = {}
        for name in self.order:
            if within is not None and name not in within:
                continue
            before = (best[edge.source] for edge in self.into[name] if edge.source in best)
            length, path = max(before, key=lambda one: one[0], default=(0.0, []))
            best[name] = (length + weights[name], [*path, name])
        return max(best.values(), key=lambda one: one[0], default=(0.0, []))

    def behind(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Of each vertex, the largest sum of weights on a path behind it, without its own: what a stage's deadline leaves for later ones."""
        found: dict[str, float] = {}
        for name in reversed(self.order):
            found[name] = max((weights[edge.target] + found[edge.target] for edge in self.out[name]), default=0.0)
        return found

    def before(self, weights: Mapping[str, float]) -> dict[str, float]:
        """Of each vertex, the largest sum of weights on a path to it, without its own."""
        found: dict[str, float] = {}
        for name in self.order:
            found[name] = max((weights[edge.source] + found[edge.source] for edge in self.into[name]), default=0.0)
        return found

    def certain(self, names: Collection[str], at: str | None = None) -> bool:
        """Whether each query that visits vertex `at` visits one of these, whatever the conditions say. at: None for each query at all.

        `names` may be what `at` itself is one of.
        """
        forces = self._forcing(names)
        if any(name in forces for name in self.sources):
            return True
        if at is None:
            return False
        reached = set(self.sources)  # by queries that visit none of `names`
        for name in self.order:
            if name in forces:
                reached.discard(name)
            elif any(edge.source in reached for edge in self.into[name]):
                reached.add(name)
        return at not in reached

    def needs(self, name: str) -> bool:
        """Whether each query visits this vertex, and ends where it fails."""
        return name not in self.spared and self.certain([name])

    def _forcing(self, names: Collection[str]) -> set[str]:
        """The vertices whose visit entails a visit to one of these."""
        found = set(names)
        for name in reversed(self.order):
            leads = [edge for edge in self.out[name] if edge.target in found]
            if any(not conditional(edge) for edge in leads) or any(
                complementary(one, other) for i, one in enumerate(leads) for other in leads[:i]
            ):
                found.add(name)
        return found


def conditional(edge: PipelineEdge) -> bool:
    """Whether some queries that visit its source may not follow it."""
    return edge.when is not None or (edge.probability is not None and edge.probability < 1.0)


def complementary(one: PipelineEdge, other: PipelineEdge) -> bool:
    """Whether each query that visits their source follows exactly one of them."""
    first, second = one.when, other.when
    if first is None or second is None or one.source != other.source:
        return False
    same = (first.output, first.reduce, first.value) == (second.output, second.reduce, second.value)
    return same and {first.op, second.op} == {"==", "!="}


def _known(text: str) -> list[Reference]:
    with suppress(BadReference):
        return references(text)
    return []  # the checks say so


def _vertices(refs: Iterable[Reference]) -> set[str]:
    return {ref.vertex for ref in refs}


def _cycle(waits: Mapping[str, Iterable[str]]) -> list[str]:
    """One cycle among vertices that all wait for another of them."""
    path = [next(iter(waits))]
    while True:
        before = min(waits[path[-1]])
        if before in path:
            return [before, *reversed(path[path.index(before) :])]
        path.append(before)
