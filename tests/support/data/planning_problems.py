"""Planning problems by seed, and an independent check of plans: used by tests and benches."""

from collections.abc import Mapping
from random import Random

import numpy as np
from msgspec.structs import replace
from scipy.optimize import linprog

from services.core.planning.plan import Plan
from services.core.planning.problem import CandidateVariant, PlanningProblem, RequirementClass

# latency ms, items/s, US$/s, load s, memory: the three of the paper's Table 2, on three kinds of hardware
KINDS = {
    "cpu": (200.0, 5.0, 1.0, 1.0, 1.0),
    "inferentia": (20.0, 100.0, 3.0, 4.0, 1.0),
    "gpu": (15.0, 800.0, 16.0, 8.0, 2.0),
}
TABLE_2 = tuple(
    CandidateVariant(
        name=name, apps=("classify",), model="resnet50", hardware=kind, latency_ms=KINDS[kind][0],
        saturation_qps=KINDS[kind][1], cost_per_s=KINDS[kind][2], load_s=KINDS[kind][3],
    )
    for name, kind in (("A", "cpu"), ("B", "inferentia"), ("C", "gpu"))
)  # fmt: skip


def table_3(load: float, latency_ms: float, **more: object) -> PlanningProblem:
    """The paper's example, with slack 1, lambda 0 and nothing running unless `more` says otherwise."""
    demand = RequirementClass(app="classify", load=load, latency_ms=latency_ms)
    return replace(PlanningProblem(candidates=TABLE_2, demands=(demand,), slack=1.0, loading_weight=0.0), **more)


def random_problem(seed: int, apps: int | None = None, variants: int = 6, spread: float = 0.4) -> PlanningProblem:
    """2 to 12 apps × 6 variants over three kinds; throughput, price and memory varied; nothing running, nothing scarce."""
    rng = Random(seed)
    candidates, demands = [], []
    for a in range(apps or rng.randint(2, 12)):
        for i in range(variants):
            kind = list(KINDS)[i % len(KINDS)]
            latency, rate, price, load_s, memory = KINDS[kind]
            rate, price, memory = (value * rng.uniform(1 - spread, 1 + spread) for value in (rate, price, memory))
            candidates.append(
                CandidateVariant(
                    name=f"a{a}v{i}",
                    apps=(f"a{a}",),
                    model=f"m{a}",
                    hardware=kind,
                    latency_ms=latency,
                    saturation_qps=rate,
                    cost_per_s=price,
                    load_s=load_s,
                    uses={f"{kind}_memory": memory},
                )
            )
        demands.append(
            RequirementClass(app=f"a{a}", load=10 ** rng.uniform(0.7, 3.0), latency_ms=rng.choice([50.0, 300.0]))
        )
    return PlanningProblem(candidates=tuple(candidates), demands=tuple(demands))


def scarce(problem: PlanningProblem, plan: Plan, seed: int, least: float, most: float) -> PlanningProblem:
    """The same with totals between `least` and `most` times what this plan takes of each resource."""
    rng = Random(f"scarce {seed}")
    used: dict[str, float] = {}
    for one in problem.candidates:
        for name, amount in one.uses.items():
            used[name] = used.get(name, 0.0) + amount * plan.instances[one.name]
    return replace(
        problem, resources={name: max(4.0, amount * rng.uniform(least, most)) for name, amount in used.items()}
    )


