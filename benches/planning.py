"""How long planning takes, and how near greedy comes to exact: `python benches/planning.py [--problems N] [--repeats N]`.

Problems vary the paper's three variants (Table 2) by ±40 % in throughput, price and memory: 2 to 12 apps × 6 variants, nothing running.
"free": nothing is scarce. "scarce": totals are 0.8 to 1.5 times what the plan without limits takes, each resource by itself;
"tight": 0.6 to 1.2 times; problems without a plan are left out. Speed: 22, 50 and 100 architectures × 8 variants, as decided by
HiGHS and by greedy.

Then the leader's plan for all workers, for both goals: 10 workers of 4 devices of three kinds, 9 apps with 50 variants, half of the room
taken, as production limits the search; then 100 workers with 100 apps of 10 variants, with 300 apps of 60, and of 60 that all fit and
differ little (bar: 2 s). A decision has two such plans; the bar for its p99 is 1 s, so for one it is 0.5 s. And the reaction of a
worker between two plans: the turn in which it sees that load is missing, and orders. 50 variants; the bar is 50 ms.
"""

import gc
import random
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from math import inf
from typing import Any

import numpy as np
import rig
import scipy.optimize  # noqa: F401  (reading it from disk is not solving)

from services.autoscaler.vms.edge import SEARCH_S
from services.core.actor import Effect
from services.core.cost import Goal
from services.core.placement import Device
from services.core.planning.capacity import carried, instances_for, layers
from services.core.planning.fleet import Unsolved, solve_fleet
from services.core.planning.plan import Plan, cheapest, greedy
from services.core.planning.problem import ClassNeed, FleetProblem, PlanningProblem, Pool, PooledVariant
from tests.support.data.planning_problems import broken, random_problem, scarce
from tests.support.simulated.autoscaled_fleet import ScalingFleet
from tests.support.simulated.fleet import variant

TIGHTNESS = {"free": None, "scarce": (0.8, 1.5), "tight": (0.6, 1.2)}


def problem_of(seed: int, kind: str, apps: int | None = None, variants: int = 6) -> PlanningProblem:
    loose = random_problem(seed, apps=apps, variants=variants)
    limits = TIGHTNESS[kind]
    return loose if limits is None else scarce(loose, greedy(loose), seed, *limits)


def feasible(kind: str, count: int) -> Iterator[tuple[PlanningProblem, Plan]]:
    seed = 0
    while count:
        problem = problem_of(seed, kind)
        seed += 1
        plan = cheapest(problem, time_limit_s=5.0, gap=1e-3)
        if plan.status != "infeasible":
            count -= 1
            yield problem, plan


def quality(kind: str, count: int) -> None:
    ratios, faults = [], 0
    for problem, exact in feasible(kind, count):
        plan = greedy(problem)
        faults += bool(broken(problem, plan))
        ratios.append(plan.objective / exact.objective if plan.status == "feasible" else inf)
    near = sum(ratio <= 1.3 for ratio in ratios) / len(ratios)
    print(
        f"{kind:7} {len(ratios):8} {near:12.1%} {at(ratios, 0.5):8.3f} {at(ratios, 0.95):8.3f} {at(ratios, 0.99):8.3f} "
        f"{sum(ratio == inf for ratio in ratios):8} {faults:8}",
        flush=True,
    )


def speed(architectures: int, kind: str, repeats: int) -> None:
    problems = [problem_of(seed, kind, apps=architectures, variants=8) for seed in range(repeats)]
    for name, solve in (
        ("cheapest", partial(cheapest, time_limit_s=0.4)),
        ("greedy", greedy),
    ):
        taken, told = [], {"optimal": 0, "feasible": 0, "infeasible": 0, "unsolved": 0}
        for problem in problems:
            ms, status = timed(solve, problem)
            taken.append(ms)
            told[status] += 1
        counts = ", ".join(f"{n} {status}" for status, n in told.items() if n)
        size = f"{architectures} x 8"
        print(f"{size:8} {kind:7} {name:12} {at(taken, 0.5):9.2f} {at(taken, 0.99):9.2f}  {counts}", flush=True)


WORKERS = {"small": (4, 1.0, 0.4), "middle": (3, 2.5, 1.0), "large": (3, 6.0, 3.0)}  # number, speed, US$/h of a device
DEVICES, DEVICE_MB, APPS, VARIANTS = 4, 16_000.0, 9, 50
GOALS: tuple[Goal, ...] = ("cost", "accuracy")
LIMIT_S, MISS, PEAKEDNESS = 0.3, 0.005, 2.0


