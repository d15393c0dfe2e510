"""The file of a pipeline (docs/pipelines.md): its graph, and for planning its sample of queries and the ways to serve its vertices."""

from collections.abc import Mapping
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import Struct

from bus.messages.catalog import AppRecord, EdgeCondition, PipelineEdge, PipelineRecord, PipelineVertex
from services.core.pipelines.checks import pipeline_errors
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.problem import LARGEST_BATCH, LONGEST_MS, PipelineProblem, StageOption, problem_errors
from services.simulation.scenario.loads import samples_of
from services.simulation.scenario.model import Times, WorkloadSpec
from services.simulation.scenario.toml import (
    Location,
    TomlTable,
    number_at,
    read_toml,
    table_at,
    text_at,
    whole_at,
)
from services.simulation.workload import Apps, WorkloadError, at_once, mean_rate

PARTS = ("pipeline", "vertex", "edge", "output", "plan")  # that a scenario may hold itself
TABLES = (*PARTS, "load", "option")
SAMPLE_S = 600.0  # of the sample trace, where neither the loads nor [plan] say how long it is
FEW = 2_000  # queries of a sample, at least: fewer say little about the slowest hundredth
LONGEST_S = 86_400.0
TARGET = 0.99  # of an app that states none, as autoscaler.slo_target
MOST_QUERIES = 10_000_000
_PRICE = 1e6  # US$ per hour


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
    loads: tuple[WorkloadSpec, ...] = ()
    options: tuple[StageOption, ...] = ()
    location: Location = Location("")


def read_pipeline(path: Path, *, planning: bool = True) -> PipelineFile:
    """The pipeline in a file. planning: also what only planning needs; without it, [plan], [[load]] and [[option]] are not read.

    Raises ScenarioError, which names the file, the key, what is wrong there and the remedy. The graph is not checked yet.
    """
    return pipeline_in(TomlTable(read_toml(path), Location(str(path)), TABLES), path.parent, planning=planning)


def pipeline_in(file: TomlTable, folder: Path, *, planning: bool = True) -> PipelineFile:
    """The same in a table. folder: to which paths are relative."""
    location = file.location
    if "pipeline" not in file:
        location.at("pipeline").refuse("is missing: a [pipeline] table states name and latency_ms")
    head = TomlTable(file.get("pipeline"), file.at("pipeline"), ("name", "latency_ms", "slo_target"))
    found = PipelineFile(
        name=head.name("name"),
        latency_ms=head.number("latency_ms", most=LONGEST_MS, above=True),
        slo_target=head.maybe("slo_target", most=1.0, above=True),
        pipeline=PipelineRecord(
            vertices=[_vertex(block) for block in file.blocks("vertex", ("name", "app", "inputs", "accuracy"))],
            edges=[_edge(block) for block in file.blocks("edge", ("from", "to", "when", "probability"))],
            output=_texts(file.table("output"), file.at("output")),
        ),
        location=location,
    )
    if not planning:
        return found
    plan = TomlTable(file.table("plan"), file.at("plan"), ("percentile", "seconds", "seed", "hop_ms"))
    return PipelineFile(
        name=found.name,
        latency_ms=found.latency_ms,
        slo_target=found.slo_target,
        pipeline=found.pipeline,
        percentile=plan.maybe("percentile", most=1.0, above=True),
        seconds=plan.maybe("seconds", most=LONGEST_S, above=True),
        seed=plan.whole("seed", 1, 0, 2**63 - 1),
        hop_ms=plan.maybe("hop_ms", most=LONGEST_MS),
        loads=samples_of(file, found.name, folder),
        options=tuple(_option(block) for block in file.blocks("option", _OPTION)),
        location=location,
    )


def check_pipeline(file: PipelineFile, apps: Mapping[str, AppRecord] | None = None) -> None:
    """Refuse a graph that is wrong. apps: that exist; None: not known. Raises ScenarioError."""
    wrong = pipeline_errors(file.name, file.latency_ms, file.pipeline, apps)
    if wrong:
        file.location.refuse("; ".join(wrong))


