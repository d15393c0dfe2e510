"""The tuner of pipelines, and stages that are asked for items: `python benches/pipelines.py [--seconds N] [--only tuner|items|live]`.

cv is σ/μ of the gaps; the paper's CV is its square. Plans, and the estimator beside the simulator, are in benches/paper/inferline_*.py.

tuner: false alarms in a stationary hour, seconds until a jump 150 -> 250 queries/s and a burst at the same mean are seen, time of a report.
items: P99 as estimated beside what the real dispatchers and executors have on virtual time, of a stage that is asked for each item of an answer, and
of one behind it, for the same arrivals.
live: P99 of a chain of three stages on a running system over what the estimator says of the queries as they were sent, at three loads (--seconds each, at most 12).
Devices are simulated, so that a batch takes what its profile says; dispatcher, executors, NATS and client are real. The way between stages is the
one that is measured meanwhile (beside it: 0.5 ms). Not in the default run.
"""

import argparse
import asyncio
import sys
import time
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import rig

sys.path.insert(0, str(rig.HERE / "paper"))

from inferline_replay import decisions
from msgspec.structs import replace

import infaas
from bus.messages.catalog import PipelineEdge, PipelinePlan, PipelineVertex
from infaas.cli.pipeline import change_of, hop_of, options_of
from services.core.pipelines.estimator import LatencyEstimator, MeasuredHop, at_percentile
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.problem import PipelineProblem, StageOption, batch_seconds
from services.core.pipelines.queueing import Floats, StageConfiguration
from services.core.pipelines.tuner import PipelineTuner
from services.simulation.run import simulate_all
from services.simulation.scenario.pipelines import PipelineFile
from services.simulation.scenario.read import read_scenario
from tests.simulation.test_pipelines import estimated, handing_on
from tests.support.data.pipeline_scenarios import write_scenario
from tests.support.data.pipelines import chain, gamma_arrivals


def tuner() -> None:
    print("\ntuner: planned for 150 queries/s\n")
    print(
        "| cv of the plan | false alarms in 10 h | s to a jump to 250/s | s to cv 2 | µs a report |\n|---|---|---|---|---|"
    )
    for cv in (0.5, 1.0, 2.0):
        plan = plan_for(gamma_arrivals(150, cv, 600, seed=1))
        alarms, reports = 0, 0.0
        for seed in range(10):
            began = time.process_time()
            found = list(decisions(PipelineTuner(plan, 0.0), gamma_arrivals(150, cv, 3600, 50 + seed), 3600.0))
            reports += (time.process_time() - began) / 36_000 / 10
            alarms += sum(decision.action == "up" for _, decision in found)
        jumps = [reaction(plan, cv, 250.0, cv, seed) for seed in range(5)]
        bursts = [reaction(plan, cv, 150.0, 2.0, seed) for seed in range(5)] if cv < 2 else []
        print(
            f"| {cv:g} | {alarms} | {np.mean(jumps):.1f} | {f'{np.mean(bursts):.1f}' if bursts else '-'} |"
            f" {1e6 * reports:.0f} |",
            flush=True,
        )


def plan_for(sample: Floats) -> PipelinePlan:
    record = chain(1)
    option = StageOption(vertex="v0", hardware="cpu", price_per_hour=0.1, batch_latency_ms={1: 60.0})
    return plan_pipeline(
        PipelineProblem(name="p", pipeline=record, latency_ms=300.0, options=(option,), arrivals=sample), effort=0
    )


def reaction(plan: PipelinePlan, usual: float, rate: float, cv: float, seed: int) -> float:
    """Seconds from a change of rate and cv, after a minute, to the first decision; infinite without one in two minutes."""
    before = gamma_arrivals(150, usual, 60, seed)
    after = 60 + gamma_arrivals(rate, cv, 120, seed + 20)
    found = decisions(PipelineTuner(plan, 0.0), np.concatenate([before, after]), 180.0)
    return next((at - 60 for at, _ in found), float("inf"))


ITEMS = ((2.6, 1.0, 30.0), (2.6, 2.0, 30.0), (18.9, 1.0, 8.0), (18.9, 2.0, 8.0))  # mean, dispersion, queries/s


def items(seconds: float) -> None:
    print("\na stage that is asked for items, and one behind it, in the simulator\n")
    print(
        "| items, mean | dispersion | queries/s | p99 estimated | p99 | error | p50 | error |\n|---|---|---|---|---|---|---|---|"
    )
    for mean, dispersion, rate in ITEMS:
        asked, load = handing_on(mean, dispersion), {"arrivals": "gamma", "cv": 1.0, "rate": rate}
        with TemporaryDirectory() as folder:
            file = write_scenario(Path(folder), asked, load, {"cpu": 24, "gpu": 24}, duration_s=seconds, patient=True)
            scenario = read_scenario(file, policies=["inferline"], seed=2)
        [run] = simulate_all(scenario)["policies"]
        latencies, found = estimated(scenario, asked), run["apps"]["p"]
        p50, p99 = (1000 * at_percentile(latencies, share) for share in (0.5, 0.99))
        print(
            f"| {mean} | {dispersion:g} | {rate:g} | {p99:.0f} | {found['p99_ms']:.0f} | {100 * (p99 / found['p99_ms'] - 1):+.1f} % |"
            f" {found['p50_ms']:.0f} | {100 * (p50 / found['p50_ms'] - 1):+.1f} % |",
            flush=True,
        )


