"""`infaas pipeline VERB`: apps that other apps answer together (docs/pipelines.md)."""

import inspect
import json as json_text
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import msgspec
from cyclopts import Parameter
from cyclopts.validators import Number
from msgspec.structs import replace

from bus.port import BusError
from infaas.cli.options import DataDir, Json, Verbs, Whole, Wide, check_verb, imported
from infaas.cli.output import Column, fail, found_words, number, print_table, progress, render_done, show, usage
from infaas.connecting import with_client
from infaas.errors import InfaasError

if TYPE_CHECKING:
    from bus.messages.catalog import PipelineEdge, PipelinePlan
    from infaas.client import Client
    from infaas.pipelines import Driver
    from services.core.pipelines.estimator import MeasuredHop
    from services.core.pipelines.problem import StageOption
    from services.simulation.scenario.pipelines import PipelineFile

Item = dict[str, Any]
T = TypeVar("T")
VERBS: Verbs = {
    "add": ("a pipeline's file", ()),
    "list": (None, ()),
    "plan": ("a pipeline's file", ("--policy",)),
    "deploy": ("a plan's file, or the name of a pipeline with --undeploy", ("--undeploy",)),
    "remove": ("the name of a pipeline", ()),
    "trace": ("a driver function as MODULE:FUNCTION", ("--samples", "--most")),
}
STILL_S = 5.0  # between lines of progress
LARGEST_PLAN = 16 * 2**20  # bytes
Policy = Literal["inferline", "model-less", "cg-mean", "cg-peak"]


def pipeline(
    verb: str,
    target: str | None = None,
    /,
    *,
    policy: Policy | None = None,
    undeploy: Annotated[bool, Parameter(negative="")] = False,
    samples: Path | None = None,
    most: Annotated[Whole | None, Parameter(validator=Number(gte=1))] = None,
    data_dir: DataDir = None,
    wide: Wide = False,
    json: Json = False,
) -> int:
    """Add, list, plan, deploy, remove and trace pipelines: apps whose queries other apps answer, one after the other or side by side.

    * add FILE.toml: add the pipeline, or change it
    * list: list the pipelines with their stages
    * plan FILE.toml: find the cheapest way to serve the file's load. Needs no system where the file has an [[option]] for each vertex.
      Prints hardware, variant, batch and replicas of each stage. Exits 1 if no plan meets the objective
    * deploy PLAN.json: serve the pipeline as `plan --json` printed it; `deploy NAME --undeploy` ends that
    * remove NAME: delete the pipeline. The apps of its stages stay
    * trace MODULE:FUNCTION: run a driver function on samples, and print the pipeline that it shows as TOML

    Example: `infaas pipeline add social.toml`

    Example: `infaas pipeline plan social.toml --json > plan.json`

    Parameters
    ----------
    verb
        What to do.
    target
        The file, name or function.
    policy
        How to plan. inferline (default): one model for each stage, the most accurate. model-less: any variant that meets the stage's
        accuracy, and the default where the file's goal is accuracy. cg-mean, cg-peak: copies of the whole pipeline, for the mean or the peak of the load.
    undeploy
        End the plan that is deployed.
    samples
        A .npz file with an array for each of the driver's inputs (trace). The first axis counts samples.
    most
        Run this many samples only (trace). Default: all.

    """
    given = {"--policy": policy, "--undeploy": undeploy, "--samples": samples, "--most": most}
    check_verb(verb, target, VERBS, given)
    target = target or ""
    match verb:
        case "add":
            return _add(Path(target), data_dir, json)
        case "list":
            return _list(data_dir, wide, json)
        case "plan":
            return _plan(Path(target), policy, data_dir, wide, json)
        case "deploy":
            return _deploy(target, undeploy, data_dir, json)
        case "remove":
            return _remove(target, data_dir, json)
        case _:
            if samples is None:
                usage("trace needs --samples: a .npz file with an array for each of the driver's inputs")
            return _trace(target, samples, most, data_dir, json)


def _add(path: Path, data_dir: Path | None, json: bool) -> int:
    fields = change_of(_read(path, planning=False))
    show(with_client(data_dir, lambda client: client.admin("set-pipeline", **fields)), json, render_done)
    return 0


def change_of(file: "PipelineFile") -> Item:
    """What the request `set-pipeline` takes of a file."""
    return {
        "pipeline": {"name": file.name, "latency_ms": file.latency_ms, "slo_target": file.slo_target},
        **msgspec.to_builtins(file.pipeline),
    }