def fleet_problem(
    seed: int, goal: Goal, apps: int = APPS, variants_of: int = VARIANTS, times: int = 1, steps: int | None = None
) -> FleetProblem:
    """times: so many times the workers, and their load. variants_of: of all apps. Each variant runs on each kind of device, as fast as that is.
    All devices together are used to about 70 % by middling variants. An app's variants differ by a step each; steps: from the first to the last.
    """
    luck = random.Random(seed)
    pools = tuple(
        Pool(
            name=name,
            machines=times * number,
            least=times * number if goal == "accuracy" else 0,
            most=times * (number if goal == "accuracy" else 10),
            price=DEVICES * price,
            resources={"gpu/memory": DEVICES * DEVICE_MB, "gpu/time": float(DEVICES)},
            elastic=goal == "cost",
        )
        for name, (number, _, price) in WORKERS.items()
    )
    variants, needs = [], []
    mean_speed = sum(number * speed for number, speed, _ in WORKERS.values()) / 10
    for app in range(apps):
        load = times * 40 * mean_speed * 50.0 * 0.7 / apps * luck.uniform(0.3, 1.7)
        options = {}
        count = variants_of // apps + (app < variants_of % apps)
        for n in range(count):
            step = n if steps is None else n * steps / count
            rate, memory = 160.0 / 1.6**step * luck.uniform(0.8, 1.2), 600.0 * 1.5**step * luck.uniform(0.8, 1.2)
            for p, (number, speed, price) in enumerate(WORKERS.values()):
                most = int(0.8 * DEVICE_MB / memory) * DEVICES
                variants.append(
                    PooledVariant(
                        name=f"{app}-{n}",
                        pool=p,
                        uses={"gpu/memory": memory},
                        computes=("gpu/time", 1.0),
                        most=most,
                        running=luck.choice((0, 0, 1, 2)) * number // 3 if times == 1 else 0,
                        price=price * memory / DEVICE_MB,
                        load_s=1.0 + memory / 1000.0,
                        serves=0.3 * rate * speed,
                        accuracy=0.6 + 0.06 * step,
                    )
                )
                options[len(variants) - 1] = rate * speed
        needs.append(_class_of(f"app{app}", load, options, layered=goal == "accuracy"))
    return FleetProblem(pools=pools, variants=tuple(variants), needs=tuple(needs), goal=goal)


