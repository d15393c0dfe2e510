"""The scenarios of benches/decisions.py whose goal is the least cost, and what all scenarios share.

A scenario is a document as docs/scenarios.md has it, and the files that it reads. All numbers are this project's own. Loads
are recorded where a file with a trace is there, else synthetic.
"""

import csv
import gzip
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from math import pi, sin
from pathlib import Path
from typing import Any, NamedTuple

TRACES = (
    Path(__file__).resolve().parents[3] / "shared" / "traces"
)  # recorded loads, which are no part of the repository
TWITTER = "twitter_per_second_days01-07.txt.gz"  # events of each second, seven days
AZURE = "AzureLLMInferenceTrace_conv.csv"  # an invocation a line, an hour
SEED = 3
DAY_S = 86_400
REAL = slice(36_000, 43_200)  # seconds of the day that are also run second by second
LOAD_QPS = (5.0, 500.0)  # of all apps together

Table = dict[str, Any]


class Built(NamedTuple):
    """document: the scenario. files: the lines of the files that it names."""

    document: Table
    files: Mapping[str, Sequence[str]] = {}


class Case(NamedTuple):
    """A named scenario. build: makes it, given the folder with traces. trace: the file that it needs there."""

    name: str
    build: Callable[[Path], Built]
    trace: str | None = None


# -- what the scenarios are made of


class AppSpec(NamedTuple):
    """size: of its models; 1 is a small convolutional network."""

    name: str
    latency_ms: float
    share: float
    size: float
    accuracy: float


APPS = tuple(
    AppSpec(name, latency, share, 0.8 + 0.25 * i, 0.01 * i)
    for i, (name, latency, share) in enumerate(
        (("feed", 80, 0.45), ("search", 40, 0.25), ("safety", 250, 0.2), ("tags", 1000, 0.07), ("rare", 600, 0.03))
    )
)


def variants_of(app: AppSpec) -> list[Table]:
    """Four of each app: on two CPU cores, on a core of Inferentia, on a GPU one by one, and on a GPU in batches."""
    k = app.size

    def variant(name: str, hardware: str, base: float, item: float, batch: int, **rest: Any) -> Table:
        return {
            "app": app.name,
            "model": f"{app.name}-net",
            "name": f"{app.name}-{name}",
            "hardware": hardware,
            "base_ms": round(base * k, 4),
            "per_item_ms": round(item * k, 4),
            "max_batch": batch,
            **rest,
        }

    a = app.accuracy
    return [
        variant("cpu", "cpu", 8, 120, 4, memory_gb=0.8, load_s=1.2, accuracy=0.73 + a, cost_per_s=0.4, uses={"cpu_cores": 2}),
        variant("inf", "inferentia", 8, 8, 4, memory_gb=0.6, load_s=3.5, accuracy=0.735 + a, cost_per_s=0.9),
        variant("gpu1", "gpu", 1, 3, 1, memory_gb=1.2, load_s=5.0, accuracy=0.75 + a, cost_per_s=3.0),
        variant("gpu16", "gpu", 4, 0.9, 16, memory_gb=1.5, load_s=7.0, accuracy=0.745 + a, cost_per_s=3.1),
    ]  # fmt: skip


def machines(kept: int = 0, **most: int) -> list[Table]:
    """The kinds of machine. kept: how many of each stay. most: other maxima."""
    found = [
        {
            "kind": "cpu", "devices": {"cpu": 8}, "resources": {"cpu_cores": 8},
            "price_per_hour": 0.384, "boot_s": 20.0, "start": 3, "min": kept, "max": 12,
        },
        {
            "kind": "gpu", "devices": {"gpu": 1}, "resources": {"gpu_memory_gb": 16.0},
            "price_per_hour": 3.06, "boot_s": 30.0, "start": 1, "min": kept, "max": 8,
        },
        {
            "kind": "inferentia", "devices": {"inferentia": 4}, "resources": {"cpu_cores": 4},
            "price_per_hour": 0.584, "boot_s": 25.0, "start": 1, "min": max(1, kept), "max": 8,
        },
    ]  # fmt: skip
    return [{**one, "max": most.get(str(one["kind"]), one["max"])} for one in found]


def scenario(
    name: str,
    duration_s: float,
    loads: Sequence[Table],
    *,
    apps: Sequence[AppSpec] = APPS,
    target: float | None = None,
    workers: Sequence[Table] | None = None,
) -> Table:
    """The document. target: `slo_target` of all apps; None: the default."""
    extra: Table = {} if target is None else {"slo_target": target}
    return {
        "scenario": {"name": name, "duration_s": duration_s, "seed": SEED},
        "cost": {"meter": "worker"},
        "app": [{"name": app.name, "latency_ms": app.latency_ms, "accuracy": 0.7, **extra} for app in apps],
        "variant": [variant for app in apps for variant in variants_of(app)],
        "worker": list(machines() if workers is None else workers),
        "load": list(loads),
    }


def traced(apps: Sequence[AppSpec], file: str) -> list[Table]:
    """A load for each app that follows the file's counts, mapped to its share of LOAD_QPS."""
    low, high = LOAD_QPS
    return [
        {
            "app": app.name, "arrivals": "trace", "file": file, "seconds_per_line": 1.0,
            "range_qps": [round(low * app.share, 4), round(high * app.share, 4)],
        }
        for app in apps
    ]  # fmt: skip


def shared(apps: Sequence[AppSpec], **load: Any) -> Table:
    """One load that is spread over the apps by their shares."""
    return {"apps": [app.name for app in apps], "shares": [app.share for app in apps], **load}


# -- recorded loads


def seconds(traces: Path) -> list[int]:
    """Events of each second of the seven days."""
    with gzip.open(traces / TWITTER, "rt") as file:
        return [int(line) for line in file.read().split()]


