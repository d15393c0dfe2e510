"""One limit on time for a whole solve: by a clock that the test turns."""

from math import inf

import pytest

from services.core.planning.deadline import Deadline
from services.core.planning.greedy import GreedySolver
from services.core.planning.problem import Problem
from services.core.planning.solvers import make_solver
from tests.support.data.planning_problems import broken, random_problem, scarce


class Hands:
    """A clock that moves by so much each time that somebody looks."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step = 100.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def hard(seed: int) -> Problem:
    loose = random_problem(seed, apps=22, variants=8)
    return scarce(loose, GreedySolver().solve(loose), seed, 0.8, 1.5)


def test_what_is_left() -> None:
    clock = Hands()
    deadline = Deadline(2.0, clock)
    soon, never = deadline.since(0.5), deadline.sooner(5.0)
    clock.now += 0.4
    assert (deadline.limited, deadline.passed(), soon.passed()) == (True, False, False)
    assert deadline.left() == pytest.approx(1.6)
    assert deadline.since(0.5).left() == pytest.approx(0.1)
    assert deadline.since(0.3).passed()
    assert deadline.bounding({"node_limit": 1}, 0.5) == {"node_limit": 1, "time_limit": pytest.approx(0.72)}
    clock.now += 1.0
    assert (soon.passed(), never.passed()) == (True, False)
    clock.now += 1.0
    assert (deadline.left(), deadline.passed(), never.passed()) == (0.0, True, True)
    assert 0 < deadline.bounding({})["time_limit"] < 1e-3


def test_without_a_clock_each_run_has_the_limit_and_without_a_limit_none() -> None:
    assert Deadline(2.0).bounding({}) == {"time_limit": 2.0}
    assert not Deadline(0.0).limited
    assert Deadline(None, Hands()).left() == inf
    assert Deadline().bounding({"node_limit": 3}) == {"node_limit": 3}


@pytest.mark.parametrize("seed", [40, 83, 106, 147, 149, 182])
def test_a_plan_that_time_cut_short_says_how_far_from_optimal_it_may_be(seed: int) -> None:
    """Each look takes 1 ms here: whatever the machine, the search ends in the midst of something."""
    problem = hard(seed)
    cheapest = make_solver("ilp", time_limit_s=None).solve(problem)
    assert cheapest.status == "optimal"
    for step in (0.0003, 0.001, 0.003, 0.03):
        plan = make_solver("ilp", time_limit_s=0.4, clock=Hands(step)).solve(problem)
        assert broken(problem, plan) == []
        if plan.status == "feasible" and plan.gap is not None:
            assert plan.objective * (1 - plan.gap) <= cheapest.objective * (1 + 1e-4)
            assert "limit" in plan.reason
        elif plan.status == "optimal":
            assert plan.objective == pytest.approx(cheapest.objective, rel=3e-4)


def test_impatience_leaves_things_unproven_that_patience_proves() -> None:
    problem = hard(182)
    impatient = make_solver("ilp", time_limit_s=60.0, clock=Hands(0.001), patience_s=1e-6).solve(problem)
    patient = make_solver("ilp", time_limit_s=60.0, clock=Hands(0.001), patience_s=None).solve(problem)
    assert (impatient.status, patient.status) == ("feasible", "optimal")
    assert impatient.gap is not None
    assert patient.objective <= impatient.objective <= patient.objective / (1 - impatient.gap) * (1 + 1e-6)
