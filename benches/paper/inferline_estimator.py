"""InferLine (paper 004), section 3.4: how long the estimator takes, and how far its P99 is from that of another seed and another simulation.

`python benches/paper/inferline_estimator.py [--short] [--seeds N ...] [--json] [--out DIR]`

Plans of all four pipelines are made from five minutes of arrivals at 150 queries/s. What they promise is compared with ten minutes of another
seed. A replay that follows single batches (inferline_replay.py) shares no code of queues with the estimator. In the simulator the services
themselves plan, deploy and tune each pipeline for 100 queries/s; its executors' P99 over a minute is compared with what the plan said before.
Seconds are of one core's processor time, the least of three.
"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from compare import Document, Figure, Result, Row, at_most, main, of, runs, stated
from inferline_pipelines import GRAPHS, PRICES, PROFILES, SIZES, latencies, problem_of, record_of, sample
from inferline_replay import replay

from benches.scoreboard.scenarios import toml
from services.core.pipelines.estimator import LatencyEstimator, at_percentile
from services.core.pipelines.graph import PipelineGraph
from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.queueing import StageConfiguration
from tests.support.data.pipelines import chain

SLOS = (0.15, 0.35, 1.0)
TAIL = 0.99
KINDS = {"cpu": "cpu", "k80": "gpu"}


def stage(fixed_ms: float, item_ms: float, batch: int, replicas: int) -> StageConfiguration:
    return StageConfiguration((0.0, *((fixed_ms + item_ms * n) / 1000 for n in range(1, batch + 1))), batch, replicas)


STAGES = {
    "batch 1, 8 replicas": stage(0, 20, 1, 8),
    "batch 2, 7 replicas": stage(10, 10, 2, 7),
    "batch 4, 2 replicas": stage(2, 3.1, 4, 2),
    "batch 8, 3 replicas": stage(10, 5, 8, 3),
    "batch 8, 8 replicas": stage(10, 5, 8, 8),
    "batch 16, 1 replica": stage(2, 1.1, 16, 1),
    "batch 8, 40 replicas": stage(80, 30, 8, 40),
}


def hour(configured: StageConfiguration, cv2: float, seed: int = 1, seconds: float = 3600.0) -> tuple[float, float]:
    """Processor seconds of an estimate of 300 queries/s through four such stages in a row, and its P99 in seconds."""
    graph, arrivals = PipelineGraph(chain(4)), sample(300.0, cv2, seconds, seed)
    began = time.process_time()
    found = LatencyEstimator(graph, arrivals).latencies(dict.fromkeys(graph.order, configured))
    return time.process_time() - began, at_percentile(found, TAIL)


def simulated(folder: Path, pipeline: str, cv2: float, seed: int, seconds: float, slo_s: float = 0.35) -> Result:
    """The pipeline's part of a run of the simulator under `inferline`. A K80's memory has room for one model."""
    record = record_of(pipeline)
    file: dict[str, Any] = {
        "pipeline": {"name": "pipeline", "latency_ms": 1000 * slo_s},
        "vertex": [{"name": one.name, "app": one.app, "inputs": {"x": "$.x"}} for one in record.vertices],
        "edge": [
            {"from": one.source, "to": one.target}
            | ({} if one.probability is None else {"probability": one.probability})
            for one in record.edges
        ],
        "output": record.output,
    }
    scenario: dict[str, Any] = {
        "scenario": {"duration_s": seconds, "policies": ["inferline"]},
        "pipeline": [{"file": "pipeline.toml"}],
        "variant": [
            {"app": one.app, "name": f"{one.name}-{kind}", "hardware": KINDS[kind], "base_ms": fixed, "per_item_ms": item, "max_batch": SIZES[-1]}
            | ({"memory_gb": 12} if kind == "k80" else {})
            for one in record.vertices
            for kind, (fixed, item) in PROFILES[one.name].items()
        ],
        "worker": [
            {"kind": "cpu", "devices": {"cpu": 16}, "price_per_hour": round(16 * PRICES["cpu"], 3), "start": 2},
            {"kind": "gpu", "devices": {"gpu": 8}, "price_per_hour": round(8 * PRICES["k80"], 3), "start": 2, "resources": {"gpu_memory_gb": 12}},
        ],
        "load": [{"app": "pipeline", "rate": 100, "arrivals": "gamma", "cv": math.sqrt(cv2)}],
    }  # fmt: skip
    (folder / "pipeline.toml").write_text(toml(file))
    (folder / "scenario.toml").write_text(toml(scenario))
    (run,) = runs(folder / "scenario.toml", [seed])
    found: Result = of(run, "inferline")["apps"]["pipeline"]
    return found


def build(seeds: Sequence[int], short: bool) -> Figure:
    """short: a minute instead of an hour, and one pipeline."""
    seconds = 60.0 if short else 300.0
    pipelines = ("Social Media",) if short else tuple(GRAPHS)
    errors: dict[float, list[list[float]]] = {}  # by CV, of each seed
    kernel: dict[float, list[list[float]]] = {}
    differences, shares, kept = [], [], []
    for seed in seeds:
        different, share, attained = [], [], []
        for cv2 in (1.0, 4.0):
            found = []
            for pipeline in pipelines:
                for slo in SLOS:
                    problem = problem_of(pipeline, sample(150.0, cv2, seconds, seed), slo)
                    plan = plan_pipeline(problem)
                    arrivals = sample(150.0, cv2, 2 * seconds, seed + 1000)
                    there = latencies(problem, plan, arrivals)
                    other = at_percentile(there, TAIL)
                    found.append(abs(plan.p99_ms / 1000.0 / other - 1.0))
                    share.append(float(np.mean(there > slo)))
                    again = at_percentile(replay(problem, plan, arrivals, 2 * seconds).latencies, TAIL)
                    different.append(abs(again / other - 1.0))
            errors.setdefault(cv2, []).append(found)
            with TemporaryDirectory() as folder:
                ran = [simulated(Path(folder), one, cv2, seed + 1000, seconds / 5) for one in pipelines]
            kernel.setdefault(cv2, []).append(
                [abs(one["pipeline"]["plan"]["p99_ms"] / one["p99_ms"] - 1.0) for one in ran]
            )
            attained += [one["attainment"] for one in ran]
        differences.append(max(different))
        kept.append(min(attained))
        shares.append(float(np.mean(np.array(share) > 1 - TAIL)))

    def error(of: str, found: dict[float, list[list[float]]]) -> list[Row]:
        return [
            stated(f"P99 against {of}, CV {cv2:g}: error, {word}", [float(value(one)) for one in mine], form=".1%")
            for cv2, mine in found.items()
            for word, value in (("mean", np.mean), ("largest", max))
        ]

    rows = [
        *error("another seed", errors),
        stated("plans with more than 1% late on another seed", shares, form=".0%"),
        stated("P99 against a replay of single batches: largest difference", differences, form=".2%"),
        *error("the simulated system", kernel),
        stated("answers in time in the simulated system, least", kept, form=".2%"),
    ]
    length, words = (60.0, "a minute") if short else (3600.0, "an hour")
    for cv2 in (1.0, 4.0):
        times = [min(hour(one, cv2, seconds=length)[0] for _ in range(1 if short else 3)) for one in STAGES.values()]
        what = f"{words} at 300 queries/s through four stages, CV {cv2:g}"
        rows.append(
            stated(f"{what}: processor time, mean of {len(times)}", [float(np.mean(times))], " s", "hundreds of ms")
        )
        rows.append(at_most(f"{what}: longest", 1.0, [max(times)], " s", tolerance=0.0))
    documents: list[Document] = [
        {"seed": seed, "errors": {cv2: errors[cv2][i] for cv2 in errors}} for i, seed in enumerate(seeds)
    ]
    return Figure("inferline_estimator", "InferLine, section 3.4: the estimator", rows, {"errors": documents}, _nothing)


def _nothing(figure: Figure, out: Path) -> None:
    """Numbers only."""


if __name__ == "__main__":
    main(build, __doc__)