def entangled_problem(seed: int) -> PlanningProblem:
    """Several classes an app, variants that several apps share, some running or bounded, a budget."""
    rng = Random(seed)
    plain = random_problem(seed, apps=rng.randint(2, 4), variants=4)
    names = [demand.app for demand in plain.demands]
    candidates = [
        replace(
            one,
            apps=tuple({one.apps[0], rng.choice(names)}) if rng.random() < 0.3 else one.apps,
            accuracy=rng.choice([None, 0.7, 0.8, 0.9]),
            running=running,
            most=rng.choice([None, None, 3 + running]),
        )
        for one, running in ((one, rng.choice([0, 0, 0, 1, 2, 5])) for one in plain.candidates)
    ]
    demands = [
        RequirementClass(
            app=demand.app, load=demand.load * rng.random(), latency_ms=latency, accuracy=accuracy,
            cost=rng.choice([float("inf"), 50.0]),
        )
        for demand in plain.demands
        for latency, accuracy in sorted(
            {(rng.choice([15.0, 50.0, 300.0]), rng.choice([0.0, 0.75, 0.85])) for _ in range(rng.randint(1, 3))}
        )
    ]  # fmt: skip
    return replace(
        plain,
        candidates=tuple(candidates),
        demands=tuple(demands),
        resources={f"{kind}_memory": rng.uniform(10, 120) for kind in KINDS} if rng.random() < 0.7 else {},
        budget_per_s=rng.choice([float("inf"), 100.0]),
        objective=rng.choice(["multiplicative", "additive"]),
    )


def applied(problem: PlanningProblem, plan: Plan) -> PlanningProblem:
    """The same a moment later, when what was planned runs."""
    return replace(
        problem, candidates=tuple(replace(one, running=plan.instances[one.name]) for one in problem.candidates)
    )


def broken(problem: PlanningProblem, plan: Plan) -> list[str]:
    """The constraints that a plan breaks, by the text of the paper and not by the solvers' programme."""
    counts = [plan.instances[one.name] for one in problem.candidates]
    found = [
        f"{one.name}: {n} instances" for one, n in zip(problem.candidates, counts, strict=True) if not _legal(one, n)
    ]
    found += [
        f"{one.name}: added, though nobody may use it"
        for one, n in zip(problem.candidates, counts, strict=True)
        if n > one.running and not any(demand.accepts(one) for demand in problem.demands)
    ]
    limits = dict(problem.resources)
    for name, total in limits.items():
        found += _over(problem, counts, [one.uses.get(name, 0.0) for one in problem.candidates], total, name)
    found += _over(problem, counts, [one.cost_per_s for one in problem.candidates], problem.budget_per_s, "budget")
    deltas = {action.variant: action.delta for action in plan.actions}
    expected = {
        one.name: n - one.running for one, n in zip(problem.candidates, counts, strict=True) if n != one.running
    }
    if deltas != expected:
        found.append(f"actions {deltas}, counts {expected}")
    if plan.status != "infeasible":
        found += [] if carried(problem, plan.instances) else ["load is not carried"]
    return found


def carried(problem: PlanningProblem, instances: Mapping[str, int]) -> bool:
    """Whether the instances can share the load so that each class gets slack × its load from those it accepts."""
    wanted = [demand.load * problem.slack for demand in problem.demands]
    pairs = [
        (v, k)
        for v, one in enumerate(problem.candidates)
        for k, demand in enumerate(problem.demands)
        if instances[one.name] and demand.accepts(one)
    ]
    if not pairs:
        return not any(wanted)
    rows = np.zeros((len(problem.candidates) + len(wanted), len(pairs)))
    for column, (v, k) in enumerate(pairs):
        rows[v, column], rows[len(problem.candidates) + k, column] = 1.0, -1.0
    limits = [one.saturation_qps * instances[one.name] for one in problem.candidates]
    limits += [-load * (1 - 1e-6) for load in wanted]
    return bool(linprog(np.zeros(len(pairs)), A_ub=rows, b_ub=limits).status == 0)


def _legal(one: CandidateVariant, n: int) -> bool:
    return n >= 0 and (one.most is None or n <= one.most)


def _over(problem: PlanningProblem, counts: list[int], amounts: list[float], total: float, name: str) -> list[str]:
    """Where more than that runs, no more is added."""
    taken = sum(amount * n for n, amount in zip(counts, amounts, strict=True))
    there = sum(amount * one.running for one, amount in zip(problem.candidates, amounts, strict=True))
    return [f"{name}: {taken} of {total}"] if taken > max(total, there) * (1 + 1e-6) else []
