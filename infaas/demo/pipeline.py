"""`infaas demo --pipeline`: a pipeline of real models, planned, deployed and tuned, under a load that triples and falls again.

A cheap model reads each digit. Where it is unsure, an accurate one reads it, too. Then a check compares the picture with known ones. What
the machine can carry is measured first, and the load is a part of that.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import infaas
from bus.messages.catalog import PipelinePlan
from bus.messages.public import RegistrationStatus
from infaas.answers import Answer
from infaas.cli.pipeline import change_of, hop_of, options_of
from infaas.client import Client
from infaas.demo.digits import UNSEEN, load
from infaas.demo.family import Progress
from infaas.demo.pipeline_results import (
    PHASES,
    TIMES,
    DemoReply,
    arrivals,
    asked_exact,
    draw,
    phase_at,
    results,
    series,
    summary,
    vertices,
)
from infaas.demo.results import TEMPORARY
from infaas.demo.scenario import FIRST_ANSWER_S, RETRY_S, PictureSource, recorded
from infaas.demo.stages import LATENCY_MS, PIPELINE, DemoStages, make_stages, pipeline_file
from infaas.demo.system import DemoSystem, temporary
from infaas.errors import InfaasError, Refused
from services.core.pipelines.planners import plan_pipeline
from services.simulation.scenario.pipelines import problem_of, read_pipeline

POLICY = "inferline"
SETTINGS = (
    "[registrar]\nthreads = [1]\nmax_batches = [16]\n"  # fewer variants: two of a model, so that it takes less time
)
PROBE_S, UNDER_WAY = 3.0, 12  # seconds and queries under way, to measure what the machine can carry
PEAK_SHARE, MOST_QPS = 0.4, 240.0  # the highest rate: of what was measured, and queries/s at most
SERVED_S = 30.0  # until the planned replicas must serve
WATCH_S = 0.5  # between looks at the instances
MAX_PROBLEMS = 5

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


@dataclass
class PipelineLoad:
    """Sends unseen digits one by one, and judges the replies."""

    client: Client
    threshold: float
    sent: int = 0
    problems: list[str] = field(default_factory=list)
    replies: list[DemoReply] = field(default_factory=list)
    instances: list[tuple[float, dict[str, int]]] = field(default_factory=list)  # Unix time, by vertex

    def __post_init__(self) -> None:
        self.pictures = load(UNSEEN)
        self._source = PictureSource(self.pictures, np.random.default_rng(0))

    async def first(self) -> None:
        """Ask until it is answered. Raises InfaasError after FIRST_ANSWER_S."""
        began = time.monotonic()
        while (reply := await self._ask(0.0, began)) is not None and reply.code:
            if time.monotonic() - began > FIRST_ANSWER_S:
                raise InfaasError(
                    f"the pipeline was not answered within {FIRST_ANSWER_S:.0f} s, but refused as {reply.code}"
                )
            await asyncio.sleep(RETRY_S)

    async def probe(self, seconds: float, progress: Progress) -> float:
        """Answers per second with UNDER_WAY queries under way all the time."""
        began, answered = time.monotonic(), 0

        async def asks() -> None:
            nonlocal answered
            while (now := time.monotonic()) < began + seconds:
                progress("measuring what the machine can carry", (now - began) / seconds)
                reply = await self._ask(now - began, now)
                answered += reply is not None and not reply.code

        async with asyncio.TaskGroup() as group:
            for _ in range(UNDER_WAY):
                group.create_task(asks())
        return answered / (time.monotonic() - began)

    async def run(self, times: Sequence[float], seconds: float, progress: Progress) -> None:
        """Send at these times, in seconds from now, and wait for the replies. Notes the instances meanwhile."""
        start = time.monotonic()
        watch = asyncio.create_task(self._watch())
        try:
            async with asyncio.TaskGroup() as group:
                for due in times:
                    await asyncio.sleep(max(0.0, start + due - time.monotonic()))
                    group.create_task(self._keep(due, start + due))
                    progress(f"sending digits: {phase_at(due / seconds)}", due / seconds)
            await asyncio.sleep(max(0.0, start + seconds - time.monotonic()))
        finally:
            watch.cancel()

    async def _keep(self, due: float, intended: float) -> None:
        reply = await self._ask(due, intended)
        if reply is not None:
            self.replies.append(reply)

    async def _watch(self) -> None:
        while True:
            self.instances.append((time.time(), await serving(self.client)))
            await asyncio.sleep(WATCH_S)

    async def _ask(self, due: float, intended: float) -> DemoReply | None:
        """None: it ended wrongly."""
        (picture,) = self._source.draw(1).tolist()
        name = f"demo-{self.sent}"
        self.sent += 1
        try:
            reply = await self.client.query(
                PIPELINE, self.pictures.x[picture : picture + 1], raise_refused=False, id=name
            )
        except InfaasError as error:
            self._failed(f"neither answered nor refused: {error}")
            return None
        took_ms = 1000.0 * (time.monotonic() - intended)
        if isinstance(reply, Refused):
            if reply.code not in TEMPORARY or not reply.message:
                self._failed(f"refused as {reply.code}: {reply.message or 'without a reason'}")
                return None
            return DemoReply(due, took_ms, picture, code=reply.code)
        problem = wrong_answer(reply, name, self.threshold)
        if problem:
            self._failed(problem)
            return None
        said, agreed = int(reply.outputs["scores"].argmax()), float(reply.outputs["verdict"][0, 1])
        return DemoReply(due, took_ms, picture, said=said, exact=asked_exact(reply), agreed=agreed, cost=reply.cost)

    def _failed(self, problem: str) -> None:
        if len(self.problems) < MAX_PROBLEMS:
            self.problems.append(problem)


def wrong_answer(answer: Answer, name: str, threshold: float) -> str:
    """What is wrong with an answer; empty if nothing is."""
    if answer.id != name:
        return f"an answer carries the id {answer.id!r} instead of {name!r}"
    for output, shape in (("scores", (1, 10)), ("verdict", (1, 2))):
        found = answer.outputs.get(output)
        if found is None or found.shape != shape or not np.isfinite(found).all():
            return f"an answer does not hold {shape[1]} finite numbers as {output}"
    expected = 2 + asked_exact(answer)
    if len(answer.members or ()) != expected:
        return f"an answer names {answer.members} as its models, not {expected}"
    sure = float(answer.outputs["scores"].max())
    if expected == 2 and sure < threshold:
        return f"the accurate model was not asked, although the cheap one was only {sure:.3f} sure"
    return "" if not answer.simulated else "an answer is said to be simulated"


async def serving(client: Client) -> dict[str, int]:
    """By vertex, the instances that serve it."""
    (listed,) = await client.pipelines(app=PIPELINE)
    return {row["vertex"]: row["instances"] for row in listed["vertices"]}


# -- from end to end


async def run(
    *, keep: bool, seconds: float, picture: Path | None, progress: Progress
) -> tuple[dict[str, Any], DemoSystem]:
    """Run the demo for so many seconds of queries. Returns its result and the system, as `infaas.demo.scenario.run`.

    picture: file to draw into; None: none is drawn.
    """
    began = time.monotonic()
    async with temporary(SETTINGS, keep=keep, progress=progress) as (system, ready_s):
        directory = system.data_dir.parent
        progress("making the check", 0.0)
        stages = await asyncio.to_thread(make_stages, directory)
        async with infaas.connect(data_dir=system.data_dir) as client:
            await _register(client, stages, progress)
            file = directory / f"{PIPELINE}.toml"
            sender = PipelineLoad(client, stages.threshold)
            await _add(client, file, stages, rate=1.0)
            progress("first answer", 0.0)
            await sender.first()
            capacity = await sender.probe(PROBE_S, progress)
            lowest = min(MOST_QPS, PEAK_SHARE * capacity) / TIMES
            await _add(client, file, stages, rate=lowest)
            plan = await _deploy(client, file, progress)
            times = arrivals(lowest, seconds)
            start, probed = time.time(), sender.sent
            await sender.run(times, seconds, progress)
        progress("reading the records", 0.0)
        problems = [*sender.problems, *await recorded(system, PIPELINE, sender.sent)]
        served = await system.sql(STAGES.format(app=PIPELINE, start=start))
        events = await system.sql(EVENTS.format(app=PIPELINE))
        found = {
            "app": PIPELINE,
            "objective_ms": LATENCY_MS,
            "threshold": stages.threshold,
            "capacity_qps": capacity,
            "rates": [lowest * grown for _, _, grown in PHASES],
            "plan": summary(plan),
            "queries": sender.sent,
            "load": sender.sent - probed,
            **results(sender.replies, sender.pictures, stages.threshold, served, seconds),
            "vertices": vertices(plan, served, sender.instances),
            "events": [{**row, "at_s": row["time"] - start} for row in events],
            "series": series(sender.replies, sender.instances, events, start, seconds),
            "picture": None,
            "pipeline_file": str(file) if keep else None,
            "problems": problems,
            "ready_s": ready_s,
            "seconds": time.monotonic() - began,
        }
    if picture is not None:
        draw(found, picture)
        found["picture"] = str(picture)
    return found, system


async def _register(client: Client, stages: DemoStages, progress: Progress) -> None:
    for number, (app, (model, path)) in enumerate(stages.files.items()):
        title = f"registering {model} for {app} ({number + 1} of {len(stages.files)})"
        progress(title, 0.0)

        def on_progress(status: RegistrationStatus, title: str = title) -> None:
            progress(title, status.progress)

        await client.register(path, app=app, model=model, validation=stages.validation[app], on_progress=on_progress)


async def _add(client: Client, path: Path, stages: DemoStages, rate: float) -> None:
    path.write_text(pipeline_file(stages, rate))  # noqa: ASYNC240  (a few lines)
    await client.admin("set-pipeline", **change_of(read_pipeline(path, planning=False)))


async def _deploy(client: Client, path: Path, progress: Progress) -> PipelinePlan:
    """Plan from the measured profiles, deploy, and wait until the planned replicas serve. Raises InfaasError."""
    progress(f"planning by {POLICY}", 0.0)
    file = read_pipeline(path)
    rows = {vertex.name: await client.variants(app=vertex.app) for vertex in file.pipeline.vertices}
    options = tuple(option for name, mine in rows.items() for option in options_of(name, mine))
    hop_ms = hop_of(row for mine in rows.values() for row in mine)
    plan = await asyncio.to_thread(plan_pipeline, problem_of(file, options, hop_ms), POLICY)
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
