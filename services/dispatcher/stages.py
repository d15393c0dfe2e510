"""Pipelines as the catalogue has them now: their stages, and how long those take. Pure."""

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, PipelineEdge, PipelineVertex, PlannedStage
from bus.messages.public import Error
from services.core.demand import reaching
from services.core.pipelines.branching import drawn_edges, ways
from services.core.pipelines.graph import PipelineGraph, Reference, references
from services.core.pipelines.items import Rows, fan_of, item_of
from services.core.selection import refusals
from services.core.selection.eligibility import AppView, Ask
from services.core.selection.refusals import misstated
from services.dispatcher.apps import Apps

NESTED = 4  # pipelines within pipelines that are looked into


class Stage(NamedTuple):
    """A vertex as it is served now. position: its place among the vertices. metrics: see `metrics_of`. seconds: that one item takes, on the planned variant or on the one that
    would be chosen without a limit of latency. before, behind: the same of the longest path of stages before and behind it.

    fan: the edge for whose items it is asked, each by itself; split: of its inputs that differ from item to item, the source's output and the
    axes of an item. rows: behind such a stage, inputs that have a row for each item, for each of which it is asked. items: how many a query asks it
    for, as far as the pipeline says. taken: its outputs that anything takes.
    """

    vertex: PipelineVertex
    position: int
    app: AppView
    metrics: frozenset[str]
    inputs: dict[str, list[Reference]]
    planned: PlannedStage | None
    seconds: float
    before: float
    behind: float
    fan: PipelineEdge | None
    split: dict[str, tuple[str, int]]
    rows: frozenset[str]
    items: float
    taken: set[str]

    def deadline(self, last: float, now: float) -> float:
        """Unix seconds: what is left behind it is for later stages, or their share where there is not enough time. last: the query's own."""
        behind = self.behind
        if behind:
            behind = min(behind, max(0.0, last - now) * behind / (self.seconds + behind))
        return last - behind

    def share(self, objective: float) -> float:
        """Seconds of the objective that are this stage's."""
        rest = objective - self.before - self.behind
        whole = self.before + self.seconds + self.behind
        return max(rest, objective * self.seconds / whole) if whole else objective

    def objective(self, seconds: float) -> float:
        """The least objective of which so many seconds are this stage's: the inverse of `share`."""
        whole = self.before + self.seconds + self.behind
        rest = seconds + self.before + self.behind
        return min(rest, seconds * whole / self.seconds) if self.seconds else rest


def learns(app: AppRecord, apps: Apps, depth: int = 0) -> bool:
    """Whether a selection policy may have made an app's answers: its own, or that of a stage that gives outputs of a pipeline."""
    if app.pipeline is None:
        return app.selection is not None and app.selection.policy is not None
    makers = {ref.vertex for text in app.pipeline.output.values() for ref in references(text)}
    views = [apps.view.apps.get(vertex.app) for vertex in app.pipeline.vertices if vertex.name in makers]
    return depth < NESTED and any(view is not None and learns(view.app, apps, depth + 1) for view in views)


class ServedPipeline:
    """A pipeline as the catalogue has it now. missing: vertices whose app is not there. ways: vertices that one query may visit.

    least: the shortest objective that it can meet.
    """

    def __init__(self, app: AppRecord, apps: Apps) -> None:
        record = app.pipeline
        assert record is not None, "the app is a pipeline"
        self.app = app
        self.graph = PipelineGraph(record)
        rows = Rows(self.graph, {one: view.app for one, view in apps.view.apps.items()})
        self.rows = rows.own
        self.outputs = {name: references(text) for name, text in record.output.items()}
        self.drawn = {name: drawn_edges(edges) for name, edges in self.graph.out.items()}
        self.ways = ways(self.graph, {one.name for one in record.vertices if _simulated(one.app, apps)})
        self.conditional = _conditional(app.app, apps)
        self.learns = learns(app, apps)
        self.conditions = {  # outputs that conditions read
            name: {edge.when.output for edge in edges if edge.when is not None}
            for name, edges in self.graph.out.items()
        }
        self.classes = apps.catalog.classes_of(app)
        self.missing = [vertex.app for vertex in record.vertices if vertex.app not in apps.view.apps]
        self.stages: dict[str, Stage] = {}
        self.metrics = metrics_of(app.app, apps)
        self.least: dict[tuple[float, str | None, int], float] = {}  # objectives, by accuracy, its metric, and items
        if self.missing:
            return
        planned = {} if app.plan is None else app.plan.vertices
        weights = service_seconds(app, apps.view.apps)
        behind = self.graph.behind(weights)
        before = self.graph.before(weights)
        for position, vertex in enumerate(record.vertices):
            name = vertex.name
            view = apps.view.apps[vertex.app]
            stage = planned.get(name)
            self.stages[name] = Stage(
                vertex,
                position,
                view,
                metrics_of(vertex.app, apps),
                {field: references(text) for field, text in vertex.inputs.items()},
                stage if stage is not None and stage.variant in view.index else None,
                weights[name],
                before[name],
                behind[name],
                fan := fan_of(self.graph, name),
                {} if fan is None else _split(vertex, fan, view, apps.view.apps[self.graph.vertices[fan.source].app]),
                frozenset(field for field, own in rows.taken(vertex).items() if own and fan is None),
                self._items(name),
                {ref.tensor for refs in self._taken() for ref in refs if ref.vertex == name},
            )

    def _items(self, name: str) -> float:
        fan, own = fan_of(self.graph, name), self.rows[name]
        if fan is None:
            return self._items(own) if own in self.graph.vertices else 1.0
        return (fan.items_mean or 1.0) * self._items(fan.source)

    def _taken(self) -> Iterator[list[Reference]]:
        """Where outputs and inputs come from."""
        yield from self.outputs.values()
        yield from (references(text) for one in self.graph.vertices.values() for text in one.inputs.values())

    def misstated(self, ask: Ask) -> Error | None:
        """The error where none of its stages is measured as the query states its accuracy."""
        return misstated(replace(ask.wish, accuracy=ask.accuracy), self.app.app, self.metrics)


