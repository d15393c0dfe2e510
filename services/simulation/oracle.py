"""What one who knows the demand could reach at best: the least cost that meets the targets, and the most accuracy. True bounds.

Time is cut into windows of ten seconds. Of each window the queries of each app are known; those of its last moments, for which
the objective reaches into the next window, may be answered there. Devices of a kind are pooled. A query takes the device time of its
variant's best batch within the objective; nobody does better. Memory, load times of models on machines that are there, waits
and whole instances are left out. So no policy beats these figures while it meets the targets.

Least cost: the number of machines of each kind that are ready in a window is whole. A machine is paid from the order, which is at time 0
at the earliest, so it costs its boot and the shortest load more than the time that it is ready. A machine that is ready in a part of
a window counts as ready in all of it; therefore a window is taken off what its start costs, and one where it ends. This is a
mixed-integer program.

Most accuracy: the machines are fixed. Shares of their time go to variants, and the targets' share of all queries is answered, or as
many as the devices carry, whichever is less. This is a linear program.
"""

import os
import resource
import sys
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import psycopg
from numpy.typing import NDArray

from bus.messages.catalog import VariantRecord
from bus.messages.public import Requirements
from services.core.cost import LatencyTable
from services.core.planning.fleet import LinearProgram, Unsolved
from services.core.toml import TomlError
from services.simulation.replay.build import ReplayOptions, build
from services.simulation.replay.database import TimeRange, database
from services.simulation.replay.recording import NothingRecorded, ReplayError
from services.simulation.scenario.model import Scenario
from services.simulation.workload import at_once

WINDOW_S = 10.0
LIMIT_S = 60.0  # for the mixed-integer program; its bound holds whenever it ends
GAP = 0.01
_SLACK_S = 0.0005  # that an answer may be late, because it travels


class NoBound(ValueError):
    """Of this scenario it is not known what is best. The text says why."""


class Bound(NamedTuple):
    """cost: US$, at least; None where it is not the goal. accuracy: of the answers in time, at most; the same. in_time: the share of queries
    answered in time, at most.
    """

    cost: float | None
    accuracy: float | None
    in_time: float


class Demand(NamedTuple):
    """queries: by stream and window. late: those of them that may also be answered after the window. needs: of each stream's queries."""

    apps: list[str]
    needs: list[Requirements]
    queries: NDArray[np.float64]
    late: NDArray[np.float64]


def _bound(program: LinearProgram, limit_s: float = LIMIT_S) -> float:
    """A value that no solution is below."""
    found = program.result({"time_limit": limit_s, "mip_rel_gap": GAP})
    if found.status:
        raise NoBound(
            f"even who knows the demand does not meet the targets with these machines and variants ({found.message})"
        )
    return found.bound


