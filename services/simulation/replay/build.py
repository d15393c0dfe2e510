"""A recording as a scenario: its traffic, catalogue and machines, with the differences that options or a file state."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.fields import filled
from bus.messages.catalog import ACCURACIES, AppRecord, VariantRecord
from bus.messages.public import Requirements
from bus.subjects import WITHOUT_APP
from services.autoscaler.vms.rules import PricedKind
from services.core.cost import listed_as
from services.core.pipelines.planners import POLICIES as PLANNERS
from services.core.placement import Device
from services.core.settings import PriceSettings
from services.core.toml import Location, struct_at
from services.shell.prices import load_prices
from services.shell.settings import read_toml
from services.simulation.replay.classes import QueryClasses
from services.simulation.replay.database import RECORDED
from services.simulation.replay.recorded import (
    Counts,
    RecordedRun,
    answering,
    machines_of,
    pipelines_in,
    plans_of,
    real_kinds,
    simulated_devices,
)
from services.simulation.replay.recording import (
    RecordedQuery,
    Recording,
    RecordingHead,
    ReplayError,
    with_stages,
    written,
)
from services.simulation.scenario.baseline import Peaks
from services.simulation.scenario.catalogue import Catalogue, model_record
from services.simulation.scenario.faults import faults_of
from services.simulation.scenario.machines import MachineBlock, cost_of, device_prices, priced
from services.simulation.scenario.machines import machines_of as stated_machines
from services.simulation.scenario.model import CostSpec, JobSpec, MachineSpec, PolicySpec, Scenario, WorkloadSpec
from services.simulation.scenario.planning import UNPLANNED, with_pipelines
from services.simulation.scenario.policies import Policies, PolicyBlock
from services.simulation.scenario.read import MachinesFile

ALIKE = 0.99  # of the queries answered then, so many answered here make a cost comparable
POLICIES = ("infaas", "static", "replicate")
AIMING = ("infaas",)  # those of them that aim at a target
BOOT_S = 30.0  # from a machine's order until it works; this is not recorded
# Recorded memory is the machine's. A scenario states what instances may use.
PRODUCTION = {"monitor": {"memory_share": 0.8}}
_FOLDED = {
    "sizes": "queries come in so many sizes that similar ones have their mean size",
    "needs": "queries ask for so many different things that nearly equal needs count as equal, the strictest of them",
}


class ReplayOptions(Struct, frozen=True, kw_only=True):
    """Differences from the recording. policies: names; empty: the file's, else POLICIES. machines: a TOML file. counts: of recorded machines.

    apps: only these; empty: all. slo_targets: each policy runs once with each of them, for all apps; empty: the apps' own.
    own: a policy besides those of the file. settings: over those of all policies. kinds: of machine that may be started, by name; None: as
    many of the recorded ones as ever ran.
    """

    policies: tuple[str, ...] = ()
    machines: Path | None = None
    counts: Counts = {}
    boot_s: float = BOOT_S
    apps: tuple[str, ...] = ()
    slo_targets: tuple[float, ...] = ()
    own: PolicyBlock | None = None
    settings: Mapping[str, Any] = {}
    kinds: Mapping[str, PricedKind] | None = None


class Replay(Struct, frozen=True):
    """scenario: to be simulated. recorded: what happened, as a run. cost: how the costs compare. notes: differences from what happened, as text."""

    scenario: Scenario
    recorded: dict[str, Any]
    cost: dict[str, Any]
    notes: list[str]


def build(source: Recording, options: ReplayOptions, progress: Callable[[int], None] | None = None) -> Replay:
    """The replay of a recording. It reads all queries (progress: called with their number). Raises ReplayError, TomlError."""
    head = source.head
    location = Location(str(options.machines or "replay"))
    missing = [app for app in options.apps if app not in {one.app for one in head.apps}]
    if missing:
        raise ReplayError(
            f"--app {missing[0]}: is not in the recording; its apps are: {', '.join(one.app for one in head.apps)}"
        )
    only = frozenset(options.apps or head.only or ()) or None
    notes, lacking = list(head.notes), list[str]()
    wanted = None if only is None else with_stages(only, head.apps)
    apps = tuple(one for one in head.apps if wanted is None or one.app in wanted)
    pipelines = [one.app for one in apps if one.pipeline is not None]
    _check_policies(options.policies, pipelines)
    kinds, recorded = _read(source, {one.app for one in apps}, only, notes, lacking, progress)
    metrics = {record.model: record.metric for record in head.variants}
    stated = {one.app: _stated(one.app, head.apps, metrics) for one in apps}
    loads = tuple(
        WorkloadSpec(
            apps=(app,),
            shares=(1.0,),
            arrivals="times",
            times=kind.times,
            items=kind.items,
            needs=replace(kind.needs, metric=stated.get(app)) if kind.needs.accuracy else kind.needs,
        )
        for app, found in sorted(kinds.items())
        for kind in found.found()
    )
    if not loads:
        raise ReplayError("none of the recorded queries can be replayed: their apps are not in the catalogue any more")
    for what, means in _FOLDED.items():
        folded = sorted(app for app, found in kinds.items() if found.folded == what)
        if folded:
            notes.append(f"{', '.join(folded)}: {means}")
    file = struct_at({} if options.machines is None else read_toml(options.machines), location, MachinesFile)
    if options.own is not None:
        file = replace(file, policy=[options.own], settings={**options.settings})
    machines, prices, cost, settings = _machines(head, file, location, options)
    things = _catalogue(head, answering(apps, notes, lacking), machines, notes)
    things = with_pipelines(things, pipelines_in(apps, head.visits, head.items))
    plans = plans_of(apps, {device.kind for one in machines for device in one.spec.devices}, notes)
    header, file = file.scenario, replace(file, settings=settings)
    peaks = Peaks(loads, things.needs, head.duration_s)
    folder = options.machines.parent if options.machines is not None else Path()
    chosen = Policies(file, location, machines, things, prices, peaks, folder, header.objective)
    if options.policies:
        policies = chosen.named(options.policies, Location("--policy"))
    elif header.policies is not None or file.policy:
        policies = chosen.listed(header.policies, location.at("scenario").at("policies"))
    else:
        policies = chosen.named(AIMING if options.slo_targets or pipelines else POLICIES, Location("--policy"))
        if pipelines and not options.slo_targets:
            notes.append(
                f"{' and '.join(UNPLANNED)} choose for apps by their own load, and the stages of {pipelines[0]} have none: left out"
            )
    _check_policies([one.base for one in policies], pipelines)
    policies = tuple(replace(one, plans=plans) for one in policies)
    records = things.apps
    if options.slo_targets:
        policies = tuple(_aiming(one, target) for one in policies for target in options.slo_targets)
        records = tuple(replace(app, slo_target=None) for app in records)
    scenario = filled(
        Scenario,
        things,
        name=f"{written(head.begins)} to {written(head.ends)}",
        duration_s=head.duration_s,
        seed=0,
        objective=header.objective,
        metrics_every_s=head.every_s,
        apps=records,
        prices=prices,
        policies=policies,
        loads=loads,
        jobs=_jobs(head, stated),
        faults=faults_of(file, location, machines, chosen.started(), things, head.duration_s, policies),
        interference=file.interference,
        cost=cost,
    )
    own_machines = file.worker is not None
    compared = _compared(head, only, cost, recorded, lacking, own_machines=own_machines)
    return Replay(scenario, recorded, compared, notes)


def _check_policies(names: Iterable[str], pipelines: Sequence[str]) -> None:
    """Refuse policies that say nothing of pipelines. Raises ReplayError."""
    for name in names:
        if name in PLANNERS:
            raise ReplayError(
                f"--policy {name}: plans the pipelines of a scenario; a replay serves them by the plans that are deployed: use infaas"
            )
        if pipelines and name in UNPLANNED:
            raise ReplayError(
                f"--policy {name}: it chooses for apps by their own load, and the stages of pipeline {pipelines[0]} have none:"
                " leave it out, or name other apps with --app"
            )


def _aiming(policy: PolicySpec, target: float) -> PolicySpec:
    """The policy with this target for apps without one."""
    settings = replace(policy.settings, autoscaler=replace(policy.settings.autoscaler, slo_target=target))
    return replace(policy, name=f"{policy.name} at {target:g}", settings=settings)


def _read(
    source: Recording,
    apps: set[str],
    only: frozenset[str] | None,
    notes: list[str],
    lacking: list[str],
    progress: Callable[[int], None] | None,
) -> tuple[dict[str, QueryClasses], dict[str, Any]]:
    """One pass over the queries: their classes by app, and the recorded run."""
    head = source.head
    reality = RecordedRun(head, only, head.every_s)
    kinds: dict[str, QueryClasses] = {}
    unknown: dict[str, int] = {}
    for number, query in enumerate(source.queries):
        if progress is not None and number % 10_000 == 0:
            progress(number)
        if only is not None and query.app not in only:
            continue
        if query.app not in apps:
            unknown[query.app] = unknown.get(query.app, 0) + 1
            continue
        reality.add(query)
        _kind_of(kinds, query, head)
    if unknown:
        count, by_model = sum(unknown.values()), unknown.pop(WITHOUT_APP, 0)
        text = f"{count:,} quer{'y' if count == 1 else 'ies'} of apps that are not in the catalogue any more are left out: "
        text += ", ".join([*sorted(unknown)[:5], *["models by themselves that no app links"] * (by_model > 0)])
        notes.append(text)
        if count > (1 - ALIKE) * head.queries:
            lacking.append(text)
    return kinds, reality.finished()


def _kind_of(kinds: dict[str, QueryClasses], query: RecordedQuery, head: RecordingHead) -> None:
    found = kinds.get(query.app)
    if found is None:
        found = kinds[query.app] = QueryClasses()
    found.add(query.time - head.begins, query.slo_ms, query.accuracy_required, query.cost_limit, query.items)


def _machines(
    head: RecordingHead, file: MachinesFile, location: Location, options: ReplayOptions
) -> tuple[list[MachineBlock], dict[str, float], CostSpec, dict[str, Any]]:
    """QueryClasses of machine, prices by kind of device, the meter, and settings for all policies."""
    settings, cost_at = file.settings, location.at("cost")
    if head.slo_target is not None:
        settings = {**settings, "autoscaler": {"slo_target": head.slo_target, **_section(settings, "autoscaler")}}
    if file.worker is not None:
        if options.counts:
            raise ReplayError(f"--worker: {options.machines} says which machines there are: write start and max there")
        machines = stated_machines(file.worker, location.at("worker"))
        cost = cost_of(file.cost, cost_at, machines)
        listed = load_prices(PriceSettings()) | head.prices
        machines = priced(machines, listed, needed=cost.meter == "worker")
        return machines, listed | device_prices(machines, listed, {}), cost, settings
    machines = [
        MachineBlock(one, one.price_per_hour, location) for one in machines_of(head, options.boot_s, options.counts)
    ]
    monitor = {**PRODUCTION["monitor"], **_section(settings, "monitor")}
    kinds = {device.kind for one in machines for device in one.spec.devices}
    prices = {**{kind: 0.0 for kind in kinds if listed_as(kind, head.prices) not in head.prices}, **head.prices}
    if options.kinds is not None:
        machines = _limited(machines, options.kinds, options.boot_s, location)
    return machines, prices, cost_of(file.cost, cost_at, machines), {**settings, "monitor": monitor}


def _limited(
    machines: list[MachineBlock], kinds: Mapping[str, PricedKind], boot_s: float, location: Location
) -> list[MachineBlock]:
    """These machines, and those that may be started. Of what has other devices than all `kinds`, no more can be."""
    found = {_shape(one.spec.devices): one._replace(spec=replace(one.spec, maximum=one.spec.start)) for one in machines}
    for name, kind in kinds.items():
        shape, limits = _shape(kind.devices), {"boot_s": kind.boot_s or boot_s}
        there = found.get(shape)
        if there is not None:
            start = there.spec.start
            limits |= {"minimum": min(kind.minimum, start), "maximum": max(kind.maximum, start)}
            found[shape] = there._replace(spec=replace(there.spec, **limits))
        elif kind.maximum:
            devices = simulated_devices(kind.devices)
            spec = filled(MachineSpec, kind, kind=name, devices=devices, boot_s=limits["boot_s"])
            found[shape] = MachineBlock(spec, spec.price_per_hour, location)
    return list(found.values())


def _shape(devices: Iterable[Device]) -> tuple[tuple[str, int], ...]:
    return tuple(sorted((one.kind, one.cores) for one in devices))


def _section(settings: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A section of the settings. Anything but a table is refused later, where settings are read."""
    found = settings.get(name, {})
    return found if isinstance(found, dict) else {name: found}


