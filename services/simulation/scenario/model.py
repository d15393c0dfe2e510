"""A scenario as the simulator runs it: complete and checked (docs/scenarios.md). Pure data.

Times are seconds from the scenario's start, rates are in queries/s, money in US$.
"""

from typing import Annotated, Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.fields import SHARE, Named, Number
from bus.messages.catalog import AppRecord, BatchingRule, ModelRecord, PipelinePlan, VariantRecord
from bus.messages.public import Requirements
from services.core.placement import Device
from services.core.settings import Settings

Arrivals = Literal["poisson", "gamma", "uniform", "mmpp", "trace", "times"]
FaultKind = Literal[
    "worker-dies", "worker-joins", "device-slow", "load-fails", "load-hangs", "load-slow", "profile-wrong", "model-errs",
    "messages-delayed", "link-clogged", "link-lost", "process-stopped", "process-dies", "watch-late", "events-twice", "ack-lost",
    "stream-down", "clock-off", "boot-late", "boot-never", "boot-twice", "lease-late", "query-resent",
    "query-cancelled", "labels-late", "change",
]  # fmt: skip
Direction = Literal["in", "out", "both"]
Change = Literal["app-deleted", "model-deleted", "version", "release", "mirror", "target", "plan", "setting"]
Objective = Literal["cost", "accuracy"]
Times = NDArray[np.float64]


# What a scenario's queries may ask for. The context is a load's own, and a deadline is a moment that no file knows.
NEEDS = tuple(name for name in Requirements.__struct_fields__ if name not in ("context", "deadline"))

BEGINS = 1_000_000.0  # the clock at a scenario's time 0


class WorkloadSpec(Struct, frozen=True, kw_only=True):
    """One stream of queries, spread over `apps` by `shares` (which add up to 1).

    rate: (second, queries/s) points, linear between them, constant beyond. cv: standard deviation / mean of the gaps (gamma).
    rates, dwell_s: queries/s and mean stay of an MMPP's states. counts: queries in each line of a trace; a line is seconds_per_line long.
    range_qps: (lowest, highest) rate to which the counts are mapped. times: the arrivals, rising. needs: of these queries; None: as
    their app. items: in each query. deadline: whether they say by when they need an answer, a time, in place of latency_ms. Of apps with several
    models that answer together: repeats: share of the queries with the inputs of an earlier one; feedback: share of the answers whose labels are sent back; context: that the queries name.
    """

    apps: tuple[str, ...]
    shares: tuple[float, ...]
    arrivals: Arrivals = "poisson"
    rate: tuple[tuple[float, float], ...] = ()
    cv: float = 1.0
    rates: tuple[float, ...] = ()
    dwell_s: tuple[float, ...] = ()
    counts: Times | None = None
    seconds_per_line: float = 1.0
    range_qps: tuple[float, float] | None = None
    times: Times | None = None
    needs: Requirements | None = None
    items: int = 1
    deadline: bool = False
    repeats: float = 0.0
    feedback: float = 0.0
    context: str | None = None


class MachineSpec(Struct, frozen=True, kw_only=True):
    """A kind of machine. start: number at time 0. The VM-autoscaler keeps the number between minimum and maximum.

    devices: simulated, named after their kind ("cpu", "gpu", "gpu1", ...). boot_s: from the order to the first heartbeat.
    workers: names of those that run at time 0; left out: KIND-0, KIND-1, ...
    """

    kind: str
    devices: tuple[Device, ...]
    price_per_hour: float
    boot_s: float = 0.0
    start: int = 0
    minimum: int = 0
    maximum: int = 0
    workers: tuple[str, ...] = ()


class JobSpec(Struct, frozen=True, kw_only=True):
    """An offline job: `inputs` items for an app, submitted at `at_s`. accuracy, metric, model, variant: what it asks for."""

    app: str
    at_s: Annotated[float, Number()] = 0.0
    inputs: Annotated[int, Number(1, 10**8)]
    accuracy: Annotated[float, SHARE] = 0.0
    metric: str | None = None
    model: str | None = None
    variant: str | None = None


