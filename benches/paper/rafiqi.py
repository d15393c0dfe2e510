"""Rafiqi (paper 001), section 5: five models where four fit, under three patterns of access; more models; and more queries at a time.

python benches/paper/rafiqi.py             three seeds, 1,000 queries a model
python benches/paper/rafiqi.py --short     one seed, 200 queries a model

Every client asks again as soon as it has its answer. The simulator runs the services' own actors; the GPU and its transfers are simulated.
"""

import statistics
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import cycle, pairwise
from typing import Any, NamedTuple

import compare
import numpy as np
from msgspec.structs import replace

from bus.messages.events import Event, ScalingEvent
from bus.messages.public import Refusal
from services.simulation.clients import QueryTemplate
from services.simulation.report import RunReport
from services.simulation.run import Run, SimulationError
from services.simulation.scenario.model import BEGINS, Scenario
from services.simulation.scenario.read import read_scenario

CAP = 4  # models on the GPU
MOST = 8
BATCH = 128  # of the run with one model
PATTERNS = ("sequential", "uniform", "zipf")
ALPHA = 1.1  # of the power law
LIMIT_S = 100_000.0  # of virtual time for one run
ALIKE = 0.05


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
        self._kinds = [QueryTemplate(app.app, needs[app.app], 1, subjects) for app in run.scenario.apps]
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
        if isinstance(message, Refusal):
            raise SimulationError(f"a query was refused: {message.error.message}")
        self.ended = self._run.kernel.now
        self.latencies.append(1000.0 * (self.ended - self._sent.pop(inbox)))
        self._ask(inbox)


