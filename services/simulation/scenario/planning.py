"""[[pipeline]] blocks: the pipelines of a scenario, and what the planners make of them.

A pipeline is planned from the scenario's load, as its random generator gives it with another seed, and from the scenario's variants and prices.
"""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from zlib import crc32

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import AppRecord, PipelinePlan, PipelineRecord, Signature, VariantRecord
from bus.messages.public import Requirements
from services.core.cost import LatencyTable, instance_price_per_s
from services.core.pipelines.checks import signature_of
from services.core.pipelines.estimator import MeasuredHop
from services.core.pipelines.graph import QUERY, references
from services.core.pipelines.planners import POLICIES as PLANNERS
from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.problem import StageOption
from services.core.toml import Location
from services.simulation.kernel import NETWORK
from services.simulation.scenario.catalogue import SIGNATURE, Catalogue
from services.simulation.scenario.machines import MachineBlock, largest_of
from services.simulation.scenario.model import PolicySpec, WorkloadSpec
from services.simulation.scenario.pipelines import (
    HeadTable,
    PipelineFile,
    PipelineTables,
    check_pipeline,
    pipeline_in,
    problem_of,
    read_pipeline,
)

HOP = MeasuredHop(2000.0 * NETWORK)  # a stage is asked and answers: two messages
COARSE = ("cg-mean", "cg-peak")  # baselines are deployed even if they miss the objective
UNPLANNED = ("static", "replicate")


class PipelineBlock(PipelineTables, frozen=True, kw_only=True):
    """A [[pipeline]] block: a file, or what one holds."""

    file: str | None = None
    pipeline: HeadTable | None = None  # type: ignore[assignment]  # is said there or here


def file_of(block: PipelineBlock, at: Location, folder: Path, *, planning: bool = True) -> PipelineFile:
    """What a block holds, or its file. planning: as of `read_pipeline`. Raises TomlError."""
    if block.file is not None:
        if block != PipelineBlock(file=block.file):
            at.at("file").refuse("says all of the pipeline: leave the other keys out, or the file")
        return read_pipeline(folder / block.file, planning=planning)
    if block.pipeline is None:
        at.at("pipeline").refuse("is missing: a [pipeline] table states name and latency_ms")
    return pipeline_in(block, at, planning=planning)


def pipelines_of(
    blocks: Sequence[PipelineBlock], location: Location, things: Catalogue, folder: Path
) -> tuple[Catalogue, tuple[PipelineFile, ...]]:
    """The catalogue with the pipelines, and their files. folder: the scenario's, to which paths are relative. Raises TomlError."""
    files: list[PipelineFile] = []
    for i, block in enumerate(blocks):
        at = location.at(i)
        file = file_of(block, at, folder)
        if file.name in things.needs or any(file.name == other.name for other in files):
            named = at.at("pipeline" if block.file is None else "file")
            named.refuse(f"{file.name} is the name of another app, too: set another [pipeline] name there")
        check_pipeline(file)
        files.append(file)
    return with_pipelines(things, files), tuple(files)


def with_pipelines(things: Catalogue, files: Sequence[PipelineFile]) -> Catalogue:
    """The catalogue with these pipelines, which are no apps of it yet. Raises TomlError."""
    if not files:
        return things
    signatures = _signatures(files, things)
    apps = {app.app: replace(app, signature=signatures.get(app.app, app.signature)) for app in things.apps}
    waiting = list(files)
    while waiting:
        ahead = {file.name for file in waiting}
        ready = [file for file in waiting if not ahead.intersection(v.app for v in file.pipeline.vertices)]
        for file in ready or waiting:  # pipelines that contain each other are refused here
            record = _numbered(file.pipeline)
            check_pipeline(replace(file, pipeline=record), apps)
            apps[file.name] = AppRecord(
                app=file.name,
                links={},
                signature=signature_of(record, apps),
                latency_ms=file.latency_ms,
                slo_target=file.slo_target,
                min_instances=0,
                pipeline=record,
            )
        waiting = [file for file in waiting if file.name not in apps]
    serves = {
        one.variant: signatures[app]
        for app, variants in things.serving.items()
        if app in signatures
        for one in variants
    }
    return replace(
        things,
        apps=tuple(apps.values()),
        needs={**things.needs, **{file.name: Requirements(latency_ms=file.latency_ms) for file in files}},
        variants=tuple(_signed(one, serves) for one in things.variants),
        serving={app: tuple(_signed(one, serves) for one in ours) for app, ours in things.serving.items()},
    )


def _signed(record: VariantRecord, signatures: Mapping[str, Signature]) -> VariantRecord:
    return replace(record, signature=signatures.get(record.variant, record.signature))


