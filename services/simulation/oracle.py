"""What one who knows the demand could reach at best: the least cost that meets the targets, and the most accuracy. True
bounds.

Time is cut into windows of ten seconds. Of each window the queries of each app are known; those whose objective reaches
beyond it may be answered later. Devices of a kind are pooled. A query takes the device time of its variant's best batch
within the objective; nobody does better. Memory, load times of models on machines that are there, waits and whole
instances are left out. So no policy beats these figures while it meets the targets, by answers of models (no default
outputs) that lack no member.

An ensemble's query is asked of each of its members, with exp3 of any one. A pipeline's query is asked of each stage
that it cannot do without, as often as it visits that in the mean; each stage may take the whole objective. Queries that
are missed may be those with the most visits. An answer's accuracy is the mean of its members', and at most that of each
stage, as registered; of members of which labels come back, it may be 1.

Least cost: the number of machines of each kind that are ready in a window is whole. A machine is paid from the order,
which is at time 0 at the earliest, so it costs its boot and the shortest load more than the time that it is ready. A
machine that is ready in a part of a window counts as ready in all of it; therefore a window is taken off what its start
costs, and one where it ends. This is a mixed-integer program.

Most accuracy: the machines are fixed. Shares of their time go to variants, and the targets' share of all queries is
answered, or as many as the devices carry, whichever is less. This is a linear program.
"""

import os
import resource
import sys
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import psycopg
from msgspec.structs import replace
from numpy.typing import NDArray

from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.public import Requirements
from services.core.cost import LatencyTable
from services.core.pipelines.branching import visits
from services.core.pipelines.graph import PipelineGraph
from services.core.planning.fleet import LinearProgram, Unsolved
from services.core.toml import TomlError
from services.simulation.replay.build import ReplayOptions, build
from services.simulation.replay.database import TimeRange, database
from services.simulation.replay.recording import ReplayError, with_stages
from services.simulation.scenario.model import Scenario
from services.simulation.workload import at_once

WINDOW_S = 10.0
SAMPLE = 10_000  # queries by which it is known how often each visits a stage
SIGMAS = 4.0  # by so many standard errors fewer visits come than in the mean
LIMIT_S = 60.0  # for the mixed-integer program; its bound holds whenever it ends
GAP = 0.01
_SLACK_S = 0.0005  # that an answer may be late, because it travels


class NoBound(ValueError):
    """Of this scenario it is not known what is best. The text says why."""


class Bound(NamedTuple):
    """cost: US$, at least; None where it is not the goal. accuracy: of the answers in time, at most; the same. in_time: the share of queries
    answered in time, at most. left_out: apps whose work is not known and counts as none, with the reasons.
    """

    cost: float | None
    accuracy: float | None
    in_time: float
    left_out: tuple[str, ...] = ()


class Demand(NamedTuple):
    """queries: by stream and window. late: those so far that may also be answered after the window. needs, items: of each stream's queries. labelled:
    whether labels of them come back.
    """

    apps: list[str]
    needs: list[Requirements]
    items: list[int]
    labelled: list[bool]
    queries: NDArray[np.float64]
    late: NDArray[np.float64]


class PartDemand(NamedTuple):
    """What a stream's queries ask of one app, or of one of its members. need: of a visit. visits: of a query, in the mean. free, slope: in visits of the
    mean query, what may be missed: so much for each query, and for each that is missed. equal: each query has equally many.
    stage: the same for all members of an ensemble.
    """

    records: list[VariantRecord]
    need: Requirements
    visits: float
    free: float
    slope: float
    equal: bool
    stage: int


def _bound(program: LinearProgram, limit_s: float = LIMIT_S) -> float:
    """A value that no solution is below."""
    found = program.result({"time_limit": limit_s, "mip_rel_gap": GAP})
    if found.status:
        raise NoBound(
            f"even who knows the demand does not meet the targets with these machines and variants ({found.message})"
        )
    return found.bound


