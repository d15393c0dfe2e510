"""`infaas demo --pipeline`: a pipeline of real models, planned, deployed and tuned, under a load that triples and falls again.

A cheap model reads each digit. Where it is unsure, an accurate one reads it, too. Then a check compares the picture with known ones. What
the machine can carry is measured first, and the load is a part of that.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from bus.messages.catalog import PipelinePlan
from infaas.answers import Answer
from infaas.cli.pipeline import change_of, hop_of, options_of
from infaas.client import Client
from infaas.demo.choices import FIRST_ANSWER_S, malformed, wrong_refusal
from infaas.demo.digits import UNSEEN, load
from infaas.demo.load import RETRY_S, DemoLoad, Progress, QueryKind, arrivals
from infaas.demo.program import Demo, DemoSystem, DemoTable, counted, register, text
from infaas.demo.stages import (
    LATENCY_MS,
    PHASES,
    PIPELINE,
    TIMES,
    DemoStages,
    asked_exact,
    bounds,
    draw,
    make_stages,
    phase_at,
    pipeline_file,
    results,
    series,
    vertices,
)
from infaas.errors import InfaasError, Refused
from services.core.pipelines.planners import plan_pipeline
from services.simulation.scenario.pipelines import problem_of, read_pipeline

POLICY = "inferline"
KIND = QueryKind(name="a digit", needs={})
PROBE_S, UNDER_WAY = 3.0, 12  # seconds and queries under way, to measure what the machine can carry
PEAK_SHARE, MOST_QPS = 0.4, 240.0  # the highest rate: of what was measured, and queries/s at most
SERVED_S = 30.0  # until the planned replicas must serve
WATCH_S = 0.5  # between looks at the instances
BLOCKS = " ▁▂▃▄▅▆▇█"

STAGES = """
SELECT stage, variant, count(*) AS visits, avg(batch)::float8 AS batch, avg(cost)::float8 AS cost,
       (percentile_cont(0.5) WITHIN GROUP (ORDER BY latency_ms))::float8 AS p50_ms,
       (percentile_cont(0.99) WITHIN GROUP (ORDER BY latency_ms))::float8 AS p99_ms
FROM infaas.query_outcomes AS part WHERE outcome IN ('ok', 'late') AND time >= to_timestamp({start}) AND parent IN (
  SELECT uid FROM infaas.query_outcomes WHERE app = '{app}' AND parent IS NULL AND outcome IN ('ok', 'late'))
