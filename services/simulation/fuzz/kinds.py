"""The kinds of fault that are drawn, and what each is drawn with."""

from collections.abc import Callable
from random import Random
from typing import Any

from msgspec import Struct

Document = dict[str, Any]


def fault_of(draw: Random, system: Document, faulty_s: float) -> Document:
    """A fault of this system that ends before `faulty_s`."""
    kinds = [kind for kind, one in KINDS.items() if one.possible(system)]
    kind = draw.choices(kinds, [KINDS[kind].weight for kind in kinds])[0]
    return _fault(draw, kind, KINDS[kind], system, faulty_s)


def faults_beside(draw: Random, system: Document, faulty_s: float) -> list[Document]:
    """Those that a system may have beside the others."""
    drawn = [(kind, one) for kind, one in BESIDE.items() if draw.random() < one.weight]
    return [_fault(draw, kind, one, system, faulty_s) for kind, one in drawn]


def cancels_of(draw: Random, system: Document, faulty_s: float) -> Document:
    """A time in which clients take their queries back: at once, while those wait or are computed, or when they may have been answered."""
    kind = KindDrawn(1.0, lambda draw, _: {"delay_s": draw.choice([0.0, 0.0005, 0.005, 0.02, 0.1, 1.0])})
    return _fault(draw, "query-cancelled", kind, system, faulty_s)


def _fault(draw: Random, kind: str, drawn: "KindDrawn", system: Document, faulty_s: float) -> Document:
    lasts = min(round(draw.choice([0.3, 0.7, 1.5, 3.0, 6.0]) * draw.uniform(0.8, 1.2), 2), faulty_s - 1.0)
    at = round(draw.uniform(0.5, faulty_s - lasts), 2)
    found: Document = {"kind": kind, "at_s": at}
    if drawn.ends:
        found["until_s"] = round(at + lasts, 2)
    return found | drawn.fields(draw, system)


# -- what there is in a system


def _workers(system: Document) -> list[str]:
    return [f"{one['kind']}-{number}" for one in system["worker"] for number in range(one["start"])]


def _processes(system: Document) -> list[str]:
    """Of dispatchers more often, since most depends on them."""
    dispatchers = [f"d-{number}" for number in range(system["settings"]["dispatcher"]["count"])]
    workers = [
        name
        for one in system["worker"]
        for number in range(one["start"])
        for worker in (f"{one['kind']}-{number}",)
        for name in (f"monitor-{worker}", *(f"{worker}/{device}" for device in one["devices"]), worker)
    ]
    return [*dispatchers, *dispatchers, "vm-0", "vm-1", *workers]


def _several(system: Document) -> list[str]:
    return [one["name"] for one in system["app"] if "selection" in one]


def _kinds(system: Document) -> list[str]:
    return [one["kind"] for one in system["worker"]]


def _always(_: Document) -> bool:
    return True


def _more_than_one(system: Document) -> bool:
    return len(_workers(system)) > 1


# -- what each kind is drawn with


def _process(draw: Random, system: Document) -> Document:
    return {"process": draw.choice(_processes(system))}


def _link(draw: Random, system: Document) -> Document:
    process = draw.choice([*_processes(system), "clients"])
    return {"process": process, "direction": draw.choice(["in", "out", "both"])}


def _maybe_variant(draw: Random, system: Document) -> Document:
    return {"variant": draw.choice(system["variant"])["name"]} if draw.random() < 0.5 else {}


def _slow(draw: Random, system: Document) -> Document:
    found: Document = {"factor": draw.choice([2.0, 5.0, 20.0])}
    return found | ({"worker": draw.choice(_workers(system))} if draw.random() < 0.7 else {})


def _errs(draw: Random, system: Document) -> Document:
    return {"model": draw.choice([one["model"] for one in system["variant"] if one["app"] in _several(system)])}


def _change(draw: Random, system: Document) -> Document:
    app = draw.choice(system["app"])["name"]
    choices: list[Document] = [
        {"what": "app-deleted", "app": app},
        {"what": "model-deleted", "model": draw.choice(system["variant"])["model"]},
        {"what": "target", "app": app, "factor": draw.choice([0.8, 0.95, 0.999])},
        {"what": "setting", "app": app, "factor": draw.choice([1.0, 4.0])},
    ]
    choices += [{"what": "plan", "app": one["pipeline"]["name"]} for one in system.get("pipeline", ())]
    return draw.choice(choices)


class KindDrawn(Struct, frozen=True):
    """weight: how often it is drawn beside the others. possible: whether a system can have it. ends: whether it has an until_s."""

    weight: float
    fields: Callable[[Random, Document], Document]
    possible: Callable[[Document], bool] = _always
    ends: bool = True


KINDS: dict[str, KindDrawn] = {
    # Without any worker nobody orders others, so the first one stays.
    "worker-dies": KindDrawn(
        1.0, lambda draw, system: {"worker": draw.choice(_workers(system)[1:])}, _more_than_one, ends=False
    ),
    "worker-joins": KindDrawn(0.5, lambda draw, system: {"hardware": draw.choice(_kinds(system))}, ends=False),
    "device-slow": KindDrawn(1.5, _slow),
    "profile-wrong": KindDrawn(
        0.7, lambda draw, system: _maybe_variant(draw, system) | {"factor": draw.choice([0.5, 2.0])}
    ),
    "load-fails": KindDrawn(0.5, _maybe_variant),
    "load-hangs": KindDrawn(0.5, _maybe_variant),
    "load-slow": KindDrawn(0.5, lambda draw, system: _maybe_variant(draw, system) | {"factor": 10.0}),
    "messages-delayed": KindDrawn(0.7, lambda draw, _: {"delay_s": draw.choice([0.002, 0.02, 0.3])}),
    "model-errs": KindDrawn(0.3, _errs, lambda system: bool(_several(system))),
    "link-clogged": KindDrawn(2.5, _link),
    "link-lost": KindDrawn(1.5, _link),
    "process-stopped": KindDrawn(2.5, _process),
    "process-dies": KindDrawn(
        2.0, lambda draw, system: _process(draw, system) | {"delay_s": draw.choice([0.05, 0.3, 1.5])}, ends=False
    ),
    "watch-late": KindDrawn(0.7, lambda draw, system: _process(draw, system) | {"delay_s": draw.choice([0.3, 2.0])}),
    "events-twice": KindDrawn(0.5, _process),
    "ack-lost": KindDrawn(0.5, _process),
    "clock-off": KindDrawn(
        0.5, lambda draw, system: {"worker": draw.choice(_workers(system)), "delay_s": draw.choice([-5.0, 5.0])}
    ),
    "boot-late": KindDrawn(
        0.3, lambda draw, system: {"hardware": draw.choice(_kinds(system)), "delay_s": draw.choice([3.0, 10.0])}
    ),
    "boot-never": KindDrawn(0.3, lambda draw, system: {"hardware": draw.choice(_kinds(system))}),
    "boot-twice": KindDrawn(0.3, lambda draw, system: {"hardware": draw.choice(_kinds(system)), "delay_s": 1.0}),
    "lease-late": KindDrawn(0.5, lambda _draw, _system: {"process": "vm-0"}),
    "query-resent": KindDrawn(1.0, lambda draw, _: {"delay_s": draw.choice([0.005, 0.05, 0.3, 2.0])}),
    "change": KindDrawn(1.0, _change),
}
# weight: the share of systems that have one
BESIDE: dict[str, KindDrawn] = {
    "stream-down": KindDrawn(0.25, _process),
    "change": KindDrawn(
        0.3, lambda draw, system: {"what": "version", "model": draw.choice(system["variant"])["model"]}
    ),
}
