"""[[app]] and [[variant]] blocks: the catalogue as a registrar would have written it."""

from collections.abc import Collection, Mapping, Sequence
from math import ceil
from typing import Annotated, ClassVar, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from bus.fields import PART, SHARE, TARGET, Named, Number, fields_of, filled
from bus.messages.catalog import (
    AppRecord,
    BatchingRule,
    Ensemble,
    ModelRecord,
    Profile,
    ProfileRow,
    Signature,
    TensorSpec,
    VariantRecord,
)
from bus.messages.public import Requirements
from bus.messages.scaling import Expectation
from services.core.batching import batching_key, rule_errors
from services.core.cost import PER_CORE, latency_ms, price_per_hour
from services.core.emulation import PROVENANCE, with_tiers
from services.core.ensemble.policies import make_policy
from services.core.toml import AMOUNT, Location, meant_or_all, one_of, shown, within
from services.registrar.checks import POLICIES, selection_errors
from services.simulation.composites import SIGNATURE as SEVERAL
from services.simulation.scenario.machines import MB, UNLIMITED_MB, MachineBlock, largest_of
from services.simulation.scenario.model import BEGINS, CostSpec

# -- a variant's profile from the speed that a scenario states
#
# There are three ways to state it, all in ms of one batch:
#
#     batch_latency_ms       by batch size: linear between, constant below the smallest, a fitted line beyond the largest (as measured profiles)
#     base_ms, per_item_ms   a batch of n takes base_ms + per_item_ms x n
#     latency_ms alone       every batch takes so long. Without max_batch, the largest batch follows from saturation_qps: as many items as
#                            an instance needs to serve so much, one batch at a time; else 1
#
# latency_ms beside one of the first two is a planning file's figure, of no particular batch. It has no effect here.
# The default of saturation_qps is that of the best batch, one batch at a time.

LARGEST_BATCH = 65536
_TOLERANCE = 1.25  # factor by which a stated saturation_qps may exceed the table's
_LATENCY = Number(above=0, most=1e9)
_PART = Number(most=1e9)
_BATCH = Number(1, LARGEST_BATCH)


class SpeedBlock(Struct, frozen=True, kw_only=True):
    """What a [[variant]] block says of its speed."""

    latency_ms: Annotated[float | None, _LATENCY] = None
    batch_latency_ms: dict[Annotated[int, _BATCH], Annotated[float, _LATENCY]] | None = None
    base_ms: Annotated[float | None, _PART] = None
    per_item_ms: Annotated[float | None, _PART] = None
    max_batch: Annotated[int | None, _BATCH] = None
    saturation_qps: Annotated[float | None, _LATENCY] = None
    load_s: Annotated[float, Number(most=1e6)] = 0.0


def speed_of(block: SpeedBlock, at: Location, memory_mb: float) -> tuple[Profile, int]:
    """The speed in a [[variant]] block, and the largest batch. at: of the block. Raises TomlError for what is impossible."""
    stated, points = block.saturation_qps, _points(block, at)
    largest = block.max_batch or max(points)
    rows = [ProfileRow(batch=n, p50_ms=ms, p99_ms=ms, cpu_ms=ms, wall_over_cpu=1.0) for n, ms in sorted(points.items())]
    best = max(1000.0 * n / latency_ms(rows, n) for n in {1, largest, *(n for n in points if n <= largest)})
    if stated is not None and stated >= _TOLERANCE * best:
        at.at("saturation_qps").refuse(
            f"{stated:g} queries/s is more than the best batch can do ({best:.4g}, one batch at a time): "
            "leave it out to have it derived, or correct the latencies or max_batch"
        )
    profile = Profile(
        rows=rows,
        load_ms=1000.0 * block.load_s,
        memory_mb=memory_mb,
        saturation_qps=best if stated is None else stated,
        provenance=PROVENANCE,
    )
    return profile, largest


