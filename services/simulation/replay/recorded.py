"""What really happened, counted by the same report as a simulation: a run whose policy is "recorded"; and what it cost.

Its latency is the system's own, from arrival to answer. A simulated latency includes the way there and back, half a millisecond.
"""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from heapq import heappop, heappush
from math import ceil, inf
from typing import Any

from msgspec.structs import replace

from bus.messages.catalog import MOST_FANNED, AppRecord, PipelineEdge, PipelinePlan, PipelineRecord
from services.core.cost import listed_as, price_per_hour
from services.core.pipelines.branching import oversized
from services.core.pipelines.graph import conditional
from services.core.placement import Device
from services.core.toml import Location
from services.registrar.checks import POLICIES
from services.simulation.composites import SIGNATURE as SEVERAL
from services.simulation.replay.recording import (
    Bin,
    RecordedQuery,
    RecordedWorker,
    RecordingHead,
    ReplayError,
    with_stages,
)
from services.simulation.report import RunReport, Sample
from services.simulation.scenario.catalogue import SIGNATURE
from services.simulation.scenario.machines import ALIKE_MB, MOST, labelled
from services.simulation.scenario.model import MachineSpec
from services.simulation.scenario.pipelines import PipelineFile

RECORDED = "recorded"
DEFAULT = "(default answer)"


class RecordedRun:
    """Add the queries in the order of their arrival, then call `finished` once. only: these apps; None: all."""

    def __init__(self, head: RecordingHead, only: frozenset[str] | None, every_s: float) -> None:
        self._head, self._only = head, only
        wanted = None if only is None else with_stages(only, head.apps)
        links = {link for app in head.apps if wanted is None or app.app in wanted for link in app.links.items()}
        hardware = {one.variant: one.hardware for one in head.variants if (one.model, one.version) in links}
        self._shown = None if only is None else frozenset(hardware)
        usual = head.slo_target
        targets = {app.app: usual if app.slo_target is None else app.slo_target for app in head.apps}
        known = {app: target for app, target in targets.items() if target is not None}
        self._report = RunReport(RECORDED, head.duration_s, every_s, base=RECORDED, hardware=hardware, targets=known)
        self._open: list[tuple[float, int, RecordedQuery]] = []  # by when they ended
        self._count = 0

    def add(self, query: RecordedQuery) -> None:
        """Add a query."""
        at = query.time - self._head.begins
        self._end_until(at)
        self._report.offered(query.app, at)
        self._count += 1
        heappush(self._open, (at + (query.latency_ms or 0.0) / 1000.0, self._count, query))

    def finished(self) -> dict[str, Any]:
        """The result, as of a simulation. Unmeasured values are None."""
        self._end_until(inf)
        head, every = self._head, self._head.every_s
        cost = 0.0
        kind_of = {one.worker: kind for kind, workers in kinds_of(head).items() for one in workers}
        for i, one in enumerate(head.bins):
            spent = self._spent(one)
            cost += spent
            workers: dict[str, int] = {}
            for name in one.workers:
                kind = kind_of.get(name)
                if kind is not None:
                    workers[kind] = workers.get(kind, 0) + 1
            span = min(every, head.duration_s - i * every)
            self._report.sample(
                Sample(
                    time=i * every,
                    instances={
                        name: round(count)
                        for name, count in one.instances.items()
                        if round(count) and (self._shown is None or name in self._shown)
                    },
                    workers=workers,
                    cost_rate=spent / span if span > 0 else 0.0,
                    utilisation=one.utilisation or 0.0,
                )
            )
        result = self._report.finished(cost, 0, 0.0, 0)
        used = [one.utilisation for one in head.bins if one.utilisation is not None]
        result |= {
            "simulated": False,
            "mean_utilisation": sum(used) / len(used) if used else None,
            "scale_actions": dict(head.actions),
        }
        if not head.billed:
            result |= {"cost": None, "cost_per_1000": None, "cost_per_1000_in_time": None}
        del result["scaling"], result["jobs"], result["decisions"], result["solve_ms"]
        del result["events"], result["events_per_s"], result["open"]
        return result

    def _spent(self, one: Bin) -> float:
        return sum(cost for app, cost in one.cost.items() if self._only is None or app in self._only)

    def _end_until(self, now: float) -> None:
        while self._open and self._open[0][0] <= now:
            at, _, query = heappop(self._open)
            self._end(query, at)

    def _end(self, query: RecordedQuery, at: float) -> None:
        answered: Callable[..., None] = self._report.answered
        seconds = (query.latency_ms or 0.0) / 1000.0
        match query.outcome:
            case "ok":
                answered(query.app, at, seconds, inf, query.accuracy, query.variant or "")
            case "late":
                answered(query.app, at, seconds, -1.0, query.accuracy, query.variant or "")
            case "default":
                answered(query.app, at, seconds, inf, None, DEFAULT)
            case "refused":
                self._report.refused(query.app, at, query.code or "refused")
            case _:  # an error: neither answered nor refused
                return


