"""From a seed to a scenario: a small whole system, its loads, and its faults, as the document of a scenario file.

It has two phases, as TigerBeetle's VOPR: first faults, then none, in which all must be well again. The machines carry the load: after the
last fault nearly all queries must be answered in time.
"""

from collections.abc import Callable
from itertools import pairwise
from math import ceil
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


def labels_of(draw: Random, system: Document, faulty_s: float) -> Document:
    """A time whose labels come late, and twice: when dispatchers may have forgotten the queries, or died since."""
    kind = KindDrawn(1.0, lambda draw, _: {"delay_s": draw.choice([0.1, 0.5, 2.0, 10.0, 30.0])})
    return _fault(draw, "labels-late", kind, system, faulty_s)


def release_of(draw: Random, system: Document, faulty_s: float) -> Document:
    """A release that ends without another one in its place: a share of the queries gets the new version, or copies of them do."""
    model = draw.choice(system["variant"])["model"]
    share = draw.choice([0.0, 0.1, 0.5])
    fields = {"what": "release", "model": model, "factor": share} if share else {"what": "mirror", "model": model}
    return _fault(draw, "change", KindDrawn(1.0, lambda _draw, _system: fields), system, faulty_s)


def _fault(draw: Random, kind: str, drawn: "KindDrawn", system: Document, faulty_s: float) -> Document:
    lasts = min(round(draw.choice([0.3, 0.7, 1.5, 3.0, 6.0]) * draw.uniform(0.8, 1.2), 2), faulty_s - 1.0)
    at = round(draw.uniform(0.5, faulty_s - lasts), 2)
    found: Document = {"kind": kind, "at_s": at}
    if drawn.ends:
        found["until_s"] = round(at + lasts, 2)
    return found | drawn.fields(draw, system)


# -- the kinds of fault: what there is in a system


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


RECOVERS_S = 20.0  # after the last fault until all is well
SERVED_S = 8.0  # then, in which queries must be answered in time
CANCELS = 0.4  # share of the systems whose clients take queries back
RELEASES = 0.3  # and of those in which a version is brought out in steps, or in the mirror
LABELS = 0.35  # and of those whose clients send labels late
BUSY = 0.3  # of a system's cores that the load takes, at most

_SPEED = {"cpu": 1.0, "gpu": 0.15}  # ms against a CPU's
_SIZES = {"s": (9.0, 0.62), "m": (21.0, 0.76), "l": (43.0, 0.88)}  # ms of one item on a CPU, accuracy
_BATCHING: tuple[Document, ...] = (
    {"policy": "aimd"},
    {"policy": "fixed", "batch": 2},
    {"policy": "delayed", "wait_ms": 5.0},
    {"policy": "quantile"},
    {"policy": "threshold"},
    {"policy": "edf", "contexts": 2},
)


def document_of(seed: int) -> Document:
    """The scenario of a seed, the same for the same seed and version."""
    draw = Random(seed)  # noqa: S311  (nothing is secret)
    beside = Random(f"{seed} beside")  # noqa: S311  (what is drawn here leaves the rest of each seed as it is)
    faulty_s = round(draw.uniform(8.0, 40.0), 1)
    workers = _machines(draw)
    apps, variants, pipelines = _catalogue(draw, sorted({kind for one in workers for kind in one["devices"]}))
    _give_memory(draw, workers, variants)
    loads = _loads(draw, apps, variants, pipelines, _cores(workers))
    for app in apps:
        if beside.random() < 0.25:
            app["default_output"] = 0
    for load in loads:
        if "latency_ms" not in load and beside.random() < 0.25:
            load["deadline"] = True
    _spare(Random(f"{seed} spared"), pipelines)  # noqa: S311
    document: Document = {
        "scenario": {
            "name": f"faults-{seed}", "duration_s": faulty_s, "seed": seed, "metrics_every_s": faulty_s, "checked": True,
            "policies": ["inferline" if pipelines and draw.random() < 0.6 else "infaas"],
        },
        "settings": _settings(draw),
        "app": apps,
        "variant": variants,
        "worker": workers,
        "pipeline": pipelines,
        "load": loads,
        "job": _jobs(draw, apps, faulty_s),
    }  # fmt: skip
    faults = [fault_of(draw, document, faulty_s) for _ in range(draw.choice([1, 2, 3, 4, 6, 9]))]
    document["fault"] = sorted(faults + faults_beside(beside, document, faulty_s), key=lambda one: one["at_s"])
    apart = Random(f"{seed} cancels")  # noqa: S311
    if apart.random() < CANCELS:
        document["fault"].append(cancels_of(apart, document, faulty_s))
    apart = Random(f"{seed} releases")  # noqa: S311
    if apart.random() < RELEASES:
        document["fault"].append(release_of(apart, document, faulty_s))
    apart = Random(f"{seed} labels")  # noqa: S311
    if apart.random() < LABELS:
        document["fault"].append(labels_of(apart, document, faulty_s))
    last = max(one.get("until_s", one["at_s"]) + max(0.0, one.get("delay_s", 0.0)) for one in document["fault"])
    document["scenario"]["duration_s"] = round(max(faulty_s, last) + RECOVERS_S + SERVED_S, 1)
    return {key: value for key, value in document.items() if value}


