"""The bench of ensembles, short: both policies follow a change of the best model, and the measure can fail."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from ensemble import OBJECTIVE_MS, of_failure, of_turns, regret, stragglers


@pytest.mark.slow
def test_after_a_failure_and_after_it_ends_both_policies_are_near_the_best_model() -> None:
    found = regret(partial(of_failure, queries=12_000), 1, eta=0.1)
    for phase in found.phases:
        assert phase.exp3 <= 1.2 * phase.best
        assert phase.exp4 <= 1.01 * phase.best
    before, during, after = found.failed
    assert during < 0.05
    assert min(before, after) > 0.8
    assert max(found.exp3, found.exp4) < found.single


def test_without_weights_that_follow_the_same_measure_fails() -> None:
    """With so small an eta that nothing is learnt, exp3 draws evenly: the measure can fail."""
    phase = regret(partial(of_turns, queries=2500), 1, eta=1e-9).phases[0]
    assert phase.exp3 > 2.0 * phase.best


@pytest.mark.slow
def test_a_slow_member_costs_confidence_and_not_latency() -> None:
    found = stragglers(seconds=10.0)
    full, late, patient = (found[way] for way in ("all in time", "answered at the objective", "wait for all"))
    assert (full["missing"], late["missing"], patient["missing"]) == (0.0, 1.0, 0.0)
    assert late["lost"] == 0
    assert late["p99_ms"] <= OBJECTIVE_MS + 10.0 < patient["p99_ms"]
    assert late["error"] <= full["error"] + 0.01