def demand_of(scenario: Scenario, window_s: float = WINDOW_S) -> Demand:
    """The queries that the simulator sends, by window."""
    count = max(1, int(np.ceil(scenario.duration_s / window_s)))
    ends = np.minimum(window_s * np.arange(1, count + 1), scenario.duration_s)
    apps: list[str] = []
    needs: list[Requirements] = []
    queries: list[NDArray[np.float64]] = []
    late: list[NDArray[np.float64]] = []
    sources = np.random.SeedSequence(scenario.seed).spawn(len(scenario.loads))
    for load, source in zip(scenario.loads, sources, strict=True):
        times, which = at_once(load, scenario.duration_s, np.random.default_rng(source))
        windows = np.minimum((times // window_s).astype(int), count - 1)
        for i, app in enumerate(load.apps):
            need = load.needs or scenario.needs[app]
            reach = window_s if need.latency_ms is None else need.latency_ms / 1000
            mine = which == i
            over = mine & (times + reach >= ends[windows])
            apps.append(app)
            needs.append(need)
            queries.append(load.items * np.bincount(windows[mine], minlength=count).astype(float))
            late.append(load.items * np.bincount(windows[over], minlength=count).astype(float))
    return Demand(apps, needs, np.array(queries), np.array(late))


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
    demand = demand_of(scenario)
    of_app = targets_of(scenario)
    targets = [of_app[app] for app in demand.apps]
    if scenario.objective == "accuracy":
        return _most_accuracy(scenario, demand, targets)
    return _least_cost(scenario, demand, targets, limit_s)


def unknown(scenario: Scenario) -> str | None:
    """Why no bound of this scenario is known; None: one is, or the program itself says so."""
    joint = next((one.app for one in scenario.apps if one.pipeline is not None or one.selection is not None), None)
    if joint is not None:
        return f"app {joint} is a pipeline or has a policy of members: the oracle knows apps that one variant answers"
    if scenario.cost.meter != "worker":
        return f"it pays machines, and [cost] meter is {scenario.cost.meter!r}: leave it out"
    return None


def best(scenario: Scenario, *, limit_s: float = LIMIT_S) -> Bound:
    """Both bounds, each for itself, with the first policy's machines and targets: the least cost, and the most accuracy of the answers that the
    targets ask for with all of them. Without a cost where the targets cannot be met.
    """
    demand, of_app = demand_of(scenario), targets_of(scenario)
    targets = [of_app[app] for app in demand.apps]
    most = _most_accuracy(scenario, demand, targets)
    try:
        return most._replace(cost=_least_cost(scenario, demand, targets, limit_s).cost)
    except NoBound:
        return most


def targets_of(scenario: Scenario) -> dict[str, float]:
    """The share of each app's queries to be answered in time."""
    default = scenario.policies[0].settings.autoscaler.slo_target
    return {app.app: app.slo_target or default for app in scenario.apps}


def _flow(
    program: LinearProgram, demand: Demand, stream: int, served: Sequence[Sequence[tuple[int, float]]]
) -> list[int]:
    """Rows by which a stream's queries are served or missed, in their window or the next. Returns the columns of misses."""
    missed, before = [], None
    for window, queries in enumerate(demand.queries[stream]):
        later = program.column(high=demand.late[stream, window])
        lost = program.column(high=queries)
        missed.append(lost)
        entries = [*served[window], (lost, 1.0), (later, 1.0)]
        if before is not None:
            entries.append((before, -1.0))
        program.row(entries, queries, queries)
        before = later
    return missed


def _least_cost(scenario: Scenario, demand: Demand, targets: Sequence[float], limit_s: float) -> Bound:
    program = LinearProgram()
    machines = scenario.policies[0].machines
    count = demand.queries.shape[1]
    fastest: dict[tuple[int, str], float] = {}  # of each stream, by kind of device
    for stream, (app, need) in enumerate(zip(demand.apps, demand.needs, strict=True)):
        for record in serving(scenario, app):
            seconds = seconds_of(record, need)
            if seconds is not None:
                key = stream, record.hardware
                fastest[key] = min(seconds, fastest.get(key, np.inf))
    served: list[list[list[tuple[int, float]]]] = [[[] for _ in range(count)] for _ in demand.apps]
    for machine in machines:
        price = machine.price_per_hour / 3600
        kinds = {device.kind for device in machine.devices}
        loads = [v.profile.load_ms / 1000 for v in scenario.variants if v.hardware in kinds]
        lead = machine.boot_s + min(loads, default=0.0)
        before: int | None = None
        for window in range(count):
            begins = window * WINDOW_S
            width = min(WINDOW_S, scenario.duration_s - begins)
            most = machine.start if begins + width <= lead else machine.maximum
            least = machine.start if window == 0 else machine.minimum
            ready = program.column(price * width, max(least, most), least, whole=True)
            if before is not None:
                starts = program.column(price * max(0.0, lead - WINDOW_S))
                ends = program.column(-price * min(WINDOW_S, max(0.0, lead - WINDOW_S)))
                program.row([(ready, 1.0), (before, -1.0), (starts, -1.0), (ends, 1.0)], 0.0, 0.0)
            before = ready
            for kind in kinds:
                cores = sum(device.cores for device in machine.devices if device.kind == kind)
                entries = [(ready, -float(cores) * WINDOW_S)]
                for stream in range(len(demand.apps)):
                    if (stream, kind) in fastest:
                        column = program.column()
                        served[stream][window].append((column, 1.0))
                        entries.append((column, fastest[stream, kind]))
                program.row(entries, -np.inf, 0.0)
    for stream, target in enumerate(targets):
        missed = _flow(program, demand, stream, served[stream])
        program.row([(column, 1.0) for column in missed], 0.0, (1 - target) * float(demand.queries[stream].sum()))
    return Bound(_bound(program, limit_s), None, 1.0)


def _most_accuracy(scenario: Scenario, demand: Demand, targets: Sequence[float]) -> Bound:
    count = demand.queries.shape[1]
    cores: dict[str, float] = {}
    for machine in scenario.policies[0].machines:
        for device in machine.devices:
            cores[device.kind] = cores.get(device.kind, 0.0) + device.cores * machine.maximum
    total = float(demand.queries.sum())
    wanted = sum(target * float(row.sum()) for target, row in zip(targets, demand.queries, strict=True))

    def program_of(in_time: float | None) -> LinearProgram:
        """Least missed queries; or, with so many in time, most accuracy."""
        program = LinearProgram()
        used: dict[tuple[str, int], list[tuple[int, float]]] = {}
        missed: list[int] = []
        for stream, (app, need) in enumerate(zip(demand.apps, demand.needs, strict=True)):
            served: list[list[tuple[int, float]]] = [[] for _ in range(count)]
            for record in serving(scenario, app):
                seconds = seconds_of(record, need)
                if seconds is None or record.hardware not in cores:
                    continue
                for window in range(count):
                    column = program.column(0.0 if in_time is None else -(record.accuracy or 0.0))
                    served[window].append((column, 1.0))
                    used.setdefault((record.hardware, window), []).append((column, seconds))
            missed += _flow(program, demand, stream, served)
        for (kind, _), entries in used.items():
            program.row(entries, -np.inf, cores[kind] * WINDOW_S)
        if in_time is None:
            for column in missed:
                program.cost[column] = 1.0
        else:
            program.row([(column, 1.0) for column in missed], total - in_time, total - in_time)
        return program

    most = total - max(0.0, _bound(program_of(None)))
    in_time = min(wanted, most * (1 - 1e-9))
    accuracy = -_bound(program_of(in_time)) / in_time
    return Bound(None, accuracy, most / total)


def serving(scenario: Scenario, app: str) -> list[VariantRecord]:
    """The variants that serve an app."""
    links = next(one.links for one in scenario.apps if one.app == app)
    return [record for record in scenario.variants if links.get(record.model) == record.version]


# -- a day of a running system, in a process of its own

MEMORY = 4 * 2**30  # bytes of addresses that it may take


def of_range(dsn: str, began: float, ended: float) -> tuple[float, str]:
    """US$ per hour that the load of this time (Unix seconds) costs at least, and how what was paid compares with it, in words; 0: why not."""
    try:
        with database(dsn, TimeRange(began, ended)) as source:
            found = build(source, ReplayOptions(policies=("infaas",)))
        why = unknown(found.scenario) or ("" if found.cost["comparable"] else str(found.cost["text"]))
        least = None if why else best(found.scenario)
    except NothingRecorded:
        return 0.0, "no query came"
    except (ReplayError, TomlError, NoBound, Unsolved, psycopg.Error) as error:
        return 0.0, " ".join(str(error).split())
    if least is None or not least.cost:
        return 0.0, why or "even who knows the load does not meet the targets with these machines and variants"
    real = found.recorded
    said = f"{real['cost'] / least.cost:.2f} times the least cost"
    if least.accuracy and real["effective_accuracy"] is not None:
        said += f", {real['effective_accuracy'] / least.accuracy:.1%} of the best accuracy"
    missed, hours = real["slo_violation_ratio"], found.scenario.duration_s / 3600
    return least.cost / hours, f"{said}, {missed or 0.0:.2%} of {real['queries']:,} queries missed in {hours:.3g} h"


if __name__ == "__main__":
    os.nice(19)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    print(msgspec.json.encode(of_range(os.environ["INFAAS_STORE__DSN"], *map(float, sys.argv[1:3]))).decode())