def problem_of(
    file: PipelineFile, options: tuple[StageOption, ...], hop: MeasuredHop, target: float = TARGET
) -> PipelineProblem:
    """What is to be planned. hop, target (share of queries in time): where the file does not say them. Raises ScenarioError, also for a wrong graph."""
    if not file.loads:
        file.location.at("load").refuse(
            "there must be at least one [[load]], as rate = 150: the plan is made for its queries"
        )
    problem = PipelineProblem(
        name=file.name,
        pipeline=file.pipeline,
        latency_ms=file.latency_ms,
        options=options,
        arrivals=sample(file),
        percentile=file.percentile or file.slo_target or target,
        hop=hop if file.hop_ms is None else MeasuredHop(file.hop_ms),
    )
    wrong = problem_errors(problem)
    if wrong:
        file.location.refuse("; ".join(wrong))
    return problem


def sample(file: PipelineFile) -> Times:
    """The arrivals of all loads together, without those at other apps, in seconds and in order. Raises ScenarioError."""
    at = file.location.at("load")
    rng = np.random.default_rng(file.seed)
    try:
        seconds = _seconds(file)
        expected = sum(mean_rate(load, seconds) * _share(load, file.name) for load in file.loads) * seconds
        if expected > MOST_QUERIES:
            at.refuse(
                f"the sample trace of {seconds:g} s would have {expected:.3g} queries, more than {MOST_QUERIES:g}:"
                f" set [plan] seconds to at most {seconds * MOST_QUERIES / expected:.3g}"
            )
        parts = [_of_app(load, file.name, *at_once(load, seconds, rng)) for load in file.loads]
    except WorkloadError as error:
        at.refuse(str(error))
    return np.sort(np.concatenate(parts), kind="stable")


def _share(load: WorkloadSpec, name: str) -> float:
    return sum(share for app, share in zip(load.apps, load.shares, strict=True) if app == name)


def _of_app(load: WorkloadSpec, name: str, times: Times, apps: Apps) -> Times:
    return times if load.apps == (name,) else times[apps == load.apps.index(name)]


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


def _vertex(block: TomlTable) -> PipelineVertex:
    return PipelineVertex(
        name=block.name("name"),
        app=block.name("app"),
        inputs=_texts(block.table("inputs"), block.at("inputs")),
        accuracy=block.maybe("accuracy", most=1.0),
    )


def _edge(block: TomlTable) -> PipelineEdge:
    when = None
    if "when" in block:
        table = TomlTable(block.get("when"), block.at("when"), ("output", "reduce", "op", "value"))
        value = table.get("value")
        when = EdgeCondition(
            output=table.text("output"), reduce=table.text("reduce", "first"), op=table.text("op"), value=value
        )
    probability = block.maybe("probability", most=1.0, above=True)
    return PipelineEdge(source=block.name("from"), target=block.name("to"), when=when, probability=probability)


def _texts(table: Any, location: Location) -> dict[str, str]:
    return {key: text_at(value, location.at(key)) for key, value in table_at(table, location).items()}


_OPTION = ("vertex", "hardware", "price_per_hour", "batch_latency_ms", "variant", "accuracy")


def _option(block: TomlTable) -> StageOption:
    location = block.at("batch_latency_ms")
    table = table_at(block.get("batch_latency_ms"), location)
    latencies = {}
    for key, value in table.items():
        size = int(key) if key.isascii() and key.isdecimal() and len(key) < 10 else key
        batch = whole_at(size, location.at(key), 1, LARGEST_BATCH)
        latencies[batch] = number_at(value, location.at(key), 0.0, LONGEST_MS, above=True)
    return StageOption(
        vertex=block.name("vertex"),
        hardware=block.text("hardware"),
        price_per_hour=block.number("price_per_hour", most=_PRICE),
        batch_latency_ms=latencies,
        variant=block.name("variant") if "variant" in block else "",
        accuracy=block.maybe("accuracy", most=1.0),
    )
