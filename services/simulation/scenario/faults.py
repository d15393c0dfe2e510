"""[[fault]] blocks and [interference]: what goes wrong, and how neighbours on a device slow each other down."""

from collections.abc import Collection, Mapping, Sequence
from re import fullmatch
from typing import Annotated, Any, get_args

from msgspec.structs import replace

from bus.fields import SHARE, Number
from services.core.toml import Location, one_of, shown, struct_at, within
from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.machines import MachineBlock, devices_of
from services.simulation.scenario.model import Change, FaultKind, FaultSpec, PolicySpec
from services.simulation.scenario.policies import PolicyFile

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
    "query-cancelled": ("app", "delay_s"),
    "labels-late": ("app", "delay_s"),
    "change": ("what", "app", "model", "factor"),
}
assert set(FAULTS) == set(get_args(FaultKind))
_FOR_GOOD = {  # kinds that do not end
    "worker-dies": "a worker that has died stays dead",
    "worker-joins": "a worker that has joined stays",
    "process-dies": "delay_s says when it is there again",
}
_OF_MACHINES = ("worker-joins", "boot-late", "boot-never", "boot-twice")  # hardware: a kind of [[worker]]
_NEEDED: Mapping[str, tuple[str, ...]] = {  # keys without a default, with the kinds that need them
    "what": ("change",),
    "hardware": _OF_MACHINES,
    "worker": ("clock-off",),
    "model": ("model-errs",),
    "factor": ("device-slow", "load-slow", "profile-wrong"),
    "delay_s": (
        "messages-delayed",
        "watch-late",
        "clock-off",
        "boot-late",
        "query-resent",
        "query-cancelled",
        "labels-late",
    ),
    "process": tuple(kind for kind, takes in FAULTS.items() if "process" in takes),
}
_CHANGES: Mapping[str, tuple[str, ...]] = {  # what each change needs
    "app-deleted": ("app",),
    "model-deleted": ("model",),
    "version": ("model",),
    "release": ("model", "factor"),
    "mirror": ("model",),
    "target": ("app", "factor"),
    "plan": ("app",),
    "setting": ("app", "factor"),
}
assert set(_CHANGES) == set(get_args(Change))
RESTARTED_AFTER = 0.5  # s until a process that died, or a machine, is there again, unless a scenario says otherwise


class FaultTables(PolicyFile, frozen=True, kw_only=True):
    """What a file says of faults, beside its policies."""

    fault: list[dict[str, Any]] = []
    interference: dict[str, Annotated[float, Number(most=1e3)]] = {}


def faults_of(
    file: FaultTables,
    location: Location,
    machines: list[MachineBlock],
    started: Mapping[str, int],
    things: Catalogue,
    duration_s: float,
    policies: Sequence[PolicySpec],
) -> tuple[FaultSpec, ...]:
    """All faults, checked like `interference`. Raises TomlError. location: of the file. things: whose apps, variants and models may be named.

    started: by kind of machine, the most that any policy of the file has at time 0. policies: that run.
    """
    for kind in file.interference:
        one_of(kind, location.at("interference").at(kind), devices_of(machines), "kind of device")
    dispatchers = max(one.settings.dispatcher.count for one in policies)
    names = {
        "app": ({one.app for one in things.apps}, "app"),
        "variant": ({one.variant for one in things.variants}, "variant"),
        "hardware": (devices_of(machines), "kind of device"),
    }
    of_machines = {**names, "hardware": ({one.spec.kind for one in machines}, "kind of [[worker]]")}
    answering = {model for app in things.apps if app.selection is not None for model in app.links}
    found = []
    for i, block in enumerate(file.fault):
        at = location.at("fault").at(i)
        fault = struct_at(block, at, FaultSpec)
        kind = fault.kind
        _keys(block, at, kind, FAULTS[kind], [key for key, kinds in _NEEDED.items() if kind in kinds])
        within(fault.at_s, at.at("at_s"), Number(most=duration_s))
        if fault.until_s <= fault.at_s:
            at.at("until_s").refuse(f"must be after at_s ({fault.at_s:g}), not {fault.until_s:g}")
        if "until_s" in block and kind in _FOR_GOOD:
            at.at("until_s").refuse(f"means nothing for {kind}: {_FOR_GOOD[kind]}")
        if kind != "clock-off":
            within(fault.delay_s, at.at("delay_s"), Number(most=1e6))
        if kind == "model-errs":
            if not answering:
                at.at("kind").refuse("needs an [[app]] with `selection`: only there does it matter what models answer")
            one_of(fault.model, at.at("model"), answering, "model")
        elif kind == "change":
            _check_change(fault, block, at, things)
        for key, (known, what) in (of_machines if kind in ("worker-dies", *_OF_MACHINES) else names).items():
            if key in block:
                one_of(block[key], at.at(key), known, what)
        if fault.worker and kind != "worker-joins" and not _is_worker(fault.worker, started):
            at.at("worker").refuse(f"no worker is ever called {fault.worker}: there are {_first(started)}")
        if "process" in block:
            _check_process(fault, at.at("process"), started, dispatchers)
        if kind in ("process-dies", "boot-twice") and "delay_s" not in block:
            fault = replace(fault, delay_s=RESTARTED_AFTER)
        found.append(fault)
    return tuple(found)


