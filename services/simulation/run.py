"""Running a scenario: under one policy, from the first machine to the last answer, or under all of its policies in turn."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from time import perf_counter
from typing import Any

from bus.messages.events import Event, OutcomeEvent, PipelineEvent
from services.simulation.clients import Clients
from services.simulation.connections import Connections
from services.simulation.faults import OF_CONNECTIONS, Faults
from services.simulation.kernel import ActorHalted, Kernel
from services.simulation.report import RunReport, Sample
from services.simulation.scenario.model import BEGINS, PolicySpec, Scenario
from services.simulation.system import SimulatedSystem, process_of

WARM_UP = 15.0  # s before that in which machines start, each app gets a query a second, and loads are instant
PRIMED_AFTER = 3.0  # s of the warm-up until the first query
DRAIN = 60.0  # s after the end for queries under way
STEP = 1.0  # s between reports of progress

Progress = Callable[[float], None]


class SimulationError(RuntimeError):
    """A run failed, because an actor or a user's own policy failed. The text names both."""


class Run:
    """The parts of one run. report: what is counted. kernel: what it runs on."""

    def __init__(
        self, scenario: Scenario, policy: PolicySpec, report: RunReport, kernel: Callable[..., Kernel] | None = None
    ) -> None:
        """kernel: makes what it runs on; None: what the scenario's faults need."""
        self.scenario = scenario
        self.report = report
        if kernel is None and any(fault.kind in OF_CONNECTIONS for fault in scenario.faults):
            kernel = partial(Connections, seed=scenario.seed, process_of=process_of)
        self.kernel = (kernel or Kernel)(BEGINS - WARM_UP, self._recorded)
        self.system = SimulatedSystem(self.kernel, scenario, policy, BEGINS, report.decided)
        if any(fault.kind == "lease-late" or fault.process == "vm-1" for fault in scenario.faults):
            self.system.controllers = 2
        self.clients = Clients(self.kernel, scenario, self.system.subjects, report, BEGINS)
        self.kernel.received = self.clients.received
        self._sampled: dict[str, float] = {}
        self._sampled_at = BEGINS
        self._take_jobs()

    def __call__(self, progress: Progress | None = None) -> dict[str, Any]:
        """Run to the end; returns the result. progress: called with the scenario's time."""
        kernel, scenario = self.kernel, self.scenario
        began = perf_counter()
        self.begin()
        end = BEGINS + scenario.duration_s
        at = BEGINS
        while at < end:
            at = min(end, at + STEP)
            kernel.run(at)
            if progress is not None:
                progress(at - BEGINS)
        self._sample(last=True)
        cost = self.system.bill.total
        while self.clients.open and kernel.now < end + DRAIN:
            kernel.run(kernel.now + STEP)
        return self.report.finished(cost, kernel.events, perf_counter() - began, len(self.clients.open))

    def begin(self) -> None:
        """Run to the scenario's time 0, and start its loads and faults."""
        kernel = self.kernel
        self.system.build()
        kernel.at(PRIMED_AFTER, self.clients.prime, BEGINS)
        kernel.run(BEGINS)
        Faults(kernel, self.system, self.scenario.faults, BEGINS, self.clients)
        self.clients.start()
        self._sample()

    def _take_jobs(self) -> None:
        """Submit each offline job at its time."""
        offline, report = self.system.offline, self.report
        offline.written = lambda job, items: report.offline(job, items, self.kernel.now - BEGINS)
        self.clients.others.update(offline.mailboxes(report.job_refused))
        for job, spec in offline.jobs.items():
            report.job(job, spec.app, spec.inputs)
            self.kernel.at(WARM_UP + spec.at_s, offline.submit, job)

    def _recorded(self, _name: str, event: Event) -> None:
        if type(event) is not OutcomeEvent:
            if self.kernel.now >= BEGINS or type(event) is PipelineEvent:
                self.report.event(event, self.kernel.now - BEGINS)
        elif self.report.pipelines and event.time >= BEGINS:
            self.report.pipelines.outcome(event)

    def _sample(self, _argument: Any = None, *, last: bool = False) -> None:
        """Report the present state, and the use of the devices since the last sample."""
        now = self.kernel.now
        if not last and now - BEGINS < self.scenario.duration_s:
            self.kernel.at(self.scenario.metrics_every_s, self._sample)
        elapsed = now - self._sampled_at
        instances: dict[str, int] = {}
        workers: dict[str, int] = {}
        shares: list[float] = []
        sampled: dict[str, float] = {}
        for worker, machine in self.system.machines.items():
            machine.advance(now)
            workers[machine.spec.kind] = workers.get(machine.spec.kind, 0) + 1
            for name, device in machine.devices.items():
                key = f"{worker}/{name}"
                sampled[key] = machine.used[name]
                if elapsed > 0:
                    used = machine.used[name] - self._sampled.get(key, 0.0)
                    shares.append(min(1.0, used / (elapsed * device.spec.cores)))
                for resident in device.residents.values():
                    variant = resident.record.variant
                    instances[variant] = instances.get(variant, 0) + 1
        self._sampled, self._sampled_at = sampled, now
        self.system.bill.advance(now)
        used = sum(shares) / len(shares) if shares else 0.0
        self.report.sample(
            Sample(
                time=now - BEGINS,
                instances=instances,
                workers=workers,
                cost_rate=self.system.bill.rate,
                utilisation=used,
            )
        )


def simulate(
    scenario: Scenario, policy: PolicySpec, report: RunReport, progress: Progress | None = None
) -> dict[str, Any]:
    """One policy's result (docs/simulation.md). The same scenario and seed give the same result, except for measured times."""
    with seldom_collected():
        return Run(scenario, policy, report)(progress)


def simulate_all(scenario: Scenario, progress: Callable[[str, float], None] | None = None) -> dict[str, Any]:
    """The results of all policies. progress: called with the policy and the scenario's time. Raises SimulationError."""
    results = []
    for policy in scenario.policies:
        report = RunReport.of(scenario, policy)
        recorded = None if progress is None else lambda at, name=policy.name: progress(name, at)
        try:
            results.append(simulate(scenario, policy, report, recorded))
        except ActorHalted as error:
            raise SimulationError(f"policy {policy.name}: {error}") from error
    return {"scenario": scenario.name, "seed": scenario.seed, "policies": results, "simulated": True}


@contextmanager
def seldom_collected() -> Iterator[None]:
    """Collect garbage rarely. Almost nothing here is in cycles, and searching for them would take a tenth of the time."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 20, 50)
    try:
        yield
    finally:
        gc.set_threshold(*before)
