"""Two workers with different hardware serve one app: who of them may rely on the other and let its instance go."""

from services.autoscaler.models.policy import InfaasScaling
from services.autoscaler.models.problem import Situation
from services.core.planning.greedy import GreedySolver
from services.core.planning.problem import CandidateVariant, PlanningProblem, RequirementClass

HOLD_S = 5.0


def one(hardware: str, cost: float) -> CandidateVariant:
    return CandidateVariant(
        name=f"m-{hardware}", apps=("app",), model="m", hardware=hardware, latency_ms=10.0, saturation_qps=100.0,
        cost_per_s=cost, load_s=1.0, running=1,
    )  # fmt: skip


def seen_by(hardware: str, load: float) -> Situation:
    """What the worker with this hardware sees; the other worker's instance it may not end."""
    both = [one("cheap", 1e-5), one("dear", 9e-5)]
    candidates = tuple(
        c
        if c.hardware == hardware
        else CandidateVariant(**{f: getattr(c, f) for f in c.__struct_fields__} | {"least": 1})
        for c in both
    )
    demand = RequirementClass(app="app", load=load, latency_ms=100.0)
    return Situation(
        problem=PlanningProblem(candidates=candidates, demands=(demand,), slack=1.05, make_before_break=True),
        records={},
        serving={c.name: 1 for c in both},
        here=frozenset({f"m-{hardware}"}),
        classes=(None,),
        apps=("app",),
        alone=False,
    )


def unloads(hardware: str, load: float) -> list[str]:
    scaling = InfaasScaling(HOLD_S)
    seen = seen_by(hardware, load)
    plan = GreedySolver().solve(seen.problem)
    for second in range(12):
        changes = scaling.decide(seen, plan, 1000.0 + second).changes
        if changes:
            return [change.variant for change in changes if change.kind == "unload"]
    return []


def test_what_is_dearer_goes_and_relies_on_what_is_cheaper() -> None:
    assert unloads("dear", 40.0) == ["m-dear"]


def test_what_is_cheaper_does_not_rely_on_what_may_go_at_the_same_moment() -> None:
    assert unloads("cheap", 0.4) == []


def test_neither_goes_when_both_are_needed() -> None:
    assert unloads("dear", 150.0) == unloads("cheap", 150.0) == []
