"""`infaas demo --pipeline`: a pipeline of real models, planned, deployed and tuned, under a load that triples and falls again.

A cheap model reads each digit. Where it is unsure, an accurate one reads it, too. Then a check compares the picture with known ones. What
the machine can carry is measured first, and the load is a part of that.
"""

import asyncio
import json
import time
from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise, repeat
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from infaas.answers import Answer
from infaas.client import Client
from infaas.demo.choices import FIRST_ANSWER_S, malformed, wrong_refusal
from infaas.demo.digits import (
    ACCURATE,
    APPS,
    CHEAP,
    CHECK,
    CLASSES,
    EXACT,
    LATENCY_MS,
    PIPELINE,
    UNSEEN,
    UNSURE,
    VERTICES,
    load,
    make_stages,
    models,
    pipeline_file,
    scores_of,
    unsure,
)
from infaas.demo.load import RETRY_S, DemoLoad, DemoReply, Labelled, QueryKind, arrivals, became, counted, text
from infaas.demo.program import Demo, DemoRun, DemoTable, save_picture
from infaas.errors import InfaasError, Refused

POLICY = "inferline"
KIND = QueryKind(name="a digit", needs={})
PROBE_S, UNDER_WAY = 3.0, 12  # seconds and queries under way, to measure what the machine can carry
PEAK_SHARE, MOST_QPS = 0.4, 240.0  # the highest rate: of what was measured, and queries/s at most
SERVED_S = 30.0  # until the planned replicas must serve
TIMES = 3.0  # by which the load grows
# Name, end as a share of the time, multiple of the lowest rate. In the last, replicas have time to go: the tuner remembers 30 s.
PHASES = (("before", 0.08, 1.0), ("tripled", 0.2, TIMES), ("after", 1.0, 1.0))
EDGES = (0.0, *(end for _, end, _ in PHASES))
BINS = 60  # points of the series
COLOURS = ("#0072B2", "#D55E00", "#E69F00")  # of the vertices

STAGES = """
SELECT stage, count(*) AS visits, array_agg(DISTINCT variant) AS variants, avg(batch)::float8 AS batch, avg(cost)::float8 AS cost,
       (percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms))::float8 AS p50_ms,
       (percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms))::float8 AS p99_ms
FROM infaas.query_outcomes AS part WHERE outcome IN ('ok', 'late') AND time >= to_timestamp({start}) AND parent IN (
  SELECT uid FROM infaas.query_outcomes WHERE app = '{app}' AND parent IS NULL AND outcome IN ('ok', 'late'))
GROUP BY 1
"""
EVENTS = """
SELECT extract(epoch FROM time)::float8 AS time, vertex, action, from_replicas, to_replicas, lambda_max, window_s, reason
FROM infaas.pipeline_events WHERE pipeline = '{app}' ORDER BY 1, 2
"""


async def play(run: DemoRun) -> dict[str, Any]:
    """Unseen digits, one by one, to a pipeline of three stages."""
    run.progress("making the check", 0.0)
    stages, pictures = await asyncio.to_thread(make_stages, run.directory), load(UNSEEN)
    await run.register(stages.files)
    sender = DemoLoad(run.client, PIPELINE, pictures, judge)
    file = await _add(run, stages.share, rate=1.0)
    run.progress("first answer", 0.0)
    await sender.first(KIND, FIRST_ANSWER_S)
    run.progress("measuring what the machine can carry", 0.0)
    began = time.monotonic()
    carried = became(await sender.run(repeat((0.0, KIND)), PROBE_S, under_way=UNDER_WAY))["answered"]
    capacity = carried / (time.monotonic() - began)
    lowest = min(MOST_QPS, PEAK_SHARE * capacity) / TIMES
    await _add(run, stages.share, rate=lowest)
    plan = await _deploy(run, file)

    def tell(due: float) -> None:
        run.progress(f"sending digits: {PHASES[bisect(EDGES[1:-1], due / run.seconds)][0]}", due / run.seconds)

    start = time.time()
    rates = [((end - at) * run.seconds, grown * lowest) for at, (_, end, grown) in zip(EDGES, PHASES, strict=False)]
    replies = await sender.run(arrivals(rates, [KIND]), run.seconds, tell)
    await run.recorded(sender)
    served = {row["stage"]: row for row in await run.system.sql(STAGES.format(app=PIPELINE, start=start))}
    events = [{**row, "at_s": row["time"] - start} for row in await run.system.sql(EVENTS.format(app=PIPELINE))]
    return {
        "queries": sender.queries,
        "objective_ms": LATENCY_MS,
        "threshold": UNSURE,
        "capacity_qps": capacity,
        "rates": [rate for _, rate in rates],
        "plan": {name: plan[name] for name in ("policy", "status", "cost_per_s", "p99_ms", "rate", "percentile")},
        **results(replies, pictures, served, run.seconds),
        "vertices": vertices(plan, served),
        "events": events,
        "series": series(replies, events, start, run.seconds),
        "pipeline_file": str(file) if run.system.keep else None,
    }


