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
        name=name,
        apps=("classify",),
        model="resnet50",
        hardware=kind,
        latency_ms=KINDS[kind][0],
        saturation_qps=KINDS[kind][1],
        cost_per_s=KINDS[kind][2],
        load_s=KINDS[kind][3],
    )
    for name, kind in (("A", "cpu"), ("B", "inferentia"), ("C", "gpu"))
)


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


def accuracy_problem(seed: int) -> PlanningProblem:
    """Served for accuracy, which slower variants of a kind have more of; 0.2 to 1.1 times the memory that the best would take."""
    rng = Random(f"accuracy {seed}")
    plain = random_problem(seed, variants=rng.choice([4, 6, 8]))
    candidates = tuple(
        replace(one, saturation_qps=one.saturation_qps * (1.6 - accuracy), accuracy=round(accuracy, 3))
        for one, accuracy in ((one, rng.uniform(0.5, 0.95)) for one in plain.candidates)
    )
    best = {
        app: max((c for c in candidates if app in c.apps and c.latency_ms <= 50.0), key=lambda c: c.accuracy or 0.0)
        for app in {demand.app for demand in plain.demands}
    }
    used: dict[str, float] = {}
    for demand in plain.demands:
        one = best[demand.app]
        for name, amount in one.uses.items():
            used[name] = used.get(name, 0.0) + amount * (1 + demand.load * 1.05 // one.saturation_qps)
    resources = {f"{kind}_memory": max(6.0, used.get(f"{kind}_memory", 0.0) * rng.uniform(0.2, 1.1)) for kind in KINDS}
    return replace(plain, candidates=candidates, resources=resources, goal="accuracy")


def entangled_problem(seed: int) -> PlanningProblem:
    """Several classes an app, variants that several apps share, some running or held, least instances, a budget."""
    rng = Random(seed)
    plain = random_problem(seed, apps=rng.randint(2, 4), variants=4)
    names = [demand.app for demand in plain.demands]
    candidates = [
        replace(
            one,
            apps=tuple({one.apps[0], rng.choice(names)}) if rng.random() < 0.3 else one.apps,
            accuracy=rng.choice([None, 0.7, 0.8, 0.9]),
            running=running,
            least=rng.choice([0, 0, 0, 1]) if running else 0,
            most=rng.choice([None, None, 3 + running]),
        )
        for one, running in ((one, rng.choice([0, 0, 0, 1, 2, 5])) for one in plain.candidates)
    ]
    demands = [
        RequirementClass(
            app=demand.app,
            load=demand.load * rng.random(),
            latency_ms=latency,
            accuracy=accuracy,
            cost=rng.choice([float("inf"), 50.0]),
            least=rng.choice([0, 0, 1, 2]),
        )
        for demand in plain.demands
        for latency, accuracy in sorted(
            {(rng.choice([15.0, 50.0, 300.0]), rng.choice([0.0, 0.75, 0.85])) for _ in range(rng.randint(1, 3))}
        )
    ]
    return replace(
        plain,
        candidates=tuple(candidates),
        demands=tuple(demands),
        resources={f"{kind}_memory": rng.uniform(10, 120) for kind in KINDS} if rng.random() < 0.7 else {},
        budget_per_s=rng.choice([float("inf"), 100.0]),
        make_before_break=rng.random() < 0.5,
        objective=rng.choice(["multiplicative", "additive"]),
    )


def running_problem(seed: int) -> PlanningProblem:
    """As a running model-autoscaler poses it: 6 to 60 candidates on one worker and beside it, 1 to 10 demands, much running.

    Totals are what runs has and some of what is free; with make_before_break, held instances elsewhere, barred variants.
    """
    rng = Random(f"running {seed}")
    apps = [f"a{a}" for a in range(rng.randint(1, 5))]
    candidates = []
    for i in range(rng.randint(6, 60)):
        kind = rng.choice(["cpu", "cpu", "cpu", "gpu", "inferentia"])
        pool = f"{rng.choice(['', '', '', 'away/'])}{kind}"
        latency, rate, price, load_s, _ = KINDS[kind]
        rate, price = rate * rng.uniform(0.5, 2.0) * (20 if kind == "cpu" else 1), price * rng.uniform(0.6, 1.4)
        running = rng.choice([0, 0, 0, 0, 1, 1, 2, 4])
        own = rng.choice(apps)
        candidates.append(
            CandidateVariant(
                name=f"v{i}",
                apps=tuple({own, rng.choice(apps)}) if rng.random() < 0.2 else (own,),
                model=f"m-{own}",
                hardware=kind,
                latency_ms=latency * rng.uniform(0.5, 1.5),
                saturation_qps=rate,
                cost_per_s=price / 3600.0,
                load_s=load_s * rng.uniform(0.1, 1.0),
                accuracy=rng.choice([None, 0.7, 0.8, 0.9]),
                uses={f"{pool}/cores": float(rng.choice([1, 2])), f"{pool}/memory": rng.uniform(50, 1500)},
                running=running,
                least=running if pool.startswith("away") else 0,
                most=running if rng.random() < 0.1 else None,
            )
        )
    demands = {
        (app, latency, accuracy): RequirementClass(
            app=app,
            load=rng.choice([0.0, 1.0, 1.0, 1.0]) * 10 ** rng.uniform(0.0, 3.0),
            latency_ms=latency,
            accuracy=accuracy,
            least=rng.choice([0, 0, 1]),
        )
        for app in (rng.choice(apps) for _ in range(rng.randint(1, 10)))
        for latency, accuracy in [(rng.choice([30.0, 300.0, float("inf")]), rng.choice([0.0, 0.0, 0.75, 0.85]))]
    }
    totals: dict[str, float] = {}
    for one in candidates:
        for pool, amount in one.uses.items():
            totals[pool] = totals.get(pool, 0.0) + amount * one.running
    roomy = rng.choice([0.0, 0.5, 2.0])
    totals = {
        pool: amount + roomy * rng.random() * (8.0 if pool.endswith("cores") else 4000.0)
        for pool, amount in totals.items()
    }
    bill = sum(one.cost_per_s * one.running for one in candidates)
    return PlanningProblem(
        candidates=tuple(candidates),
        demands=tuple(demands.values()),
        resources=totals,
        objective=rng.choice(["multiplicative", "additive"]),
        budget_per_s=rng.choice([float("inf"), float("inf"), bill * rng.uniform(0.8, 2.0)]),
        make_before_break=True,
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
        if n > max(one.running, one.least) and not any(demand.accepts(one) for demand in problem.demands)
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
        for demand in problem.demands:
            able = sum(n for one, n in zip(problem.candidates, counts, strict=True) if demand.accepts(one))
            if able < demand.least:
                found.append(f"{demand.app}: {able} instances of {demand.least}")
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
    return one.least <= n and (one.most is None or n <= one.most)


def _over(problem: PlanningProblem, counts: list[int], amounts: list[float], total: float, name: str) -> list[str]:
    """What is held already is there, whatever the total; with make-before-break everything that runs."""
    mine = list(zip(problem.candidates, counts, amounts, strict=True))
    if problem.make_before_break and name not in problem.time_shared:
        taken = sum(amount * max(n, one.running) for one, n, amount in mine)
        there = sum(amount * max(one.least, one.running) for one, _, amount in mine)
    else:
        taken = sum(amount * n for _, n, amount in mine)
        there = sum(amount * one.least for one, _, amount in mine)
    return [f"{name}: {taken} of {total}"] if taken > max(total, there) * (1 + 1e-6) else []