def twitter(traces: Path, day: int, *, real: bool = False) -> list[int]:
    """Events of each minute of a day (1 to 7); real: of each second of two hours."""
    counts = seconds(traces)[(day - 1) * DAY_S : day * DAY_S]
    return counts[REAL] if real else [sum(counts[at : at + 60]) for at in range(0, DAY_S, 60)]


def azure(traces: Path) -> list[float]:
    """Seconds of the invocations, from the first on."""
    with (traces / AZURE).open() as file:
        times = sorted(datetime.fromisoformat(row["TIMESTAMP"][:26]) for row in csv.DictReader(file))
    return [(time - times[0]).total_seconds() for time in times]


def _day(name: str, day: int, *, real: bool = False, kept: int = 0, target: float | None = None) -> Case:
    def build(traces: Path) -> Built:
        counts = twitter(traces, day, real=real)
        document = scenario(name, len(counts), traced(APPS, "day.txt"), target=target, workers=machines(kept))
        return Built(document, {"day.txt": [str(count) for count in counts]})

    return Case(name, build, TWITTER)


def _azure(name: str) -> Case:
    def build(traces: Path) -> Built:
        times = azure(traces)
        load = shared(APPS, arrivals="times", file="times.txt")
        return Built(scenario(name, int(times[-1]) + 1, [load]), {"times.txt": [f"{time:.6f}" for time in times]})

    return Case(name, build, AZURE)


# -- synthetic loads


def _cold() -> Table:
    """The second app has no query at all until everybody comes."""
    usual, cold = APPS[0], APPS[2]
    rate = [[0, 0], [180, 0], [180.1, 150], [240, 150], [240.1, 0]]
    loads = [{"app": usual.name, "rate": 40}, {"app": cold.name, "rate": rate}]
    return scenario("cold-flash", 420, loads, apps=(usual, cold))


def _zipf() -> Table:
    """Forty apps; a wave with a period of five minutes."""
    count = 40
    weights = [1 / rank for rank in range(1, count + 1)]
    apps = [
        AppSpec(f"app{i}", (80, 150, 250, 600)[i % 4], weight / sum(weights), 0.8 + 0.05 * (i % 7), 0.01 * (i % 5))
        for i, weight in enumerate(weights)
    ]
    rate = [[at, round(150 - 100 * sin(2 * pi * at / 300 + pi / 2), 1)] for at in range(0, 901, 15)]
    return scenario("zipf-40", 900, [shared(apps, rate=rate)], apps=apps)


def _fleet(count: int) -> Table:
    """Eighty cores in machines of one size: one, ten or forty, of which all but one may go."""
    cores = 80 // count
    worker = {
        "kind": "cpu", "devices": {"cpu": cores}, "resources": {"memory_gb": 4.0 * cores},
        "price_per_hour": 0.048 * cores, "boot_s": 20.0, "start": (count + 1) // 2, "min": 1, "max": count,
    }  # fmt: skip
    apps = APPS[2:]
    rate = [[at, round(60 - 45 * sin(2 * pi * at / 300 + pi / 2), 1)] for at in range(0, 901, 15)]
    total = sum(app.share for app in apps)
    apps = tuple(app._replace(share=app.share / total) for app in apps)
    document = scenario(f"workers-{count}", 900, [shared(apps, rate=rate)], apps=apps, workers=[worker])
    return {**document, "variant": [one for one in document["variant"] if one["hardware"] == "cpu"]}


def cost_cases() -> Iterator[Case]:
    """All whose goal is the least cost."""
    for day in range(1, 8):
        yield _day(f"twitter-{day}", day)
    for day in range(1, 8):
        yield _day(f"twitter-{day}-999", day, target=0.999)
    for day in range(1, 8):
        yield _day(f"twitter-{day}-kept", day, kept=1)
    yield _day("twitter-3-real", 3, real=True)
    yield _azure("azure")
    mmpp = shared(APPS, arrivals="mmpp", rates=[20, 150, 350], dwell_s=[60, 25, 8])
    step = [[0, 10], [120, 10], [120.1, 200], [360, 200], [360.1, 10], [600, 10]]
    drift = [[0, 20], [900, 300], [1800, 20]]
    for document in (
        scenario("mmpp", 900, [mmpp]),
        scenario("step-20", 600, [shared(APPS, rate=step)]),
        _cold(),
        scenario("slow-drift", 1800, [shared(APPS, rate=drift)]),
        _zipf(),
        *map(_fleet, (1, 10, 40)),
    ):
        yield Case(document["scenario"]["name"], lambda _, document=document: Built(document))


# -- writing


def toml(document: Mapping[str, Any]) -> str:
    """A document as TOML: tables at the top level, and lists of tables."""
    parts = []
    for name, value in document.items():
        tables, header = (value, f"[[{name}]]") if isinstance(value, list) else ([value], f"[{name}]")
        parts += [f"{header}\n" + "".join(f"{key} = {_value(one)}\n" for key, one in t.items()) for t in tables]
    return "\n".join(parts)


def _value(value: Any) -> str:
    match value:
        case bool():
            return str(value).lower()
        case str():
            return f'"{value}"'
        case Mapping():
            return "{ " + ", ".join(f"{key} = {_value(one)}" for key, one in value.items()) + " }"
        case list() | tuple():
            return "[" + ", ".join(map(_value, value)) + "]"
        case _:
            return repr(value)


def write(built: Built, folder: Path) -> Path:
    """The scenario's file, with the files that it reads beside it."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in built.files.items():
        (folder / name).write_text("\n".join(lines) + "\n")
    path = folder / "scenario.toml"
    path.write_text(toml(built.document))
    return path
