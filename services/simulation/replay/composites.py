"""Recorded pipelines and ensembles as a scenario has them: their queries are sent, and the simulated dispatchers ask their parts."""

from collections.abc import Collection, Iterable, Mapping

from msgspec.structs import replace

from bus.messages.catalog import AppRecord, PipelineEdge, PipelinePlan, PipelineRecord
from services.core.pipelines.branching import oversized
from services.core.pipelines.graph import conditional
from services.registrar.checks import POLICIES
from services.simulation.ensembles import SIGNATURE as SEVERAL
from services.simulation.scenario.catalogue import SIGNATURE
from services.simulation.scenario.pipelines import PipelineFile
from services.simulation.scenario.toml import Location

RAREST = 1e-6  # probability of an edge that no recorded query followed


def pipelines_in(apps: Iterable[AppRecord], visits: Mapping[str, Mapping[str, int]]) -> list[PipelineFile]:
    """The pipelines among these apps. Contents are not recorded, so conditions hold as often as they did. visits: see RecordingHead."""
    return [
        PipelineFile(
            name=app.app,
            latency_ms=app.latency_ms or 0.0,
            slo_target=app.slo_target,
            pipeline=as_often(app.pipeline, visits.get(app.app, {})),
            location=Location(f"pipeline {app.app}"),
        )
        for app in apps
        if app.pipeline is not None
    ]


def as_often(pipeline: PipelineRecord, visits: Mapping[str, int]) -> PipelineRecord:
    """The pipeline with probabilities by which its vertices are visited as often as these. It says them itself of vertices with several edges."""
    into: dict[str, int] = {}
    for edge in pipeline.edges:
        into[edge.target] = into.get(edge.target, 0) + 1
    edges = []
    for edge in pipeline.edges:
        before = visits.get(edge.source, 0)
        if before and conditional(edge) and into[edge.target] == 1:
            share = min(1.0, max(RAREST, visits.get(edge.target, 0) / before))
            edge = replace(edge, probability=share)
        edges.append(edge)
    return replace(pipeline, edges=_balanced(edges))


def _balanced(edges: list[PipelineEdge]) -> list[PipelineEdge]:
    """The same, where no two that exclude each other add up to more than 1."""
    pair = next((found for one in edges if (found := oversized([e for e in edges if e.source == one.source]))), None)
    if pair is None:
        return edges
    total = sum(edge.probability or 0.0 for edge in pair)
    return _balanced(
        [replace(one, probability=(one.probability or 0.0) / total) if one in pair else one for one in edges]
    )


def plans_of(apps: Iterable[AppRecord], hardware: Collection[str], notes: list[str]) -> dict[str, PipelinePlan]:
    """The plans that are deployed, by pipeline. hardware: kinds of device that there are."""
    found: dict[str, PipelinePlan] = {}
    for app in apps:
        if app.plan is None:
            continue
        absent = sorted({stage.hardware for stage in app.plan.vertices.values()}.difference(hardware))
        if absent:
            notes.append(f"no machine has {', '.join(absent)}: {app.app} runs without its plan")
        else:
            found[app.app] = app.plan
    return found


def answering(apps: Iterable[AppRecord], notes: list[str], lacking: list[str]) -> tuple[AppRecord, ...]:
    """The apps as they answer here, without pipelines. lacking: what is not replayed as it was."""
    apps = list(apps)
    stages = {vertex.app for app in apps if app.pipeline is not None for vertex in app.pipeline.vertices}
    found, alone = [], []
    for app in apps:
        if app.pipeline is not None:
            continue
        policy = None if app.selection is None else app.selection.policy
        several = policy in POLICIES and app.app not in stages
        if policy is not None and not several:
            alone.append(app.app)
        selection = app.selection if several else None
        found.append(replace(app, selection=selection, signature=SEVERAL if several else SIGNATURE))
    if alone:
        text = f"of {', '.join(alone)} one model answers here instead of several: stages and policies of users' own are not replayed"
        notes.append(text)
        lacking.append(text)
    taught = [app.app for app in found if app.selection is not None]
    if taught:
        notes.append(f"the policies of {', '.join(taught)} begin without what feedback had taught them")
    return tuple(found)
