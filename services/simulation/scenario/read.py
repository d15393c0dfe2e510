"""Reading a scenario file into a Scenario. Everything is checked before anything runs."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar

from msgspec import Struct
from msgspec.structs import asdict, replace

from bus.fields import SHARE, TARGET, Number, filled
from services.core.settings import AutoscalerSettings
from services.core.toml import AMOUNT, Location, struct_at, text_at, within
from services.shell.prices import load_prices
from services.shell.settings import read_toml
from services.simulation.scenario.baseline import Peaks
from services.simulation.scenario.catalogue import AppBlock, VariantBlock, catalogue
from services.simulation.scenario.faults import FaultTables, faults_of
from services.simulation.scenario.loads import LoadBlock, jobs_of, loads_of
from services.simulation.scenario.machines import WorkerBlock, cost_of, device_prices, machines_of, priced
from services.simulation.scenario.model import CostSpec, JobSpec, Objective, Scenario
from services.simulation.scenario.planning import PipelineBlock, Planning, check_loads, pipelines_of
from services.simulation.scenario.policies import DEFAULTS, Policies, settings_of, tree_at
from services.simulation.workload import WorkloadError, mean_rate

_SEED = Number(most=2**63 - 1)
_LONGEST = 1e7  # seconds
_MOST_SAMPLES = 1e6


class PoliciesHeader(Struct, frozen=True, kw_only=True):
    """What the [scenario] table of a replay says."""

    policies: list[str] | None = None
    objective: Objective = "cost"


class Header(PoliciesHeader, frozen=True, kw_only=True):
    """The [scenario] table."""

    name: str | None = None
    duration_s: Annotated[float, Number(above=0, most=_LONGEST)]
    seed: Annotated[int, _SEED] = 1
    metrics_every_s: Annotated[float | None, Number(above=0)] = None
    checked: bool = False


class AutoscalerTable(Struct, frozen=True, kw_only=True):
    """[autoscaler]: the targets, which are the same as in [settings.autoscaler]."""

    moved: ClassVar[Mapping[str, str]] = {
        key: f"has no place here: write it as [settings.autoscaler] {key}"
        for key in AutoscalerSettings.__struct_fields__
        if key not in ("slo_target", "accuracy_mean", "worth")
    }

    slo_target: Annotated[float | None, TARGET] = None
    accuracy_mean: Annotated[float | None, SHARE] = None
    worth: Annotated[float | None, AMOUNT] = None


class MachinesFile(FaultTables, frozen=True, kw_only=True):
    """The tables of a replay's file: machines and policies, and what may go wrong."""

    moved: ClassVar[Mapping[str, str]] = dict.fromkeys(
        ("app", "variant", "load", "job"), "has no place here: apps, variants and loads are the recorded ones"
    )

    scenario: PoliciesHeader = PoliciesHeader()
    worker: list[WorkerBlock] | None = None
    cost: CostSpec = CostSpec()


class ScenarioFile(MachinesFile, frozen=True, kw_only=True):
    """A whole file."""

    moved: ClassVar[Mapping[str, str]] = {
        "slack": "has no place here: write it as [settings.autoscaler] slack",
        "lambda": "has no place here: write it as [settings.autoscaler] loading_weight",
        "resources": "has no place here: state what machines have in [[worker]] blocks",
        **{key: f"has no place here: write it in [scenario], as {key}" for key in Header.__struct_fields__},
    }

    scenario: Annotated[Header, "a [scenario] table states at least duration_s"]
    variant: list[VariantBlock] = []
    app: list[AppBlock] = []
    load: list[LoadBlock] = []
    job: tuple[JobSpec, ...] = ()
    pipeline: list[PipelineBlock] = []
    autoscaler: AutoscalerTable = AutoscalerTable()


def read_scenario(path: Path, *, policies: Sequence[str] = (), seed: int | None = None) -> Scenario:
    """The scenario in a file. policies: names of those to run instead of the file's. seed: instead of the file's.

    Raises TomlError, which names the file, the key, what is wrong there and the remedy.
    """
    return derive(read_toml(path), path, policies, seed)


def derive(content: Any, path: Path, policies: Sequence[str] = (), seed: int | None = None) -> Scenario:
    """The scenario in a file's content. path: the file's, for refusals and relative paths."""
    location = Location(str(path))
    file = _with_target(struct_at(content, location, ScenarioFile), location)
    header, at = file.scenario, location.at("scenario")
    duration = header.duration_s
    every = min(2.0, duration) if header.metrics_every_s is None else header.metrics_every_s
    within(every, at.at("metrics_every_s"), Number(above=0, most=duration))
    if duration / every > _MOST_SAMPLES:
        at.at("metrics_every_s").refuse(f"would be {duration / every:.3g} samples: at least {duration / 1e6:g}")
    if seed is not None:
        within(seed, location.at("seed"), _SEED)
    machines = machines_of(file.worker or (), location.at("worker"))
    cost = cost_of(file.cost, location.at("cost"), machines)
    common = settings_of(location.at("settings"), DEFAULTS, tree_at(file.settings, location.at("settings")))
    listed = load_prices(common.prices)
    machines = priced(machines, listed, needed=cost.meter == "worker")
    prices = device_prices(machines, listed, common.prices.per_hour)
    things = catalogue(file.app, file.variant, location, machines, prices, cost)
    things, pipelines = pipelines_of(file.pipeline, location.at("pipeline"), things, path.parent)
    loads = loads_of(file.load, location.at("load"), things, path.parent)
    check_loads(loads, location.at("load"), [one.name for one in pipelines])
    for i, load in enumerate(loads):
        try:
            mean_rate(load, duration)
        except WorkloadError as error:  # what the generator of arrivals refuses
            location.at("load").at(i).refuse(str(error))
    jobs = jobs_of(file.job, location.at("job"), things, duration)
    if not loads and not jobs:
        location.at("load").refuse("there must be at least one [[load]], or [[job]]: nothing would happen")
    peaks = Peaks(loads, things.needs, duration)
    chosen = Policies(file, location, machines, things, prices, peaks, path.parent, header.objective)
    from_file = chosen.listed(header.policies, at.at("policies"))
    selected = chosen.named(tuple(policies), location.at("policies")) if policies else from_file
    planning = Planning(pipelines, things, machines, prices, loads, duration)
    return filled(
        Scenario,
        things,
        name=text_at(path.stem, location) if header.name is None else header.name,
        duration_s=duration,
        seed=header.seed if seed is None else seed,
        objective=header.objective,
        metrics_every_s=every,
        prices=prices,
        policies=tuple(planning.planned(one, at.at("policies")) for one in selected),
        loads=loads,
        jobs=jobs,
        faults=faults_of(file, location, machines, chosen.started(), things, duration, selected),
        interference=file.interference,
        cost=cost,
        checked=header.checked,
    )


def _with_target(file: ScenarioFile, location: Location) -> ScenarioFile:
    """What `[autoscaler]` states, among the settings."""
    stated = {key: value for key, value in asdict(file.autoscaler).items() if value is not None}
    section = file.settings.get("autoscaler", {})
    if not stated or not isinstance(section, dict):  # settings are checked later
        return file
    for key in stated.keys() & section.keys():
        location.at("autoscaler").at(key).refuse("is stated in [settings.autoscaler], too: leave one of them out")
    return replace(file, settings={**file.settings, "autoscaler": {**section, **stated}})
