"""Reading a scenario file into a Scenario. Everything is checked before anything runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from services.core.settings import AutoscalerSettings
from services.shell.prices import load_prices
from services.simulation.scenario.baseline import Peaks
from services.simulation.scenario.catalogue import catalogue, target_in
from services.simulation.scenario.faults import faults_of, interference_of
from services.simulation.scenario.loads import jobs_of, loads_of
from services.simulation.scenario.machines import cost_of, device_prices, machines_of, priced
from services.simulation.scenario.model import Scenario, WorkloadSpec
from services.simulation.scenario.planning import Planning, check_loads, pipelines_of
from services.simulation.scenario.policies import DEFAULTS, Policies, objective_of, settings_of, tree_at
from services.simulation.scenario.toml import Location, TomlTable, read_toml, table_at, text_at, whole_at
from services.simulation.workload import WorkloadError, mean_rate

_TABLES = (
    *("scenario", "variant", "app", "worker", "load", "baseline", "policy"),
    *("job", "fault", "interference", "cost", "settings", "autoscaler", "pipeline"),
)
KEYS = ("name", "duration_s", "seed", "policies", "objective", "metrics_every_s", "checked")
_ELSEWHERE = {
    "slack": "has no place here: write it as [settings.autoscaler] slack",
    "lambda": "has no place here: write it as [settings.autoscaler] loading_weight",
    "resources": "has no place here: state what machines have in [[worker]] blocks",
    **{key: f"has no place here: write it in [scenario], as {key}" for key in KEYS},
}
_SETTINGS = {
    key: f"has no place here: write it as [settings.autoscaler] {key}" for key in AutoscalerSettings.__struct_fields__
}
_LONGEST = 1e7  # seconds
_MOST_SAMPLES = 1e6
_LAST_SEED = 2**63 - 1


def read_scenario(path: Path, *, policies: Sequence[str] = (), seed: int | None = None) -> Scenario:
    """The scenario in a file. policies: names of those to run instead of the file's. seed: instead of the file's.

    Raises ScenarioError, which names the file, the key, what is wrong there and the remedy.
    """
    return derive(read_toml(path), path, policies, seed)


def derive(content: Any, path: Path, policies: Sequence[str] = (), seed: int | None = None) -> Scenario:
    """The scenario in a file's content. path: the file's, for refusals and relative paths."""
    location = Location(str(path))
    file = _with_target(TomlTable(content, location, _TABLES, _ELSEWHERE))
    if "scenario" not in file:
        location.at("scenario").refuse("is missing: a [scenario] table states at least duration_s")
    header = TomlTable(file.get("scenario"), location.at("scenario"), KEYS)
    duration = header.number("duration_s", most=_LONGEST, above=True)
    every = header.number("metrics_every_s", min(2.0, duration), most=duration, above=True)
    if duration / every > _MOST_SAMPLES:
        header.at("metrics_every_s").refuse(f"would be {duration / every:.3g} samples: at least {duration / 1e6:g}")
    objective = objective_of(header)
    first = whole_at(header.content.get("seed", 1), header.at("seed"), 0, _LAST_SEED)
    machines = machines_of(file)
    cost = cost_of(file, machines)
    common = settings_of(file.at("settings"), DEFAULTS, tree_at(file.content.get("settings", {}), file.at("settings")))
    listed = load_prices(common.prices)
    machines = priced(machines, listed, needed=cost.meter == "worker")
    prices = device_prices(machines, listed, common.prices.per_hour)
    things = catalogue(file, machines, prices, cost)
    things, pipelines = pipelines_of(file, things, path.parent)
    loads = loads_of(file, things, path.parent)
    check_loads(file, loads, [one.name for one in pipelines])
    for i, load in enumerate(loads):
        _possible(load, duration, file.at("load").at(i))
    jobs = jobs_of(file, things, duration)
    if not loads and not jobs:
        file.at("load").refuse("there must be at least one [[load]], or [[job]]: nothing would happen")
    peaks = Peaks(loads, things.needs, duration)
    chosen = Policies(file, machines, things, prices, peaks, path.parent, objective)
    from_file = chosen.listed(header.content.get("policies"), header.at("policies"))
    selected = chosen.named(tuple(policies), location.at("policies")) if policies else from_file
    planning = Planning(pipelines, things, machines, prices, loads, duration)
    return Scenario(
        name=header.text("name", text_at(path.stem, location)),
        duration_s=duration,
        seed=first if seed is None else whole_at(seed, location.at("seed"), 0, _LAST_SEED),
        objective=objective,
        metrics_every_s=every,
        apps=things.apps,
        models=things.models,
        variants=things.variants,
        prices=prices,
        needs=things.needs,
        policies=tuple(planning.planned(one, header.at("policies")) for one in selected),
        loads=loads,
        jobs=jobs,
        faults=faults_of(
            file, machines, chosen.started(), things, duration, max(one.settings.dispatcher.count for one in selected)
        ),
        interference=interference_of(file, machines),
        batching=things.batching,
        cost=cost,
        checked=header.flag("checked"),
    )


def _with_target(file: TomlTable) -> TomlTable:
    """`[autoscaler] slo_target` among the settings, where it is the same as in [settings.autoscaler]."""
    table = TomlTable(file.table("autoscaler"), file.at("autoscaler"), ("slo_target",), _SETTINGS)
    target = target_in(table)
    if target is None:
        return file
    settings = file.table("settings")
    section = table_at(settings.get("autoscaler", {}), file.at("settings").at("autoscaler"))
    if "slo_target" in section:
        table.at("slo_target").refuse("is stated in [settings.autoscaler], too: leave one of them out")
    stated = {**settings, "autoscaler": {**section, "slo_target": target}}
    return TomlTable({**file.content, "settings": stated}, file.location, _TABLES)


def _possible(load: WorkloadSpec, duration_s: float, location: Location) -> None:
    """Refuse a load that the generator of arrivals refuses."""
    try:
        mean_rate(load, duration_s)
    except WorkloadError as error:
        location.refuse(str(error))
