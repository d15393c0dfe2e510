"""[[app]] and [[variant]] blocks: the catalogue as a registrar would have written it."""

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from msgspec import Struct, ValidationError, convert
from msgspec.structs import asdict, replace

from bus.fields import TARGET
from bus.messages.catalog import (
    AppRecord,
    BatchingRule,
    Ensemble,
    ModelRecord,
    Signature,
    TensorSpec,
    VariantRecord,
)
from bus.messages.public import Requirements
from services.core.batching import batching_key, rule_errors
from services.core.cost import PER_CORE, price_per_hour
from services.core.emulation import with_tiers
from services.core.ensemble.policies import make_policy
from services.registrar.checks import POLICIES, selection_errors
from services.simulation.ensembles import SIGNATURE as SEVERAL
from services.simulation.scenario import profiles
from services.simulation.scenario.machines import MB, UNLIMITED_MB, MachineBlock, largest_of
from services.simulation.scenario.model import NEEDS, CostSpec
from services.simulation.scenario.toml import TomlTable, meant, name_at, number_at, shown, whole_at

APP_KEYS = ("name", "latency_ms", "accuracy", "cost", "slo_target", "batching", "selection", "default_output")
VARIANT_KEYS = (
    *("app", "model", "name", "hardware", "cost_per_s", "accuracy", "running", "uses", "memory_gb", "batching"),
    *profiles.KEYS,
)
_ELSEWHERE = {"qps": "has no place here: state the number of queries in [[load]]"}
SIGNATURE = Signature(  # one byte an item, because no contents are simulated
    inputs=[TensorSpec(name="x", datatype="BOOL", shape=[])],
    outputs=[TensorSpec(name="y", datatype="BOOL", shape=[])],
)
_FILLED = "synthetic"  # in place of a framework and a file


class Catalogue(Struct, frozen=True, kw_only=True):
    """Apps, models and variants. batching: rules by key. serving: each app's variants, in the file's order."""

    apps: tuple[AppRecord, ...]
    models: tuple[ModelRecord, ...]
    variants: tuple[VariantRecord, ...]
    needs: dict[str, Requirements]
    serving: dict[str, tuple[VariantRecord, ...]]
    batching: dict[str, BatchingRule] = {}


def needs_of(block: TomlTable) -> Requirements:
    """What queries ask for, from a block with those needs that it states."""
    return Requirements(**block.fields(Requirements, *NEEDS))


def catalogue(
    scenario: TomlTable, machines: list[MachineBlock], prices: Mapping[str, float], cost: CostSpec
) -> Catalogue:
    """Apps with their needs, models and variants. Raises ScenarioError."""
    asked: dict[str, Requirements] = {}
    targets: dict[str, float | None] = {}
    batching: dict[str, BatchingRule] = {}
    choosing: dict[str, TomlTable] = {}
    defaults: dict[str, float | None] = {}
    for block in scenario.blocks("app", APP_KEYS, _ELSEWHERE):
        name = block.name("name")
        if name in asked:
            block.at("name").refuse(f"{name} occurs twice: state other needs of some of its queries in [[load]]")
        asked[name] = needs_of(block)
        targets[name] = target_in(block)
        batching |= _batching(block, "app", name)
        choosing[name] = block
        defaults[name] = block.maybe("default_output")
    blocks = scenario.blocks("variant", VARIANT_KEYS)
    if not blocks:
        scenario.at("variant").refuse("there must be at least one [[variant]]: nothing could answer")
    strict = bool(asked)
    entries: list[ServingVariant] = []
    named: set[str] = set()
    for block in blocks:
        record = _variant(block, machines, prices, cost)
        if record.variant in named:
            block.at("name").refuse(f"{record.variant} occurs twice: a variant's name is unique")
        named.add(record.variant)
        batching |= _batching(block, "variant", record.variant)
        entries.append(ServingVariant(record, _apps_of(block, asked if strict else None)))
    for app in sorted({app for entry in entries for app in entry.apps}):
        asked.setdefault(app, Requirements())
    serving = {app: tuple(one.record for one in entries if app in one.apps) for app in asked}
    for i, (app, variants) in enumerate(serving.items()):
        if not variants:
            scenario.at("app").at(i).refuse(f"no [[variant]] serves {app}: name it in some variant's `app`")
    linked = link(entries)
    by_name = {one.variant: one for one in linked.variants}
    selections = {app: selection_of(block, app, linked.links[app]) for app, block in choosing.items()}
    return Catalogue(
        apps=tuple(
            AppRecord(
                app=app,
                links=linked.links[app],
                signature=SIGNATURE if selections.get(app) is None else SEVERAL,
                selection=selections.get(app),
                latency_ms=needs.latency_ms,
                default_output=defaults.get(app),
                slo_target=targets.get(app),
            )
            for app, needs in asked.items()
        ),
        models=tuple(
            ModelRecord(
                model=model, version=version, task=None, metric="top1", format=_FILLED, source=_FILLED, validation=_FILLED,
                signature=SIGNATURE, created=0.0, registration=_FILLED,
            )
            for model, version in linked.models
        ),
        variants=linked.variants,
        needs=asked,
        batching=batching,
        serving={app: tuple(by_name[one.variant] for one in records) for app, records in serving.items()},
    )  # fmt: skip


