"""Edges by which the items of an answer go on, each as a query of the next stage (the boxes of a detector): how many, and which. Pure.

How many items an answer has is planned with, and drawn where a simulated device has made up the answer, from the law with the edge's mean and
dispersion (variance over mean): Poisson's, a negative binomial where they vary more, a binomial where they vary less. Each is closed under sums.
"""

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from math import ceil, lgamma, log, prod

import numpy as np
from msgspec import UNSET
from numpy.typing import NDArray

from bus.datatypes import SIZES
from bus.fields import faults
from bus.messages.catalog import AppRecord, PipelineEdge, PipelineRecord, PipelineVertex, TensorSpec
from bus.messages.public import Tensor
from bus.tensors import BadTensor, from_array, to_array
from services.core.pipelines.graph import QUERY, PipelineGraph, Reference, references

Apps = Mapping[str, AppRecord]
Counts = NDArray[np.int64]

MOST = 100  # items of an answer, where its edge does not say it
MOST_ASKED = 10_000  # items for which one query may ask a stage
_ALIKE = 1e-6  # dispersions that differ less from Poisson's are it


def most_of(edge: PipelineEdge) -> int:
    """The items that one answer may have."""
    return edge.items_max or MOST


def fan_of(graph: PipelineGraph, name: str) -> PipelineEdge | None:
    """The edge for whose items a vertex is asked. None: it is asked once."""
    return next((edge for edge in graph.into[name] if edge.items), None)


# -- how many


def drawn_items(draws: NDArray[np.float64], edge: PipelineEdge, answers: Counts) -> Counts:
    """The items that these numbers of answers have together, by draws in [0, 1). An edge without a mean has one of each answer."""
    found = np.zeros(len(draws), np.int64)
    mean, dispersion = edge.items_mean or 1.0, 1.0 if edge.items_dispersion is UNSET else edge.items_dispersion
    for count in np.unique(answers[answers > 0]).tolist():
        these = answers == count
        shares = _shares(mean * count, dispersion, most_of(edge) * count)
        found[these] = np.searchsorted(shares, draws[these], "right")
    return found


@lru_cache(maxsize=1024)
def _shares(mean: float, dispersion: float, most: int) -> NDArray[np.float64]:
    """The probability of at most 0, 1, ... `most` - 1 items."""
    if abs(dispersion - 1.0) < _ALIKE:
        logs = [n * log(mean) - mean - lgamma(n + 1) for n in range(most)]
    elif dispersion > 1.0:
        r = mean / (dispersion - 1.0)
        fixed = -r * log(dispersion) - lgamma(r)
        logs = [fixed + lgamma(n + r) - lgamma(n + 1) + n * log(1.0 - 1.0 / dispersion) for n in range(most)]
    else:
        trials = max(ceil(mean), round(mean / (1.0 - dispersion)))
        p = mean / trials
        if p > 1.0 - _ALIKE:
            return np.zeros(min(most, trials))
        fixed = lgamma(trials + 1)
        logs = [
            fixed - lgamma(n + 1) - lgamma(trials - n + 1) + n * log(p) + (trials - n) * log(1.0 - p)
            for n in range(min(most, trials + 1))
        ]
    return np.cumsum(np.exp(logs))


# -- which


class TooManyItems(BadTensor):
    """An answer has more items than its edge hands on."""


def item_of(given: TensorSpec, wanted: TensorSpec) -> TensorSpec | None:
    """An item of this output, where it has one axis more than the input that takes it. None: it has not."""
    if len(given.shape) != len(wanted.shape) + 1:
        return None
    return TensorSpec(name=given.name, datatype=given.datatype, shape=list(given.shape[1:]))


def split(tensor: Tensor, rank: int, edge: PipelineEdge) -> list[Tensor]:
    """The items of an answer's output, each as an input of one item. rank: of one item. Raises BadTensor: also where there are too many."""
    shape, most = tensor.shape, most_of(edge)
    answers, each = (shape[0], shape[1]) if len(shape) == rank + 2 else (1, shape[0])
    if len(shape) not in (rank + 1, rank + 2):
        raise BadTensor(f"{edge.items} has shape {shape}, and one of its items must have {rank} axes")
    if each > most and not edge.items_cut:
        raise TooManyItems(f"{edge.items} has {each} items, and items_max is {most}: send less, or raise it")
    found = rows(Tensor(tensor.datatype, [answers * each, *(shape[-rank:] if rank else [])], tensor.data))
    return [found[answer * each + i] for answer in range(answers) for i in range(min(each, most))]