def _remove(name: str, data_dir: Path | None, json: bool) -> int:
    async def send(client: "Client") -> Item:
        if not await client.pipelines(app=name):
            fail(f"there is no pipeline {name!r}: infaas pipeline list shows those that there are")
        return await client.admin("delete-app", app=name)

    show(with_client(data_dir, send), json, render_done)
    return 0


def _deploy(target: str, undeploy: bool, data_dir: Path | None, json: bool) -> int:
    plan = None if undeploy else _read_plan(Path(target))
    name = target if plan is None else plan.get("pipeline")
    if not isinstance(name, str):
        usage(f"{target}: pipeline: is missing; deploy takes what `infaas pipeline plan FILE.toml --json` prints")
    done = with_client(data_dir, lambda client: client.admin("deploy-pipeline", app=name, plan=plan))
    show(done, json, render_done)
    return 0


def _read_plan(path: Path) -> Item:
    try:
        with path.open("rb") as opened:
            content = opened.read(LARGEST_PLAN + 1)
        if len(content) > LARGEST_PLAN:
            usage(f"cannot read {path}: it is larger than {LARGEST_PLAN >> 20} MiB, which no plan is")
        found = json_text.loads(content)
    except OSError as error:
        usage(f"cannot read {path}: {error.strerror}")
    except (ValueError, RecursionError) as error:
        usage(f"{path} is no JSON: {error}; deploy takes what `infaas pipeline plan FILE.toml --json` prints")
    if not isinstance(found, dict):
        usage(f"{path} is no plan: deploy takes what `infaas pipeline plan FILE.toml --json` prints")
    return found


# -- lists

_STAGES = (
    Column("pipeline", "pipeline"),
    Column("stage", "vertex"),
    Column("app", "app", rank=1),
    Column("variant", "variant"),
    Column("hardware", "hardware", rank=3),
    Column("batch", "batch", rank=4),
    Column("planned", "replicas", rank=5),
    Column("wanted", "wanted", rank=2),
    Column("instances", "instances"),
    Column("queued", "queued", rank=2),
    Column("share", lambda one: None if one["share"] is None else f"{one['share']:.0%}", rank=6),
)


def _list(data_dir: Path | None, wide: bool, json: bool) -> int:
    items = with_client(data_dir, lambda client: client.pipelines())
    show({"items": items}, json, lambda document: _render(document["items"], wide))
    return 0


def _render(items: list[Item], wide: bool) -> None:
    for item in items:
        plan = f"no plan any more: {item['plan_ended']}" if item["plan_ended"] else "no plan"
        if item["plan"] is not None:
            dollars = number(3600.0 * item["plan"]["cost_per_s"])
            plan = f"plan by {item['plan']['policy']}: {dollars} US$/h, {number(item['plan']['p99_ms'])} ms"
        right = f", {found_words(found)}" if (found := item["quality"]) else ""
        print(f"{item['app']}: objective {number(item['latency_ms'])} ms, {plan}{right}")
    if items:
        print()
    rows = [stage | {"pipeline": item["app"]} for item in items for stage in item["vertices"]]
    print_table(rows, _STAGES, "no pipelines yet: `infaas pipeline add FILE.toml` adds one", wide=wide)
    for row in rows:
        if row["missing"]:
            print(f"{row['pipeline']}, {row['vertex']}: {row['missing']}")


# -- plans


def _read(path: Path, *, planning: bool) -> "PipelineFile":
    """Ends the command (bad usage) if the file is wrong."""
    from services.simulation.scenario.pipelines import read_pipeline  # noqa: PLC0415  (numpy takes long to import)

    return _refusing(lambda: read_pipeline(path, planning=planning))


def _refusing(work: Callable[[], T]) -> T:
    """The result; a file that is wrong ends the command (bad usage)."""
    from services.core.toml import TomlError  # noqa: PLC0415  (after the arguments have been understood)

    try:
        return work()
    except TomlError as error:
        usage(str(error))


