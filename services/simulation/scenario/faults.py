"""[[fault]] blocks and [interference]: what goes wrong, and how neighbours on a device slow each other down."""

from collections.abc import Mapping
from re import fullmatch
from typing import cast, get_args

from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.machines import MachineBlock, devices_of
from services.simulation.scenario.model import Change, Direction, FaultKind, FaultSpec
from services.simulation.scenario.toml import TomlTable, number_at, one_of, shown, text_at

FAULTS: Mapping[str, tuple[str, ...]] = {
    "worker-dies": ("worker", "hardware"),
    "worker-joins": ("worker", "hardware"),
    "device-slow": ("worker", "hardware", "factor"),
    "load-fails": ("variant", "hardware"),
    "load-hangs": ("variant", "hardware"),
    "load-slow": ("variant", "hardware", "factor"),
    "profile-wrong": ("variant", "hardware", "factor"),
    "model-errs": ("model",),
    "messages-delayed": ("delay_s",),
    "link-clogged": ("process", "direction"),
    "link-lost": ("process", "direction"),
    "process-stopped": ("process",),
    "process-dies": ("process", "delay_s"),
    "watch-late": ("process", "delay_s"),
    "events-twice": ("process",),
    "ack-lost": ("process",),
    "stream-down": ("process",),
    "clock-off": ("worker", "delay_s"),
    "boot-late": ("hardware", "delay_s"),
    "boot-never": ("hardware",),
    "boot-twice": ("hardware", "delay_s"),
    "lease-late": ("process",),
    "query-resent": ("app", "delay_s"),
    "change": ("what", "app", "model", "factor"),
}
FAULT_KEYS = (
    *("kind", "at_s", "until_s", "worker", "hardware", "variant", "model", "factor", "delay_s"),
    *("process", "direction", "app", "what"),
)
assert set(FAULTS) == set(get_args(FaultKind))
_FOR_GOOD = {  # kinds that do not end
    "worker-dies": "a worker that has died stays dead",
    "worker-joins": "a worker that has joined stays",
    "process-dies": "delay_s says when it is there again",
}
_OF_MACHINES = (
    "worker-dies",
    "worker-joins",
    "boot-late",
    "boot-never",
    "boot-twice",
)  # hardware: a kind of [[worker]]
_REQUIRED: Mapping[str, tuple[str, ...]] = {
    "worker-joins": ("hardware",),
    "boot-late": ("hardware",),
    "boot-never": ("hardware",),
    "boot-twice": ("hardware",),
    "clock-off": ("worker",),
}
_DELAYED = ("messages-delayed", "watch-late", "clock-off", "boot-late", "query-resent")  # delay_s is required
_SCALED = ("device-slow", "load-slow", "profile-wrong")  # factor is required
_CHANGES: Mapping[str, tuple[str, ...]] = {  # what each change needs
    "app-deleted": ("app",),
    "model-deleted": ("model",),
    "version": ("model",),
    "target": ("app", "factor"),
    "plan": ("app",),
    "setting": ("app", "factor"),
}
assert set(_CHANGES) == set(get_args(Change))
RESTARTED_AFTER = 0.5  # s until a process that died, or a machine, is there again, unless a scenario says otherwise


def faults_of(
    scenario: TomlTable,
    machines: list[MachineBlock],
    started: Mapping[str, int],
    things: Catalogue,
    duration_s: float,
    dispatchers: int,
) -> tuple[FaultSpec, ...]:
    """All faults. Raises ScenarioError. things: whose apps, variants and models may be named.

    started: by kind of machine, the most that any policy has at time 0. dispatchers: the most of any policy.
    """
    apps = [one.app for one in things.apps]
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
        if until is not None and kind in _FOR_GOOD:
            block.at("until_s").refuse(f"means nothing for {kind}: {_FOR_GOOD[kind]}")
        for key in _REQUIRED.get(kind, ()):
            block.get(key)
        hardware = ""
        if "hardware" in block and kind in _OF_MACHINES:
            hardware = one_of(block.get("hardware"), block.at("hardware"), kinds, "kind of [[worker]]")
        elif "hardware" in block:
            hardware = one_of(block.get("hardware"), block.at("hardware"), devices_of(machines), "kind of device")
        variant = one_of(block.get("variant"), block.at("variant"), variants, "variant") if "variant" in block else ""
        if kind == "model-errs" and not models:
            block.at("kind").refuse("needs an [[app]] with `selection`: only there does it matter what models answer")
        model = ""
        if kind == "model-errs":
            model = one_of(block.get("model"), block.at("model"), models, "model")
        elif kind == "change":
            model = _changed(block, things)
        app = one_of(block.get("app"), block.at("app"), apps, "app") if "app" in block else ""
        direction = one_of(
            block.content.get("direction", "both"), block.at("direction"), get_args(Direction), "direction"
        )
        lasting = RESTARTED_AFTER if kind in ("process-dies", "boot-twice") else 0.0
        found.append(
            FaultSpec(
                kind=cast(FaultKind, kind),
                at_s=at,
                until_s=float("inf") if until is None else until,
                worker=_worker(block, started, joins=kind == "worker-joins") if "worker" in block else "",
                hardware=hardware,
                variant=variant,
                model=model,
                factor=block.number("factor", None if kind in _SCALED else 1.0, most=1e6, above=True),
                delay_s=block.number(
                    "delay_s",
                    None if kind in _DELAYED else lasting,
                    least=-1e6 if kind == "clock-off" else 0.0,
                    most=1e6,
                ),
                process=_process(block, started, dispatchers) if "process" in FAULTS[kind] else "",
                direction=cast(Direction, direction),
                app=app,
                what=cast(Change, block.content.get("what", "")),
            )
        )
    return tuple(found)


