"""Rafiqi (paper 001), section 5: five models where four fit, under three patterns of access; more models; and more queries at a time.

python benches/paper/rafiqi.py             three seeds, 1,000 queries a model
python benches/paper/rafiqi.py --short     one seed, 200 queries a model

Every client asks again as soon as it has its answer. The simulator runs the services' own actors; the GPU and its transfers are simulated.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle
from typing import Any, NamedTuple

import compare
import numpy as np
from msgspec.structs import replace

from bus.messages.events import Event, ScalingEvent
from bus.messages.public import Answer
from services.simulation.clients import QueryTemplate
from services.simulation.report import RunReport
from services.simulation.run import BEGINS, Run
from services.simulation.scenario.model import Scenario
from services.simulation.scenario.read import read_scenario

CAP = 4  # models on the GPU
MOST = 8
PATTERNS = ("sequential", "uniform", "zipf")
ALPHA = 1.1  # of the power law
SWAP_MS = 90.0
LIMIT_S = 3000.0  # of virtual time for one run


class Measured(NamedTuple):
    """One run. latencies: ms of each query, in the order of the answers. swaps: models brought to the GPU."""

    latencies: list[float]
    seconds: float
    swaps: int
    demoted: int

    @property
    def mean(self) -> float:
        return statistics.fmean(self.latencies)

    @property
    def qps(self) -> float:
        return len(self.latencies) / self.seconds

    def at(self, share: float) -> float:
        return float(np.quantile(self.latencies, share))


class ClosedLoop:
    """Clients that each have one query under way, until `count` have been answered. which: the app of the next query, by its place."""

    def __init__(self, run: Run, which: Iterator[int], clients: int, count: int) -> None:
        self.latencies: list[float] = []
        self.ended = 0.0
        self._run, self._which, self._left = run, which, count
        needs, subjects = run.scenario.needs, run.system.subjects
        self._kinds = [QueryTemplate(app.app, needs[app.app], 1, subjects, 0.0) for app in run.scenario.apps]
        self._sent: dict[str, float] = {}
        self._inboxes = [f"_INBOX.loop.{client}" for client in range(clients)]
        for inbox in self._inboxes:
            run.clients.others[inbox] = partial(self._answered, inbox)

    def start(self) -> None:
        for inbox in self._inboxes:
            self._ask(inbox)

    @property
    def done(self) -> bool:
        return not self._sent

    def _ask(self, inbox: str) -> None:
        if self._left <= 0:
            return
        self._left -= 1
        kernel, kind = self._run.kernel, self._kinds[next(self._which)]
        self._sent[inbox] = kernel.now
        kernel.publish(kind.subject, kind.head, inbox, kind.body)

    def _answered(self, inbox: str, message: object) -> None:
        if not isinstance(message, Answer):
            raise RuntimeError(f"a query was refused: {message}")
        self.ended = self._run.kernel.now
        self.latencies.append(1000.0 * (self.ended - self._sent.pop(inbox)))
        self._ask(inbox)


class SwapReport(RunReport):
    """Counts what comes to the device and leaves it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actions: Counter[str] = Counter()

    def event(self, kind: str, event: Event, now: float) -> None:
        super().event(kind, event, now)
        if isinstance(event, ScalingEvent):
            self.actions[event.action] += event.count


def copies(scenario: Scenario, number: int) -> Scenario:
    """The scenario with so many copies of its model, each with an app of its own."""
    [app], [model], [variant] = scenario.apps, scenario.models, scenario.variants
    names = [f"caffenet-{n}" for n in range(1, number + 1)]
    return replace(
        scenario,
        apps=tuple(replace(app, app=name, links={name: model.version}) for name in names),
        models=tuple(replace(model, model=name) for name in names),
        variants=tuple(replace(variant, variant=f"{name}-gpu", model=name) for name in names),
        needs={name: scenario.needs[app.app] for name in names},
        loads=(),
    )


def pattern(name: str, models: int, rng: np.random.Generator) -> Iterator[int]:
    """The model of each query. zipf: the power law of the paper, cut off at the last model."""
    if name == "sequential":
        return cycle(range(models))
    weights = np.ones(models) if name == "uniform" else np.arange(1, models + 1) ** -ALPHA
    return (int(one) for one in iter(partial(rng.choice, models, p=weights / weights.sum()), None))


def measure(scenario: Scenario, which: str, models: int, queries: int, clients: int = 1) -> Measured:
    """One run: `queries` queries by so many clients. The first ones, until every model has been asked once, are not counted."""
    [policy] = scenario.policies
    report = SwapReport.of(scenario, policy)
    run = Run(scenario, policy, report)
    run.system.build()
    run.kernel.run(BEGINS)
    loop = ClosedLoop(run, pattern(which, models, np.random.default_rng(scenario.seed)), clients, queries)
    loop.start()
    while not loop.done and run.kernel.now < BEGINS + LIMIT_S:
        run.kernel.run(run.kernel.now + 1.0)
    actions = report.actions
    return Measured(loop.latencies, loop.ended - BEGINS, actions["promote"] + actions["load"], actions["demote"])
