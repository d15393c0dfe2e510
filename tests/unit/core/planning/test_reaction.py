"""The paper's greedy reaction (section 4.2.2): replicate what runs, or upgrade to one other variant, within what there is room for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from services.core.planning.plan import Plan, cheapest, greedy
from services.core.planning.problem import RequirementClass, lacking, react
from tests.support.data.planning_problems import TABLE_2, broken, entangled_problem, random_problem, scarce, table_3


@pytest.mark.parametrize(
    ("load", "latency_ms", "instances"),
    [
        (10, 300, {"A": 2, "B": 0, "C": 0}),
        (10, 50, {"A": 0, "B": 1, "C": 0}),
        (1000, 300, {"A": 0, "B": 10, "C": 0}),  # of one variant; the cheapest mixture is 2 B + 1 C
    ],
)
def test_the_loads_of_table_3(load: float, latency_ms: float, instances: dict[str, int]) -> None:
    plan = greedy(table_3(load, latency_ms))
    assert (plan.instances, plan.status, plan.solver) == (instances, "feasible", "greedy")


def test_replicate_or_upgrade_whichever_costs_less() -> None:
    """The paper's two options for a running variant that no longer suffices. What runs stays."""
    running = (replace(TABLE_2[0], running=2), *TABLE_2[1:])
    assert react(table_3(10, 300, candidates=running)).added == {}
    assert react(table_3(12, 300, candidates=running)).added == {"A": 1}
    assert react(table_3(60, 300, candidates=running)).added == {"B": 1}


def test_what_takes_long_to_load_counts_for_more() -> None:
    """Three more A at 3 US$/s, or one B at 2.9 that loads for four seconds."""
    cheaper = (replace(TABLE_2[0], running=1), replace(TABLE_2[1], cost_per_s=2.9))
    assert react(table_3(20, 300, candidates=cheaper, loading_weight=0.0)).added == {"B": 1}
    assert react(table_3(20, 300, candidates=cheaper, loading_weight=0.1)).added == {"A": 3}


def test_where_nothing_carries_all_that_is_missing_the_most_is_taken_and_the_rest_told() -> None:
    sized = tuple(replace(one, uses={"cores": 1.0}, running=int(one.name == "A")) for one in TABLE_2[:2])
    problem = table_3(500, 300, candidates=sized, resources={"cores": 3.0})
    found = react(problem)
    assert (found.added, found.lacking) == ({"B": 2}, {0: pytest.approx(500 - 5 - 200)})
    assert lacking(problem) == {0: pytest.approx(495)}


def test_what_serves_one_class_serves_no_other() -> None:
    shared = replace(TABLE_2[1], running=1)
    demands = tuple(RequirementClass(app="classify", load=60, latency_ms=ms) for ms in (50, 300))
    assert react(table_3(0, 300, candidates=(shared,), demands=demands)).added == {"B": 1}


def test_what_does_not_fit_is_named() -> None:
    sized = (replace(TABLE_2[2], uses={"gpus": 1.0}),)
    plan = greedy(table_3(1000, 16, candidates=sized, resources={"gpus": 1.0}))
    assert (plan.status, plan.instances) == ("infeasible", {"C": 1})
    assert "200 items/s more than fits in gpus (1)" in plan.reason
    assert greedy(table_3(1000, 10)).reason == "app classify: no variant answers within 10 ms: C takes 15 ms"


@given(st.integers(0, 10**9))
def test_constraints_hold_where_variants_are_shared(seed: int) -> None:
    problem = entangled_problem(seed)
    problem = replace(
        problem,
        candidates=tuple(
            replace(one, running=0 if one.most is None else min(one.running, one.most)) for one in problem.candidates
        ),
    )
    plan = greedy(problem)
    assert broken(problem, plan) == []
    assert (plan.status == "infeasible") == bool(plan.unmet)


@given(st.integers(0, 10**9), st.sampled_from([0.5, 0.8, 1.0, 1.5]))
def test_constraints_hold_where_resources_are_scarce(seed: int, tightness: float) -> None:
    loose = random_problem(seed)
    problem = scarce(loose, greedy(loose), seed, tightness, tightness + 0.5)
    assert broken(problem, greedy(problem)) == []


def test_one_variant_is_near_the_cheapest_mixture_where_nothing_is_scarce() -> None:
    ratios = [greedy(one).objective / cheapest(one, gap=1e-3).objective for one in map(random_problem, range(20))]
    assert max(ratios) < 1.6
    assert sum(ratios) / len(ratios) < 1.15


def test_the_check_of_constraints_sees() -> None:
    """What would make the tests above pass for nothing."""
    loose = random_problem(5)
    plan = greedy(loose)
    problem = scarce(loose, plan, 5, 1.0, 1.2)
    name = max(plan.instances, key=lambda name: plan.instances[name])

    def changed(n: int) -> Plan:
        return replace(plan, instances=plan.instances | {name: n})

    assert broken(loose, plan) == []
    assert any("not carried" in text for text in broken(loose, changed(0)))
    assert any("memory" in text for text in broken(problem, changed(1000)))
    assert any("-1 instances" in text for text in broken(loose, changed(-1)))
    assert any("actions" in text for text in broken(loose, changed(plan.instances[name] + 1)))