def target_in(block: TomlTable) -> float | None:
    """The target that a block states; None if it states none."""
    target = block.maybe("slo_target")
    refused = None if target is None else TARGET.refuse(target)
    if refused is not None:
        block.at("slo_target").refuse(refused)
    return target


def selection_of(block: TomlTable, app: str, links: Collection[str]) -> Ensemble | None:
    """How several models of an app answer together: `selection = "exp4"`, or a table with the fields of `infaas admin set-selection`."""
    if "selection" not in block:
        return None
    location, given = block.at("selection"), block.get("selection")
    given = {"policy": given} if isinstance(given, str) else given
    try:
        stated = convert(given, _StatedSelection)
    except ValidationError as error:
        location.refuse(str(error))
    for wrong in selection_errors(stated):
        location.refuse(wrong)
    if stated.policy is not None and make_policy(stated) is None:
        location.refuse(
            f"policy: {stated.policy} runs in a process of its own, which is not simulated: {', '.join(POLICIES)} are"
        )
    for model in stated.members or ():
        if model not in links:
            location.refuse(f"members: no [[variant]] of model {model} serves {app}{meant(model, links)}")
    return Ensemble(**asdict(stated)) if stated.policy is not None or stated.cache_mb else None


class _StatedSelection(Ensemble, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A selection as a file states it."""


def _batching(block: TomlTable, scope: str, name: str) -> dict[str, BatchingRule]:
    """The rule in a block: `batching = "aimd"`, or a table with the fields of `infaas admin set-batching`. Empty where there is none."""
    if "batching" not in block:
        return {}
    location, given = block.at("batching"), block.get("batching")
    try:
        rule = convert({"policy": given} if isinstance(given, str) else given, _StatedRule)
    except ValidationError as error:
        location.refuse(str(error))
    for wrong in rule_errors(rule):
        location.refuse(wrong)
    return {batching_key(scope, name): BatchingRule(**asdict(rule))}


class _StatedRule(BatchingRule, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A rule as a file states it."""


def _apps_of(block: TomlTable, known: Mapping[str, Requirements] | None) -> frozenset[str]:
    """The apps that a variant serves. known: apps with blocks; None if no app has one."""
    given: Any = block.get("app")
    listed = isinstance(given, list)
    apps: list[str] = []
    for i, app in enumerate(given if isinstance(given, list) else [given]):
        location = block.at("app").at(i) if listed else block.at("app")
        name = name_at(app, location)
        if known is not None and name not in known:
            location.refuse(f"there is no [[app]] {shown(name)}{meant(name, known)}")
        if name in apps:
            location.refuse(f"{name} occurs twice")
        apps.append(name)
    if not apps:
        block.at("app").refuse("must name at least one app")
    return frozenset(apps)


def _variant(
    block: TomlTable, machines: list[MachineBlock], prices: Mapping[str, float], cost: CostSpec
) -> VariantRecord:
    name = block.name("name")
    kinds = {device.kind for one in machines for device in one.spec.devices}
    hardware = block.text("hardware")
    if hardware not in kinds:
        block.at("hardware").refuse(f"there is no device {shown(hardware)} on any [[worker]]{meant(hardware, kinds)}")
    device = largest_of(machines, hardware)
    assert device is not None  # hardware is one of those kinds
    threads, memory_gb = _uses(block, hardware)
    stated = block.maybe("memory_gb", most=UNLIMITED_MB / MB)
    if stated is not None and memory_gb is not None and stated != memory_gb:
        block.at("memory_gb").refuse(f"is {stated:g}, while uses says {memory_gb:g}: leave one of them out")
    memory_mb = MB * (stated if stated is not None else memory_gb or 0.0)
    if memory_mb > device.memory_mb:
        block.at("memory_gb" if stated is not None else "uses").refuse(
            f"{memory_mb / MB:g} GB of memory are more than any {hardware} has ({device.memory_mb / MB:g} GB)"
        )
    cores = max(d.cores for one in machines for d in one.spec.devices if d.kind == hardware)
    if hardware in PER_CORE and threads > cores:
        block.at("uses").at("cpu_cores").refuse(f"{threads} cores are more than any {hardware} has ({cores})")
    block.whole("running", 0, 0, 10**6)  # a key of planning files, without effect here
    profile, max_batch = profiles.speed_of(block, memory_mb)
    price = block.maybe("cost_per_s", most=1e9)
    if price is None and hardware in cost.per_gb_s and memory_mb > 0:
        price = memory_mb / MB * cost.per_gb_s[hardware]
    shared = memory_mb > 0 and device.memory_mb < UNLIMITED_MB
    if price is None and hardware not in PER_CORE and not shared:
        price = price_per_hour(hardware, prices) / 3600.0  # unknown how many fit: the whole device
    return VariantRecord(
        variant=name,
        model=name_at(block.content.get("model", name), block.at("model")),
        version="1",
        framework=_FILLED,
        precision=_FILLED,
        threads=threads,
        max_batch=max_batch,
        hardware=hardware,
        artifact=_FILLED,
        format=_FILLED,
        accuracy=block.maybe("accuracy", most=1.0),
        agreement=None,
        profile=with_tiers(profile, hardware),
        signature=SIGNATURE,
        simulated=True,
        price_per_s=price,
    )


def _uses(block: TomlTable, hardware: str) -> tuple[int, float | None]:
    """Threads on the device (1 on other hardware than a CPU), and GB of its memory if stated."""
    location = block.at("uses")
    memory = "memory_gb", f"{hardware}_memory_gb"
    keys = {"cpu_cores", "cpu_memory_gb", *memory, hardware, f"{hardware}s", f"{hardware}_cores"}
    table = TomlTable(block.content.get("uses", {}), location, keys)
    said = [key for key in memory if key in table]
    if len(said) > 1:
        location.at(said[1]).refuse(f"says the same as {said[0]}: leave one of them out")
    for key in sorted(table.content.keys() - {"cpu_cores", *memory}):
        amount = number_at(table.content[key], location.at(key))
        if key != "cpu_memory_gb" and (hardware, key) != ("cpu", "cpu_cores") and amount > 1:
            location.at(key).refuse(f"must be at most 1: an instance runs on one {hardware}")
    gb = table.maybe(said[0], most=UNLIMITED_MB / MB) if said else None
    if "cpu_cores" not in table:
        return 1, gb
    if hardware != "cpu":
        table.number("cpu_cores")
        return 1, gb
    return whole_at(table.content["cpu_cores"], location.at("cpu_cores"), 1, 4096), gb


# -- which version of which model serves an app
#
# An app links a model in one version, and all variants of that version serve it. So variants that serve the same apps are one version,
# and variants that serve entirely other apps another one. If the apps overlap (A serves one, B serves one and two), the model is
# split: its second part is called <model>-2, and is a model of its own for queries that name models.


class ServingVariant(NamedTuple):
    """A variant and the apps that it serves."""

    record: VariantRecord
    apps: frozenset[str]


class Linked(NamedTuple):
    """models: (name, version). variants: with their models' names and versions, in the given order. links: app to model to version."""

    models: tuple[tuple[str, str], ...]
    variants: tuple[VariantRecord, ...]
    links: dict[str, dict[str, str]]


def link(entries: list[ServingVariant]) -> Linked:
    """Link every app to exactly its variants."""
    names = {entry.record.model for entry in entries}
    parts: dict[str, list[list[frozenset[str]]]] = {}  # of a model: its parts, each a list of versions' apps
    called: dict[tuple[str, int], str] = {}
    models: dict[tuple[str, str], None] = {}
    variants: list[VariantRecord] = []
    links: dict[str, dict[str, str]] = {}
    for record, apps in entries:
        of_model = parts.setdefault(record.model, [])
        part = _part(of_model, apps)
        name = called.get((record.model, part))
        if name is None:
            name = called[record.model, part] = _free(record.model, part, names)
            names.add(name)
        version = str(of_model[part].index(apps) + 1)
        models[name, version] = None
        variants.append(replace(record, model=name, version=version))
        for app in apps:
            links.setdefault(app, {})[name] = version
    return Linked(tuple(models), tuple(variants), links)


def _part(parts: list[list[frozenset[str]]], apps: frozenset[str]) -> int:
    """The part with a version for these apps. Else they get a version in the first part without any of them."""
    for i, versions in enumerate(parts):
        if apps in versions:
            return i
    for i, versions in enumerate(parts):
        if not any(apps & other for other in versions):
            versions.append(apps)
            return i
    parts.append([apps])
    return len(parts) - 1


def _free(model: str, part: int, taken: set[str]) -> str:
    if part == 0:
        return model
    number = part + 1
    while f"{model[:56]}-{number}" in taken:
        number += 1
    return f"{model[:56]}-{number}"