def rows(tensor: Tensor) -> list[Tensor]:
    """Each row as an input of one item. Raises BadTensor."""
    count, *tail = tensor.shape
    size = SIZES[tensor.datatype]
    if not size:  # texts differ in length
        array = to_array(tensor, "rows", empty=True)
        return [from_array(array[i : i + 1]) for i in range(count)]
    width = size * prod(tail)
    return [Tensor(tensor.datatype, [1, *tail], tensor.data[i * width : (i + 1) * width]) for i in range(count)]


def joined(tensors: Sequence[Tensor], spec: TensorSpec) -> Tensor:
    """The rows of several answers one after the other; none where there are none. Raises BadTensor where they differ in shape."""
    if not tensors:
        return Tensor(spec.datatype, [0, *(max(0, length) for length in spec.shape)], b"")
    first = tensors[0]
    other = next((one for one in tensors if one.shape[1:] != first.shape[1:] or one.datatype != first.datatype), None)
    if other is not None:
        raise BadTensor(
            f"answers to items have the shapes {first.shape} and {other.shape}: they cannot be put together"
        )
    rows = sum(one.shape[0] for one in tensors)
    return Tensor(first.datatype, [rows, *first.shape[1:]], b"".join(one.data for one in tensors))


# -- what is wrong


def edge_errors(graph: PipelineGraph, record: PipelineRecord) -> Iterator[str]:
    """All that is wrong with edges whose items go on, as far as no app is looked at."""
    asked = dict.fromkeys(graph.order, 1)
    for name in graph.order:
        into, fan = graph.into[name], fan_of(graph, name)
        asked[name] = max((asked[edge.source] for edge in into), default=1)
        if fan is None:
            continue
        at = f"edge[{fan.source} -> {name}]"
        asked[name] = asked[fan.source] * most_of(fan)
        if len(into) > 1:
            others = ", ".join(edge.source for edge in into if edge is not fan)
            yield f"{at}.items: {name} is asked for each item of one answer; leave the edges from {others} out"
        if asked[name] > MOST_ASKED:
            yield f"{at}.items_max: a query may ask {name} for {asked[name]} items, at most {MOST_ASKED}; set a smaller items_max"
        whole = f"{fan.source}.{fan.items}"
        if whole not in graph.vertices[name].inputs.values():
            yield f'{at}.items: no input of {name} takes {whole}; say inputs = {{ NAME = "{whole}" }} in its [[vertex]]'
    for edge in record.edges:
        at = f"edge[{edge.source} -> {edge.target}]"
        yield from (f"{at}.{fault.key}: {fault.reason}" for fault in faults(edge))
        if not edge.items:
            said = [key for key in ("items_mean", "items_dispersion", "items_max", "items_cut") if getattr(edge, key)]
            yield from (
                f"{at}.{key}: is for an edge with items; name the output there, or leave it out" for key in said
            )


class Rows:
    """How many rows the outputs of vertices have for one query: what is told by the vertex for whose items they are; "": one.

    own: by vertex. graph: without errors.
    """

    def __init__(self, graph: PipelineGraph, apps: Apps, known: "dict[str, Rows] | None" = None) -> None:
        """known: of pipelines within pipelines, by app."""
        self.own: dict[str, str] = {}
        self._graph, self._apps = graph, apps
        self._known: dict[str, Rows] = {} if known is None else known
        for name in graph.order:
            taken = {} if fan_of(graph, name) is not None else self.taken(graph.vertices[name])
            self.own[name] = (
                name if fan_of(graph, name) is not None else next((one for one in taken.values() if one), "")
            )

    def taken(self, vertex: PipelineVertex) -> dict[str, str]:
        """Of each input, whose rows it has."""
        return {field: self.of(references(text)[0]) for field, text in vertex.inputs.items()}

    def of(self, ref: Reference) -> str:
        """Whose rows a tensor has."""
        if ref.vertex == QUERY:
            return ""
        own, inner = self.own[ref.vertex], self._inner(ref)
        return f"{ref.vertex}/{inner}" if inner else own

    def _inner(self, ref: Reference) -> str:
        app = self._apps.get(self._graph.vertices[ref.vertex].app)
        if app is None or app.pipeline is None or ref.tensor not in app.pipeline.output:
            return ""
        rows = self._known.get(app.app)
        if rows is None:
            rows = self._known[app.app] = Rows(PipelineGraph(app.pipeline), self._apps, self._known)
        return next((found for one in references(app.pipeline.output[ref.tensor]) if (found := rows.of(one))), "")