def _points(block: SpeedBlock, at: Location) -> dict[int, float]:
    """Batch size to ms."""
    table, base, flat = block.batch_latency_ms, block.base_ms, block.latency_ms
    if block.per_item_ms is not None and base is None:
        at.at("base_ms").refuse("is missing: per_item_ms comes on top of it")
    if table is not None and base is not None:
        at.at("base_ms").refuse("says the same as batch_latency_ms: leave one of them out")
    if table is not None:
        return _table(table, at.at("batch_latency_ms"))
    if base is not None:
        per_item = block.per_item_ms or 0.0
        if base + per_item <= 0:
            at.at("base_ms").refuse("must be above 0, or per_item_ms must be: no batch takes no time")
        return {n: base + per_item * n for n in (1, block.max_batch or 1)}
    if flat is None:
        at.at("latency_ms").refuse(
            "is missing: say how long a batch takes, by latency_ms, batch_latency_ms, or base_ms and per_item_ms"
        )
    size = 1 if block.saturation_qps is None else ceil(block.saturation_qps * flat / 1000.0 - 1e-6)
    if size > LARGEST_BATCH:
        at.at("saturation_qps").refuse(f"needs batches of {size:.3g}: the most is {LARGEST_BATCH}")
    return dict.fromkeys((1, block.max_batch or max(1, size)), flat)


def _table(points: dict[int, float], at: Location) -> dict[int, float]:
    if not points:
        at.refuse("must name at least one batch size, as { 1 = 15.0, 8 = 22.0 }")
    before = 0
    for size in sorted(points):
        if before and points[size] < points[before]:
            at.at(str(size)).refuse(
                f"{points[size]:g} ms is less than a batch of {before} takes ({points[before]:g} ms): "
                "a larger batch never takes less"
            )
        before = size
    return points


# -- the blocks

_MEMORY = Number(most=UNLIMITED_MB / MB)
SIGNATURE = Signature(  # one byte an item, because no contents are simulated
    inputs=[TensorSpec(name="x", datatype="BOOL", shape=[])],
    outputs=[TensorSpec(name="y", datatype="BOOL", shape=[])],
)
_FILLED = "synthetic"  # in place of a framework and a file


class ExpectedLoad(Struct, frozen=True, kw_only=True):
    """One entry of `expect`: what an operator has said (`infaas expect`). at: seconds from the start."""

    qps: Annotated[float, Number(above=0, most=1e9)]
    at: Annotated[float, Number(most=1e9)]


class AppBlock(Struct, frozen=True, kw_only=True):
    """An [[app]] block. batching, selection: as of `infaas admin set-batching` and `set-selection`; a text is its policy."""

    moved: ClassVar[Mapping[str, str]] = {"qps": "has no place here: state the number of queries in [[load]]"}

    name: Named
    expect: list[ExpectedLoad] = []
    latency_ms: Annotated[float | None, fields_of(Requirements)["latency_ms"].rule] = None
    accuracy: Annotated[float | None, SHARE] = None
    cost: Annotated[float | None, fields_of(Requirements)["cost"].rule] = None
    slo_target: Annotated[float | None, TARGET] = None
    accuracy_mean: Annotated[float | None, PART] = None
    worth: Annotated[float | None, AMOUNT] = None
    batching: Annotated[str | BatchingRule | None, "a policy, or a table of batching"] = None
    selection: Annotated[str | Ensemble | None, "a policy, or a table of a selection"] = None
    default_output: Annotated[float | None, AMOUNT] = None


class VariantBlock(SpeedBlock, frozen=True, kw_only=True):
    """A [[variant]] block. running: a key of planning files, without effect here."""

    app: Named | list[Named]
    name: Named
    model: Named | None = None
    hardware: str
    cost_per_s: Annotated[float | None, Number(most=1e9)] = None
    accuracy: Annotated[float | None, SHARE] = None
    running: Annotated[int, Number(most=10**6)] = 0
    uses: dict[str, Annotated[float, AMOUNT]] = {}
    memory_gb: Annotated[float | None, _MEMORY] = None
    batching: Annotated[str | BatchingRule | None, "a policy, or a table of batching"] = None


class Catalogue(Struct, frozen=True, kw_only=True):
    """Apps, models and variants. batching: rules by key. serving: each app's variants, in the file's order."""

    apps: tuple[AppRecord, ...]
    models: tuple[ModelRecord, ...]
    variants: tuple[VariantRecord, ...]
    needs: dict[str, Requirements]
    serving: dict[str, tuple[VariantRecord, ...]]
    batching: dict[str, BatchingRule] = {}


