"""[[load]] and [[job]] blocks: streams of queries, and offline jobs."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bus.messages.public import Requirements
from services.simulation.scenario.catalogue import Catalogue, needs_of
from services.simulation.scenario.model import NEEDS, Arrivals, JobSpec, Times, WorkloadSpec
from services.simulation.scenario.toml import Location, TomlTable, list_at, number_at, one_of, shown
from services.simulation.workload import WorkloadError, read_counts, read_times, zipf

_MOST_QPS = 1e7
_LATEST = 1e9  # seconds
_OF_SELECTION = ("repeats", "feedback", "context", "confidence")  # of apps of which several models answer together
_EVERYWHERE = ("app", "apps", "shares", "arrivals", "items", "deadline", *NEEDS, "repeats", "feedback", "context")
_OF: Mapping[str, tuple[Arrivals, tuple[str, ...]]] = {
    "poisson": ("poisson", ("rate",)),
    "uniform": ("uniform", ("rate",)),
    "gamma": ("gamma", ("rate", "cv")),
    "mmpp": ("mmpp", ("rates", "dwell_s")),
    "trace": ("trace", ("file", "seconds_per_line", "range_qps")),
    "times": ("times", ("file",)),
}
_OF_ARRIVALS = ("arrivals", *sorted({key for _, keys in _OF.values() for key in keys}))
KEYS = sorted({*_EVERYWHERE, *_OF_ARRIVALS})


def loads_of(scenario: TomlTable, things: Catalogue, folder: Path) -> tuple[WorkloadSpec, ...]:
    """All streams. Raises ScenarioError. folder: the file's, to which paths are relative."""
    return tuple(_load(block, things, folder) for block in scenario.blocks("load", KEYS))


def samples_of(file: TomlTable, app: str, folder: Path) -> tuple[WorkloadSpec, ...]:
    """The [[load]] blocks of a file about a single app, which they need not name. Raises ScenarioError."""
    found = []
    for block in file.blocks("load", ("app", *_OF_ARRIVALS)):
        if "app" in block:
            one_of(block.get("app"), block.at("app"), (app,), "app")
        found.append(_timed(WorkloadSpec(apps=(app,), shares=(1.0,), arrivals=_arrivals(block)), block, folder))
    return tuple(found)


def _arrivals(block: TomlTable) -> Arrivals:
    kind = one_of(block.content.get("arrivals", "poisson"), block.at("arrivals"), _OF, "arrivals")
    arrivals, keys = _OF[kind]
    for key in sorted(block.content.keys() - {*_EVERYWHERE, *keys}):
        block.at(key).refuse(f"means nothing with arrivals {kind!r}, which take {', '.join(keys)}: leave it out")
    return arrivals


def _load(block: TomlTable, things: Catalogue, folder: Path) -> WorkloadSpec:
    needs = things.needs
    apps, shares = _apps(block, needs)
    arrivals = _arrivals(block)
    plain = {app.app for app in things.apps if app.selection is None}
    for key in _OF_SELECTION:
        if key in block and plain.issuperset(apps):
            block.at(key).refuse(
                "means nothing for an [[app]] without `selection`: leave it out, or state `selection` there"
            )
    load = WorkloadSpec(
        apps=apps,
        shares=shares,
        arrivals=arrivals,
        needs=_own_needs(block, [needs[app] for app in apps]),
        items=block.whole("items", 1, 1, 65536),
        deadline=block.flag("deadline"),
        repeats=block.number("repeats", 0.0, most=1.0),
        feedback=block.number("feedback", 0.0, most=1.0),
        context=block.text("context") if "context" in block else None,
    )
    return _timed(load, block, folder)


def _own_needs(block: TomlTable, of_apps: list[Requirements]) -> Requirements | None:
    """The block's needs over those of its apps; None if it states none."""
    if not block.content.keys() & set(NEEDS):
        return None
    for key in NEEDS:
        if key not in block and len({getattr(one, key) for one in of_apps}) > 1:
            block.at(key).refuse(
                "is missing: where a load has needs of its own, and its apps differ in this one, state it"
            )
    own = needs_of(block)
    return replace(of_apps[0], **{key: getattr(own, key) for key in NEEDS if key in block})


def _timed(load: WorkloadSpec, block: TomlTable, folder: Path) -> WorkloadSpec:
    """The load with the block's arrivals."""
    match load.arrivals:
        case "mmpp":
            rates = _numbers(block.get("rates"), block.at("rates"), most=_MOST_QPS)
            dwell = _numbers(block.get("dwell_s"), block.at("dwell_s"), most=_LATEST, above=True)
            if len(rates) != len(dwell):
                block.at("dwell_s").refuse(f"must have one entry for each of rates ({len(rates)}), not {len(dwell)}")
            return replace(load, rates=rates, dwell_s=dwell)
        case "trace":
            span = block.content.get("range_qps")
            return replace(
                load,
                counts=_recorded(block, folder, read_counts),
                seconds_per_line=block.number("seconds_per_line", 1.0, most=_LATEST, above=True),
                range_qps=None if span is None else _range(span, block.at("range_qps")),
            )
        case "times":
            return replace(load, times=_recorded(block, folder, read_times))
    load = replace(load, rate=_rate(block.get("rate"), block.at("rate")))
    return replace(load, cv=block.number("cv", most=1000.0, above=True)) if load.arrivals == "gamma" else load


