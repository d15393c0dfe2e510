"""The file of a pipeline (docs/pipelines.md): its graph, and for planning its sample of queries and the ways to serve its vertices."""

from collections.abc import Mapping
from math import ceil, inf
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from bus.fields import PART, SHARE, Named, Number, filled
from bus.messages.catalog import AppRecord, EdgeCondition, PipelineEdge, PipelineRecord, PipelineVertex
from services.core.cost import Goal
from services.core.pipelines.checks import pipeline_errors
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.problem import DEAREST, LONGEST_MS, PipelineProblem, StageOption, problem_errors
from services.core.toml import Location, struct_at, value_at
from services.shell.settings import read_toml
from services.simulation.scenario.loads import SampleBlock, samples_of
from services.simulation.scenario.model import Times, WorkloadSpec
from services.simulation.workload import WorkloadError, at_once, mean_rate

SAMPLE_S = 600.0  # of the sample trace, where neither the loads nor [plan] say how long it is
FEW = 2_000  # queries of a sample, at least: fewer say little about the slowest hundredth
LONGEST_S = 86_400.0
TARGET = 0.99  # of an app that states none, as autoscaler.slo_target
MOST_QUERIES = 10_000_000
_LATENCY = Number(above=0, most=LONGEST_MS)


class HeadTable(Struct, frozen=True, kw_only=True):
    """[pipeline]."""

    name: Named
    latency_ms: Annotated[float, _LATENCY]
    slo_target: Annotated[float | None, PART] = None


class VertexBlock(PipelineVertex, frozen=True, kw_only=True):
    """A [[vertex]] block."""

    name: Named
    app: Named
    accuracy: Annotated[float | None, SHARE] = None


class EdgeBlock(PipelineEdge, frozen=True, kw_only=True):
    """An [[edge]] block."""

    source: Named = field(name="from")
    target: Named = field(name="to")
    when: EdgeCondition | None = None
    probability: Annotated[float | None, PART] = None


class PlanTable(Struct, frozen=True, kw_only=True):
    """[plan]. percentile: of the latencies, that a plan is for. seconds: of the sample trace. hop_ms: of a message between two stages.
    goal, budget_per_hour: as `PipelineProblem` has them.
    """

    percentile: Annotated[float | None, PART] = None
    seconds: Annotated[float | None, Number(above=0, most=LONGEST_S)] = None
    seed: Annotated[int, Number(most=2**63 - 1)] = 1
    hop_ms: Annotated[float | None, Number(most=LONGEST_MS)] = None
    goal: Goal = "cost"
    budget_per_hour: Annotated[float | None, Number(above=0, most=DEAREST)] = None


class PipelineTables(Struct, frozen=True, kw_only=True):
    """What a scenario's [[pipeline]] block may hold. plan: read where something is planned."""

    pipeline: Annotated[HeadTable, "a [pipeline] table states name and latency_ms"]
    vertex: list[VertexBlock] = []
    edge: list[EdgeBlock] = []
    output: dict[str, str] = {}
    plan: Any = {}


class PipelineDocument(PipelineTables, frozen=True, kw_only=True):
    """A whole file. load, option: read where something is planned."""

    load: Any = []
    option: Any = []


class PipelineFile(Struct, frozen=True, kw_only=True):
    """percentile: of the latencies, that a plan is for; None: the app's target. seconds: of the sample trace; None: as the loads say.

    hop_ms: of a message between two stages; None: not said.
    """

    name: str
    latency_ms: float
    slo_target: float | None
    pipeline: PipelineRecord
    percentile: float | None = None
    seconds: float | None = None
    seed: int = 1
    hop_ms: float | None = None
    goal: Goal = "cost"
    budget_per_hour: float | None = None
    loads: tuple[WorkloadSpec, ...] = ()
    options: tuple[StageOption, ...] = ()
    location: Location = Location("")


def read_pipeline(path: Path, *, planning: bool = True) -> PipelineFile:
    """The pipeline in a file. planning: also what only planning needs; without it, [plan], [[load]] and [[option]] are not read.

    Raises TomlError, which names the file, the key, what is wrong there and the remedy. The graph is not checked yet.
    """
    location = Location(str(path))
    document = struct_at(read_toml(path), location, PipelineDocument)
    found = pipeline_in(document, location, planning=planning)
    if not planning:
        return found
    loads = value_at(document.load, location.at("load"), list[SampleBlock])
    options = value_at(document.option, location.at("option"), tuple[StageOption, ...])
    return replace(
        found,
        loads=samples_of(loads, location.at("load"), found.name, path.parent),
        options=options,
    )