def _catalogue(
    head: RecordingHead, chosen: tuple[AppRecord, ...], machines: list[MachineBlock], notes: list[str]
) -> Catalogue:
    """The recorded catalogue of these apps with all variants simulated. Simulated variants of hardware that was real are left out."""
    real = real_kinds(head)
    twins = [one.variant for one in head.variants if one.simulated and one.hardware in real]
    if twins:
        notes.append(f"simulated variants of hardware that was there are left out: {', '.join(twins[:3])}")
    records = tuple(
        replace(one, simulated=True) for one in head.variants if not one.simulated or one.hardware not in real
    )
    serving: dict[str, tuple[VariantRecord, ...]] = {
        one.app: tuple(record for record in records if one.links.get(record.model) == record.version) for one in chosen
    }
    mute = sorted(app for app, found in serving.items() if not found)
    if mute:
        notes.append(f"no variant serves {', '.join(mute[:5])}: all its queries are refused")
    here = {device.kind for one in machines for device in one.spec.devices}
    absent = sorted({one.hardware for one in records} - here)
    if absent:
        notes.append(f"no machine has {', '.join(absent)}: variants for that are not used")
    used = {one.variant for found in serving.values() for one in found}
    records = tuple(one for one in records if one.variant in used and one.hardware in here)
    names = sorted({(one.model, one.version) for one in records})
    return Catalogue(
        apps=chosen,
        models=tuple(model_record(model, version, RECORDED) for model, version in names),
        variants=records,
        needs={one.app: Requirements(latency_ms=one.latency_ms) for one in chosen},
        serving={app: tuple(one for one in found if one.hardware in here) for app, found in serving.items()},
    )