def _apps(block: TomlTable, needs: Mapping[str, Requirements]) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if ("app" in block) == ("apps" in block):
        block.at("app").refuse("must be there, or apps for a stream spread over several; not both")
    if "app" in block:
        if "shares" in block:
            block.at("shares").refuse("needs apps, a list: one app has all of the stream")
        return (one_of(block.get("app"), block.at("app"), needs, "app"),), (1.0,)
    apps = tuple(one_of(app, block.at("apps").at(i), needs, "app") for i, app in enumerate(block.items("apps")))
    if not apps:
        block.at("apps").refuse("must name at least one app")
    if len(set(apps)) < len(apps):
        block.at("apps").refuse("names an app twice")
    return apps, _shares(block.content.get("shares"), block.at("shares"), len(apps))


def _shares(given: Any, location: Location, count: int) -> tuple[float, ...]:
    """The share of each app: equal by default, or by Zipf's law in the order of the apps."""
    if given is None:
        return (1.0 / count,) * count
    if isinstance(given, str):
        if given != "zipf":
            location.refuse(f'must be "zipf", {{ zipf = 0.9 }}, or a list of shares, not {shown(given)}')
        given = {"zipf": 1.0}
    if isinstance(given, dict):
        return zipf(count, TomlTable(given, location, ("zipf",)).number("zipf", most=100.0))
    weights = _numbers(given, location, most=1.0)
    if len(weights) != count:
        location.refuse(f"must have one entry for each of apps ({count}), not {len(weights)}")
    total = sum(weights)
    if abs(total - 1.0) > 1e-3:
        location.refuse(f"must add up to 1, not {total:g}")
    return tuple(weight / total for weight in weights)


def _numbers(given: Any, location: Location, most: float, *, above: bool = False) -> tuple[float, ...]:
    found = tuple(
        number_at(one, location.at(i), 0.0, most, above=above) for i, one in enumerate(list_at(given, location))
    )
    if not found:
        location.refuse("must have at least one entry")
    return found


def _rate(given: Any, location: Location) -> tuple[tuple[float, float], ...]:
    """A rate: one number, or points."""
    if isinstance(given, dict | str):
        location.refuse(f"must be one number, or points as [[0, 4], [60, 80]], not {shown(given)}")
    if not isinstance(given, list):
        return ((0.0, number_at(given, location, 0.0, _MOST_QPS)),)
    points: list[tuple[float, float]] = []
    for i, pair in enumerate(given):
        at = location.at(i)
        if not isinstance(pair, list) or len(pair) != 2:
            at.refuse(f"must be [second, queries/s], not {shown(pair)}")
        second = number_at(pair[0], at.at(0), 0.0, _LATEST)
        if points and second <= points[-1][0]:
            at.at(0).refuse(f"must be after the point before it ({points[-1][0]:g} s), not {second:g}: times rise")
        points.append((second, number_at(pair[1], at.at(1), 0.0, _MOST_QPS)))
    if not points:
        location.refuse("must have at least one point, as [[0, 4]]")
    return tuple(points)


def _range(given: Any, location: Location) -> tuple[float, float]:
    span = _numbers(given, location, most=_MOST_QPS)
    if len(span) != 2 or span[0] > span[1]:
        location.refuse(f"must be [lowest, highest] queries/s, not {shown(given)}")
    return span[0], span[1]


def _recorded(block: TomlTable, folder: Path, read: Callable[[Path], Times]) -> Times:
    location = block.at("file")
    path = folder / block.text("file")
    try:
        return read(path)
    except WorkloadError as error:
        location.refuse(str(error))
    except (OSError, ValueError) as error:  # no path can be so
        location.refuse(f"cannot read {shown(str(path))}: {error}")


JOB_KEYS = ("app", "at_s", "inputs", "accuracy", "model", "variant")


def jobs_of(scenario: TomlTable, things: Catalogue, duration_s: float) -> tuple[JobSpec, ...]:
    """All offline jobs. Raises ScenarioError."""
    found = []
    for block in scenario.blocks("job", JOB_KEYS):
        app = one_of(block.get("app"), block.at("app"), things.serving, "app with models")
        models = {one.model for one in things.serving[app]}
        model = one_of(block.get("model"), block.at("model"), models, "model of this app") if "model" in block else None
        variants = {one.variant for one in things.serving[app]}
        location = block.at("variant")
        variant = (
            one_of(block.get("variant"), location, variants, "variant of this app") if "variant" in block else None
        )
        found.append(
            JobSpec(
                app=app,
                at_s=block.number("at_s", 0.0, most=duration_s),
                inputs=block.whole("inputs", None, 1, 10**8),
                accuracy=block.number("accuracy", 0.0, most=1.0),
                model=model,
                variant=variant,
            )
        )
    return tuple(found)