def row_errors(graph: PipelineGraph, record: PipelineRecord, apps: Apps) -> Iterator[str]:
    """What cannot be asked for items, or for all of them together."""
    rows = Rows(graph, apps)
    for name in graph.order:
        vertex, fan, own = graph.vertices[name], fan_of(graph, name), rows.own[name]
        at = f"vertex[{name}]"
        taken = rows.taken(vertex)
        if fan is not None:
            text = f"{fan.source}.{fan.items}"
            field = next(key for key, one in vertex.inputs.items() if one == text)
            spec = _outputs(apps, graph.vertices[fan.source]).get(fan.items or "")
            wanted = _input(apps, vertex, field)
            if spec is not None and item_of(spec, wanted) is None and not taken[field]:
                yield (
                    f"edge[{fan.source} -> {name}].items: {text} has {len(spec.shape)} axes in an answer, and {field} of {vertex.app}"
                    f" has {len(wanted.shape)}; give it an axis of items, such as [-1, ...], or leave items out"
                )
            for key, one in vertex.inputs.items():
                if taken[key] and not set(references(one)) & _of_source(graph, fan):
                    yield f"{at}.inputs.{key}: {one} has rows of its own; ask {name} for those, or name what each query has once"
            continue
        other = next((key for key, one in taken.items() if one not in ("", own)), None)
        if other is not None:
            yield (
                f"{at}.inputs.{other}: has rows for items of {taken[other]}, and other inputs for those of {own};"
                f" make {name} an output for each, or leave one out"
            )
    for edge in record.edges:
        if edge.when is not None and (own := rows.of(Reference(edge.source, edge.when.output))):
            yield (
                f"edge[{edge.source} -> {edge.target}].when: {edge.source} answers for each item of {own}, and a condition decides once a"
                f" query; make a pipeline of {edge.source} and {edge.target}, and ask that for items"
            )
    for where, ref in _whole(graph, record):
        if rows.own.get(ref.vertex):
            spec = _outputs(apps, graph.vertices[ref.vertex]).get(ref.tensor)
            if spec is not None and -1 in spec.shape:
                yield (
                    f"{where}: {ref} differs in shape from item to item, so that its answers cannot be put together; hand its items on"
                    " (items), or name another output"
                )


def _of_source(graph: PipelineGraph, fan: PipelineEdge) -> set[Reference]:
    return {
        ref
        for text in graph.vertices[fan.target].inputs.values()
        for ref in references(text)
        if ref.vertex == fan.source
    }


def _whole(graph: PipelineGraph, record: PipelineRecord) -> Iterator[tuple[str, Reference]]:
    """What takes all rows of a vertex together, and where."""
    for field, text in record.output.items():
        yield from ((f"output.{field}", ref) for ref in references(text))
    for name, vertex in graph.vertices.items():
        fan = fan_of(graph, name)
        for field, text in vertex.inputs.items():
            for ref in references(text):
                if fan is None or ref.vertex != fan.source:
                    yield f"vertex[{name}].inputs.{field}", ref


def _input(apps: Apps, vertex: PipelineVertex, field: str) -> TensorSpec:
    signature = apps[vertex.app].signature
    assert signature is not None, "it was checked before"
    return next(spec for spec in signature.inputs if spec.name == field)


def _outputs(apps: Apps, vertex: PipelineVertex) -> dict[str, TensorSpec]:
    signature = apps[vertex.app].signature
    return {} if signature is None else {spec.name: spec for spec in signature.outputs}