def _split(vertex: PipelineVertex, fan: PipelineEdge, view: AppView, source: AppView) -> dict[str, tuple[str, int]]:
    """Of the inputs that come from the source: those that are its items, or have an axis more there."""
    made = {} if source.app.signature is None else {spec.name: spec for spec in source.app.signature.outputs}
    found = {}
    for spec in () if view.app.signature is None else view.app.signature.inputs:
        for ref in references(vertex.inputs[spec.name]) if spec.name in vertex.inputs else ():
            if ref.vertex == fan.source and (
                ref.tensor == fan.items or (ref.tensor in made and item_of(made[ref.tensor], spec) is not None)
            ):
                found[spec.name] = (ref.tensor, len(spec.shape))
    return found


def asked_by(name: str, apps: Apps, depth: int = 0) -> Iterator[AppView]:
    """An app, and those that answer for it as stages of pipelines, however deep."""
    view = apps.view.apps.get(name)
    if view is None or depth > NESTED:
        return
    yield view
    for vertex in () if view.app.pipeline is None else view.app.pipeline.vertices:
        yield from asked_by(vertex.app, apps, depth + 1)


def metrics_of(name: str, apps: Apps) -> frozenset[str]:
    """What an app's models are measured by, of a pipeline those of all its stages. Empty: not known of all."""
    found = [view.metrics for view in asked_by(name, apps) if view.app.pipeline is None]
    return frozenset[str]().union(*found) if all(found) else frozenset()


def unserved(name: str, apps: Apps, depth: int = 0) -> str:
    """Why no query of an app can be answered now; of a pipeline, why a stage that each query visits has no answer. Empty: one may be."""
    view = apps.view.apps.get(name)
    if view is None:
        return f"there is no app {name!r} any more" if depth else ""
    if view.app.pipeline is None:
        return refusals.unserved(view, apps.view)
    for vertex in view.app.pipeline.vertices if depth < NESTED else ():
        why = unserved(vertex.app, apps, depth + 1)
        if why and PipelineGraph(view.app.pipeline).needs(vertex.name):
            return f"vertex {vertex.name}: {why}"
    return ""


def _conditional(name: str, apps: Apps) -> bool:
    """Whether a pipeline, or one in it, decides by answers where to go on, or with how many items."""
    pipelines = (view.app.pipeline for view in asked_by(name, apps))
    return any(edge.when or edge.items for one in pipelines if one is not None for edge in one.edges)


def _simulated(name: str, apps: Apps) -> bool:
    """Whether a simulated device may answer for an app, and make up the outputs: then draws decide on edges, not conditions."""
    return any(record.simulated for view in asked_by(name, apps) for record in view.records)


def service_seconds(app: AppRecord, apps: Mapping[str, AppView], depth: int = 0) -> dict[str, float]:
    """Of each vertex of a pipeline, the seconds of one item: on the planned variant, else on the one that would be chosen without a limit of
    latency. 0.0: unknown. apps: by name. A full batch behind a stage would refuse queries that may still be in time.
    """
    planned = {} if app.plan is None else app.plan.vertices
    found = {}
    for vertex in app.pipeline.vertices if app.pipeline is not None else ():
        stage, view = planned.get(vertex.name), apps.get(vertex.app)
        seconds = 0.0
        place = None if stage is None or view is None else view.index.get(stage.variant)
        if view is not None and place is not None:
            seconds = view.groups[place].table.seconds(1)
        elif stage is not None:
            seconds = stage.service_ms / 1000.0
        elif view is not None and view.app.pipeline is not None and depth < NESTED:
            graph = PipelineGraph(view.app.pipeline)
            seconds = graph.longest_path(service_seconds(view.app, apps, depth + 1))[0]
        elif view is not None and view.app.pipeline is None:
            floor = vertex.accuracy
            suffices = reaching(view.records, floor, view.app, view.current) if floor else view.default
            places = view.in_order(np.flatnonzero(view.current & suffices))
            seconds = view.groups[int(places[0])].table.seconds(1) if places.size else 0.0
        found[vertex.name] = seconds
    return found
