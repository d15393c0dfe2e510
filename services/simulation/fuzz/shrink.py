"""The smallest scenario that still breaks the same invariant: delta debugging (Zeller and Hildebrandt 2002) of its faults, loads and parts."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from math import ceil
from pathlib import Path
from typing import Any

from services.simulation.fuzz.trial import FaultTrial, Wrap
from services.simulation.fuzz.violations import Violation
from services.simulation.scenario.read import derive
from services.simulation.scenario.toml import ScenarioError

Document = dict[str, Any]
Tried = Callable[[int, Document], None]  # number of runs so far, and the smallest document
LIVENESS = ("served", "one-leader", "plan-loaded", "nobody-paused", "replicas")  # which are looked at after the faults


def broken(document: Document, invariant: str, wrap: Wrap | None = None) -> Violation | None:
    """The first violation of this invariant in a run of the document. None: there is none, or it is no scenario."""
    try:
        scenario = derive(document, Path("shrunk.toml"))
    except ScenarioError:
        return None
    verdict = FaultTrial(scenario, wrap).verdict(until=lambda found: any(one.invariant == invariant for one in found))
    return next((one for one in verdict.violations if one.invariant == invariant), None)


def shrink(
    document: Document, violation: Violation, over: Callable[[], bool], tried: Tried, wrap: Wrap | None = None
) -> tuple[Document, Violation]:
    """The smallest document found before `over` says that the time is up, and its violation. wrap: as of Trial."""
    invariant, runs = violation.invariant, 0
    again = True
    while again and not over():
        again = False
        for smaller in _smaller(document, violation):
            if over():
                break
            runs += 1
            found = broken(smaller, invariant, wrap)
            if found is not None:
                document, violation, again = smaller, found, True
                tried(runs, document)
                break
            tried(runs, document)
    return document, violation


def _smaller(document: Document, violation: Violation) -> Iterator[Document]:
    """Documents with less, the boldest first."""
    scenario = document["scenario"]
    if violation.invariant not in LIVENESS and violation.time + 2.0 < scenario["duration_s"]:
        shorter = deepcopy(document)
        end = shorter["scenario"]["duration_s"] = shorter["scenario"]["metrics_every_s"] = float(
            ceil(violation.time + 1.0)
        )
        for key in ("fault", "job"):
            if key in shorter:
                shorter[key] = [one for one in shorter[key] if one["at_s"] < end]
        yield _tidy(shorter)
    yield from _fewer(document, "fault")
    for key in ("job", "load"):
        yield from _fewer(document, key)
    yield from _without_apps(document)
    yield from _fewer(document, "variant")
    for section in document.get("settings", {}):
        plain = deepcopy(document)
        del plain["settings"][section]
        yield _tidy(plain)
    yield from _fewer_machines(document)
    for i, load in enumerate(document.get("load", ())):
        for key in sorted(load.keys() - {"app", "rate"}):
            plain = deepcopy(document)
            del plain["load"][i][key]
            yield plain
        if load["rate"] > 1.0:
            calmer = deepcopy(document)
            calmer["load"][i]["rate"] = round(load["rate"] / 2, 2)
            yield calmer
    for i, app in enumerate(document["app"]):
        for key in ("batching", "default_output"):
            if key in app:
                plain = deepcopy(document)
                del plain["app"][i][key]
                yield plain


def _fewer(document: Document, key: str) -> Iterator[Document]:
    """Without parts of this list: halves, quarters, ..., single ones."""
    items = document.get(key, [])
    size = ceil(len(items) / 2)
    while items and size:
        for first in range(0, len(items), size):
            less = deepcopy(document)
            less[key] = items[:first] + items[first + size :]
            yield _tidy(less)
        size = 0 if size == 1 else ceil(size / 2)


def _without_apps(document: Document) -> Iterator[Document]:
    """Without an app, or a pipeline, and all that is for it."""
    for pipeline in document.get("pipeline", ()):
        name = pipeline["pipeline"]["name"]
        less = deepcopy(document)
        less["pipeline"] = [one for one in less["pipeline"] if one["pipeline"]["name"] != name]
        if less["scenario"]["policies"] == ["inferline"]:
            less["scenario"]["policies"] = ["infaas"]
        yield _of_others(less, name)
    for app in document["app"]:
        less = deepcopy(document)
        less["app"] = [one for one in less["app"] if one["name"] != app["name"]]
        less["variant"] = [one for one in less["variant"] if one["app"] != app["name"]]
        yield _of_others(less, app["name"])


def _of_others(document: Document, app: str) -> Document:
    for key in ("load", "job", "fault"):
        document[key] = [one for one in document.get(key, ()) if one.get("app") != app]
    return _tidy(document)


def _fewer_machines(document: Document) -> Iterator[Document]:
    for i, worker in enumerate(document["worker"]):
        for start in range(worker["start"] - 1, -1, -1):
            less = deepcopy(document)
            if start:
                less["worker"][i] |= {"start": start, "min": start}
            else:
                del less["worker"][i]
            yield less


def _tidy(document: Document) -> Document:
    """Without empty parts."""
    return {key: value for key, value in document.items() if value}