def _plan(path: Path, policy: str | None, data_dir: Path | None, wide: bool, json: bool) -> int:
    from services.core.pipelines.planners import plan_pipeline  # noqa: PLC0415  (numpy takes long to import)
    from services.core.pipelines.problem import HOP, MeasuredStages  # noqa: PLC0415
    from services.simulation.scenario.pipelines import TARGET, check_pipeline, problem_of  # noqa: PLC0415

    file = _read(path, planning=True)
    policy = policy or ("model-less" if file.goal == "accuracy" else "inferline")
    _refusing(lambda: check_pipeline(file))
    offered = {option.vertex for option in file.options}
    missing = {vertex.app for vertex in file.pipeline.vertices if vertex.name not in offered}
    options, hop, target = file.options, HOP, TARGET
    measured: list[Item] = []
    if missing:
        rows, target, seen, measured = with_client(data_dir, lambda client: _asked(client, file, offered))
        file = with_items(file, seen)
        asked = {vertex.name for vertex in file.pipeline.vertices if vertex.accuracy is not None}
        options += tuple(
            option
            for vertex, mine in rows.items()
            for option in options_of(vertex, mine if vertex in asked else answering_as_models(mine))
        )
        hop = hop_of(row for mine in rows.values() for row in mine)
    problem = _refusing(lambda: problem_of(file, options, hop, target))
    problem = replace(problem, measured=msgspec.convert(measured, tuple[MeasuredStages, ...]))
    count, seconds = len(problem.arrivals), float(problem.arrivals[-1])
    with _progress(f"planning by {policy}: {count:,} queries in {seconds:,.0f} s, {len(options)} ways to serve"):
        found = plan_pipeline(problem, policy)
    document = msgspec.to_builtins(found)
    if not found.reason:
        del document["reason"]
    show(document, json, lambda _: _render_plan(found, options, wide))
    if found.status == "infeasible":
        fail(f"infeasible: {found.reason}")
    return 0


async def _asked(
    client: "Client", file: "PipelineFile", offered: set[str]
) -> tuple[dict[str, list[Item]], float, list[Item], list[Item]]:
    """The variants of the running system that could serve the other vertices, and the pipeline's target and edges there, and what labels say of its answers.

    Ends the command if there are no variants for one of them.
    """
    from services.simulation.scenario.pipelines import TARGET  # noqa: PLC0415  (numpy takes long to import)

    found = {}
    registered = await client.pipelines(app=file.name)
    apps = {one["app"]: one["versions"] for one in await client.apps()}
    for vertex in file.pipeline.vertices:
        if vertex.name in offered:
            continue
        listed = await client.variants(app=vertex.app) if vertex.app in apps else []
        rows = found[vertex.name] = serving_now(listed, apps.get(vertex.app, {}))
        if not rows:
            what = "it has no variants" if vertex.app in apps else "there is no such app"
            usage(
                f"{file.location.file}: vertex {vertex.name}, app {vertex.app}: {what} in the running system;"
                f' add [[option]] with vertex = "{vertex.name}", hardware, price_per_hour and batch_latency_ms'
            )
    if not registered:
        return found, TARGET, [], []
    return found, registered[0]["slo_target"], registered[0]["edges"], registered[0]["measured"]


def serving_now(rows: Iterable[Item], versions: Mapping[str, str]) -> list[Item]:
    """Without the new version of a release, which no plan may name. rows: of the list of variants. versions: by model, of the list of apps."""
    return [row for row in rows if versions.get(row["model"]) == row["version"]]


def with_items(file: "PipelineFile", edges: Iterable[Item]) -> "PipelineFile":
    """The file with mean and dispersion of items as the system has seen them, where it does not say the mean. edges: of the list of pipelines."""
    seen = {(one["from"], one["to"]): one.get("items_seen") for one in edges}

    def measured(edge: "PipelineEdge") -> "PipelineEdge":
        found = seen.get((edge.source, edge.target))
        if not edge.items or edge.items_mean or not found or not found["mean"]:
            return edge
        return replace(edge, items_mean=found["mean"], items_dispersion=found["dispersion"])

    return replace(file, pipeline=replace(file.pipeline, edges=[measured(edge) for edge in file.pipeline.edges]))


def hop_of(rows: Iterable[Item]) -> "MeasuredHop":
    """The mean of what these variants' batches were measured to take beyond their profiles; the default if none was."""
    from services.core.pipelines.problem import HOP  # noqa: PLC0415  (numpy takes long to import)

    known = [row for row in rows if row["hop_ms"] is not None]
    if not known:
        return HOP
    quantiles = zip(*(row["hop_quantiles_ms"] for row in known), strict=True)
    return HOP._replace(ms=fmean(row["hop_ms"] for row in known), quantiles_ms=tuple(map(fmean, quantiles)))