def _signatures(files: Sequence[PipelineFile], things: Catalogue) -> dict[str, Signature]:
    """Of each app that is a vertex, the tensors that pipelines name. Apps of which several models answer together keep their own."""
    plain = {app.app for app in things.apps if app.selection is None}
    inputs: dict[str, dict[str, None]] = {}
    outputs: dict[str, dict[str, None]] = {}
    handed: set[tuple[str, str]] = set()  # outputs whose items go on have an axis of them
    for file in files:
        record = file.pipeline
        asked = {vertex.name: vertex.app for vertex in record.vertices}
        for vertex in record.vertices:
            inputs.setdefault(vertex.app, {}).update(dict.fromkeys(vertex.inputs))
        texts = [text for vertex in record.vertices for text in vertex.inputs.values()] + list(record.output.values())
        named = [ref for text in texts for ref in references(text) if ref.vertex != QUERY]
        for source, tensor in named:
            outputs.setdefault(asked[source], {})[tensor] = None
        for edge in record.edges:
            if edge.when is not None:
                outputs.setdefault(asked[edge.source], {})[edge.when.output] = None
            if edge.items:
                handed.add((asked[edge.source], edge.items))
    given, made = SIGNATURE.inputs[0], SIGNATURE.outputs[0]
    return {
        app: Signature(
            inputs=[replace(given, name=name) for name in inputs[app] or (given.name,)],
            outputs=[
                replace(made, name=name, shape=[*made.shape, 1] if (app, name) in handed else made.shape)
                for name in outputs.get(app) or (made.name,)
            ],
        )
        for app in inputs.keys() & plain
    }


def _numbered(record: PipelineRecord) -> PipelineRecord:
    """The same with numbers in place of texts that are compared: tensors have no contents here, and all are of one type."""

    def number(value: Any) -> Any:
        return crc32(value.encode()) if isinstance(value, str) else value

    edges = []
    for edge in record.edges:
        when = edge.when
        if when is not None:
            value = [number(one) for one in when.value] if isinstance(when.value, list) else number(when.value)
            edge = replace(edge, when=replace(when, value=value))
        edges.append(edge)
    return replace(record, edges=edges)


# -- plans


class Planning(Struct, eq=False):
    """How a scenario's pipelines are planned. machines: of the scenario. duration_s: of the loads."""

    files: Sequence[PipelineFile]
    things: Catalogue
    machines: list[MachineBlock]
    prices: Mapping[str, float]
    loads: Sequence[WorkloadSpec]
    duration_s: float

    def planned(self, policy: PolicySpec, location: Location) -> PolicySpec:
        """The policy with the plans of all pipelines, if it is a planner's. Raises TomlError, which names the location."""
        if policy.base in UNPLANNED and self.files:
            location.refuse(
                f"{policy.name} chooses for [[app]]s by their own load, and a pipeline's vertices have none: use one of {', '.join(PLANNERS)}"
            )
        if policy.base not in PLANNERS:
            return policy
        if not self.files:
            location.refuse(f"{policy.name} plans pipelines, and there is no [[pipeline]]: add one")
        return replace(policy, plans={file.name: self._plan(file, policy, location) for file in self.files})

    def _plan(self, file: PipelineFile, policy: PolicySpec, location: Location) -> PipelinePlan:
        loads = tuple(load for load in self.loads if file.name in load.apps)
        if not loads:
            location.refuse(f"{policy.name} plans {file.name} for its queries, and no [[load]] names it: add one")
        seconds = file.seconds or (None if all(_steady(load) for load in loads) else self.duration_s)
        options = [
            option
            for vertex in file.pipeline.vertices
            for record in self.things.serving.get(vertex.app, ())
            if policy.hardware is None or record.hardware in policy.hardware
            for option in (self._option(vertex.name, record),)
        ]
        sampled = replace(file, loads=loads, seconds=seconds)
        plan = plan_pipeline(problem_of(sampled, tuple(options), HOP), policy.base)
        if plan.status == "infeasible" and policy.base not in COARSE:
            location.refuse(f"{policy.name} finds no plan for {file.name}: {plan.reason}")
        return plan

    def _option(self, vertex: str, record: VariantRecord) -> StageOption:
        device = largest_of(self.machines, record.hardware)
        assert device is not None  # each variant's hardware is on some machine
        table = LatencyTable(record)
        sizes = {min(row.batch, record.max_batch) for row in record.profile.rows} | {1, record.max_batch}
        return StageOption(
            vertex=vertex,
            hardware=record.hardware,
            price_per_hour=3600.0 * instance_price_per_s(record, self.prices, device.cores, device.memory_mb),
            batch_latency_ms={size: 1000.0 * table.seconds(size) for size in sorted(sizes)},
            variant=record.variant,
            accuracy=record.accuracy,
        )


def _steady(load: WorkloadSpec) -> bool:
    """Whether it goes on like this for ever, so that its sample may be longer than the scenario."""
    return load.arrivals == "mmpp" or len(load.rate) == 1


def check_loads(loads: Sequence[WorkloadSpec], location: Location, pipelines: Collection[str]) -> None:
    """Refuse loads that pipelines do not take. location: of their blocks."""
    for i, load in enumerate(loads):
        for app in load.apps:
            if load.items > 1 and app in pipelines:
                location.at(i).at("items").refuse(
                    f"must be 1, not {load.items}: {app} is a pipeline, and each of its queries goes its own way"
                )