# -- recorded cost as a time line
#
# Rows come as meters write them (services/monitor/devices.py): at the end of each period, for each device one row of its unused part, as
# long as the period, and the rows of its instances, which may be shorter.

NOBODY = ""


class RecordedCost:
    """Sums of cost rows. Add rows in the order of their end; those of one end by unit, the unused part first.

    A unit is all devices of a kind on a worker.
    """

    def __init__(self, begins: float, ends: float, every: float) -> None:
        self.rows = 0
        self._begins, self._ends, self._every = begins, ends, every
        count = max(1, ceil((ends - begins) / every - 1e-9))
        self._cost: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
        self._held: list[defaultdict[str, float]] = [defaultdict(float) for _ in range(count)]
        self._workers: list[set[str]] = [set() for _ in range(count)]
        self._simulated: defaultdict[str, float] = defaultdict(float)
        self._unit = ("", 0.0)
        self._period = 0.0
        self._total: defaultdict[str, float] = defaultdict(float)  # by unit, US$
        self._seconds: defaultdict[str, float] = defaultdict(float)  # by unit, of its devices
        self._imaginary: set[str] = set()

    def add(
        self,
        time: float,
        seconds: float,
        unit: str,
        app: str | None,
        variant: str | None,
        cost: float,
        *,
        simulated: bool,
    ) -> None:
        """Add a row, of the `seconds` until `time`. Its cost is spread evenly over the period."""
        if (unit, time) != self._unit:
            self._unit, self._period = (unit, time), seconds
        if variant is None:
            self._period = seconds
            self._seconds[unit] += seconds
        if simulated:
            self._imaginary.add(unit)
        self._total[unit] += cost
        period = max(self._period, seconds, 1e-9)
        start = time - period
        if time <= self._begins or start >= self._ends:
            return
        self.rows += 1
        worker = unit.rpartition("/")[0]
        first = max(0, int((start - self._begins) // self._every))
        last = min(len(self._cost) - 1, int((time - self._begins) // self._every))
        for i in range(first, last + 1):
            low = self._begins + i * self._every
            inside = min(time, low + self._every, self._ends) - max(start, low, self._begins)
            if inside <= 0:
                continue
            part = inside / period
            self._cost[i][app or NOBODY] += cost * part
            if simulated:
                self._simulated[app or NOBODY] += cost * part
            if variant is not None:
                self._held[i][variant] += seconds * part
            self._workers[i].add(worker)

    def bins(self, used: Mapping[int, float]) -> list[Bin]:
        """The time series. used: utilisation, by number of the bin."""
        found = []
        for i, (cost, held, workers) in enumerate(zip(self._cost, self._held, self._workers, strict=True)):
            span = min(self._every, self._ends - self._begins - i * self._every)
            found.append(
                Bin(
                    instances={name: seconds / span for name, seconds in sorted(held.items())},
                    workers=sorted(workers),
                    cost=dict(sorted(cost.items())),
                    utilisation=used.get(i),
                )
            )
        return found

    def simulated(self) -> dict[str, float]:
        """Cost of simulated devices, US$ by app."""
        return dict(sorted(self._simulated.items()))

    def is_simulated(self, unit: str) -> bool:
        """Whether a unit's devices are simulated."""
        return unit in self._imaginary

    def cores(self, unit: str, price: float) -> int | None:
        """Cores of each device of a unit, from their cost; None if unknown. price: US$ per hour of a core, or of a device without priced cores."""
        seconds = self._seconds.get(unit, 0.0)
        if seconds <= 0 or price <= 0:
            return None
        return max(1, round(self._total[unit] * 3600.0 / seconds / price))


# -- the recorded system as a scenario has it: workers with the same devices as kinds of machine

_AT_START = 15.0  # s after the beginning within which machines that already ran have sent a sample

Counts = Mapping[str, tuple[int, int]]  # kind: how many at time 0, and at most


def kinds_of(head: RecordingHead) -> dict[str, list[RecordedWorker]]:
    """Workers by kind of machine. Simulated devices beside real ones of their kind are left out, like their variants."""
    real = real_kinds(head)
    groups: defaultdict[tuple[tuple[str, int, int], ...], list[RecordedWorker]] = defaultdict(list)
    for worker in head.workers:
        devices = [one for one in worker.devices if not one.simulated or one.kind not in real]
        if devices:
            shape = tuple(sorted((one.kind, one.cores, round(one.memory_mb / ALIKE_MB)) for one in devices))
            groups[shape].append(replace(worker, devices=devices))
    ordered = sorted(groups.items(), key=lambda one: (-len(one[1]), one[0]))
    return labelled((min(shape, key=lambda one: (one[0] == "cpu", one[0]))[0], workers) for shape, workers in ordered)


def real_kinds(head: RecordingHead) -> set[str]:
    """The kinds of device that are real on some worker."""
    return {device.kind for worker in head.workers for device in worker.devices if not device.simulated}


def machines_of(head: RecordingHead, boot_s: float, counts: Counts) -> list[MachineSpec]:
    """Kinds of machine: as many as ran at the beginning, at most as many as ever ran at one time, unless `counts` says otherwise."""
    found = []
    groups = kinds_of(head)
    for kind in counts:
        if kind not in groups:
            raise ReplayError(
                f"--worker {kind}: no such machine was recorded; there were: {', '.join(groups) or 'none'}"
                " (--machines FILE.toml describes others)"
            )
    early = {kind: sum(one.first <= head.begins + _AT_START for one in workers) for kind, workers in groups.items()}
    if groups and not any(early.values()):  # without any machine, nothing would be served
        first = min(groups, key=lambda kind: min(one.first for one in groups[kind]))
        early[first] = 1
    for kind, workers in groups.items():
        names = {one.worker for one in workers}
        most = max((len(names.intersection(one.workers)) for one in head.bins), default=0)
        start, upper = counts.get(kind, (early[kind], max(most, early[kind], 1)))
        devices = simulated_devices(workers[0].devices)
        found.append(
            MachineSpec(
                kind=kind,
                devices=devices,
                price_per_hour=sum(
                    price_per_hour(one.kind, head.prices, one.cores)
                    for one in devices
                    if listed_as(one.kind, head.prices) in head.prices
                ),
                boot_s=boot_s,
                start=min(start, MOST),
                minimum=min(1, start),
                maximum=min(max(start, upper), MOST),
            )
        )
    if not any(one.start for one in found):
        raise ReplayError(
            "no machine runs at the begin: say --worker KIND=N with at least 1, or describe them with --machines FILE.toml"
            if groups
            else "no worker was recorded in this time: describe the machines with --machines FILE.toml"
        )
    return found


def simulated_devices(devices: Sequence[Device]) -> tuple[Device, ...]:
    """The devices with the simulator's names, all simulated."""
    seen: defaultdict[str, int] = defaultdict(int)
    found = []
    for device in devices:
        number = seen[device.kind]
        seen[device.kind] += 1
        name = device.kind if number == 0 else f"{device.kind}{number}"
        found.append(replace(device, name=name, simulated=True, address="cpu"))
    return tuple(found)


# -- pipelines and ensembles: their queries are sent, and the simulated dispatchers ask their parts

RAREST = 1e-6  # probability of an edge that no recorded query followed


Asked = Mapping[str, tuple[int, int]]


def pipelines_in(
    apps: Iterable[AppRecord], visits: Mapping[str, Mapping[str, int]], items: Mapping[str, Asked]
) -> list[PipelineFile]:
    """The pipelines among these apps. Contents are not recorded, so conditions hold as often as they did, and answers have as many items.

    visits, items: see RecordingHead.
    """
    return [
        PipelineFile(
            name=app.app,
            latency_ms=app.latency_ms or 0.0,
            slo_target=app.slo_target,
            pipeline=as_often(app.pipeline, visits.get(app.app, {}), items.get(app.app, {})),
            location=Location(f"pipeline {app.app}"),
        )
        for app in apps
        if app.pipeline is not None
    ]


def as_often(pipeline: PipelineRecord, visits: Mapping[str, int], items: Asked) -> PipelineRecord:
    """The pipeline with probabilities by which its vertices are visited as often as these, and with the items of answers that there were.

    Vertices with several edges keep what the pipeline itself says of them.
    """
    into: dict[str, int] = {}
    for edge in pipeline.edges:
        into[edge.target] = into.get(edge.target, 0) + 1
    queries = max(visits.values(), default=0)
    edges = []
    for edge in pipeline.edges:
        before = visits.get(edge.source, 0)
        if before and edge.items:
            edge = _with_items(edge, items, queries)
        elif before and conditional(edge) and into[edge.target] == 1:
            share = min(1.0, max(RAREST, visits.get(edge.target, 0) / before))
            edge = replace(edge, probability=share)
        edges.append(edge)
    return replace(pipeline, edges=_balanced(edges))


def _with_items(edge: PipelineEdge, items: Asked, queries: int) -> PipelineEdge:
    """Whether it is followed is in the number of items, too: none where not.

    Of n answers with m items each in the mean, Var(items) = m · dispersion · E(n) + m² · Var(n).
    """
    (answers, several), (asked, squares) = (items.get(name, (0, 0)) for name in (edge.source, edge.target))
    mean = max(RAREST, asked / answers) if answers else RAREST
    varied = squares / queries - (asked / queries) ** 2 - mean**2 * (several / queries - (answers / queries) ** 2)
    dispersion = varied / (mean * answers / queries) if asked else 1.0
    return replace(
        edge,
        probability=None,
        items_mean=min(mean, float(MOST_FANNED)),
        items_dispersion=min(max(0.0, dispersion), float(MOST_FANNED)),
    )


def _balanced(edges: list[PipelineEdge]) -> list[PipelineEdge]:
    """The same, where no two that exclude each other add up to more than 1."""
    pair = next((found for one in edges if (found := oversized([e for e in edges if e.source == one.source]))), None)
    if pair is None:
        return edges
    total = sum(edge.probability or 0.0 for edge in pair)
    return _balanced(
        [replace(one, probability=(one.probability or 0.0) / total) if one in pair else one for one in edges]
    )


def plans_of(apps: Iterable[AppRecord], hardware: Collection[str], notes: list[str]) -> dict[str, PipelinePlan]:
    """The plans that are deployed, by pipeline. hardware: kinds of device that there are."""
    found: dict[str, PipelinePlan] = {}
    for app in apps:
        if app.plan is None:
            continue
        absent = sorted({stage.hardware for stage in app.plan.vertices.values()}.difference(hardware))
        if absent:
            notes.append(f"no machine has {', '.join(absent)}: {app.app} runs without its plan")
        else:
            found[app.app] = app.plan
    return found


def answering(apps: Iterable[AppRecord], notes: list[str], lacking: list[str]) -> tuple[AppRecord, ...]:
    """The apps as they answer here, without pipelines. lacking: what is not replayed as it was."""
    apps = list(apps)
    stages = {vertex.app for app in apps if app.pipeline is not None for vertex in app.pipeline.vertices}
    found, alone = [], []
    for app in apps:
        if app.pipeline is not None:
            continue
        policy = None if app.selection is None else app.selection.policy
        several = policy in POLICIES and app.app not in stages
        if policy is not None and not several:
            alone.append(app.app)
        selection = app.selection if several else None
        found.append(replace(app, selection=selection, signature=SEVERAL if several else SIGNATURE))
    if alone:
        text = f"of {', '.join(alone)} one model answers here instead of several: stages and policies of users' own are not replayed"
        notes.append(text)
        lacking.append(text)
    taught = [app.app for app in found if app.selection is not None]
    if taught:
        notes.append(f"the policies of {', '.join(taught)} begin without what feedback had taught them")
    return tuple(found)