def answering_as_models(rows: list[Item]) -> list[Item]:
    """Those that serve queries without an accuracy, as those of a stage without one; of the list of variants."""
    from services.core.demand import floor_of  # noqa: PLC0415  (numpy takes long to import)

    able = [
        row for row in rows if not row["differing"] and (row["accuracy"] or 1.0) >= floor_of(SimpleNamespace(**row))
    ]
    return able or rows


def options_of(vertex: str, rows: Iterable[Item]) -> "list[StageOption]":
    """The ways to serve a vertex with the variants of its app. rows: of the list of variants."""
    from services.core.pipelines.problem import StageOption  # noqa: PLC0415  (numpy takes long to import)

    return [
        StageOption(
            vertex=vertex,
            hardware=row["hardware"],
            price_per_hour=row["price_per_hour"],
            batch_latency_ms={int(size): ms for size, ms in row["batch_latency_ms"].items()},
            variant=row["variant"],
            accuracy=row["accuracy"],
        )
        for row in rows
        if not row["dominated"]
    ]


@contextmanager
def _progress(text: str) -> Iterator[None]:
    """Say on stderr what is done, and again from time to time as long as it takes."""
    progress(text)
    began, ended = time.monotonic(), threading.Event()

    def still() -> None:
        while not ended.wait(STILL_S):
            progress(f"still planning after {time.monotonic() - began:.0f} s")

    thread = threading.Thread(target=still, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _render_plan(found: "PipelinePlan", options: "tuple[StageOption, ...]", wide: bool) -> None:
    prices = {(one.vertex, one.hardware, one.variant): one.price_per_hour for one in options}
    rows = [{**msgspec.to_builtins(stage), "vertex": name} for name, stage in found.vertices.items()]
    columns = (
        Column("stage", "vertex"),
        Column("hardware", "hardware", rank=1),
        Column("variant", "variant"),
        Column("batch", "batch"),
        Column("replicas", "replicas"),
        Column("visits/query", "scale", rank=4),
        Column("load", lambda row: f"{row['rho']:.0%}", rank=2),
        Column("service ms", "service_ms", rank=3),
        Column("of objective", lambda row: f"{row['service_ms'] / found.latency_ms:.0%}", rank=5),
        Column("US$/h", lambda row: row["replicas"] * prices[row["vertex"], row["hardware"], row["variant"]]),
    )
    print_table(rows, columns, "", wide=wide)
    print(
        f"{found.status}, by {found.policy}: {number(3600.0 * found.cost_per_s)} US$/h; {100 * found.percentile:g} % of queries in"
        f" {number(found.p99_ms)} ms, objective {number(found.latency_ms)} ms"
        + ("" if found.accuracy is None else f"; accuracy {found.accuracy:.4g}")
    )


# -- as code


def _trace(named: str, samples: Path, most: int | None, data_dir: Path | None, json: bool) -> int:
    from infaas.inputs import read_arrays  # noqa: PLC0415  (numpy takes long to import)
    from infaas.tracing import trace  # noqa: PLC0415

    driver = _driver(named)
    arrays = {name: array[:most] if array.ndim else array for name, array in read_arrays(samples).items()}
    told = 0.0

    def tell(runs: int) -> None:
        nonlocal told
        if time.monotonic() - told > STILL_S:
            told = time.monotonic()
            progress(f"{runs} runs")

    try:
        found = with_client(data_dir, lambda client: trace(client, driver, arrays, on_run=tell))
    except (InfaasError, BusError):
        raise
    except Exception as error:  # the driver is the user's own code
        if os.environ.get("INFAAS_TRACEBACK"):
            raise
        fail(f"{named} failed on a sample: {type(error).__name__}: {error} (INFAAS_TRACEBACK=1 shows where)")
    name = named.rpartition(":")[2].replace(".", "-").strip("_-") or "traced"
    document = {
        "queries": found.queries,
        "scale": found.scale,
        "edges": [
            {"from": source, "to": target, "probability": found.probability(source, target)}
            for source, target in found.edges
        ],
        "toml": found.to_toml(name),
    }
    show(document, json, lambda _: print(document["toml"], end=""))
    return 0


def _driver(named: str) -> "Driver":
    """The function MODULE:FUNCTION. Ends the command (bad usage) if there is none, or if it is no driver."""
    found = imported(named)
    if not inspect.iscoroutinefunction(found):
        usage(f"{named} is no driver: it must be an `async def` function of (rpc, x)")
    return cast("Driver", found)