def demand_of(scenario: Scenario, window_s: float = WINDOW_S) -> Demand:
    """The queries that the simulator sends, by window. Those without an objective have one window's."""
    count = max(1, int(np.ceil(scenario.duration_s / window_s)))
    ends = np.minimum(window_s * np.arange(1, count + 1), scenario.duration_s)
    found = Demand([], [], [], [], np.zeros((0, count)), np.zeros((0, count)))
    queries, late = [], []
    sources = np.random.SeedSequence(scenario.seed).spawn(len(scenario.loads))
    for load, source in zip(scenario.loads, sources, strict=True):
        times, which = at_once(load, scenario.duration_s, np.random.default_rng(source))
        for i, app in enumerate(load.apps):
            need = load.needs or scenario.needs[app]
            reach = window_s if need.latency_ms is None else need.latency_ms / 1000
            mine = np.sort(times[which == i])
            come = np.searchsorted(mine, [*ends[:-1], np.inf])
            found.apps.append(app)
            found.needs.append(need)
            found.items.append(load.items)
            found.labelled.append(load.feedback > 0)
            queries.append(np.diff(come, prepend=0).astype(float))
            late.append((come - np.searchsorted(mine, ends - reach)).astype(float))
    return found._replace(queries=np.array(queries), late=np.array(late))


def parts_of(scenario: Scenario, app: str, need: Requirements, target: float, queries: float) -> list[PartDemand]:
    """What so many queries ask of whom, of which the target's share is answered in time."""
    apps = {one.app: one for one in scenario.apps}
    found: list[PartDemand] = []

    def ask(name: str, need: Requirements, asked: NDArray[np.int64]) -> None:
        one = apps[name]
        if one.pipeline is not None:
            graph = PipelineGraph(one.pipeline)
            visited = visits(graph, np.arange(SAMPLE, dtype=np.uint64))
            for vertex in one.pipeline.vertices:
                if not graph.spared & {vertex.name, *graph.ancestors(vertex.name)}:
                    ask(vertex.app, replace(need, accuracy=vertex.accuracy), asked * visited[vertex.name])
        elif asked.any() and not _keeps_answers(one):
            stage = len(found)
            found.extend(PartDemand(records, wish, *missing(asked), stage) for records, wish in members(one, need))

    def members(one: AppRecord, need: Requirements) -> Iterator[tuple[list[VariantRecord], Requirements]]:
        records, rules = serving(scenario, one.app), one.selection
        if rules is None or rules.policy is None:
            yield records, need
            return
        models = sorted({record.model for record in records}.intersection(rules.members or one.links))
        free = replace(need, accuracy=None)  # a member is asked whatever it reaches
        each = [[record for record in records if record.model == model] for model in models]
        if rules.policy == "exp3":
            each = [[record for mine in each for record in mine]]
        able = [mine for mine in each if any(seconds_of(record, free) is not None for record in mine)]
        yield from ((mine, free) for mine in able or each)  # who is never in time, is not waited for

    def missing(asked: NDArray[np.int64]) -> tuple[float, float, float, bool]:
        """As in `PartDemand`, after the app's need. What the least of the queries visit is convex in their share: its tangent at the target holds everywhere."""
        mean = float(asked.mean())
        if asked.min() == asked.max():
            return mean, 0.0, 1.0, True
        least, at = np.sort(asked), int(target * SAMPLE)
        slope = float(least[min(at, SAMPLE - 1)]) / mean
        chance = SIGMAS * float(asked.std()) / mean * (1 / SAMPLE + 1 / max(1.0, queries)) ** 0.5
        return (
            mean,
            float(least[at:].mean()) / mean * (1 - at / SAMPLE) - slope * (1 - at / SAMPLE) + chance,
            slope,
            False,
        )

    ask(app, need, np.ones(SAMPLE, np.int64))
    return found