def judge(kind: QueryKind, items: int, id: str, said: Answer | Refused) -> str:
    """What is wrong with a reply; empty if nothing is."""
    if isinstance(said, Refused):
        return wrong_refusal(kind, said)
    wrong = malformed(said, id, items, {"scores": CLASSES, "verdict": 2})
    if wrong:
        return wrong
    # Whether the accurate model was asked, too.
    expected = 2 + any(member.partition("@")[0] == ACCURATE for member in said.members or ())
    if len(said.members or ()) != expected:
        return f"names {said.members} as its models, not {expected}"
    sure = float(said.outputs["scores"].max())
    if expected == 2 and sure < UNSURE:
        return f"the accurate model was not asked, although the cheap one was only {sure:.3f} sure"
    return ""


async def serving(client: Client) -> dict[str, int]:
    """By vertex, the instances that serve it."""
    (listed,) = await client.pipelines(app=PIPELINE)
    return {row["vertex"]: row["instances"] for row in listed["vertices"]}


async def _add(run: DemoRun, share: float, rate: float) -> Path:
    """Add or change the pipeline. Returns its file."""
    path = run.directory / f"{PIPELINE}.toml"
    path.write_text(pipeline_file(share, rate))
    await run.system.infaas("pipeline", "add", path)
    return path


async def _deploy(run: DemoRun, file: Path) -> dict[str, Any]:
    """Plan from the measured profiles, deploy, and wait until the planned replicas serve. Raises InfaasError."""
    run.progress(f"planning by {POLICY}", 0.0)
    plan: dict[str, Any] = await run.system.infaas("pipeline", "plan", file, "--policy", POLICY)
    planned = file.with_name("plan.json")
    planned.write_text(json.dumps(plan))
    await run.system.infaas("pipeline", "deploy", planned)
    began = time.monotonic()
    while lacking := [
        name for name, there in (await serving(run.client)).items() if there < plan["vertices"][name]["replicas"]
    ]:
        run.progress(f"waiting for planned replicas of {', '.join(sorted(lacking))}", 0.5)
        if time.monotonic() - began > SERVED_S:
            raise InfaasError(f"planned replicas of {', '.join(sorted(lacking))} do not serve within {SERVED_S:.0f} s")
        await asyncio.sleep(RETRY_S)
    return plan


# -- the figures. Pure


def between(replies: Sequence[DemoReply], edges: Sequence[float]) -> list[dict[str, Any]]:
    """What became of the queries that were due between each two of these seconds."""
    return [
        {"seconds": end - start, "qps": len(there) / (end - start), **became(there, LATENCY_MS)}
        for start, end in pairwise(edges)
        for there in [[one for one in replies if start <= one.due < end]]
    ]


def results(
    replies: Sequence[DemoReply], pictures: Labelled, served: Mapping[str, Mapping[str, Any]], seconds: float
) -> dict[str, Any]:
    """The whole and its phases. computed: what was not measured here. check: of right and wrong answers, how many it doubts.

    served: of each vertex, visits and means of its parts.
    """
    parts = between(replies, [seconds * at for at in EDGES])
    answered = [(one, one.answer) for one in replies if one.answer is not None]
    pairs = [(bool(one.right[0]), float(answer.outputs["verdict"][0, 1]) < 0.5) for one, answer in answered]
    return {
        **became(replies, LATENCY_MS),
        "phases": [
            {"name": name, "times": grown, **part} for (name, _, grown), part in zip(PHASES, parts, strict=True)
        ],
        "computed": _computed([int(one.pictures[0]) for one, _ in answered], pictures, served),
        "check": {
            word: {"answers": len(doubts), "doubted": sum(doubts)}
            for word, said in (("right", True), ("wrong", False))
            for doubts in [[doubted for right, doubted in pairs if right is said]]
        },
    }


