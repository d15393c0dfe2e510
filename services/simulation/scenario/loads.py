"""[[load]] and [[job]] blocks: streams of queries, and offline jobs."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from msgspec import Struct
from msgspec.structs import asdict, replace

from bus.fields import SHARE, Number
from bus.messages.public import Requirements
from services.core.toml import SECONDS, Location, one_of, shown, within
from services.simulation.scenario.catalogue import Catalogue
from services.simulation.scenario.model import NEEDS, Arrivals, JobSpec, Times, WorkloadSpec
from services.simulation.workload import WorkloadError, read_counts, read_times, zipf

_QPS = Number(most=1e7)
_DWELL = Number(above=0, most=1e9)
_OF_SELECTION = ("repeats", "feedback", "context", "confidence")  # of apps of which several models answer together
_OF: Mapping[Arrivals, tuple[str, ...]] = {
    "poisson": ("rate",),
    "uniform": ("rate",),
    "gamma": ("rate", "cv"),
    "mmpp": ("rates", "dwell_s"),
    "trace": ("file", "seconds_per_line", "range_qps"),
    "times": ("file",),
}
assert set(_OF) == set(get_args(Arrivals))
Point = Annotated[tuple[Annotated[float, SECONDS], Annotated[float, _QPS]], "[second, queries/s]"]


class ZipfShares(Struct, frozen=True):
    """zipf: the exponent."""

    zipf: Annotated[float, Number(most=100.0)]


class LoadBlock(Requirements, frozen=True, kw_only=True):
    """A [[load]] block, with the needs of its own queries. deadline: whether these say by when they need an answer."""

    app: str | None = None
    apps: list[str] | None = None
    shares: Annotated[
        Literal["zipf"] | ZipfShares | list[float] | None, SHARE, '"zipf", { zipf = 0.9 }, or a list of shares'
    ] = None
    arrivals: Arrivals = "poisson"
    rate: Annotated[Annotated[float, _QPS] | list[Point] | None, "one number, or points as [[0, 4], [60, 80]]"] = None
    cv: Annotated[float | None, Number(above=0, most=1000.0)] = None
    rates: Annotated[list[float] | None, _QPS] = None
    dwell_s: Annotated[list[float] | None, _DWELL] = None
    file: str | None = None
    seconds_per_line: Annotated[float | None, _DWELL] = None
    range_qps: Annotated[list[float] | None, _QPS, "[lowest, highest] queries/s"] = None
    items: Annotated[int, Number(1, 65536)] = 1
    deadline: bool = False  # of other queries a moment, which no file knows
    repeats: Annotated[float | None, SHARE] = None
    feedback: Annotated[float | None, SHARE] = None


class SampleBlock(LoadBlock, frozen=True, kw_only=True):
    """A [[load]] block of a file about a single app, which it need not name. It only says how queries arrive."""

    moved: ClassVar[Mapping[str, str]] = dict.fromkeys(
        (*NEEDS, *_OF_SELECTION, "apps", "shares", "items", "deadline"),
        "has no place here: these queries are only counted",
    )


def loads_of(
    blocks: Sequence[LoadBlock], location: Location, things: Catalogue, folder: Path
) -> tuple[WorkloadSpec, ...]:
    """All streams. Raises TomlError. location: of the blocks. folder: the file's, to which paths are relative."""
    return tuple(_load(block, location.at(i), things, folder) for i, block in enumerate(blocks))


def samples_of(blocks: Sequence[SampleBlock], location: Location, app: str, folder: Path) -> tuple[WorkloadSpec, ...]:
    """The same of a file about a single app."""
    found = []
    for i, block in enumerate(blocks):
        if block.app is not None:
            one_of(block.app, location.at(i).at("app"), (app,), "app")
        found.append(timed(WorkloadSpec(apps=(app,), shares=(1.0,)), block, location.at(i), folder))
    return tuple(found)


def _load(block: LoadBlock, at: Location, things: Catalogue, folder: Path) -> WorkloadSpec:
    needs = things.needs
    apps, shares = _apps(block, at, needs)
    plain = {app.app for app in things.apps if app.selection is None}
    for key in _OF_SELECTION:
        if getattr(block, key) is not None and plain.issuperset(apps):
            at.at(key).refuse(
                "means nothing for an [[app]] without `selection`: leave it out, or state `selection` there"
            )
    load = WorkloadSpec(
        apps=apps,
        shares=shares,
        needs=_own_needs(block, at, [needs[app] for app in apps]),
        items=block.items,
        deadline=block.deadline,
        repeats=block.repeats or 0.0,
        feedback=block.feedback or 0.0,
        context=block.context,
    )
    return timed(load, block, at, folder)


def _own_needs(block: LoadBlock, at: Location, of_apps: list[Requirements]) -> Requirements | None:
    """The block's needs over those of its apps; None if it states none."""
    own = {key: value for key, value in asdict(block).items() if key in NEEDS and value is not None}
    if not own:
        return None
    for key in NEEDS:
        if key not in own and len({getattr(one, key) for one in of_apps}) > 1:
            at.at(key).refuse(
                "is missing: where a load has needs of its own, and its apps differ in this one, state it"
            )
    return replace(of_apps[0], **own)