def _keeps_answers(app: AppRecord) -> bool:
    """Whether some of an app's queries take no work, nobody knows how many."""
    return app.selection is not None and app.selection.cache_mb > 0


def seconds_of(record: VariantRecord, need: Requirements) -> float | None:
    """Core-seconds of an item in the best batch that is in time, or device-seconds; None: never in time, or not accurate enough."""
    if record.accuracy is not None and need.accuracy is not None and record.accuracy < need.accuracy:
        return None
    table = LatencyTable(record)
    limit = np.inf if need.latency_ms is None else need.latency_ms / 1000 + _SLACK_S
    cores = record.threads if record.hardware == "cpu" else 1
    times = [cores * table.seconds(n) / n for n in range(1, record.max_batch + 1) if table.seconds(n) <= limit]
    return min(times, default=None)


def bound(scenario: Scenario, *, limit_s: float = LIMIT_S) -> Bound:
    """The best that meets the targets. limit_s: of the mixed-integer program."""
    work = _work_of(scenario)
    return _most_accuracy(work) if scenario.objective == "accuracy" else _least_cost(work, limit_s)


def unknown(scenario: Scenario) -> str | None:
    """Why no bound of this scenario is known; None: one is, or the program itself says so."""
    if scenario.cost.meter != "worker":
        return f"it pays machines, and [cost] meter is {scenario.cost.meter!r}: leave it out"
    return None


def best(scenario: Scenario, *, limit_s: float = LIMIT_S) -> Bound:
    """Both bounds, each for itself, with the first policy's machines and targets: the least cost, and the most accuracy of the answers that the
    targets ask for with all of them. Without a cost where the targets cannot be met.
    """
    work = _work_of(scenario)
    most = _most_accuracy(work)
    try:
        return most._replace(cost=_least_cost(work, limit_s).cost)
    except NoBound:
        return most


def _failing(scenario: Scenario) -> tuple[bool, int]:
    """Whether faults leave fewer machines than the least, which are not paid then; and how many join that nobody has ordered."""
    kinds = [fault.kind for fault in scenario.faults]
    return any(kind in ("worker-dies", "process-dies", "boot-never") for kind in kinds), kinds.count("worker-joins")


def targets_of(scenario: Scenario) -> dict[str, float]:
    """The share of each app's queries to be answered in time."""
    default = scenario.policies[0].settings.autoscaler.slo_target
    return {app.app: app.slo_target or default for app in scenario.apps}


class _Work(NamedTuple):
    """targets, parts: of each stream. left_out: as in `Bound`."""

    scenario: Scenario
    demand: Demand
    targets: list[float]
    parts: list[list[PartDemand]]
    left_out: tuple[str, ...]

    def seconds(self, stream: int, part: PartDemand) -> Iterator[tuple[VariantRecord, float]]:
        """The variants that may answer this part, and their core-seconds for a query in the mean."""
        for record in part.records:
            seconds = seconds_of(record, part.need)
            if seconds is not None:
                yield record, seconds * part.visits * self.demand.items[stream]


def _work_of(scenario: Scenario) -> _Work:
    demand, of_app = demand_of(scenario), targets_of(scenario)
    targets = [of_app[app] for app in demand.apps]
    sums = demand.queries.sum(axis=1).tolist()
    streams = zip(demand.apps, demand.needs, targets, sums, strict=True)
    parts = [parts_of(scenario, *stream) for stream in streams]
    asked = with_stages(demand.apps, scenario.apps)
    kept = [app.app for app in scenario.apps if app.app in asked and _keeps_answers(app)]
    left_out = tuple(f"app {app} is left out: it keeps answers, and what has one takes no work" for app in kept)
    return _Work(scenario, demand, targets, parts, left_out)


Used = defaultdict[
    tuple[str, int], list[tuple[int, float]]
]  # by kind of device and window: columns, and seconds of each of theirs