def _keys(block: Collection[str], at: Location, what: str, takes: Sequence[str], needed: Sequence[str]) -> None:
    """Refuse keys that mean nothing for this, and the absence of those that are needed."""
    for key in sorted(set(block) - {"kind", "at_s", "until_s", *takes}):
        at.at(key).refuse(f"means nothing for {what}, which takes {', '.join(takes)}: leave it out")
    for key in needed:
        if key not in block:
            at.at(key).refuse("is missing")


def _is_worker(name: str, started: Mapping[str, int]) -> bool:
    """Kind and number (from 0) of those of time 0; kind, epoch and number of those that are added later."""
    kind, _, number = name.rpartition("-")
    first = fullmatch("0|[1-9][0-9]*", number) is not None and int(number) < started.get(kind, 0)
    return first or any(fullmatch(f"{one}-[1-9][0-9]*-[1-9][0-9]*", name) for one in started)


def _first(started: Mapping[str, int]) -> str:
    there = (f"{one}-0" + (f" to {one}-{count - 1}" if count > 1 else "") for one, count in started.items() if count)
    return ", ".join(there) or "none at time 0"


def _check_process(fault: FaultSpec, at: Location, started: Mapping[str, int], dispatchers: int) -> None:
    """Refuse what is no name of a process, of a worker for all of its processes, or "clients"."""
    name = fault.process
    if name == "clients" and fault.kind not in ("link-clogged", "link-lost"):
        at.refuse("only the links of clients fail: link-clogged or link-lost")
    if fault.kind == "lease-late" and name not in ("vm-0", "vm-1"):
        at.refuse(f"must be a VM-autoscaler, vm-0 or vm-1, not {shown(name)}")
    fixed = {"clients", "vm-0", "vm-1", "jobs-0", *(f"d-{number}" for number in range(dispatchers))}
    worker = name.removeprefix("monitor-").removeprefix("model-").removeprefix("offline-").partition("/")[0]
    if name not in fixed and not _is_worker(worker, started):
        at.refuse(
            f"no process is ever called {shown(name)}: there are {', '.join(sorted(fixed))}, and of each worker W: W, monitor-W, "
            f"model-W, offline-W, W/DEVICE (workers: {_first(started)})"
        )


def _check_change(fault: FaultSpec, block: dict[str, Any], at: Location, things: Catalogue) -> None:
    """Refuse what is no change of the catalogue."""
    what = one_of(fault.what, at.at("what"), _CHANGES, "change")
    _keys(block.keys() - {"what"}, at, what, _CHANGES[what], _CHANGES[what])
    if what == "target":
        within(fault.factor, at.at("factor"), Number(above=0, most=0.999))
    if what == "release":
        within(fault.factor, at.at("factor"), SHARE)
    if "model" in block:
        one_of(fault.model, at.at("model"), {record.model for record in things.models}, "model")
