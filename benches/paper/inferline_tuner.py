"""InferLine (paper 004), figures 7, 8, 10, 11 and 12: late queries and cost while traffic changes and a tuner follows it.

`python benches/paper/inferline_tuner.py [--short] [--seeds N ...] [--json] [--out DIR]`

Social Media, objective 0.35 s. Replicas that are ordered serve 5 s later (inferline_replay.py). InferLine is its plan with its tuner. CG-Mean and
CG-Peak have the baselines' tuner, after AutoScale. Figure 7 plans from the first quarter of an hour of each trace and judges the rest; its
two traces look like the paper's, whose originals are not available. The others plan from ten minutes of 150 queries/s with another seed.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from compare import Document, Figure, Row, at_least, at_most, canvas, holds, main, ratios, saved, stated
from inferline_pipelines import problem_of, sample
from inferline_replay import Replayed, replay
from msgspec.structs import replace

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.planners import CoarseTuner, plan_pipeline
from services.core.pipelines.queueing import Floats
from services.core.pipelines.tuner import PipelineTuner

PIPELINE, SLO, RATE = "Social Media", 0.35, 150.0
POINT_S, PLANNED_S = 30.0, 900.0
RAMPS = (15.0, 60.0, 120.0)  # s, from 150 to 250 queries/s
WINDOW_S = 10.0
Rates = Sequence[tuple[float, float]]  # (time, queries/s), linear between


class TunedTrace(NamedTuple):
    """arrivals: that a plan is judged by. sample: that it is made from; traces of the same `origin` have the same."""

    origin: str
    sample: Floats
    arrivals: Floats
    seconds: float


def varying(rates: Rates, seed: int, cv2: float = 1.0) -> Floats:
    """Arrivals with gamma-distributed gaps, stretched to a rate that changes."""
    times = np.arange(rates[0][0], rates[-1][0] + 0.5, 0.5)
    rate = np.interp(times, [at for at, _ in rates], [value for _, value in rates])
    count = np.concatenate([[0.0], np.cumsum((rate[1:] + rate[:-1]) / 2 * 0.5)])
    return np.interp(sample(1.0, cv2, float(count[-1]), seed), count, times)


def day(points: Sequence[float], seed: int) -> TunedTrace:
    """A trace of mean rates, 30 s each."""
    parts = [POINT_S * i + sample(rate, 1.0, POINT_S, 1000 * seed + i) for i, rate in enumerate(points)]
    arrivals = np.concatenate(parts)
    late = arrivals[arrivals >= PLANNED_S] - PLANNED_S
    return TunedTrace(f"{seed}: {points}", arrivals[arrivals < PLANNED_S], late, POINT_S * len(points) - PLANNED_S)


def spike(seed: int) -> TunedTrace:
    """Figure 7(a): a slow wave, then twice as many queries for two minutes. 300 queries/s at most."""
    points = [130.0 + 15.0 * np.sin(i / 9.0) for i in range(120)]
    points[70:75] = [200.0, 300.0, 300.0, 280.0, 200.0]
    return day(points, seed)


def jump(seed: int) -> TunedTrace:
    """Figure 7(b): a jump at once, and little from 1000 s on."""
    points = [180.0 + 10.0 * np.sin(i / 5.0) for i in range(120)]
    points[46:52] = [300.0] * 6
    points[63:] = list(np.linspace(120.0, 30.0, 12)) + [30.0] * 45
    return day(points, seed)


def ramp(top: float, seconds: float, seed: int, end: float = 300.0) -> TunedTrace:
    """From 150 queries/s to more within so many seconds, after a minute; it stays so."""
    rates = [(0.0, RATE), (60.0, RATE), (60.0 + seconds, top), (end, top)]
    return TunedTrace(f"{seed}", sample(RATE, 1.0, 600.0, seed), varying(rates, seed + 500), end)


def bursts(seed: int, end: float = 300.0) -> TunedTrace:
    """The rate stays, CV 1 becomes 4 after a minute."""
    parts = [sample(RATE, 1.0, 60.0, seed + 500), 60.0 + sample(RATE, 4.0, end - 60.0, seed + 501)]
    return TunedTrace(f"{seed}", sample(RATE, 1.0, 600.0, seed), np.concatenate(parts), end)


# how each is planned, and what tunes it
SYSTEMS: dict[str, tuple[str, type[PipelineTuner | CoarseTuner] | None]] = {
    "InferLine": ("inferline", PipelineTuner),
    "planner only": ("inferline", None),
    "planner + CG tuner": ("inferline", CoarseTuner),
    "CG-Mean": ("cg-mean", CoarseTuner),
    "CG-Peak": ("cg-peak", CoarseTuner),
    "CG-Mean, no tuner": ("cg-mean", None),
}


class TraceReplays:
    """One trace under several systems. Each is planned and replayed once."""

    _plans: ClassVar[dict[tuple[str, str], PipelinePlan]] = {}

    def __init__(self, trace: TunedTrace) -> None:
        self.trace = trace
        self.problem = problem_of(PIPELINE, trace.sample, SLO)
        self._runs: dict[str, Replayed] = {}

    def plan(self, policy: str) -> PipelinePlan:
        key = (self.trace.origin, policy)
        if key not in self._plans:
            self._plans[key] = plan_pipeline(self.problem, policy)
        return self._plans[key]

    def run(self, system: str) -> Replayed:
        """One of SYSTEMS, or `oracle`: the planner that knows the trace."""
        if system not in self._runs:
            self._runs[system] = self._replayed(system)
        return self._runs[system]

    def _replayed(self, system: str) -> Replayed:
        if system == "oracle":
            known = replace(self.problem, arrivals=self.trace.arrivals)
            return replay(known, plan_pipeline(known, "inferline"), self.trace.arrivals, self.trace.seconds, None)
        policy, tuner = SYSTEMS[system]
        plan = self.plan(policy)
        tuned = None if tuner is None else tuner(plan, 0.0)
        return replay(self.problem, plan, self.trace.arrivals, self.trace.seconds, tuned)

    def windows(self, system: str) -> tuple[list[float], list[float]]:
        """The share of late queries in each 10 s, and cost in US$ per hour."""
        found = self.run(system)
        edges = np.arange(0.0, self.trace.seconds + WINDOW_S / 2, WINDOW_S)
        late = (found.latencies > SLO).astype(float)
        total = np.maximum(1, np.histogram(self.trace.arrivals, edges)[0])
        share = np.histogram(self.trace.arrivals, edges, weights=late)[0] / total
        times = [at for at, _ in found.spent]
        prices = [price for _, price in found.spent]
        cost = [prices[int(np.searchsorted(times, at + WINDOW_S, "left")) - 1] for at in edges[:-1]]
        return share.tolist(), cost


def build(seeds: Sequence[int], short: bool) -> Figure:
    """short: one ramp and the bursts, two minutes and a half each."""
    if short:
        traces = {
            "ramp of 60 s": [TraceReplays(ramp(250.0, 60.0, seed, 150.0)) for seed in seeds],
            "bursts": [TraceReplays(bursts(seed, 150.0)) for seed in seeds],
        }
        rows = _ramps(traces) + _bursts(traces["bursts"]) + _together(traces)
        return Figure("inferline_tuner", "InferLine: figures 10 and 11", rows, _documents(seeds, traces, {}), draw)
    days = {
        "spike": [TraceReplays(spike(seed)) for seed in seeds],
        "jump": [TraceReplays(jump(seed)) for seed in seeds],
    }
    traces = {
        f"ramp of {seconds:g} s": [TraceReplays(ramp(250.0, seconds, seed)) for seed in seeds] for seconds in RAMPS
    }
    traces["bursts"] = [TraceReplays(bursts(seed)) for seed in seeds]
    rising = {f"to {top:g}/s": [TraceReplays(ramp(top, 20.0, seed)) for seed in seeds] for top in (200.0, 300.0)}
    rows = [row for name, benches in days.items() for row in _day(name, benches)]
    rows += [row for name, benches in rising.items() for row in _rising(name, benches)]
    rows += _ramps(traces) + _bursts(traces["bursts"]) + _attribution(traces["ramp of 60 s"])
    rows += _together({**traces, **rising})
    title = "InferLine, figures 7, 8, 10, 11 and 12: while traffic changes"
    return Figure("inferline_tuner", title, rows, _documents(seeds, days, {**traces, **rising}), draw)


def _late(benches: Sequence[TraceReplays], system: str) -> list[float]:
    return [bench.run(system).late for bench in benches]


def _late_rows(at: str, benches: Sequence[TraceReplays], told: dict[str, tuple[str, str]]) -> list[Row]:
    """told: by system the row's words, and what the paper says."""
    return [
        stated(f"{at} {words}", _late(benches, system), paper=paper, form=".2%")
        for system, (words, paper) in told.items()
    ]


