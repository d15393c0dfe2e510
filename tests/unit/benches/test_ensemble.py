"""The bench of ensembles, short: its streams are what it says, and both policies follow a change of the best model."""

import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "benches"))

from ensemble import FIGURE_8, OBJECTIVE_MS, main, of_digits, of_failure, of_turns, regret, stragglers


def test_the_digits_best_model_answers_wrongly_in_the_middle_third() -> None:
    stream = of_digits(np.random.default_rng(0), 3000)
    errors = stream.errors()
    shares = [errors[:, start:end].mean(axis=1) for start, end in stream.phases()]
    best = int(shares[0].argmin())
    assert stream.names[best] == "cnn-l"
    assert shares[1][best] > 0.95
    assert shares[2].argmin() == best
    assert len(stream.names) == 7


def test_models_are_as_accurate_as_figure_8_says() -> None:
    stream = of_failure(np.random.default_rng(0))
    assert (1.0 - stream.errors()[:, 10_000:].mean(axis=1)) == pytest.approx(FIGURE_8, abs=0.02)
    np.testing.assert_allclose(stream.scores.sum(axis=2), 1.0, rtol=1e-5)


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


def test_what_is_printed(capsys) -> None:
    main(["regret", "--runs", "1", "--streams", "turns", "--etas", "0.5", "--bounds", "50", "--queries", "500"])
    text = capsys.readouterr().out
    assert "turns, eta 0.5, least weight 1/50" in text
    assert text.count("settled") == 5
    assert "all, in hindsight" in text


@pytest.mark.slow
def test_a_slow_member_costs_confidence_and_not_latency() -> None:
    found = stragglers(seconds=10.0)
    full, late, patient = (found[way] for way in ("all in time", "answered at the objective", "wait for all"))
    assert (full["missing"], late["missing"], patient["missing"]) == (0.0, 1.0, 0.0)
    assert late["lost"] == 0
    assert late["p99_ms"] <= OBJECTIVE_MS + 10.0 < patient["p99_ms"]
    assert late["error"] <= full["error"] + 0.01
