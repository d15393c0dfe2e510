"""The estimator, the planners and the tuner of pipelines: `python benches/pipelines.py [--seconds N] [--only estimator|planner|tuner|kernel]`.

The pipelines and profiles are those of benches/paper/inferline_pipelines.py. cv is σ/μ of the gaps; the paper's CV is its square, so that 2
here is 4 there. Seconds are of one core's processor time.

estimator: an hour at 300 queries/s through four stages in a row, in several configurations. Bar: 1 s.
planner: cost and run time of each policy, and the share of late queries on traffic of another seed. effort 0: the paper's steps alone, on
the sample as it is.
kernel: P99 as planned beside what the real dispatchers and executors have on virtual time, where queries wait however long it takes; and the share
that misses the objective where they do not. The run's seed is another than the plan's.
tuner: false alarms in a stationary hour, seconds until a jump 150 -> 250 queries/s and a burst at the same mean are seen, time of a report.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TypeVar

import numpy as np
import rig  # noqa: F401  (makes the packages importable)

sys.path.insert(0, str(Path(__file__).resolve().parent / "paper"))

from inferline_estimator import STAGES, hour
from inferline_pipelines import GRAPHS, missed, problem_of
from msgspec.structs import replace

from bus.messages.catalog import PipelinePlan
from services.core.pipelines.envelope import BIN_S
from services.core.pipelines.planners import plan_pipeline
from services.core.pipelines.problem import PipelineProblem, StageOption
from services.core.pipelines.queueing import Floats
from services.core.pipelines.tuner import PipelineTuner, TunerDecision
from services.simulation.run import simulate_all
from services.simulation.scenario.read import read_scenario
from tests.support.data.pipeline_scenarios import write_scenario
from tests.support.data.pipelines import chain, gamma_arrivals

T = TypeVar("T")


def timed(work: Callable[[], T]) -> tuple[T, float]:
    began = time.process_time()
    result = work()
    return result, time.process_time() - began


def estimator() -> None:
    print("\nan hour at 300 queries/s through four stages\n")
    print("| each stage | s, cv 1 | p99 ms | s, cv 2 | p99 ms |\n|---|---|---|---|---|")
    for name, stage in STAGES.items():
        row = []
        for cv in (1.0, 2.0):
            seconds, p99 = hour(stage, cv * cv)
            row += [f"{seconds:.2f}", f"{1000 * p99:.0f}"]
        print(f"| {name} | {' | '.join(row)} |", flush=True)


def planner(seconds: float) -> None:
    print("\nplans: US$/h (late on another seed, planner's seconds)\n")
    print(
        "| pipeline | rate | cv | objective | inferline | effort 0 | cg-mean | cg-peak |\n|---|---|---|---|---|---|---|---|"
    )
    for name in GRAPHS:
        for rate, cv, latency_ms in ((150, 1.0, 350.0), (150, 2.0, 350.0), (300, 2.0, 500.0), (150, 1.0, 150.0)):
            sample, other = (gamma_arrivals(rate, cv, seconds, seed) for seed in (1, 2))
            problem = problem_of(name, sample, latency_ms / 1000.0)
            cells = []
            for policy, effort in (("inferline", None), ("inferline", 0), ("cg-mean", 0), ("cg-peak", 0)):
                more = {} if effort is None else {"effort": effort, "rounds": 1}
                plan, took = timed(lambda: plan_pipeline(problem, policy, **more))  # noqa: B023
                late = missed(problem, plan, other)
                cells.append(
                    f"{3600 * plan.cost_per_s:.2f} ({100 * late:.1f} %, {took:.1f}){'' if plan.status != 'infeasible' else ' -'}"
                )
            print(f"| {name} | {rate} | {cv:g} | {latency_ms:g} | {' | '.join(cells)} |", flush=True)


def tuner() -> None:
    print("\ntuner: planned for 150 queries/s\n")
    print(
        "| cv of the plan | false alarms in 10 h | s to a jump to 250/s | s to cv 2 | µs a report |\n|---|---|---|---|---|"
    )
    for cv in (0.5, 1.0, 2.0):
        plan = plan_for(gamma_arrivals(150, cv, 600, seed=1))
        alarms, reports = 0, 0.0
        for seed in range(10):
            (found, took) = timed(lambda: list(told(plan, gamma_arrivals(150, cv, 3600, 50 + seed), 3600.0)))  # noqa: B023
            alarms += sum(decision.action == "up" for _, decision in found)
            reports += took / 36_000 / 10
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


def told(plan: PipelinePlan, arrivals: Floats, seconds: float) -> Iterator[tuple[float, TunerDecision]]:
    tuner = PipelineTuner(plan, 0.0)
    counts = np.bincount((arrivals / BIN_S).astype(int), minlength=round(seconds / BIN_S) + 20)
    for i in range(round(seconds / 0.1)):
        decision = tuner.told(0.1 * i, counts[10 * i : 10 * i + 10].tolist(), 0.1 * (i + 1))
        if decision is not None:
            yield 0.1 * (i + 1), decision


def reaction(plan: PipelinePlan, usual: float, rate: float, cv: float, seed: int) -> float:
    """Seconds from a change of rate and cv, after a minute, to the first decision; infinite without one in two minutes."""
    before = gamma_arrivals(150, usual, 60, seed)
    after = 60 + gamma_arrivals(rate, cv, 120, seed + 20)
    return next((at - 60 for at, _ in told(plan, np.concatenate([before, after]), 180.0)), float("inf"))


def kernel(seconds: float) -> None:
    print("\nplans in the simulator, 100 queries/s\n")
    print(
        "| pipeline | cv | objective | policy | p99 planned | p99 | error | missed |\n|---|---|---|---|---|---|---|---|"
    )
    for name in GRAPHS:
        for cv, latency_ms in ((1.0, 500.0), (2.0, 500.0)):
            problem = replace(problem_of(name, np.zeros(0), latency_ms / 1000.0), name="p")
            workers = {option.hardware: 24 for option in problem.options}
            load = {"arrivals": "gamma", "rate": 100, "cv": cv}
            for policy in ("inferline", "model-less"):
                runs = []
                for patient in (True, False):
                    with TemporaryDirectory() as folder:
                        file = write_scenario(Path(folder), problem, load, workers, duration_s=seconds, patient=patient)
                        [run] = simulate_all(read_scenario(file, policies=[policy], seed=2))["policies"]
                    runs.append(run["apps"]["p"])
                planned, found = runs[0]["pipeline"]["plan"]["p99_ms"], runs[0]["p99_ms"]
                print(
                    f"| {name} | {cv:g} | {latency_ms:g} | {policy} | {planned:.0f} | {found:.0f} |"
                    f" {100 * (planned / found - 1):+.1f} % | {100 * (1 - runs[1]['attainment']):.2f} % |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=600.0, help="of the planners' sample traces")
    parser.add_argument("--only", choices=("estimator", "planner", "tuner", "kernel"))
    options = parser.parse_args()
    if options.only in (None, "estimator"):
        estimator()
    if options.only in (None, "planner"):
        planner(options.seconds)
    if options.only in (None, "tuner"):
        tuner()
    if options.only == "kernel":
        kernel(options.seconds)


if __name__ == "__main__":
    main()
