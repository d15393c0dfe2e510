"""[[fault]] blocks and [interference]: what goes wrong, and how neighbours on a device slow each other down."""

from collections.abc import Mapping
from re import fullmatch
from typing import cast, get_args

from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.machines import MachineBlock, devices_of
from services.simulation.scenario.model import FaultKind, FaultSpec
from services.simulation.scenario.toml import TomlTable, number_at, one_of

FAULTS: Mapping[str, tuple[str, ...]] = {
    "worker-dies": ("worker", "hardware"),
    "device-slow": ("worker", "hardware", "factor"),
    "load-fails": ("variant", "hardware"),
    "messages-delayed": ("delay_s",),
    "model-errs": ("model",),
}
FAULT_KEYS = ("kind", "at_s", "until_s", "worker", "hardware", "variant", "model", "factor", "delay_s")
assert set(FAULTS) == set(get_args(FaultKind))


def faults_of(
    scenario: TomlTable,
    machines: list[MachineBlock],
    started: Mapping[str, int],
    things: Catalogue,
    duration_s: float,
) -> tuple[FaultSpec, ...]:
    """All faults. Raises ScenarioError. things: whose variants and models may be named. started: by kind of machine, the most that any policy has at time 0."""
    kinds = [one.spec.kind for one in machines]
    variants = [one.variant for one in things.variants]
    models = {model for app in things.apps if app.selection is not None for model in app.links}
    found = []
    for block in scenario.blocks("fault", FAULT_KEYS):
        kind = one_of(block.get("kind"), block.at("kind"), FAULTS, "kind of fault")
        for key in sorted(block.content.keys() - {"kind", "at_s", "until_s", *FAULTS[kind]}):
            block.at(key).refuse(f"means nothing for {kind}, which takes {', '.join(FAULTS[kind])}: leave it out")
        at = block.number("at_s", most=duration_s)
        until = block.maybe("until_s", above=True)
        if until is not None and until <= at:
            block.at("until_s").refuse(f"must be after at_s ({at:g}), not {until:g}")
        if until is not None and kind == "worker-dies":
            block.at("until_s").refuse("means nothing for worker-dies: a worker that has died stays dead")
        hardware = ""
        if "hardware" in block and kind == "worker-dies":
            hardware = one_of(block.get("hardware"), block.at("hardware"), kinds, "kind of [[worker]]")
        elif "hardware" in block:
            hardware = one_of(block.get("hardware"), block.at("hardware"), devices_of(machines), "kind of device")
        variant = one_of(block.get("variant"), block.at("variant"), variants, "variant") if "variant" in block else ""
        if kind == "model-errs" and not models:
            block.at("kind").refuse("needs an [[app]] with `selection`: only there does it matter what models answer")
        model = one_of(block.get("model"), block.at("model"), models, "model") if kind == "model-errs" else ""
        found.append(
            FaultSpec(
                kind=cast(FaultKind, kind),
                at_s=at,
                until_s=float("inf") if until is None else until,
                worker=_worker(block, started) if "worker" in block else "",
                hardware=hardware,
                variant=variant,
                model=model,
                factor=block.number("factor", None if kind == "device-slow" else 1.0, most=1e6, above=True),
                delay_s=block.number("delay_s", None if kind == "messages-delayed" else 0.0, most=1e6),
            )
        )
    return tuple(found)


def _worker(block: TomlTable, started: Mapping[str, int]) -> str:
    """A worker's name: kind and number (from 0) for those of time 0; kind, epoch and number for those that are added later."""
    name = block.name("worker")
    kind, _, number = name.rpartition("-")
    first = fullmatch("0|[1-9][0-9]*", number) is not None and int(number) < started.get(kind, 0)
    if not first and not any(fullmatch(f"{one}-[1-9][0-9]*-[1-9][0-9]*", name) for one in started):
        there = ", ".join(
            f"{one}-0" + (f" to {one}-{count - 1}" if count > 1 else "") for one, count in started.items() if count
        )
        block.at("worker").refuse(f"no worker is ever called {name}: there are {there or 'none at time 0'}")
    return name


def interference_of(scenario: TomlTable, machines: list[MachineBlock]) -> dict[str, float]:
    """Strength by kind of device. Raises ScenarioError."""
    location = scenario.at("interference")
    return {
        one_of(kind, location.at(kind), devices_of(machines), "kind of device"): number_at(
            value, location.at(kind), most=1e3
        )
        for kind, value in scenario.table("interference").items()
    }