def _computed(shown: Sequence[int], pictures: Labelled, served: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Of single models: accuracies for the same pictures, and what the accurate one for each query would cost, by paid visits."""
    x, labels = pictures.x[shown], pictures.y[shown]
    quick, exact = (scores_of(models()[one], x) for one in (CHEAP, ACCURATE))
    both = np.where(unsure(quick)[:, None], exact, quick)
    found: dict[str, Any] = {}
    for name, scores in {"quick": quick, "exact": exact, "both": both}.items():
        found[name] = float((scores.argmax(axis=1) == labels).mean()) if shown else None
    costs = [served[vertex]["cost"] for vertex in (EXACT, CHECK) if vertex in served]
    return found | {"costs_per_1000": [1000.0 * cost for cost in costs]}


def vertices(plan: Mapping[str, Any], served: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """How each vertex was planned, and how it was visited."""
    nothing = dict.fromkeys(("batch", "cost", "p50_ms", "p99_ms")) | {"visits": 0, "variants": []}
    kept = ("replicas", "batch", "scale", "service_ms", "rho", "accuracy")
    return [
        {
            **nothing,
            **served.get(name, {}),
            "vertex": name,
            "app": APPS[name],
            "variant": stage["variant"],
            "planned": {key: stage.get(key) for key in kept},
        }
        for name, stage in plan["vertices"].items()
    ]


def series(
    replies: Sequence[DemoReply], events: Sequence[Mapping[str, Any]], start: float, seconds: float
) -> dict[str, Any]:
    """Over the load. time: seconds to the end of each interval. attainment: of its queries; None without any.

    wanted: replicas that the tuner wants at the end of each interval, by vertex.
    """
    edges = np.linspace(0.0, seconds, BINS + 1)
    parts, ends = between(replies, edges.tolist()), start + edges[1:]
    steps = {
        vertex: [(row["time"], row["to_replicas"]) for row in events if row["vertex"] == vertex] for vertex in VERTICES
    }
    return {
        "time": edges[1:].tolist(),
        "qps": [part["qps"] for part in parts],
        "attainment": [part["slo_attainment"] for part in parts],
        "wanted": {vertex: last_of(steps[vertex], ends) for vertex in VERTICES},
    }


def last_of(steps: Sequence[tuple[float, int]], times: NDArray[np.float64]) -> list[int]:
    """The last value at each time; before the first step, that one's. steps: in order."""
    if not steps:
        return [0] * len(times)
    at = np.searchsorted([when for when, _ in steps], times, side="right") - 1
    return [steps[max(0, place)][1] for place in at.tolist()]


# -- what is printed


def shown(result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
    plan = result["plan"]
    yield DemoTable(
        f"{result['app']} as planned by {plan['policy']} for {plan['rate']:.3g} queries/s ({plan['status']},"
        f" US$ {3600 * plan['cost_per_s']:.3g} an hour, estimated p99 {plan['p99_ms']:.3g} ms), and as it was served",
        [_stage_cells(row, result) for row in result["vertices"]],
        left=("variant",),
    )
    whole = {**result, "name": "in all", "qps": result["sent"] / sum(phase["seconds"] for phase in result["phases"])}
    yield DemoTable(
        f"its queries, objective {result['objective_ms']:g} ms (as the client saw them)",
        [_phase_cells(row) for row in (*result["phases"], whole)],
    )
    yield from figures(result)
    if result["pipeline_file"] is not None:
        yield f"the pipeline: {result['pipeline_file']}"


def _stage_cells(row: Mapping[str, Any], result: Mapping[str, Any]) -> dict[str, str]:
    """How a vertex was planned, visited and served."""
    planned, wanted = row["planned"], result["series"]["wanted"][row["vertex"]]
    return {
        "stage": row["vertex"],
        "variant": row["variant"],
        "accuracy": text(planned["accuracy"], "{:.3f}"),
        "visits": str(row["visits"]),
        "a query": f"{row['visits'] / max(1, result['answered']):.2f}, planned {planned['scale']:.2f}",
        "replicas": f"planned {planned['replicas']}",
        "over time": " → ".join(str(count) for count, _ in groupby(wanted)),
        "batch": text(row["batch"], "{:.1f}") + f" of {planned['batch']}",
        "p50": text(row["p50_ms"], "{:.1f} ms"),
        "p99": text(row["p99_ms"], "{:.1f} ms"),
    }


def _phase_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Latency and attainment of the pipeline in a phase of the load."""
    return {
        "load": row["name"],
        "queries": str(row["sent"]),
        "queries/s": f"{row['qps']:.1f}",
        "refused": str(sum(row["refused"].values())),
        "p50": text(row["p50_ms"], "{:.1f} ms"),
        "p99": text(row["p99_ms"], "{:.1f} ms"),
        "in time": text(row["slo_attainment"], "{:.1%}"),
    }


def figures(result: Mapping[str, Any]) -> Iterator[str]:
    """Accuracy, cost, what the check found, and what the tuner decided, in words."""
    rates = ", then ".join(f"{rate:.3g}" for rate in result["rates"])
    yield f"Load: the machine carried {result['capacity_qps']:.0f} queries/s of this pipeline; sent were {rates}."
    computed, check = result["computed"], result["check"]
    if result["answered"]:
        yield (
            f"Accuracy: {result['accuracy']:.2%} measured. For the same pictures, computed here: {CHEAP} alone"
            f" {computed['quick']:.2%}, {ACCURATE} alone {computed['exact']:.2%}."
        )
        by_stage = ", ".join(
            f"{row['vertex']} {1e3 * row['cost'] * row['visits'] / result['answered']:.3g}"
            for row in result["vertices"]
            if row["cost"] is not None
        )
        yield f"Cost: US$ {result['cost_per_1000']:.3g} per 1,000 queries, charged ({by_stage})."
        if len(costs := computed["costs_per_1000"]) == 2:
            yield (
                f"The accurate model for each query, computed from what its visits here were charged: {costs[0]:.3g};"
                f" with the check: {sum(costs):.3g}."
            )
        wrong, right = ("{doubted} of {answers}".format(**check[word]) for word in ("wrong", "right"))
        yield f"Check: it doubts {wrong} wrong answers, and {right} right ones."
    for (at, action), rows in groupby(result["events"], key=lambda row: (row["at_s"], row["action"])):
        changed = list(rows)
        what = ", ".join(f"{row['vertex']} {row['from_replicas']} → {row['to_replicas']}" for row in changed)
        reason = max((row["reason"] for row in changed), key=len)  # the longest also says what found no room
        yield f"Tuner at {at:.1f} s: {action}: {what}: {reason}"
    if result["refused"]:
        yield f"Refused: {counted(result['refused'])}."


def draw(found: Mapping[str, Any], path: Path) -> None:
    """Rate, replicas and attainment over time, as the paper's figures 6 and 7."""
    from matplotlib.figure import Figure  # noqa: PLC0415  (an extra)

    series = found["series"]
    at, wanted = [0.0, *series["time"]], series["wanted"]
    figure = Figure(figsize=(9.0, 6.4), dpi=110, layout="constrained")
    panels = rate, replicas, share = figure.subplots(3, 1, sharex=True, height_ratios=(1.0, 1.3, 1.0))

    def over_time(values: Sequence[Any]) -> NDArray[np.float64]:
        return np.array([values[0], *values], float)

    rate.step(at, over_time(series["qps"]), color="black", lw=1.2, label="sent")
    rate.set_ylabel("queries/s")
    replicas.stackplot(
        at, list(map(over_time, wanted.values())), labels=list(wanted), step="pre", colors=COLOURS, edgecolor="white"
    )
    replicas.set_ylabel("replicas")
    replicas.yaxis.get_major_locator().set_params(integer=True)
    share.step(at, over_time(series["attainment"]), color="#009E73", lw=1.5, label="in time")
    share.set_ylabel(f"within {found['objective_ms']:g} ms")
    share.set_ylim(top=1.05)
    for panel in panels:
        for end in EDGES[1:-1]:
            panel.axvline(at[-1] * end, color="grey", lw=0.8, ls="--")
    planned = f"planned for {found['plan']['rate']:.3g} queries/s"
    title = f"{found['app']}, {found['sent']} digits: {found['slo_attainment'] or 0:.1%} in time, {planned}"
    save_picture(figure, panels, title, at[-1], path)


DEMO = Demo(
    PIPELINE,
    play,
    shown,
    draw,
    settings="[registrar]\nthreads = [1]\nmax_batches = [16]\n",  # fewer variants: two of a model, so that it takes less time
)