def timed(load: WorkloadSpec, block: LoadBlock, at: Location, folder: Path) -> WorkloadSpec:
    """The load with the block's arrivals. folder: to which paths are relative. Raises TomlError."""
    kind, takes = block.arrivals, _OF[block.arrivals]
    for key in sorted({key for keys in _OF.values() for key in keys}):
        if key not in takes and getattr(block, key) is not None:
            at.at(key).refuse(f"means nothing with arrivals {kind!r}, which take {', '.join(takes)}: leave it out")
    for key in takes:
        if key not in ("seconds_per_line", "range_qps") and getattr(block, key) is None:
            at.at(key).refuse("is missing")
        if getattr(block, key) == []:
            at.at(key).refuse(
                "must have at least one point, as [[0, 4]]" if key == "rate" else "must have at least one entry"
            )
    load = replace(load, arrivals=kind)
    match kind:
        case "mmpp":
            rates, dwell = tuple(block.rates or ()), tuple(block.dwell_s or ())
            if len(rates) != len(dwell):
                at.at("dwell_s").refuse(f"must have one entry for each of rates ({len(rates)}), not {len(dwell)}")
            return replace(load, rates=rates, dwell_s=dwell)
        case "trace":
            span = block.range_qps
            if span is not None and (len(span) != 2 or span[0] > span[1]):
                at.at("range_qps").refuse(f"must be [lowest, highest] queries/s, not {shown(span)}")
            return replace(
                load,
                counts=_recorded(block, at, folder, read_counts),
                seconds_per_line=block.seconds_per_line or 1.0,
                range_qps=None if span is None else tuple(span),
            )
        case "times":
            return replace(load, times=_recorded(block, at, folder, read_times))
    points = block.rate if isinstance(block.rate, list) else [(0.0, block.rate)]
    for i, (second, _) in enumerate(points[1:], 1):
        if second < points[i - 1][0]:
            at.at("rate").at(i).at(0).refuse(
                f"must not be before the point before it ({points[i - 1][0]:g} s), as {second:g} is: times rise"
            )
    return replace(load, rate=tuple(points), cv=1.0 if block.cv is None else block.cv)


def _apps(
    block: LoadBlock, at: Location, needs: Mapping[str, Requirements]
) -> tuple[tuple[str, ...], tuple[float, ...]]:
    if (block.app is None) == (block.apps is None):
        at.at("app").refuse("must be there, or apps for a stream spread over several; not both")
    if block.app is not None:
        if block.shares is not None:
            at.at("shares").refuse("needs apps, a list: one app has all of the stream")
        return (one_of(block.app, at.at("app"), needs, "app"),), (1.0,)
    apps = tuple(one_of(app, at.at("apps").at(i), needs, "app") for i, app in enumerate(block.apps or ()))
    if not apps:
        at.at("apps").refuse("must name at least one app")
    if len(set(apps)) < len(apps):
        at.at("apps").refuse("names an app twice")
    return apps, shares_of(block.shares, at.at("shares"), len(apps))


def shares_of(given: str | ZipfShares | list[float] | None, at: Location, count: int) -> tuple[float, ...]:
    """The share of each app: equal by default, or by Zipf's law in the order of the apps."""
    if given is None:
        return (1.0 / count,) * count
    if not isinstance(given, list):
        return zipf(count, given.zipf if isinstance(given, ZipfShares) else 1.0)
    if len(given) != count:
        at.refuse(f"must have one entry for each of apps ({count}), not {len(given)}")
    total = sum(given)
    if abs(total - 1.0) > 1e-3:
        at.refuse(f"must add up to 1, not {total:g}")
    return tuple(weight / total for weight in given)


def _recorded(block: LoadBlock, at: Location, folder: Path, read: Callable[[Path], Times]) -> Times:
    path = folder / (block.file or "")
    try:
        return read(path)
    except WorkloadError as error:
        at.at("file").refuse(str(error))
    except (OSError, ValueError) as error:  # no path can be so
        at.at("file").refuse(f"cannot read {shown(str(path))}: {error}")


def jobs_of(jobs: tuple[JobSpec, ...], location: Location, things: Catalogue, duration_s: float) -> tuple[JobSpec, ...]:
    """All offline jobs, checked. Raises TomlError. location: of their blocks."""
    for i, job in enumerate(jobs):
        at = location.at(i)
        one_of(job.app, at.at("app"), things.serving, "app with models")
        within(job.at_s, at.at("at_s"), Number(most=duration_s))
        for key in ("model", "variant"):
            known = {getattr(one, key) for one in things.serving[job.app]}
            if getattr(job, key) is not None:
                one_of(getattr(job, key), at.at(key), known, f"{key} of this app")
    return jobs