def _serve(
    program: LinearProgram, demand: Demand, stream: int, part: PartDemand, ways: Sequence[tuple[str, float]], used: Used, lost: int
) -> list[list[int]]:  # fmt: skip
    """Rows by which a part of a stream's queries is served or missed, in their window or a later one. ways: kinds of device, and seconds of a query there.
    lost: the column of the stream's missed queries. Returns the columns of each way.
    """
    queries, late = demand.queries[stream], demand.late[stream]
    found: list[list[int]] = [[] for _ in ways]
    misses, before = [(lost, -part.slope)], None
    for window, come in enumerate(queries.tolist()):
        later, missed = program.column(high=late[window]), program.column()
        entries = [(missed, 1.0), (later, 1.0)]
        if before is not None:
            entries.append((before, -1.0))
        for (kind, seconds), columns in zip(ways, found, strict=True):
            columns.append(program.column())
            entries.append((columns[-1], 1.0))
            used[kind, window].append((columns[-1], seconds))
        program.row(entries, come, come)
        misses.append((missed, 1.0))
        before = later
    program.row(misses, 0.0 if part.equal else -np.inf, part.free * float(queries.sum()))
    return found


def _least_cost(work: _Work, limit_s: float) -> Bound:
    program, used, scenario = LinearProgram(), Used(list), work.scenario
    for stream, target in enumerate(work.targets):
        lost = program.column(high=(1 - target) * float(work.demand.queries[stream].sum()))
        for part in work.parts[stream]:
            fastest: dict[str, float] = {}
            for record, seconds in work.seconds(stream, part):
                fastest[record.hardware] = min(seconds, fastest.get(record.hardware, np.inf))
            _serve(program, work.demand, stream, part, list(fastest.items()), used, lost)
    dies, joined = _failing(scenario)
    for machine in scenario.policies[0].machines:
        price = machine.price_per_hour / 3600
        kinds = {device.kind for device in machine.devices}
        loads = [v.profile.load_ms / 1000 for v in scenario.variants if v.hardware in kinds]
        lead = machine.boot_s + min(loads, default=0.0)
        before: int | None = None
        for window in range(work.demand.queries.shape[1]):
            begins = window * WINDOW_S
            width = min(WINDOW_S, scenario.duration_s - begins)
            most = joined + (machine.start if begins + width <= lead else machine.maximum)
            least = 0 if dies else machine.start if window == 0 else machine.minimum
            ready = program.column(price * width, max(least, most), least, whole=True)
            if before is not None:
                starts = program.column(price * max(0.0, lead - WINDOW_S))
                ends = program.column(-price * min(WINDOW_S, max(0.0, lead - WINDOW_S)))
                program.row([(ready, 1.0), (before, -1.0), (starts, -1.0), (ends, 1.0)], 0.0, 0.0)
            before = ready
            for kind in kinds:
                cores = sum(device.cores for device in machine.devices if device.kind == kind)
                used[kind, window].append((ready, -float(cores) * WINDOW_S))
    for entries in used.values():
        program.row(entries, -np.inf, 0.0)
    return Bound(_bound(program, limit_s), None, 1.0, work.left_out)