def _cost(benches: Sequence[TraceReplays], system: str) -> list[float]:
    return [bench.run(system).cost for bench in benches]


def _fewer(benches: Sequence[TraceReplays], system: str) -> list[float]:
    """How many times as many queries are late under this system as under InferLine, of all seeds together. One late query at least."""
    late = {
        one: sum(bench.run(one).late * len(bench.trace.arrivals) for bench in benches) for one in (system, "InferLine")
    }
    return [late[system] / max(1.0, late["InferLine"])]


def _day(name: str, benches: Sequence[TraceReplays]) -> list[Row]:
    at = f"7, {name}:"
    planned = [one.plan("cg-peak").cost_per_s / one.plan("inferline").cost_per_s for one in benches]
    rows = [
        at_least(f"{at} CG-Peak's plan costs … times InferLine's", 5.0, planned, " x"),
        at_least(f"{at} CG-Peak costs … times InferLine, all the time", 4.2, ratios(_cost(benches, "CG-Peak"), _cost(benches, "InferLine")), " x"),
        stated(f"{at} CG-Mean costs … times InferLine, all the time", ratios(_cost(benches, "CG-Mean"), _cost(benches, "InferLine")), " x"),
        stated(f"{at} queries late, InferLine", _late(benches, "InferLine"), paper="near zero", form=".2%"),
    ]  # fmt: skip
    for system in ("CG-Mean", "CG-Peak"):
        rows.append(stated(f"{at} queries late, {system}", _late(benches, system), form=".2%"))
        paper = "32" if system == "CG-Peak" else "not stated"
        rows.append(stated(f"{at} {system} has … times as many late", _fewer(benches, system), " x", paper))
    return rows