class FaultSpec(Struct, frozen=True, kw_only=True):
    """A fault from at_s until until_s.

    worker-dies: all processes of a worker end as by kill -9 (worker: its name, else the first of machine kind `hardware`, else the
    first). worker-joins: a machine of kind `hardware` appears (worker: its name, also that of one that died; else one of its own).
    device-slow: batches take `factor` times as long on devices of kind `hardware` (of `worker`, if named); profile-wrong: those of
    `variant`. load-fails, load-hangs, load-slow: loads (of `variant`, if named) fail, last until until_s, take `factor` times as long.
    model-errs: all that `model` answers is wrong, in apps of which several models answer together.
    messages-delayed: each message takes delay_s longer. boot-late, boot-never, boot-twice: machines of kind `hardware` that are
    ordered work delay_s later, never, or restart delay_s after their first boot. clock-off: a worker's clock is off by delay_s.

    process: of an actor ("d-0", "vm-0", "monitor-W", "model-W", "offline-W", "W/cpu", "jobs-0"), all of a worker ("W"), or "clients".
    link-clogged: what it sends (direction "out"), or gets ("in"), waits and then goes on in its order. link-lost: the same, but what would
    come in is lost, and nobody listens there. process-stopped: it handles nothing, and its clock goes on; after 2 s its supervisor starts
    another, but not of a whole worker. process-dies: as by kill -9; it starts again delay_s later. watch-late: changes of buckets reach
    it delay_s later, each twice. events-twice: its batches of events are stored twice. ack-lost: it does not hear that they are.
    stream-down: they are not stored before until_s.
    lease-late: its claims of the lease are answered at until_s.
    query-resent: clients send each query (of `app`, if named) again after delay_s, with the same key. query-cancelled: they take it back then.
    labels-late: they send the labels of what is answered (by `app`, if named) delay_s later, and again; simulated models then say which class they mean.
    change: `what` happens to `app` or `model` in the catalogue, until until_s: it is deleted, another version of it is linked ("version"), or
    gets the share `factor` of the queries ("release") or copies of them ("mirror"), its slo_target ("target") or its largest batch ("setting") becomes
    `factor`, its plan is withdrawn ("plan").
    """

    kind: Annotated[FaultKind, "kind of fault"]
    at_s: Annotated[float, Number()]
    until_s: Annotated[float, Number(above=0)] = float("inf")
    worker: Named = ""
    hardware: str = ""
    variant: str = ""
    model: str = ""
    factor: Annotated[float, Number(above=0, most=1e6)] = 1.0
    delay_s: Annotated[float, Number(-1e6, 1e6)] = 0.0
    process: str = ""
    direction: Direction = "both"
    app: str = ""
    what: Annotated[Change, "change"] | Literal[""] = ""


class PolicySpec(Struct, frozen=True, kw_only=True):
    """A policy to run. name: in the results. base: "infaas", "infaas-ilp", "static", "replicate", "round-robin", "brute-force", or
    "module:Class" of a user's own.

    hardware: the only kinds of device whose variants take part; None: all. machines: those that run and may run. settings:
    the services', with a static system's choice for each app (static: all instances run at time 0; replicate: one). plans: those that
    are deployed, by pipeline; base is then the planner's name.
    """

    name: str
    base: str
    hardware: frozenset[str] | None
    machines: tuple[MachineSpec, ...]
    settings: Settings
    plans: dict[str, PipelinePlan] = {}


class CostSpec(Struct, frozen=True, kw_only=True):
    """What counts as cost. worker: running machines x their price. memory: GB of loaded instances x US$/GB-s by hardware."""

    meter: Literal["worker", "memory"] = "worker"
    per_gb_s: dict[str, Annotated[float, Number(most=1e9)]] = {}


class Scenario(Struct, frozen=True, kw_only=True):
    """A whole scenario. apps, models, variants: the catalogue as a registrar would have written it (variants are simulated, with
    profiles of provenance "synthetic"). prices: US$ per hour by kind of device (services/core/cost.py). needs: of each app's queries.
    interference: strength by kind of device. batching: rules by their keys in the control bucket. checked: whether what must always hold
    is checked at every step (services/simulation/fuzz).
    """

    name: str
    duration_s: float
    seed: int
    objective: Objective
    metrics_every_s: float
    apps: tuple[AppRecord, ...]
    models: tuple[ModelRecord, ...]
    variants: tuple[VariantRecord, ...]
    prices: dict[str, float]
    needs: dict[str, Requirements]
    policies: tuple[PolicySpec, ...]
    loads: tuple[WorkloadSpec, ...]
    jobs: tuple[JobSpec, ...] = ()
    faults: tuple[FaultSpec, ...] = ()
    interference: dict[str, float] = {}
    batching: dict[str, BatchingRule] = {}
    cost: CostSpec = CostSpec()
    checked: bool = False