def _most_accuracy(work: _Work) -> Bound:
    demand = work.demand
    cores: dict[str, float] = {}
    for machine in work.scenario.policies[0].machines:
        for device in machine.devices:
            cores[device.kind] = cores.get(device.kind, 0.0) + device.cores * (
                machine.maximum + _failing(work.scenario)[1]
            )
    sums = demand.queries.sum(axis=1).tolist()
    wanted = sum(target * queries for target, queries in zip(work.targets, sums, strict=True))
    top = max((record.accuracy or 0.0 for record in work.scenario.variants), default=0.0)

    def program_of(in_time: float | None) -> LinearProgram:
        """Least missed queries; or, with so many in time, most accuracy. Answers whose accuracy nobody knows do not count: as if they had the best."""
        program, used = LinearProgram(), Used(list)
        missed = [program.column(1.0 if in_time is None else 0.0, high=queries) for queries in sums]
        for stream, (parts, lost) in enumerate(zip(work.parts, missed, strict=True)):
            right = program.column(0.0 if in_time is None else -1.0)  # the sum of the answers' accuracies
            most = 1.0 if demand.labelled[stream] or not parts else top
            program.row([(right, 1.0), (lost, most)], -np.inf, most * sums[stream])
            stages: dict[int, list[tuple[int, float]]] = {}
            for part in parts:
                found = list(work.seconds(stream, part))
                ways = [(record.hardware, seconds) for record, seconds in found]
                served = _serve(program, demand, stream, part, ways, used, lost)
                if part.equal and not demand.labelled[stream]:
                    share = 1 / sum(other.stage == part.stage for other in parts)
                    values = (share * (top if record.accuracy is None else record.accuracy) for record, _ in found)
                    gained = [(one, -value) for columns, value in zip(served, values, strict=True) for one in columns]
                    stages.setdefault(part.stage, [(right, 1.0)]).extend(gained)
            for entries in stages.values():
                program.row(entries, -np.inf, 0.0)
        for (kind, _), entries in used.items():
            program.row(entries, -np.inf, cores.get(kind, 0.0) * WINDOW_S)
        if in_time is not None:
            lacking = sum(sums) - in_time
            program.row([(column, 1.0) for column in missed], lacking, lacking)
        return program

    most = sum(sums) - max(0.0, _bound(program_of(None)))
    in_time = min(wanted, most * (1 - 1e-9))
    accuracy = -_bound(program_of(in_time)) / in_time if in_time else None
    return Bound(None, accuracy, most / max(1.0, sum(sums)), work.left_out)


def serving(scenario: Scenario, app: str) -> list[VariantRecord]:
    """The variants that serve an app."""
    links = next(one.links for one in scenario.apps if one.app == app)
    return [one for one in scenario.variants if all(links.get(model) == version for model, version in one.versions)]


# -- a day of a running system, in a process of its own

MEMORY = 4 * 2**30  # bytes of addresses that it may take


def of_range(dsn: str, began: float, ended: float) -> tuple[float, str]:
    """US$ per hour that the load of this time (Unix seconds) costs at least, and how what was paid compares with it, in words; 0: why not."""
    try:
        with database(dsn, TimeRange(began, ended)) as source:
            found = build(source, ReplayOptions(policies=("infaas",)))
        lacking = "" if found.cost["comparable"] else str(found.cost["text"]).rpartition("not comparable: ")[2]
        why = unknown(found.scenario) or ("" if found.recorded["cost"] else str(found.cost["text"]))
        least = None if why else best(found.scenario)
    except (ReplayError, TomlError, NoBound, Unsolved) as error:
        return 0.0, " ".join(str(error).split())
    if least is None or not least.cost:
        return 0.0, why or "even who knows the load does not meet the targets with these machines and variants"
    real = found.recorded
    said = f"{real['cost'] / least.cost:.2f} times the least cost"
    if least.accuracy and real["effective_accuracy"] is not None:
        said += f", {real['effective_accuracy'] / least.accuracy:.1%} of the best accuracy"
    missed, hours = real["slo_violation_ratio"], found.scenario.duration_s / 3600
    said += f", {missed or 0.0:.2%} of {real['queries']:,} queries missed in {hours:.3g} h"
    return least.cost / hours, "; ".join(filter(None, (said, *least.left_out, lacking)))


if __name__ == "__main__":
    answer = os.dup(1)  # for that alone: HiGHS prints a line within some searches
    os.dup2(2, 1)
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    try:
        os.write(answer, msgspec.json.encode(of_range(os.environ["INFAAS_STORE__DSN"], *map(float, sys.argv[1:3]))))
    except psycopg.Error as error:
        print(error, file=sys.stderr)
        sys.exit(os.EX_TEMPFAIL)  # another time it may work