def pipeline_in(tables: PipelineTables, location: Location, *, planning: bool = True) -> PipelineFile:
    """The same of a scenario's block, without loads and options."""
    plan = struct_at(tables.plan, location.at("plan"), PlanTable) if planning else PlanTable()
    return PipelineFile(
        **asdict(tables.pipeline),
        **asdict(plan),
        pipeline=PipelineRecord(
            vertices=[PipelineVertex(**asdict(one)) for one in tables.vertex],
            edges=[PipelineEdge(**asdict(one)) for one in tables.edge],
            output=tables.output,
        ),
        location=location,
    )


def check_pipeline(file: PipelineFile, apps: Mapping[str, AppRecord] | None = None) -> None:
    """Refuse a graph that is wrong. apps: that exist; None: not known. Raises TomlError."""
    wrong = pipeline_errors(file.name, file.latency_ms, file.pipeline, apps)
    if wrong:
        file.location.refuse("; ".join(wrong))


def problem_of(
    file: PipelineFile, options: tuple[StageOption, ...], hop: MeasuredHop, target: float = TARGET
) -> PipelineProblem:
    """What is to be planned. hop, target (share of queries in time): where the file does not say them. Raises TomlError, also for a wrong graph."""
    if not file.loads:
        file.location.at("load").refuse(
            "there must be at least one [[load]], as rate = 150: the plan is made for its queries"
        )
    problem = filled(
        PipelineProblem,
        file,
        options=options,
        arrivals=sample(file),
        percentile=file.percentile or file.slo_target or target,
        hop=hop if file.hop_ms is None else MeasuredHop(file.hop_ms),
        budget_per_hour=file.budget_per_hour or inf,
    )
    wrong = problem_errors(problem)
    if wrong:
        file.location.refuse("; ".join(wrong))
    return problem


def sample(file: PipelineFile) -> Times:
    """The arrivals of all loads together, without those at other apps, in seconds and in order. Raises TomlError."""
    at = file.location.at("load")
    rng = np.random.default_rng(file.seed)
    try:
        seconds = _seconds(file)
        shares = [dict(zip(load.apps, load.shares, strict=True))[file.name] for load in file.loads]
        rates = [mean_rate(load, seconds) for load in file.loads]
        expected = sum(rate * share for rate, share in zip(rates, shares, strict=True)) * seconds
        if expected > MOST_QUERIES:
            at.refuse(
                f"the sample trace of {seconds:g} s would have {expected:.3g} queries, more than {MOST_QUERIES:g}:"
                f" set [plan] seconds to at most {seconds * MOST_QUERIES / expected:.3g}"
            )
        streams = [(load, *at_once(load, seconds, rng)) for load in file.loads]
    except WorkloadError as error:
        at.refuse(str(error))
    parts = [times[apps == load.apps.index(file.name)] for load, times, apps in streams]
    return np.sort(np.concatenate(parts), kind="stable")


def _seconds(file: PipelineFile) -> float:
    """How long the sample trace is: as [plan] says, as long as its longest recorded load, else long enough to say something."""
    if file.seconds is not None:
        return file.seconds
    recorded = [found for load in file.loads if (found := _recorded(load))]
    if recorded and len(recorded) == len(file.loads):
        return min(LONGEST_S, max(recorded))
    seconds = max(SAMPLE_S, *recorded, *(load.rate[-1][0] for load in file.loads if load.rate))
    rate = sum(mean_rate(load, seconds) for load in file.loads)
    return min(LONGEST_S, max(seconds, float(ceil(FEW / rate)) if rate > 0 else 0.0))


def _recorded(load: WorkloadSpec) -> float | None:
    """Seconds of a trace or of given times."""
    if load.counts is not None:
        return len(load.counts) * load.seconds_per_line
    if load.times is not None:
        return float(np.nextafter(load.times[-1], np.inf))
    return None