def _rising(name: str, benches: Sequence[TraceReplays]) -> list[Row]:
    rows = []
    for system, paper in (("InferLine", "near zero"), ("CG-Mean", "high"), ("CG-Peak", "high")):
        rows.append(
            stated(f"8, {name} in 20 s: queries late, {system}", _late(benches, system), paper=paper, form=".2%")
        )
    for system, paper in (("InferLine", "not stated"), ("CG-Mean", "100%"), ("CG-Peak", "100%")):
        worst = [max(bench.windows(system)[0]) for bench in benches]
        rows.append(stated(f"8, {name} in 20 s: … in the worst 10 s, {system}", worst, paper=paper, form=".0%"))
    return rows


def _ramps(traces: dict[str, list[TraceReplays]]) -> list[Row]:
    rows = []
    for name, benches in traces.items():
        if not name.startswith("ramp"):
            continue
        costs = ratios(_cost(benches, "InferLine"), _cost(benches, "oracle"))
        late = {
            "InferLine": ("queries late, InferLine", "near zero"),
            "planner only": ("… planner only", "high"),
            "oracle": ("… planner that knows the trace", "near zero"),
        }
        rows += [
            *_late_rows(f"10, {name}:", benches, late),
            at_least(f"10, {name}: CG-Mean has … times as many late", 34.5, _fewer(benches, "CG-Mean"), " x"),
            at_most(f"10, {name}: InferLine costs … times the planner that knows", 1.0, costs, " x"),
        ]
    return rows


def _bursts(benches: Sequence[TraceReplays]) -> list[Row]:
    first = [next((at for at, _ in b.run("InferLine").decisions if at > 60.0), float("inf")) - 60.0 for b in benches]
    late = {
        "InferLine": ("queries late, InferLine", "near zero"),
        "planner only": ("… planner only", "high"),
        "CG-Mean": ("… CG-Mean", "not stated"),
    }
    return [
        stated("11, CV 1 to 4: the tuner acts after", first, " s", "at once"),
        *_late_rows("11, CV 1 to 4:", benches, late),
        at_least("11, CV 1 to 4: CG-Mean has … times as many late", 34.5, _fewer(benches, "CG-Mean"), " x"),
    ]