def _machines(draw: Random) -> list[Document]:
    """1 to 4 machines of one or two kinds. As many as there are at first are kept; another may come in the place of one that died."""
    count = draw.randint(1, 4)
    kinds = ["cpu"] if count == 1 or draw.random() < 0.6 else ["cpu", "gpu"]
    found = []
    for kind in kinds:
        start = count if len(kinds) == 1 else 1 if kind == "gpu" else count - 1
        cores = draw.choice([2, 4, 4])
        devices = {"cpu": cores} if kind == "cpu" else {"gpu": 1, "cpu": cores}
        found.append({
            "kind": kind, "devices": devices, "price_per_hour": draw.choice([0.1, 0.2]) + (kind == "gpu"),
            "boot_s": draw.choice([0.5, 2.0]), "start": start, "min": start, "max": start + draw.choice([1, 2]),
        })  # fmt: skip
    return found


def _give_memory(draw: Random, workers: list[Document], variants: list[Document]) -> None:
    """A machine holds all variants once, and little or much more."""
    for worker in workers:
        for kind, key in (("cpu", "memory_gb"), ("gpu", "gpu_memory_gb")):
            if kind in worker["devices"]:
                once = sum(one["memory_gb"] for one in variants if one["hardware"] == kind)
                worker.setdefault("resources", {})[key] = round(once * draw.choice([1.1, 1.5, 4.0]), 2)


def _cores(workers: list[Document]) -> float:
    """The cores of the smallest half of the machines: what is left if some of them die."""
    each = sorted(one["devices"]["cpu"] for one in workers for _ in range(one["start"]))
    return float(sum(each[: ceil(len(each) / 2)]))


def _catalogue(draw: Random, hardware: list[str]) -> tuple[list[Document], list[Document], list[Document]]:
    """Apps, their variants, and pipelines of them."""
    names = [f"app{number}" for number in range(draw.randint(1, 3))]
    apps, variants = [], []
    for name in names:
        several = draw.random() < 0.35
        sizes = draw.choice(["sm", "sml", "ml"] if several else ["s", "m", "sm", "sl", "sml"])
        app: Document = {"name": name}
        if several:
            app["selection"] = {"policy": draw.choice(["exp4", "exp3", "majority", "weighted"])}
            if draw.random() < 0.5:
                app["selection"]["cache_mb"] = draw.choice([0.01, 1.0])
            if app["selection"]["policy"] in ("exp3", "exp4") and draw.random() < 0.4:
                app["selection"]["contextual"] = True
        if draw.random() < 0.3:
            app["batching"] = draw.choice(_BATCHING)
        slowest = 0.0
        for size in sizes:
            ms, accuracy = _SIZES[size]
            for kind in hardware:
                one = round(ms * _SPEED[kind] * draw.choice([0.7, 1.0, 1.3]), 2)
                most = draw.choice([1, 4, 8])
                slope = 0.5 if kind == "cpu" else 0.1
                variants.append({
                    "app": name, "model": f"{name}-{size}", "name": f"{name}-{size}-{kind}", "hardware": kind, "accuracy": accuracy,
                    "base_ms": round(one * (1 - slope), 3), "per_item_ms": round(one * slope, 3), "max_batch": most,
                    "load_s": draw.choice([0.2, 0.8, 2.0]), "memory_gb": draw.choice([0.1, 0.3, 0.8]),
                })  # fmt: skip
                slowest = max(slowest, one * (1 + slope * (most - 1)))
        app["latency_ms"] = round(draw.choice([3.0, 6.0, 15.0]) * max(slowest, 25.0), 0)
        apps.append(app)
    plain = [one for one in apps if "selection" not in one]
    pipelines = [_pipeline(draw, plain)] if plain and draw.random() < 0.4 else []
    return apps, variants, pipelines