def _stated(app: str, known: Iterable[AppRecord], metrics: Mapping[str, str]) -> str | None:
    """In which metric an app's recorded accuracies are stated: its models', or that of a pipeline's stages, a share of right answers first."""
    asked = with_stages([app], known)
    models = {model for one in known if one.app in asked for model in one.links}
    return min(
        (metrics[one] for one in models if one in metrics), key=lambda one: (one not in ACCURACIES, one), default=None
    )


def _jobs(head: RecordingHead, stated: Mapping[str, str | None]) -> tuple[JobSpec, ...]:
    """stated: by app."""
    return tuple(
        filled(JobSpec, one, at_s=one.created - head.begins, metric=stated[one.app] if one.accuracy else None)
        for one in head.jobs
        if one.app in stated
    )


def _compared(
    head: RecordingHead,
    only: frozenset[str] | None,
    cost: CostSpec,
    recorded: Mapping[str, Any],
    lacking: Sequence[str],
    *,
    own_machines: bool,
) -> dict[str, Any]:
    """What the recorded cost covers, and whether it can be compared with the simulated costs."""
    if not head.billed:
        text = "no cost was recorded in this time"
    elif cost.meter != "worker":
        text = "the recorded bill is machines x price, the simulated one GB x seconds x price: not comparable"
    elif only is not None:
        text = "the recorded cost is that of the instances of these apps, the simulated one that of whole machines: not comparable"
    elif lacking:
        text = f"the simulations do not have all of what was paid for: not comparable: {'; '.join(lacking)}"
    else:
        text = "both bills are machines x price for the whole time, used or not: comparable"
        if own_machines:
            text += " (on other machines)"
    comparable = head.billed and cost.meter == "worker" and only is None and not lacking
    simulated = sum(cost for app, cost in head.simulated_cost.items() if only is None or app in only)
    if comparable and simulated:
        text += f"; US$ {simulated:.4g} of the recorded one is of simulated devices"
    return {"comparable": comparable, "text": text, "recorded": recorded["cost"], "of_simulated_devices": simulated}
