"""InferLine (paper 004), figures 5, 6 and 9: what plans cost, and how many queries are late under them.

`python benches/paper/inferline_plans.py [--short] [--seeds N ...] [--json] [--out DIR]`

The four pipelines of inferline_pipelines.py, planned by `inferline`, `cg-mean` and `cg-peak` from five minutes of arrivals. Each plan is judged
by ten minutes with another seed. Planners' seconds are of one core's processor time.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from compare import Document, Figure, Row, at_least, at_most, canvas, holds, main, saved, stated
from inferline_pipelines import GRAPHS, chooses_models, missed, problem_of, sample

from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.problem import PipelineProblem

POLICIES = ("inferline", "cg-mean", "cg-peak")
FIGURES_5_6 = ("Image Processing", "Video Monitoring")
RATES, CV2, SLOS = (100.0, 300.0), (1.0, 4.0), (0.15, 0.35, 1.0)
SWEEP = ("Social Media", 150.0, (0.1, 0.15, 0.25, 0.35, 0.5, 1.0))  # figure 9
FLOOR = 0.75  # of the plan that chooses models


class PlannedCase(NamedTuple):
    """cost: US$ per hour, by policy. late: share of queries with another seed. seconds: of the planner. language: hardware of that vertex."""

    pipeline: str
    rate: float
    cv2: float
    slo: float
    cost: dict[str, float]
    late: dict[str, float]
    seconds: dict[str, float]
    language: str = ""


def case(pipeline: str, rate: float, cv2: float, slo: float, seed: int, seconds: float) -> PlannedCase:
    problem = problem_of(pipeline, sample(rate, cv2, seconds, seed), slo)
    other = sample(rate, cv2, 2 * seconds, seed + 1000)
    plans, took = {}, {}
    for policy in POLICIES:
        began = time.process_time()
        plans[policy] = plan_pipeline(problem, policy)
        took[policy] = time.process_time() - began
    ours = plans["inferline"].vertices
    return PlannedCase(
        pipeline,
        rate,
        cv2,
        slo,
        {policy: 3600 * plan.cost_per_s for policy, plan in plans.items()},
        {policy: missed(problem, plan, other) for policy, plan in plans.items()},
        took,
        ours["language"].hardware if "language" in ours else "",
    )


def build(seeds: Sequence[int], short: bool) -> Figure:
    """short: Video Monitoring at one rate, one minute."""
    seconds = 60.0 if short else 300.0
    pipelines, rates = (("Video Monitoring",), (150.0,)) if short else (tuple(GRAPHS), RATES)
    grids, sweeps = [], []
    for seed in seeds:
        grids.append(
            [case(p, rate, cv2, slo, seed, seconds) for p in pipelines for rate in rates for cv2 in CV2 for slo in SLOS]
        )
        name, rate, slos = SWEEP
        sweeps.append([] if short else [case(name, rate, cv2, slo, seed, seconds) for cv2 in CV2 for slo in slos])
    rows = _costs(grids, pipelines) + _late(grids) + _trends(grids, sweeps) + _planner(grids)
    if not short:
        rows.append(_models(seeds, seconds))
    documents: list[Document] = [
        {"seed": seed, "grid": [one._asdict() for one in grid], "sweep": [one._asdict() for one in sweep]}
        for seed, grid, sweep in zip(seeds, grids, sweeps, strict=True)
    ]
    return Figure("inferline_plans", "InferLine, figures 5, 6 and 9: cost of plans", rows, {"plans": documents}, draw)


def _costs(grids: Sequence[list[PlannedCase]], pipelines: Sequence[str]) -> list[Row]:
    shown = [p for p in FIGURES_5_6 if p in pipelines]
    rows = [
        at_least("CG-Peak costs … times InferLine, at most", 7.6, [max(_dearer(of(grid, shown), "cg-peak")) for grid in grids], " x"),
        stated("CG-Mean costs … times InferLine, at most", [max(_dearer(of(grid, shown), "cg-mean")) for grid in grids], " x"),
    ]  # fmt: skip
    for p in pipelines:
        for policy, words in (("cg-peak", "CG-Peak"), ("cg-mean", "CG-Mean")):
            means = [float(np.mean(_dearer(of(grid, [p]), policy))) for grid in grids]
            rows.append(stated(f"{p}: {words} costs … times InferLine, mean", means, " x"))
    rows.append(
        holds(
            "InferLine costs no more than CG-Peak, all cases",
            "yes",
            [min(_dearer(grid, "cg-peak")) >= 1 - 1e-9 for grid in grids],
        )
    )
    return rows


def _late(grids: Sequence[list[PlannedCase]]) -> list[Row]:
    def mean(policy: str, cases: Callable[[PlannedCase], bool] = lambda _: True) -> list[float]:
        return [float(np.mean([one.late[policy] for one in grid if cases(one)])) for grid in grids]

    return [
        at_most("queries late, InferLine, mean of the cases", 0.01, mean("inferline"), form=".2%", tolerance=0.0),
        stated("queries late, InferLine, worst case", [max(one.late["inferline"] for one in grid) for grid in grids], form=".2%"),
        stated("queries late, CG-Peak, mean", mean("cg-peak"), paper="near zero", form=".2%"),
        stated("queries late, CG-Mean, mean", mean("cg-mean"), paper="high", form=".2%"),
        stated("queries late, CG-Mean, CV 1", mean("cg-mean", lambda one: one.cv2 == 1.0), form=".2%"),
        stated("queries late, CG-Mean, CV 4", mean("cg-mean", lambda one: one.cv2 == 4.0), paper="higher", form=".2%"),
        stated("queries late, CG-Mean, CV 4, objective 0.15 s", mean("cg-mean", lambda one: one.cv2 == 4.0 and one.slo == 0.15), paper="higher", form=".2%"),
    ]  # fmt: skip


def _trends(grids: Sequence[list[PlannedCase]], sweeps: Sequence[list[PlannedCase]]) -> list[Row]:
    every = [[*grid, *sweep] for grid, sweep in zip(grids, sweeps, strict=True)]
    rows = [
        stated("cost rises or stays with CV 4 instead of 1", [_share(cases, "cv2", 1) for cases in every], paper="always", form=".0%"),
        stated("cost falls or stays with a longer objective", [_share(cases, "slo", -1) for cases in every], paper="mostly", form=".0%"),
    ]  # fmt: skip
    if any(len({one.rate for one in grid}) > 1 for grid in grids):
        rates = [_share(cases, "rate", 1) for cases in grids]
        rows.append(stated("cost rises with the rate", rates, paper="always", form=".0%"))
    for slo in (SLOS[0], SLOS[-1]):
        gaps = [_gap(cases, slo) for cases in every]
        paper = "narrows" if slo == SLOS[-1] else "not stated"
        rows.append(stated(f"CV 4 costs … times CV 1, objective {slo:g} s, mean", gaps, " x", paper))
    if any(sweeps):
        cpu = [_first_cpu(sweep) for sweep in sweeps]
        rows.append(stated("Social Media: language identification on a CPU from an objective of", cpu, " s", "0.15 s"))
    return rows


def _planner(grids: Sequence[list[PlannedCase]]) -> list[Row]:
    times = [[one.seconds["inferline"] for one in grid] for grid in grids]
    return [
        stated("planner's processor time, mean", [float(np.mean(some)) for some in times], " s"),
        stated("planner's processor time, longest", [max(some) for some in times], " s"),
    ]


def _models(seeds: Sequence[int], seconds: float) -> Row:
    """Ours: the plan chooses models as well, where a vertex names the accuracy that it needs."""
    found = []
    for seed in seeds:
        posed: PipelineProblem = chooses_models(sample(150.0, 4.0, seconds, seed), 0.35, FLOOR)
        found.append(plan_pipeline(posed, "inferline").cost_per_s / plan_pipeline(posed, "model-less").cost_per_s)
    return stated(
        f"Image Processing, accuracy {FLOOR:.0%}: InferLine costs … times `model-less`", found, " x", "no such"
    )


def of(cases: Iterable[PlannedCase], pipelines: Sequence[str]) -> list[PlannedCase]:
    return [one for one in cases if one.pipeline in pipelines]


def _dearer(cases: Iterable[PlannedCase], policy: str) -> list[float]:
    return [one.cost[policy] / one.cost["inferline"] for one in cases]


def _share(cases: Sequence[PlannedCase], by: str, sign: int) -> float:
    """Of pairs of cases that differ in this alone, and are next to each other, those whose cost goes this way."""
    rest = [field for field in ("pipeline", "rate", "cv2", "slo") if field != by]
    groups: dict[tuple[object, ...], dict[float, float]] = {}
    for one in cases:
        groups.setdefault(tuple(getattr(one, field) for field in rest), {})[getattr(one, by)] = one.cost["inferline"]
    good = []
    for group in groups.values():
        costs = [group[key] for key in sorted(group)]
        good += [sign * (b - a) >= -1e-9 for a, b in pairwise(costs)]
    return float(np.mean(good))


def _gap(cases: Sequence[PlannedCase], slo: float) -> float:
    costs = {(one.pipeline, one.rate, one.cv2): one.cost["inferline"] for one in cases if one.slo == slo}
    return float(np.mean([costs[p, rate, 4.0] / cost for (p, rate, cv2), cost in costs.items() if cv2 == 1.0]))


def _first_cpu(sweep: Sequence[PlannedCase]) -> float:
    return min((one.slo for one in sweep if one.cv2 == 1.0 and one.language == "cpu"), default=float("inf"))


def draw(figure: Figure, out: Path) -> None:
    """As figures 5 and 6: cost and late queries of each policy by case; and the sweep of figure 9. The first seed."""
    found = figure.documents["plans"][0]
    shown = [p for p in FIGURES_5_6 if any(one["pipeline"] == p for one in found["grid"])]
    picture, panels = canvas(2, len(shown) + bool(found["sweep"]), (10.0, 6.6))
    colours = {"inferline": "#009E73", "cg-mean": "#E69F00", "cg-peak": "#D55E00"}
    parts = ((0, "cost", 1.0), (1, "late", 100.0))
    for (above, below), pipeline in zip(panels.T, shown, strict=False):
        mine = [one for one in found["grid"] if one["pipeline"] == pipeline]
        places = np.arange(len(mine))
        for i, (policy, colour) in enumerate(colours.items()):
            for row, key, factor in parts:
                heights = [factor * one[key][policy] for one in mine]
                (above, below)[row].bar(places + 0.27 * (i - 1), heights, 0.27, color=colour, label=policy)
        names = [f"{one['rate']:g}/s, CV {one['cv2']:g}, {one['slo']:g} s" for one in mine]
        below.set_xticks(places, names, rotation=90, fontsize=7)
        above.set_xticks([])
        above.set_title(pipeline, fontsize=10)
    panels[0][0].legend(fontsize=8, frameon=False)
    if found["sweep"]:
        for cv2, line in ((1.0, "-"), (4.0, "--")):
            mine = [one for one in found["sweep"] if one["cv2"] == cv2]
            for policy, colour in colours.items():
                for row, key, factor in parts:
                    ys, label = [factor * one[key][policy] for one in mine], f"{policy}, CV {cv2:g}"
                    panels[row][-1].plot([one["slo"] for one in mine], ys, line, color=colour, marker=".", label=label)
        panels[0][-1].set_title(f"{SWEEP[0]}, {SWEEP[1]:g} queries/s", fontsize=10)
        panels[1][-1].set_xlabel("objective, s")
        panels[0][-1].legend(fontsize=7, frameon=False)
    title = "InferLine's plans and its baselines (estimated, other seeds)"
    saved(picture, panels, title, out / "inferline_plans.png", ("US$ per hour", "queries late, %"))


if __name__ == "__main__":
    main(build, __doc__)