def _pipeline(draw: Random, apps: list[Document]) -> Document:
    """A chain of two or three vertices, of which a later one may be passed over."""
    names = ["first", "second", "third"][: draw.randint(2, 3)]
    asked = [draw.choice(apps) for _ in names]
    edges: list[Document] = [{"from": one, "to": other} for one, other in pairwise(names)]
    rest = ""
    if len(names) == 3 and draw.random() < 0.5:
        edges[1]["when"] = {"output": "y", "op": ">", "value": 0}
        edges[1]["probability"] = 0.5
        rest = f" | {names[1]}.y"
    return {
        "pipeline": {"name": "pipe", "latency_ms": sum(one["latency_ms"] for one in asked) + 50.0},
        "vertex": [
            {"name": name, "app": app["name"], "inputs": {"x": "$.x"}} for name, app in zip(names, asked, strict=True)
        ],
        "edge": edges,
        "output": {"y": f"{names[-1]}.y{rest}"},
        "plan": {"seconds": 60.0},
    }


def _spare(draw: Random, pipelines: list[Document]) -> None:
    """Of some pipelines, a stage but the last may fail, or the first answer of two counts."""
    for one in pipelines:
        names = [vertex["name"] for vertex in one["vertex"]]
        what = draw.random()
        if what < 0.3:
            draw.choice(one["vertex"][:-1])["optional"] = True
        elif what < 0.5 and len(one["edge"]) == 1:
            one["edge"].clear()
            one["output"]["y"] = f"any({names[0]}.y, {names[1]}.y)"


def _loads(
    draw: Random, apps: list[Document], variants: list[Document], pipelines: list[Document], cores: float
) -> list[Document]:
    """A stream for each app and pipeline, and some with needs of their own. Together they keep at most `BUSY` of so many cores busy."""
    ms = {
        app["name"]: sum(one["base_ms"] + one["per_item_ms"] for one in variants if one["app"] == app["name"] and one["hardware"] == "cpu")
        for app in apps
    }  # fmt: skip
    found: list[Document] = [
        {"app": app["name"], "of": ms[app["name"]], "selection": app.get("selection")} for app in apps
    ]
    found += [
        {"app": one["pipeline"]["name"], "of": sum(ms[vertex["app"]] for vertex in one["vertex"]), "selection": None}
        for one in pipelines
    ]
    found += [dict(draw.choice(found[: len(apps)]), odd=True) for _ in range(draw.choice([0, 1, 2]))]
    share = BUSY * cores * 1000.0 / len(found)  # ms of computing a second
    loads = []
    for one in found:
        rate = round(min(20.0, share / one["of"]) * draw.choice([0.3, 0.6, 1.0]), 2)
        load: Document = {"app": one["app"], "rate": min(rate, 2.0) if "odd" in one else rate}
        if one["selection"] is not None:
            load["feedback"] = draw.choice([0.0, 0.5, 1.0])
            load["repeats"] = draw.choice([0.0, 0.3])
            if draw.random() < 0.5:
                load["items"] = 2
            if one["selection"].get("contextual"):
                load["context"] = draw.choice(["north", "south"])
        if "odd" in one:
            serving = [each for each in variants if each["app"] == one["app"]]
            load |= _needs(draw, serving, several=one["selection"] is not None)
        elif draw.random() < 0.3:
            load["priority"] = draw.choice([1, 3, 9])
        loads.append(load)
    return loads


def _needs(draw: Random, variants: list[Document], *, several: bool) -> Document:
    """Needs of every kind, also such that cannot be met."""
    one = draw.choice(variants)
    choices: list[Document] = [
        {"accuracy": draw.choice([0.5, 0.7, 0.8, 0.99])},
        {"latency_ms": draw.choice([5.0, 30.0, 120.0, 1000.0])},
        {"cost": draw.choice([1e-6, 1e-3, 1.0])},
        {"model": one["model"]},
        {"variant": one["name"]},
        {"priority": draw.choice([1, 9])},
        {"accuracy": 0.7, "latency_ms": 200.0, "priority": 2},
    ]
    if several:
        choices.append({"confidence": draw.choice([0.3, 0.9])})
    return draw.choice(choices)


def _settings(draw: Random) -> Document:
    # The first draw of two decides nothing: without it, seeds would give other systems than they gave.
    return {
        "dispatcher": {
            "count": draw.randint(1, 3),
            "max_queue": (draw.choice(range(5)), draw.choice([100_000, 100_000, 40]))[1],
        },
        "autoscaler": {
            "hold_s": (draw.choice(range(8)), draw.choice([2.0, 10.0]))[1],
        },
        "machines": {"idle_s": draw.choice([5.0, 100.0]), "period_s": draw.choice([0.5, 1.0])},
        "executor": {"exclusive": draw.random() < 0.7, "order": draw.choice(["edf", "edf", "lru"])},
    }


def _jobs(draw: Random, apps: list[Document], faulty_s: float) -> list[Document]:
    plain = [one["name"] for one in apps if "selection" not in one]
    if not plain or draw.random() < 0.7:
        return []
    return [
        {"app": draw.choice(plain), "at_s": round(draw.uniform(0.0, faulty_s / 2), 1), "inputs": draw.choice([40, 200])}
    ]
