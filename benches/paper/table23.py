"""INFaaS (Romero et al., USENIX ATC 2021), tables 2 and 3: three variants, three loads, which instances cost least.

`python benches/paper/table23.py [--json] [--out DIR]`: examples/plan.toml under `infaas plan`; nothing is random or simulated.
"""

from collections.abc import Sequence
from math import inf

import compare
from compare import Figure, Row, holds, near
from msgspec.structs import replace

from infaas.cli.plan import read_plan_file
from services.core.planning.plan import cheapest
from services.core.planning.problem import PlanningProblem

EXAMPLE = compare.ROOT / "examples" / "plan.toml"
# queries/s, ms: the cheapest instances of each variant and their US$/s; how much more other choices cost
TABLE = (
    (10.0, 300.0, {"A": 2, "B": 0, "C": 0}, 2.0, {"C": 8.0}),
    (10.0, 50.0, {"A": 0, "B": 1, "C": 0}, 3.0, {"C": 5.3}),
    (1000.0, 300.0, {"A": 0, "B": 2, "C": 1}, 22.0, {"C": 1.45, "A": 9.0}),
)


def build(seeds: Sequence[int] = (), short: bool = False) -> Figure:
    """All rows of Table 3. seeds, short: there is nothing to vary."""
    del seeds, short
    rows: list[Row] = []
    for qps, slo_ms, instances, cost, others in TABLE:
        problem = _problem(qps, slo_ms)
        wanted = " + ".join(f"{count} {name}" for name, count in instances.items() if count)
        what = f"{qps:g} queries/s in {slo_ms:g} ms"
        plan = cheapest(problem)
        rows.append(holds(f"{what}: instances", wanted, [plan.instances == instances]))
        rows.append(near(f"{what}: cost", cost, [plan.cost_per_s], " US$/s", tolerance=0))
        for name, factor in others.items():
            alone = [one for one in problem.candidates if one.name == name]
            dearer = cheapest(replace(problem, candidates=tuple(alone))).cost_per_s
            rows.append(
                near(f"{what}: {name} alone costs … times that", factor, [dearer / plan.cost_per_s], tolerance=0.02)
            )
    return Figure("table23", "Tables 2 and 3: the cheapest instances of three variants", rows)


def _problem(qps: float, slo_ms: float) -> PlanningProblem:
    problem = read_plan_file(EXAMPLE)
    (demand,) = problem.demands
    return replace(problem, demands=(replace(demand, load=qps, latency_ms=slo_ms),), budget_per_s=inf)


if __name__ == "__main__":
    compare.main(build, __doc__)