def _class_of(name: str, load: float, rates: dict[int, float], *, layered: bool) -> ClassNeed:
    """A class as the leader poses it: in layers where machines are fixed, else the load and its reserve."""
    peak = 1.4 * load
    if not layered:
        whole = {v: instances_for(peak, rate, LIMIT_S, MISS, PEAKEDNESS) for v, rate in rates.items()}
        return ClassNeed(
            name=name, load=load, options={v: (load / rates[v], whole[v] - load / rates[v]) for v in rates}
        )
    ends = {v: layers((load, 1.2 * load), peak, rate, LIMIT_S, MISS, PEAKEDNESS, 1.0) for v, rate in rates.items()}
    middle = sorted(rates, key=lambda v: rates[v])[len(rates) // 2]
    shares = [carried(end, load, rates[middle], LIMIT_S, PEAKEDNESS) / load for end in ends[middle]]
    return ClassNeed(
        name=name, load=load, options={v: _steps(found) for v, found in ends.items()}, layers=_steps(shares)
    )


def _steps(ends: Sequence[float]) -> tuple[float, ...]:
    return tuple(max(0.0, end - before) for before, end in zip((0.0, *ends), ends, strict=False))


def fleet_speed(goal: Goal, repeats: int, bar_ms: float = 500.0, **size: int | None) -> None:
    taken, without, missing = [], 0, []
    for seed in range(repeats):
        problem = fleet_problem(seed, goal, **size)
        began = time.perf_counter()
        try:
            plan = solve_fleet(problem, time_limit_s=SEARCH_S)
            load = sum(need.load for need in problem.needs)
            lost = [
                need.load * part * share
                for need, each in zip(problem.needs, plan.missing, strict=True)
                for part, share in zip(need.layers[:-1], each[:-1], strict=True)
            ]
            missing.append(sum(lost) / load)
        except Unsolved:
            without += 1
        taken.append(1000.0 * (time.perf_counter() - began))
    verdict = "within" if at(taken, 0.99) <= bar_ms else "beyond"
    print(
        f"{goal:12} {at(taken, 0.5):9.0f} {at(taken, 0.99):9.0f}  {verdict} {bar_ms:.0f} ms; {without} of {repeats} without a plan; "
        f"load not carried: {max(missing, default=1.0):.2%} at most",
        flush=True,
    )


class Reacting(ScalingFleet):
    """One worker with 50 variants, and the milliseconds that each of its reactions computes (other programs do not count)."""

    def __init__(self, luck: random.Random) -> None:
        self.taken: list[float] = []
        models = (
            variant(name_of(n), model=f"m{n}", base_ms=luck.uniform(2.0, 20.0), per_item_ms=luck.uniform(1.0, 20.0))
            for n in range(VARIANTS)
        )
        device = Device(name="cpu", kind="cpu", cores=64, memory_mb=64_000.0)
        super().__init__(*models, devices={"w0": (device,)})
        actor: Any = self.stage.members["model-w0"].actor
        self._react, actor._react = actor._react, self._timed

    def _timed(self, now: float) -> list[Effect]:
        began = time.process_time()
        orders: list[Effect] = self._react(now)
        if orders:
            self.taken.append(1000.0 * (time.process_time() - began))
        return orders


def name_of(n: int) -> str:
    return f"m{n}-v1-ort-fp32-t1-b8"


def worker_speed(steps: int = 20) -> None:
    luck = random.Random(1)
    fleet = Reacting(luck)
    for _ in range(steps):
        fleet.load(luck.uniform(60.0, 200.0), 6.0, variant=name_of(luck.randrange(VARIANTS)), latency_ms=500.0)
    taken = fleet.taken
    assert taken, "the load of each step is more than one instance carries"
    verdict = "within" if at(taken, 0.99) <= 50.0 else "beyond"
    print(f"\na worker's reaction, {VARIANTS} variants: {len(taken)} reactions, p50 {at(taken, 0.5):.1f} ms,", end=" ")
    print(f"p99 {at(taken, 0.99):.1f} ms of computing  {verdict} 50 ms", flush=True)


def timed(solve: Callable[[PlanningProblem], Plan], problem: PlanningProblem) -> tuple[float, str]:
    began = time.perf_counter()
    try:
        status: str = solve(problem).status
    except Unsolved:
        status = "unsolved"
    return 1000.0 * (time.perf_counter() - began), status


def at(values: Sequence[float], share: float) -> float:
    return float(np.quantile(values, share, method="inverted_cdf"))  # a value that there was; some are infinite


def main() -> None:
    parser = rig.parser(__doc__)
    parser.add_argument("--problems", type=int, default=1000, help="for each line of greedy against exact")
    parser.add_argument(
        "--repeats", type=int, default=100, help="problems for each line of speed (half as many of 100)"
    )
    parser.add_argument("--fleet", action="store_true", help="only the plan for all workers")
    options = parser.parse_args()
    if not options.fleet:
        one_worker(options.problems, options.repeats)
    print(f"\nplan for all workers: 10 workers x {DEVICES} devices, {VARIANTS} variants, {APPS} apps")
    print(f"{'goal':12} {'p50 ms':>9} {'p99 ms':>9}")
    for goal in GOALS:
        fleet_speed(goal, options.repeats)
    for apps, each, steps in ((100, 10, None), (300, 60, None), (300, 60, 6)):
        print(
            f"100 workers, {apps} apps with {each} variants each{'' if steps is None else ', all of which fit and differ little'}"
        )
        for goal in GOALS:
            fleet_speed(goal, 5, 2000.0, apps=apps, variants_of=apps * each, times=10, steps=steps)
    worker_speed()


def one_worker(problems: int, repeats: int) -> None:
    print(f"{'':7} {'problems':>8} {'within 1.3 x':>12} {'p50':>8} {'p95':>8} {'p99':>8} {'no plan':>8} {'broken':>8}")
    for kind in TIGHTNESS:
        quality(kind, problems)
    gc.collect()
    gc.freeze()  # as services do once they are up: what was imported is not looked through again and again
    print(f"\n{'size':8} {'':7} {'solver':12} {'p50 ms':>9} {'p99 ms':>9}")
    for architectures in (22, 50, 100):
        for kind in ("free", "scarce"):
            speed(architectures, kind, repeats if architectures < 50 else max(1, repeats // 2))


if __name__ == "__main__":
    main()