def catalogue(
    apps: Sequence[AppBlock],
    variants: Sequence[VariantBlock],
    location: Location,
    machines: list[MachineBlock],
    prices: Mapping[str, float],
    cost: CostSpec,
) -> Catalogue:
    """Apps with their needs, models and variants. location: of the file. Raises TomlError."""
    batching: dict[str, BatchingRule] = {}
    stated: dict[str, AppBlock] = {}
    for i, block in enumerate(apps):
        at = location.at("app").at(i)
        if block.name in stated:
            at.at("name").refuse(f"{block.name} occurs twice: state other needs of some of its queries in [[load]]")
        stated[block.name] = block
        batching |= _batching(block.batching, at.at("batching"), "app", block.name)
    if not variants:
        location.at("variant").refuse("there must be at least one [[variant]]: nothing could answer")
    entries: list[ServingVariant] = []
    named: set[str] = set()
    for i, one in enumerate(variants):
        at = location.at("variant").at(i)
        record = _variant(one, at, machines, prices, cost)
        if record.variant in named:
            at.at("name").refuse(f"{record.variant} occurs twice: a variant's name is unique")
        named.add(record.variant)
        batching |= _batching(one.batching, at.at("batching"), "variant", record.variant)
        entries.append(ServingVariant(record, _apps_of(one.app, at.at("app"), stated)))
    for app in sorted({app for entry in entries for app in entry.apps}):
        stated.setdefault(app, AppBlock(name=app))
    serving = {app: tuple(one.record for one in entries if app in one.apps) for app in stated}
    for i, (app, serves) in enumerate(serving.items()):
        if not serves:
            location.at("app").at(i).refuse(f"no [[variant]] serves {app}: name it in some variant's `app`")
    linked = link(entries)
    by_name = {one.variant: one for one in linked.variants}
    selections = {
        block.name: selection_of(block, location.at("app").at(i), linked.links[block.name])
        for i, block in enumerate(apps)
    }
    return Catalogue(
        apps=tuple(
            filled(
                AppRecord,
                block,
                app=app,
                links=linked.links[app],
                signature=SIGNATURE if selections.get(app) is None else SEVERAL,
                selection=selections.get(app),
                accuracy="",  # the block's is what its queries ask for
                expects=[Expectation(BEGINS + one.at, one.qps) for one in block.expect],
            )
            for app, block in stated.items()
        ),
        models=tuple(model_record(model, version, _FILLED) for model, version in linked.models),
        variants=linked.variants,
        needs={
            app: Requirements(latency_ms=block.latency_ms, accuracy=block.accuracy, cost=block.cost)
            for app, block in stated.items()
        },
        batching=batching,
        serving={app: tuple(by_name[one.variant] for one in records) for app, records in serving.items()},
    )


def model_record(model: str, version: str, filled: str) -> ModelRecord:
    """A model of which nothing but its variants matters. filled: in place of what is not known."""
    return ModelRecord(
        model=model, version=version, task=None, metric="top1", format=filled, source=filled, validation=filled,
        signature=SIGNATURE, created=0.0, registration=filled,
    )  # fmt: skip


def selection_of(block: AppBlock, at: Location, links: Collection[str]) -> Ensemble | None:
    """How several models of an app answer together, checked. at: of its block."""
    at, stated = at.at("selection"), block.selection
    if stated is None:
        return None
    stated = Ensemble(policy=stated) if isinstance(stated, str) else stated
    for wrong in selection_errors(stated):
        at.refuse(wrong)
    if stated.policy is not None and make_policy(stated) is None:
        at.refuse(
            f"policy: {stated.policy} runs in a process of its own, which is not simulated: {', '.join(POLICIES)} are"
        )
    for model in stated.members or ():
        if model not in links:
            at.refuse(f"members: no [[variant]] of model {model} serves {block.name}{meant_or_all(model, links)}")
    return stated if stated.policy is not None or stated.cache_mb else None


def _batching(stated: str | BatchingRule | None, at: Location, scope: str, name: str) -> dict[str, BatchingRule]:
    """The rule in a block, checked. Empty where there is none."""
    if stated is None:
        return {}
    rule = BatchingRule(policy=stated) if isinstance(stated, str) else stated
    for wrong in rule_errors(rule):
        at.refuse(wrong)
    return {batching_key(scope, name): rule}