GROUP BY 1, 2 ORDER BY 1, visits DESC
"""
EVENTS = """
SELECT extract(epoch FROM time)::float8 AS time, vertex, action, from_replicas, to_replicas, lambda_max, window_s, reason
FROM infaas.pipeline_events WHERE pipeline = '{app}' ORDER BY 1, 2
"""


class PipelineDemo(Demo):
    """Unseen digits, one by one, to a pipeline of three stages."""

    app = PIPELINE
    settings = (
        "[registrar]\nthreads = [1]\nmax_batches = [16]\n"  # fewer variants: two of a model, so that it takes less time
    )

    def __init__(self, *, keep: bool) -> None:
        self._keep = keep
        self._pictures = load(UNSEEN)
        self._instances: list[tuple[float, dict[str, int]]] = []  # Unix time, by vertex

    async def play(self, client: Client, directory: Path, seconds: float, progress: Progress) -> DemoLoad:
        progress("making the check", 0.0)
        self._stages = stages = await asyncio.to_thread(make_stages, directory)
        files = [(app, model, path, stages.validation[app]) for app, (model, path) in stages.files.items()]
        await register(client, files, progress)
        self._file = directory / f"{PIPELINE}.toml"
        sender = DemoLoad(client, PIPELINE, self._pictures, partial(judge, stages.threshold))
        await _add(client, self._file, stages, rate=1.0)
        progress("first answer", 0.0)
        await sender.first(KIND, FIRST_ANSWER_S)
        progress("measuring what the machine can carry", 0.0)
        self._capacity = await sender.carried(KIND, UNDER_WAY, PROBE_S)
        self._lowest = min(MOST_QPS, PEAK_SHARE * self._capacity) / TIMES
        await _add(client, self._file, stages, rate=self._lowest)
        self._plan = await _deploy(client, self._file, progress)
        self._start, self._seconds = time.time(), seconds
        rates = [(share * seconds, grown * self._lowest) for _, share, grown in PHASES]
        watching = asyncio.create_task(self._watch(client))
        try:
            await sender.run(
                arrivals(rates, [KIND]),
                seconds,
                lambda due: progress(f"sending digits: {phase_at(due / seconds)}", due / seconds),
            )
        finally:
            watching.cancel()
        return sender

    async def _watch(self, client: Client) -> None:
        while True:
            self._instances.append((time.time(), await serving(client)))
            await asyncio.sleep(WATCH_S)

    async def figures(self, system: DemoSystem, load: DemoLoad) -> dict[str, Any]:
        plan, replies, start, seconds = self._plan, load.replies[KIND.name], self._start, self._seconds
        served = await system.sql(STAGES.format(app=PIPELINE, start=start))
        events = await system.sql(EVENTS.format(app=PIPELINE))
        return {
            "objective_ms": LATENCY_MS,
            "threshold": self._stages.threshold,
            "capacity_qps": self._capacity,
            "rates": [self._lowest * grown for _, _, grown in PHASES],
            "plan": {
                name: getattr(plan, name) for name in ("policy", "status", "cost_per_s", "p99_ms", "rate", "percentile")
            },
            "load": load.sent.total(),
            **results(replies, self._pictures, self._stages.threshold, served, seconds),
            "vertices": vertices(plan, served, self._instances),
            "events": [{**row, "at_s": row["time"] - start} for row in events],
            "series": series(replies, self._instances, events, start, seconds),
            "pipeline_file": str(self._file) if self._keep else None,
        }

    def shown(self, result: Mapping[str, Any]) -> Iterator[str | DemoTable]:
        plan = result["plan"]
        yield DemoTable(
            f"{result['app']} as planned by {plan['policy']} for {plan['rate']:.3g} queries/s ({plan['status']},"
            f" US$ {3600 * plan['cost_per_s']:.3g} an hour, estimated p99 {plan['p99_ms']:.3g} ms), and as it was served",
            [_stage_cells(row, result) for row in result["vertices"]],
            left=("variant",),
        )
        seconds = sum(phase["seconds"] for phase in result["phases"])
        queries, refused = result["load"], sum(result["refused"].values())
        whole = {**result, "name": "in all", "queries": queries, "qps": queries / seconds, "refused": refused}
        yield DemoTable(
            f"its queries, objective {result['objective_ms']:g} ms (as the client saw them)",
            [_phase_cells(row) for row in (*result["phases"], whole)],
        )
        yield from figures(result)
        yield from chart(result["series"], result["phases"])
        if result["pipeline_file"] is not None:
            yield f"the pipeline: {result['pipeline_file']}"

    def draw(self, result: Mapping[str, Any], path: Path) -> None:
        draw(result, path)


def judge(threshold: float, kind: QueryKind, items: int, id: str, said: Answer | Refused) -> str:
    """What is wrong with a reply; empty if nothing is."""
    if isinstance(said, Refused):
        return wrong_refusal(kind, said)
    wrong = malformed(said, id, items, {"scores": 10, "verdict": 2})
    if wrong:
        return wrong
    expected = 2 + asked_exact(said)
    if len(said.members or ()) != expected:
        return f"names {said.members} as its models, not {expected}"
    sure = float(said.outputs["scores"].max())
    if expected == 2 and sure < threshold:
        return f"the accurate model was not asked, although the cheap one was only {sure:.3f} sure"
    return ""


async def serving(client: Client) -> dict[str, int]:
    """By vertex, the instances that serve it."""
    (listed,) = await client.pipelines(app=PIPELINE)
    return {row["vertex"]: row["instances"] for row in listed["vertices"]}


async def _add(client: Client, path: Path, stages: DemoStages, rate: float) -> None:
    path.write_text(pipeline_file(stages, rate))  # noqa: ASYNC240  (a few lines)
    await client.admin("set-pipeline", **change_of(read_pipeline(path, planning=False)))


async def _deploy(client: Client, path: Path, progress: Progress) -> PipelinePlan:
    """Plan from the measured profiles, deploy, and wait until the planned replicas serve. Raises InfaasError."""
    progress(f"planning by {POLICY}", 0.0)
    file = read_pipeline(path)
    rows = {vertex.name: await client.variants(app=vertex.app) for vertex in file.pipeline.vertices}
    options = tuple(option for name, mine in rows.items() for option in options_of(name, mine))
    hop = hop_of(row for mine in rows.values() for row in mine)
    plan = await asyncio.to_thread(plan_pipeline, problem_of(file, options, hop), POLICY)
    if plan.status == "infeasible":
        raise InfaasError(f"no plan meets {LATENCY_MS:g} ms: {plan.reason}")
    await client.admin("deploy-pipeline", app=PIPELINE, plan=plan)
    began = time.monotonic()
    while lacking := {name for name, n in (await serving(client)).items() if n < plan.vertices[name].replicas}:
        progress(f"waiting for planned replicas of {', '.join(sorted(lacking))}", 0.5)
        if time.monotonic() - began > SERVED_S:
            raise InfaasError(f"planned replicas of {', '.join(sorted(lacking))} do not serve within {SERVED_S:.0f} s")
        await asyncio.sleep(RETRY_S)
    return plan


# -- what is printed


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
        "instances": "{} .. {}".format(*row["instances"]),
        "batch": text(row["batch"], "{:.1f}") + f" of {planned['batch']}",
        "p50": text(row["p50_ms"], "{:.1f} ms"),
        "p99": text(row["p99_ms"], "{:.1f} ms"),
    }


def _phase_cells(row: Mapping[str, Any]) -> dict[str, str]:
    """Latency and attainment of the pipeline in a phase of the load."""
    return {
        "load": row["name"],
        "queries": str(row["queries"]),
        "queries/s": f"{row['qps']:.1f}",
        "refused": str(row["refused"]),
        "p50": text(row["p50_ms"], "{:.1f} ms"),
        "p99": text(row["p99_ms"], "{:.1f} ms"),
        "in time": text(row["attainment"], "{:.1%}"),
    }


def figures(result: Mapping[str, Any]) -> Iterator[str]:
    """Accuracy, cost, what the check found, and what the tuner decided, in words."""
    rates = ", then ".join(f"{rate:.3g}" for rate in result["rates"])
    yield f"Load: the machine carried {result['capacity_qps']:.0f} queries/s of this pipeline; sent were {rates}."
    accuracy, cost, check = result["accuracy"], result["cost"], result["check"]
    if accuracy is not None:
        yield (
            f"Accuracy: {accuracy['answers']:.2%} measured. For the same pictures, computed here: {accuracy['quick']} alone"
            f" {accuracy['computed_quick']:.2%}, {accuracy['exact']} alone {accuracy['computed_exact']:.2%}."
        )
    if cost["per_1000"] is not None:
        by_stage = ", ".join(
            f"{row['vertex']} {1e3 * row['cost'] * row['visits'] / result['answered']:.3g}"
            for row in result["vertices"]
            if row["cost"] is not None
        )
        yield f"Cost: US$ {cost['per_1000']:.3g} per 1,000 queries, charged ({by_stage})."
        if cost["computed_exact_and_check_per_1000"] is not None:
            yield (
                f"The accurate model for each query, computed from what its visits here were charged:"
                f" {cost['computed_exact_per_1000']:.3g}; with the check: {cost['computed_exact_and_check_per_1000']:.3g}."
            )
    if check["right"] + check["wrong"]:
        yield (
            f"Check: it doubts {check['wrong_doubted']} of {check['wrong']} wrong answers, and {check['right_doubted']} of {check['right']}"
            " right ones."
        )
    for (at, action), rows in groupby(result["events"], key=lambda row: (row["at_s"], row["action"])):
        changed = list(rows)
        what = ", ".join(f"{row['vertex']} {row['from_replicas']} → {row['to_replicas']}" for row in changed)
        reason = max((row["reason"] for row in changed), key=len)  # the longest also says what found no room
        yield f"Tuner at {at:.1f} s: {action}: {what}: {reason}"
    if result["refused"]:
        yield f"Refused: {counted(result['refused'])}."


def chart(shown: Mapping[str, Any], phases: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Rate, replicas and attainment over time, a block for each interval; the last line says how the load's rate changes."""
    rows: list[tuple[str, Sequence[float | None], float, str]] = [
        ("queries/s", shown["qps"], max(shown["qps"], default=0.0), "{:.0f}"),
        *((f"{vertex} replicas", row, float(max(*row, 1)), "{:.0f}") for vertex, row in shown["wanted"].items()),
        ("in time", shown["attainment"], 1.0, "{:.0%}"),
    ]
    wide = max(len(name) for name, *_ in rows)
    for name, values, top, form in rows:
        yield f"{name:>{wide}} {blocks(values, top)} to {form.format(top)}"
    ends = [round(len(shown["time"]) * at) for at in bounds()]
    lengths = [end - start for start, end in pairwise(ends)]
    axis = "".join(f"|×{phase['times']:g}"[:n].ljust(n) for phase, n in zip(phases, lengths, strict=True))
    yield f"{'':>{wide}} {axis} {sum(phase['seconds'] for phase in phases):.0f} s"


def blocks(values: Sequence[float | None], top: float) -> str:
    """One character for each value, 0 .. top: a space for None and 0, at least the lowest block for what is above 0."""
    shares = [0.0 if value is None or top <= 0 else min(1.0, max(0.0, value / top)) for value in values]
    return "".join(BLOCKS[max(1, round(share * 8))] if share > 0 else " " for share in shares)