class SwapReport(RunReport):
    """Counts what comes to the device and leaves it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.actions: Counter[str] = Counter()

    def event(self, event: Event, now: float) -> None:
        super().event(event, now)
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
        needs=dict.fromkeys(names, scenario.needs[app.app]),
        loads=(),
    )


def pattern(name: str, models: int, rng: np.random.Generator) -> Iterator[int]:
    """The model of each query. zipf: the power law of the paper, cut off at the last model."""
    if name == "sequential":
        return cycle(range(models))
    weights = np.ones(models) if name == "uniform" else np.arange(1, models + 1) ** -ALPHA
    return (int(one) for one in iter(partial(rng.choice, models, p=weights / weights.sum()), None))


def measure(scenario: Scenario, which: str, models: int, queries: int, clients: int = 1) -> Measured:
    """One run: `queries` queries by so many clients."""
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


def build(seeds: Sequence[int], short: bool) -> compare.Figure:
    read = [copies(read_scenario(compare.HERE / "rafiqi.toml", seed=seed), MOST) for seed in seeds]
    a_model = 200 if short else 1000
    counts = (1, CAP, CAP + 1) if short else range(1, MOST + 1)
    found = {
        (name, models): [measure(one, name, models, a_model * models) for one in read]
        for name in PATTERNS
        for models in counts
    }
    clients = [2**n for n in range(0, 10, 2 if short else 1)]
    batched = {c: measure(_batches(read[0], BATCH), "sequential", 1, 20 * c + 200, c).qps for c in clients}
    alone = {c: measure(_batches(read[0], 1), "sequential", 1, 2 * c + 200, c).qps for c in clients}
    many = {c: measure(read[0], "uniform", CAP + 1, a_model, c).qps for c in (1, 8, 32)}
    rows = [*_five(found), *_knee(found), *_concurrency(batched, alone, many)]
    title = "Rafiqi, simulated: models of 233 MB on a GPU that holds four, one query at a time; and one model with more queries at a time"
    return compare.Figure("rafiqi", title, rows)


Found = Mapping[tuple[str, int], Sequence[Measured]]


def _batches(scenario: Scenario, most: int) -> Scenario:
    return replace(scenario, variants=tuple(replace(one, max_batch=most) for one in scenario.variants))


def _five(found: Found) -> Iterator[compare.Row]:
    """Figure 2."""
    runs = {name: found[name, CAP + 1] for name in PATTERNS}
    papers = {"sequential": "100 %", "uniform": "20 %", "zipf": "fewest"}
    shares = {name: [one.swaps / len(one.latencies) for one in runs[name]] for name in PATTERNS}
    good = {
        "sequential": min(shares["sequential"]) > 1 - ALIKE,
        "uniform": abs(statistics.fmean(shares["uniform"]) - 1 / (CAP + 1)) < ALIKE * 0.5,
        "zipf": statistics.fmean(shares["zipf"]) < statistics.fmean(shares["uniform"]),
    }
    for name in PATTERNS:
        what = f"five models, {name}: queries that wait for a swap"
        yield compare.Row(what, papers[name], shares[name], good[name], form=".1%")
    for name in PATTERNS:
        means = [one.mean for one in runs[name]]
        yield compare.stated(f"five models, {name}: mean latency", means, " ms", form=".0f")
    ordered = [
        zipf.mean < uniform.mean < sequential.mean
        for sequential, uniform, zipf in zip(*(runs[name] for name in PATTERNS), strict=True)
    ]
    yield compare.holds("mean latency: zipf below uniform below sequential", "yes", ordered)
    alike = [
        max(p) <= (1 + ALIKE) * min(p) for p in zip(*([m.at(0.99) for m in runs[n]] for n in PATTERNS), strict=True)
    ]
    yield compare.holds("P99 almost the same for all three", "yes", alike)
    added = [
        swapped.at(0.5) - calm.at(0.5)
        for swapped, calm in zip(runs["sequential"], found["sequential", CAP], strict=True)
    ]
    yield compare.at_most("what a swap adds to a query", 90, added, " ms", form=".0f")


def _knee(found: Found) -> Iterator[compare.Row]:
    """Figures 3 and 4."""
    for name in PATTERNS:
        held = [
            four.qps >= 0.95 * one.qps and five.qps <= 0.9 * four.qps
            for one, four, five in zip(*(found[name, n] for n in (1, CAP, CAP + 1)), strict=True)
        ]
        yield compare.holds(f"{name}: throughput falls with the fifth model, not before", "yes", held)
    for name, paper in (("sequential", 0.2), ("uniform", 0.5), ("zipf", 0.5)):
        pairs = zip(found[name, CAP + 1], found[name, CAP], strict=True)
        parts = [five.qps / four.qps for five, four in pairs]
        yield compare.at_least(f"{name}: throughput with five models, of that with four", paper, parts, form=".0%")
    pairs = zip(found["sequential", CAP + 1], found["sequential", CAP], strict=True)
    yield compare.at_most(
        "sequential: latency with five models, of that with four", 5, [a.mean / b.mean for a, b in pairs], "×"
    )


def _concurrency(
    batched: Mapping[int, float], alone: Mapping[int, float], many: Mapping[int, float]
) -> Iterator[compare.Row]:
    """Figure 5, and what the paper could not measure."""
    clients = sorted(batched)
    below = [c for c in clients if c <= BATCH]
    rises = all(batched[b] > batched[a] for a, b in pairwise(below))
    stops = batched[clients[-1]] <= 1.2 * batched[2 * BATCH] if 2 * BATCH in batched else True
    yield compare.holds("one model, batches up to 128: throughput rises up to 2^7 queries at a time", "yes", [rises])
    yield compare.holds("and hardly beyond twice that", "it falls beyond 2^7", [stops])
    gain = batched[below[-1]] / batched[1]
    yield compare.stated(f"throughput at {below[-1]} queries at a time, of that at 1", [gain], "×")
    flat = max(alone.values()) <= 1.1 * min(alone.values())
    yield compare.holds("without batches throughput does not rise", "yes (NVIDIA's engine)", [flat])
    for c, qps in many.items():
        what = f"five models, uniform, {c} quer{'y' if c == 1 else 'ies'} at a time: throughput"
        yield compare.stated(what, [qps], " queries/s", paper="not measured" if c > 1 else "not stated")


if __name__ == "__main__":
    compare.main(build, __doc__)