def _apps_of(given: str | list[str], at: Location, known: Collection[str]) -> frozenset[str]:
    """The apps that a variant serves. known: apps with blocks; where there are none, any name is an app."""
    listed = [given] if isinstance(given, str) else given
    for i, app in enumerate(listed):
        here = at if isinstance(given, str) else at.at(i)
        if known:
            one_of(app, here, known, "[[app]]")
        if app in listed[:i]:
            here.refuse(f"{app} occurs twice")
    if not listed:
        at.refuse("must name at least one app")
    return frozenset(listed)


def _variant(
    block: VariantBlock, at: Location, machines: list[MachineBlock], prices: Mapping[str, float], cost: CostSpec
) -> VariantRecord:
    hardware = block.hardware
    kinds = {device.kind for one in machines for device in one.spec.devices}
    if hardware not in kinds:
        at.at("hardware").refuse(
            f"there is no device {shown(hardware)} on any [[worker]]{meant_or_all(hardware, kinds)}"
        )
    device = largest_of(machines, hardware)
    assert device is not None  # hardware is one of those kinds
    threads, memory_gb = _uses(block.uses, at.at("uses"), hardware)
    stated = block.memory_gb
    if stated is not None and memory_gb is not None and stated != memory_gb:
        at.at("memory_gb").refuse(f"is {stated:g}, while uses says {memory_gb:g}: leave one of them out")
    memory_mb = MB * (stated if stated is not None else memory_gb or 0.0)
    if memory_mb > device.memory_mb:
        at.at("memory_gb" if stated is not None else "uses").refuse(
            f"{memory_mb / MB:g} GB of memory are more than any {hardware} has ({device.memory_mb / MB:g} GB)"
        )
    cores = max(d.cores for one in machines for d in one.spec.devices if d.kind == hardware)
    if hardware in PER_CORE and threads > cores:
        at.at("uses").at("cpu_cores").refuse(f"{threads} cores are more than any {hardware} has ({cores})")
    profile, max_batch = speed_of(block, at, memory_mb)
    price = block.cost_per_s
    if price is None and hardware in cost.per_gb_s and memory_mb > 0:
        price = memory_mb / MB * cost.per_gb_s[hardware]
    shared = memory_mb > 0 and device.memory_mb < UNLIMITED_MB
    if price is None and hardware not in PER_CORE and not shared:
        price = price_per_hour(hardware, prices) / 3600.0  # unknown how many fit: the whole device
    return VariantRecord(
        variant=block.name,
        model=block.model or block.name,
        version="1",
        framework=_FILLED,
        precision=_FILLED,
        threads=threads,
        max_batch=max_batch,
        hardware=hardware,
        artifact=_FILLED,
        format=_FILLED,
        accuracy=block.accuracy,
        agreement=None,
        profile=with_tiers(profile, hardware),
        signature=SIGNATURE,
        simulated=True,
        price_per_s=price,
    )


def _uses(uses: Mapping[str, float], at: Location, hardware: str) -> tuple[int, float | None]:
    """Threads on the device (1 on other hardware than a CPU), and GB of its memory if stated."""
    memory = "memory_gb", f"{hardware}_memory_gb"
    keys = {"cpu_cores", "cpu_memory_gb", *memory, hardware, f"{hardware}s", f"{hardware}_cores"}
    for key, amount in uses.items():
        if key not in keys:
            at.at(key).refuse(f"there is no such key{meant_or_all(key, keys)}")
        if key not in ("cpu_memory_gb", "cpu_cores", *memory) and amount > 1:
            at.at(key).refuse(f"must be at most 1: an instance runs on one {hardware}")
    said = [key for key in memory if key in uses]
    if len(said) > 1:
        at.at(said[1]).refuse(f"says the same as {said[0]}: leave one of them out")
    if said:
        within(uses[said[0]], at.at(said[0]), _MEMORY)
    gb = uses[said[0]] if said else None
    cores = uses.get("cpu_cores", 1) if hardware == "cpu" else 1
    if cores != int(cores):
        at.at("cpu_cores").refuse(f"must be a whole number, not {cores:g}")
    within(cores, at.at("cpu_cores"), Number(1, 4096))
    return int(cores), gb


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