def _worker(block: TomlTable, started: Mapping[str, int], *, joins: bool) -> str:
    """A worker's name. joins: any name that a worker may have."""
    name = block.name("worker")
    if not joins and not _is_worker(name, started):
        block.at("worker").refuse(f"no worker is ever called {name}: there are {_first(started)}")
    return name


def _is_worker(name: str, started: Mapping[str, int]) -> bool:
    """Kind and number (from 0) of those of time 0; kind, epoch and number of those that are added later."""
    kind, _, number = name.rpartition("-")
    first = fullmatch("0|[1-9][0-9]*", number) is not None and int(number) < started.get(kind, 0)
    return first or any(fullmatch(f"{one}-[1-9][0-9]*-[1-9][0-9]*", name) for one in started)


def _first(started: Mapping[str, int]) -> str:
    there = (f"{one}-0" + (f" to {one}-{count - 1}" if count > 1 else "") for one, count in started.items() if count)
    return ", ".join(there) or "none at time 0"


def _process(block: TomlTable, started: Mapping[str, int], dispatchers: int) -> str:
    """The name of a process, of a worker for all of its processes, or "clients"."""
    name = text_at(block.get("process"), block.at("process"))
    if name == "clients" and block.get("kind") not in ("link-clogged", "link-lost"):
        block.at("process").refuse("only the links of clients fail: link-clogged or link-lost")
    if block.get("kind") == "lease-late" and name not in ("vm-0", "vm-1"):
        block.at("process").refuse(f"must be a VM-autoscaler, vm-0 or vm-1, not {shown(name)}")
    fixed = {"clients", "vm-0", "vm-1", "jobs-0", *(f"d-{number}" for number in range(dispatchers))}
    worker = name.removeprefix("monitor-").removeprefix("model-").removeprefix("offline-").partition("/")[0]
    if name not in fixed and not _is_worker(worker, started):
        block.at("process").refuse(
            f"no process is ever called {shown(name)}: there are {', '.join(sorted(fixed))}, and of each worker W: W, monitor-W, "
            f"model-W, offline-W, W/DEVICE (workers: {_first(started)})"
        )
    return name


def _changed(block: TomlTable, things: Catalogue) -> str:
    """The model that changes; "" if an app does."""
    what = one_of(block.get("what"), block.at("what"), _CHANGES, "change")
    for key in _CHANGES[what]:
        block.get(key)
    for key in sorted(block.content.keys() & {"app", "model", "factor"} - set(_CHANGES[what])):
        block.at(key).refuse(f"means nothing for {what}, which takes {', '.join(_CHANGES[what])}: leave it out")
    if what == "target":
        number_at(block.get("factor"), block.at("factor"), most=0.999, above=True)
    models = {record.model for record in things.models}
    return one_of(block.get("model"), block.at("model"), models, "model") if "model" in block else ""


def interference_of(scenario: TomlTable, machines: list[MachineBlock]) -> dict[str, float]:
    """Strength by kind of device. Raises ScenarioError."""
    location = scenario.at("interference")
    return {
        one_of(kind, location.at(kind), devices_of(machines), "kind of device"): number_at(
            value, location.at(kind), most=1e3
        )
        for kind, value in scenario.table("interference").items()
    }
