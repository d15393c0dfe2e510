"""A scenario as the simulator runs it: everything checked, nothing left open (docs/scenarios.md). Pure data.

Times are seconds from the scenario's start, rates queries/s, money US$.
"""

from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from bus.messages.catalog import AppRecord, ModelRecord, VariantRecord
from services.core.placement import Device
from services.core.settings import Settings

Arrivals = Literal["poisson", "gamma", "uniform", "mmpp", "trace", "times"]
FaultKind = Literal["worker-dies", "device-slow", "load-fails", "messages-delayed"]
Objective = Literal["cost", "accuracy"]
Times = NDArray[np.float64]


class StaticChoice(Struct, frozen=True):
    """What a developer chose for an app: a variant, and how many instances of it in the whole cluster."""

    variant: str
    instances: int = 1


class QueryNeeds(Struct, frozen=True, kw_only=True):
    """What queries ask for. latency_ms, cost (US$ per 1,000): None = no limit. accuracy: 0 = any."""

    latency_ms: float | None = None
    accuracy: float = 0.0
    cost: float | None = None


class WorkloadSpec(Struct, frozen=True, kw_only=True):
    """One stream of queries, spread over `apps` by `shares` (which add up to 1).

    rate: (second, queries/s) points, linear between them, constant beyond; its mean where arrivals come from counts or times is
    theirs. cv: standard deviation / mean of the gaps (gamma). rates, dwell_s: of an MMPP's states, queries/s and mean stay.
    counts: queries in each line of a trace of seconds_per_line; range_qps: (lowest, highest) rate that they are mapped to.
    times: arrivals themselves, rising. needs: of these queries, where they differ from their app's. items: in each query.
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
    needs: QueryNeeds | None = None
    items: int = 1


class MachineSpec(Struct, frozen=True, kw_only=True):
    """A kind of machine. start: how many run at time 0; the VM-autoscaler keeps them between minimum and maximum.

    devices are simulated, named after their kind ("cpu", "gpu", "gpu1", ...). boot_s: from the order to the first heartbeat.
    """

    kind: str
    devices: tuple[Device, ...]
    price_per_hour: float
    boot_s: float = 0.0
    start: int = 0
    minimum: int = 0
    maximum: int = 0


class JobSpec(Struct, frozen=True, kw_only=True):
    """Offline work: so many inputs for an app, submitted at a time. accuracy, model, variant: what it asks for."""

    app: str
    at_s: float
    inputs: int
    accuracy: float = 0.0
    model: str | None = None
    variant: str | None = None


class FaultSpec(Struct, frozen=True, kw_only=True):
    """Something that goes wrong from at_s on, until until_s.

    worker-dies: one (worker: its name, else the first of machine kind `hardware`, else the first), as kill -9 of all its
    processes. device-slow: batches take `factor` times as long on devices of kind `hardware` (of `worker`, if named).
    load-fails: loads (of `variant`, if named) fail. messages-delayed: each message takes delay_s longer.
    """

    kind: FaultKind
    at_s: float
    until_s: float = float("inf")
    worker: str = ""
    hardware: str = ""
    variant: str = ""
    factor: float = 1.0
    delay_s: float = 0.0


class PolicySpec(Struct, frozen=True, kw_only=True):
    """One run. name: in the results. base: "infaas", "infaas-ilp", "static", "replicate", "round-robin", "brute-force", or
    "module:Class" of a user's own.

    hardware: the only kinds of device whose variants count; None: all. machines: with what this run starts, and may start.
    choice: for each app what a static system's developer would have chosen (static: all instances run at time 0; replicate: one).
    settings: of the services.
    """

    name: str
    base: str
    hardware: frozenset[str] | None
    machines: tuple[MachineSpec, ...]
    choice: dict[str, StaticChoice]
    settings: Settings


class CostSpec(Struct, frozen=True, kw_only=True):
    """What is counted as cost. worker: machines that run x their price; memory: GB of loaded instances x US$/GB-s by hardware."""

    meter: Literal["worker", "memory"] = "worker"
    per_gb_s: dict[str, float] = {}


class Scenario(Struct, frozen=True, kw_only=True):
    """All of it. apps, models, variants: the catalogue as a registrar would have written it (variants simulated, with
    profiles of provenance "synthetic"). prices: US$ per hour by device kind, as services/core/cost.py wants them.
    needs: of each app's queries. interference: strength by kind of device.
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
    needs: dict[str, QueryNeeds]
    policies: tuple[PolicySpec, ...]
    loads: tuple[WorkloadSpec, ...]
    jobs: tuple[JobSpec, ...] = ()
    faults: tuple[FaultSpec, ...] = ()
    interference: dict[str, float] = {}
    cost: CostSpec = CostSpec()