LIVE_APPS = ("first", "second", "third")
LIVE_QPS = (40.0, 60.0, 120.0)
LIVE_MS, SKIPPED_S, LONGEST_LIVE_S = 400.0, 3.0, 12.0
LIVE = "[registrar]\nthreads = [1]\nmax_batches = [8]\n[worker]\nsimulate = { inferentia = 3 }\n"


async def live(system: rig.DemoSystem, seconds: float) -> None:
    print("\na chain of three stages, live on simulated devices\n")
    print(
        "| queries/s | batch, replicas of each | hop ms | estimated P99 | live P99 | live over estimate | … at 0.5 ms | P50 | refused |"
    )
    print("|---|---|---|---|---|---|---|---|---|", flush=True)
    async with infaas.connect(data_dir=system.data_dir) as client:
        for app in LIVE_APPS:
            await client.register(rig.MODEL, app=app, model=app, validation=rig.VALIDATION)
        [row] = await client.apps(app=LIVE_APPS[0])
        record = replace(
            chain(3),
            vertices=[
                PipelineVertex(name=name, app=name, inputs={row["inputs"][0]["name"]: f"$.{row['inputs'][0]['name']}"})
                for name in LIVE_APPS
            ],
            edges=[PipelineEdge(source=a, target=b) for a, b in pairwise(LIVE_APPS)],
            output={"y": f"third.{row['outputs'][0]['name']}"},
        )
        file = PipelineFile(name="live", latency_ms=LIVE_MS, slo_target=None, pipeline=record)
        await client.admin("set-pipeline", **change_of(file))
        for rate in LIVE_QPS:
            print(await live_row(client, file, rate, seconds), flush=True)


async def live_row(client: infaas.Client, file: PipelineFile, rate: float, seconds: float) -> str:
    """Plan from the profiles, deploy, ask, and estimate the same queries."""
    rows = [row for app in LIVE_APPS for row in await client.variants(app=app)]
    options = tuple(
        next(one for one in options_of(app, [row for row in rows if row["app"] == app]) if one.hardware == "inferentia")
        for app in LIVE_APPS
    )
    problem = PipelineProblem(
        name=file.name, pipeline=file.pipeline, latency_ms=file.latency_ms, options=options,
        arrivals=gamma_arrivals(rate, 1.0, 600.0, 1), hop=hop_of(rows),
    )  # fmt: skip
    plan = plan_pipeline(problem, effort=0, rounds=1)
    await client.admin("deploy-pipeline", app=file.name, plan=plan)
    while True:
        [listed] = await client.pipelines(app=file.name)
        if all(one["instances"] >= one["replicas"] for one in listed["vertices"]):
            break
        await asyncio.sleep(0.2)
    x = rig.stored()[0][:1]
    due = gamma_arrivals(rate, 1.0, seconds + SKIPPED_S, 7)

    async def ask(_: float) -> tuple[float, float]:
        began = time.monotonic()
        answer = await client.query(file.name, x, raise_refused=False, timeout=20.0)
        return began, time.monotonic() - began if isinstance(answer, infaas.Answer) else np.nan

    sent, took = np.array(await rig.paced(due, ask)).T
    sent -= sent[0] - due[0]
    hop = hop_of([row for app in LIVE_APPS for row in await client.variants(app=app)])
    tables = {one.vertex: batch_seconds(one) for one in options}
    stages = {
        name: StageConfiguration(tables[name][: one.batch + 1], one.batch, one.replicas)
        for name, one in plan.vertices.items()
    }
    seen = (due > SKIPPED_S) & ~np.isnan(took)
    graph = PipelineGraph(file.pipeline)
    measured, assumed = (
        LatencyEstimator(graph, np.sort(sent), hop=one).latencies(stages)[due > SKIPPED_S]
        for one in (hop, MeasuredHop(0.5))
    )
    p99 = at_percentile(took[seen], 0.99)
    estimated = at_percentile(measured, 0.99)
    return (
        f"| {rate:g} | {', '.join(f'{one.batch} x{one.replicas}' for one in plan.vertices.values())} | {hop.ms:.2f} |"
        f" {1000 * estimated:.0f} | {1000 * p99:.0f} | {p99 / estimated:.2f} | {p99 / at_percentile(assumed, 0.99):.2f} |"
        f" {np.median(took[seen]) / np.median(measured):.2f} | {int(np.isnan(took).sum())} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="simulated, of items; of live at most 12 a load")
    parser.add_argument("--only", choices=("tuner", "items", "live"))
    options = parser.parse_args()
    if options.only in (None, "tuner"):
        tuner()
    if options.only in (None, "items"):
        items(options.seconds)
    if options.only == "live":
        with rig.system(LIVE) as system:
            asyncio.run(live(system, min(options.seconds, LONGEST_LIVE_S)))


if __name__ == "__main__":
    main()