def _attribution(benches: Sequence[TraceReplays]) -> list[Row]:
    systems = {
        "CG-Mean, no tuner": "coarse planner alone",
        "planner only": "fine planner alone",
        "planner + CG tuner": "fine planner, coarse tuner",
        "InferLine": "fine planner, fine tuner",
    }
    rows = [
        stated(f"12: queries late, {words}", _late(benches, system), form=".2%") for system, words in systems.items()
    ]
    late = [
        [bench.run(system).late for system in ("planner only", "planner + CG tuner", "InferLine")] for bench in benches
    ]
    saved = ratios([b.plan("cg-peak").cost_per_s for b in benches], [b.plan("inferline").cost_per_s for b in benches])
    return [
        *rows,
        holds("12: each part lowers the late queries", "yes", [a > b > c for a, b, c in late]),
        at_least("12: CG-Peak's plan costs … times InferLine's", 3.0, saved, " x"),
    ]


def _together(traces: dict[str, list[TraceReplays]]) -> list[Row]:
    """Over rises, ramps and bursts."""
    count = len(next(iter(traces.values())))
    late = {
        system: [
            float(sum(np.count_nonzero(mine[i].run(system).latencies > SLO) for mine in traces.values()))
            for i in range(count)
        ]
        for system in ("InferLine", "CG-Mean", "CG-Peak")
    }
    cost = {
        system: [float(np.mean([mine[i].run(system).cost for mine in traces.values()])) for i in range(count)]
        for system in late
    }
    rows = [
        at_least("all of these: CG-Mean has … times as many late", 34.5, ratios(late["CG-Mean"], late["InferLine"]), " x"),
        stated("all of these: CG-Peak has … times as many late", ratios(late["CG-Peak"], late["InferLine"]), " x"),
    ]  # fmt: skip
    return rows + [
        stated(f"all of these: {system} costs … times InferLine", ratios(cost[system], cost["InferLine"]), " x")
        for system in ("CG-Mean", "CG-Peak")
    ]


def _documents(
    seeds: Sequence[int], days: dict[str, list[TraceReplays]], others: dict[str, list[TraceReplays]]
) -> dict[str, list[Document]]:
    """Of each trace and system: late queries and cost in each 10 s."""
    found: dict[str, list[Document]] = {}
    for name, benches in {**days, **others}.items():
        found[name] = []
        for seed, bench in zip(seeds, benches, strict=True):
            edges = np.arange(0.0, bench.trace.seconds + WINDOW_S / 2, WINDOW_S)
            rate = np.histogram(bench.trace.arrivals, edges)[0] / WINDOW_S
            systems: dict[str, Any] = {}
            for system in ("InferLine", "CG-Mean", "CG-Peak"):
                share, cost = bench.windows(system)
                systems[system] = {"late": share, "cost": cost}
            found[name].append({"seed": seed, "time": edges[:-1].tolist(), "rate": rate.tolist(), "systems": systems})
    return found


def draw(figure: Figure, out: Path) -> None:
    """As figure 7: rate, late queries and cost over time, of the first two traces; the first seed."""
    shown = list(figure.documents)[:2]
    picture, panels = canvas(3, len(shown), (9.5, 6.6), sharex="col")
    colours = {"InferLine": "#009E73", "CG-Mean": "#E69F00", "CG-Peak": "#D55E00"}
    for (rate, late, cost), name in zip(panels.T, shown, strict=True):
        found = figure.documents[name][0]
        rate.plot(found["time"], found["rate"], color="#404040")
        rate.set_title(name, fontsize=10)
        for system, colour in colours.items():
            mine = found["systems"][system]
            late.plot(found["time"], [100 * one for one in mine["late"]], color=colour, label=system)
            cost.step(found["time"], mine["cost"], color=colour, where="post")
        cost.set_xlabel("time, s")
    panels[1][0].legend(fontsize=8, frameon=False)
    title, labels = (
        "InferLine and its baselines with their tuners (estimated)",
        ("queries/s", "queries late, %", "US$ per hour"),
    )
    saved(picture, panels, title, out / "inferline_tuner.png", labels)


if __name__ == "__main__":
    main(build, __doc__)
