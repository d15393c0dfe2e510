"""The tuner reacts to a change of traffic at once, to none without one, and gives back when it is over."""

from collections.abc import Iterator
from itertools import pairwise
from math import sqrt
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import PipelinePlan, PlannedStage
from services.core.pipelines.envelope import BIN_S, limits, most_in, traffic_envelope, windows_from
from services.core.pipelines.planners import IDLE_S, POLICIES, CoarseTuner, make_tuner, plan_pipeline
from services.core.pipelines.problem import PipelineProblem, StageOption
from services.core.pipelines.tuner import PipelineTuner, TunerDecision, replicas_for
from tests.support.data.pipelines import Floats, chain, gamma_arrivals

T0 = 1_700_000_000.0  # a Unix time, as services have it
PLANNED = {"a": 3, "b": 5, "c": 1}


def planned(sample: Floats, shortest_s: float = 0.12) -> PipelinePlan:
    envelope, dispersion = traffic_envelope(sample, shortest_s)
    stage = PlannedStage(hardware="cpu", batch=1, replicas=1, scale=1.0, service_ms=40.0, rho=0.8)
    vertices = {name: replace(stage, replicas=k) for name, k in PLANNED.items()}
    return PipelinePlan(
        pipeline="p", policy="inferline", status="feasible", cost_per_s=1.0, p99_ms=100.0, vertices=vertices,
        envelope=envelope, dispersion=dispersion, steps=[], rate=(len(sample) - 1) / float(sample[-1] - sample[0]),
        latency_ms=350.0,
    )  # fmt: skip


class At(NamedTuple):
    seconds: float
    decision: TunerDecision


def run(
    tuner: PipelineTuner, arrivals: Floats, seconds: float, dispatchers: int = 1, every: float = 0.1
) -> Iterator[At]:
    """Report these arrivals as dispatchers do. With several, each has its share of them and reports at another time."""
    bins = round(every / BIN_S)
    share = [
        np.bincount((arrivals[d::dispatchers] / BIN_S + 1e-6).astype(int), minlength=round(seconds / BIN_S) + 2 * bins)
        for d in range(dispatchers)
    ]
    for i in range(round(seconds / every)):
        for d, counts in enumerate(share):
            now = T0 + (i + 1) * every + (0.02 * d)
            decision = tuner.told(T0 + i * every, counts[i * bins : (i + 1) * bins].tolist(), now)
            if decision is not None:
                yield At((i + 1) * every, decision)


def poisson_then(rate: float, cv: float, from_s: float, until_s: float, end_s: float, seed: int) -> Floats:
    """150/s, and this between two times."""
    parts = [
        gamma_arrivals(150.0, 1.0, from_s, seed),
        from_s + gamma_arrivals(rate, cv, until_s - from_s, seed + 1),
        until_s + gamma_arrivals(150.0, 1.0, end_s - until_s, seed + 2),
    ]
    return np.concatenate(parts)


SAMPLE = gamma_arrivals(150.0, 1.0, 600.0, seed=9)


# -- the envelope


def test_windows_double_to_a_minute_and_the_envelope_is_of_any_window() -> None:
    assert windows_from(0.113) == pytest.approx([0.12, 0.24, 0.48, 0.96, 1.92, 3.84, 7.68, 15.36, 30.72, 60.0])
    assert windows_from(0.0)[0] == BIN_S
    assert windows_from(100.0) == [60.0]
    # Trap 26: six queries on both sides of a bin's edge are six in one window, three in each bin.
    arrivals = np.array([0.095, 0.097, 0.099, 0.101, 0.103, 0.105])
    assert most_in(arrivals, 0.1) == 6
    assert traffic_envelope(arrivals, 0.1)[0][0] == (0.1, 6)


@given(st.lists(st.integers(0, 3000), max_size=60), st.integers(1, 500))
def test_no_window_has_more(moments: list[int], length: int) -> None:
    arrivals = np.sort(np.array(moments, float)) / 1000.0
    most = max((sum(at <= other < at + length - 0.001 for other in moments) for at in moments), default=0)
    assert most_in(arrivals, length / 1000.0) == most


def test_bursts_are_told_by_the_gaps_variation_and_short_samples_say_nothing_of_it() -> None:
    """Trap 25: the paper's CV of 4 is σ²/μ²; gaps of σ/μ = 2 have it, and counts in long windows a variance of 4 times the mean."""
    gaps = np.diff(gamma_arrivals(150.0, 2.0, 2000.0, seed=5))
    assert gaps.std() / gaps.mean() == pytest.approx(2.0, rel=0.03)
    _, dispersion = traffic_envelope(gamma_arrivals(150.0, 2.0, 2000.0, seed=5), 0.12)
    assert dispersion[4] == pytest.approx(4.0, rel=0.2)
    envelope, dispersion = traffic_envelope(gamma_arrivals(100.0, 2.0, 30.0, seed=4), 0.1)
    assert len(dispersion) == len(envelope) == len(windows_from(0.1))
    assert dispersion[-1] == dispersion[-2] == dispersion[-3] > 1.5


def test_limits_grow_with_the_rate_and_counts_that_vary_little_are_skewed() -> None:
    envelope, dispersion = traffic_envelope(SAMPLE, 0.12)
    at_plan = limits(envelope, dispersion, 150.0, 150.0)
    assert all(limit >= most for limit, (_, most) in zip(at_plan, envelope, strict=True))
    low, high = limits(envelope, dispersion, 150.0, 15.0), limits(envelope, dispersion, 150.0, 300.0)
    assert all(a < b < c for a, b, c in zip(low, at_plan, high, strict=True))
    assert all(limit <= 150.0 * w + 8 * sqrt(150.0 * w) + 8 for limit, (w, _) in zip(at_plan, envelope, strict=True))
    # Of gaps with σ/μ = 0.5, an hour has 26 queries in some tenth of a second, 5.7 standard deviations above the mean.
    assert limits([(0.1, 25)], [0.25], 150.0, 150.0)[0] > 26
    assert limits([(0.1, 25)], [1.0], 150.0, 150.0)[0] < 45


# -- no change


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (0, *range(2, 10)))])
def test_a_stationary_hour_is_no_change(seed: int) -> None:
    """Trap 27: the envelope of one trace, an hour of another of the same law. cv 2 is the paper's CV of 4."""
    cv = (0.5, 1.0, 2.0)[seed % 3]
    plan = planned(gamma_arrivals(150.0, cv, 600.0, seed))
    assert not list(run(PipelineTuner(plan, T0), gamma_arrivals(150.0, cv, 3600.0, seed + 100), 3600.0))


def test_the_bare_envelope_would_call_it_one() -> None:
    """What the limits beyond the envelope are for."""
    plan = planned(gamma_arrivals(150.0, 1.0, 600.0, 1))
    other = gamma_arrivals(150.0, 1.0, 3600.0, 101)
    assert any(most_in(other, window) > most for window, most in plan.envelope)


# -- more traffic


@pytest.mark.parametrize(
    ("planned_k", "rate", "wanted"), [(3, 250.0, 5), (6, 250.0, 10), (1, 150.0, 1), (7, 151.0, 8), (3, 0.0, 1)]
)
def test_replicas_in_proportion(planned_k: int, rate: float, wanted: int) -> None:
    """Trap 28: 3 · 250 / 150 is 5, although floating-point numbers make it a little more for some rates."""
    assert replicas_for(planned_k, rate, 150.0) == wanted


def test_proportions_are_not_rounded_up_by_rounding_errors() -> None:
    for k in range(1, 200):
        for numerator in range(1, 40):
            assert replicas_for(k * 3, numerator * 0.1, 0.3) == max(1, k * numerator)


@pytest.mark.parametrize("seed", range(5))
def test_all_stages_grow_in_the_first_report_of_a_change(seed: int) -> None:
    plan = planned(SAMPLE)
    up = next(iter(run(PipelineTuner(plan, T0), poisson_then(250.0, 1.0, 60.0, 120.0, 180.0, seed), 180.0)))
    assert 60.0 < up.seconds < 63.0
    assert (up.decision.action, up.decision.before) == ("up", PLANNED)
    assert up.decision.replicas == {
        name: replicas_for(k, up.decision.lambda_max, plan.rate) for name, k in PLANNED.items()
    }
    assert up.decision.lambda_max >= 250.0 * 0.9
    assert "queries in" in up.decision.reason


@pytest.mark.parametrize("seed", range(5))
def test_bursts_at_the_same_mean_are_a_change_for_as_long_as_they_last(seed: int) -> None:
    """Row 100: CV 1 becomes 4 (the paper's), the rate stays."""
    arrivals = poisson_then(150.0, 2.0, 60.0, 120.0, 121.0, seed)
    up = next(iter(run(PipelineTuner(planned(SAMPLE), T0), arrivals, 120.0)))
    assert 60.0 < up.seconds < 90.0
    assert up.decision.window_s < 2.0
    # Counts vary more than planned although few are too much: there is no cut between two of those.
    arrivals = poisson_then(150.0, 2.0, 60.0, 240.0, 360.0, seed)
    found = list(run(PipelineTuner(planned(SAMPLE), T0), arrivals, 360.0))
    assert 60.0 < found[0].seconds < 75.0
    assert all(one.decision.action == "up" for one in found if 75.0 < one.seconds < 240.0)
    assert found[-1].decision.replicas == PLANNED
    assert 250.0 < found[-1].seconds < 300.0


def test_bursts_are_seen_before_a_count_is_too_much() -> None:
    up = next(iter(run(PipelineTuner(planned(SAMPLE), T0), poisson_then(150.0, 2.0, 60.0, 240.0, 360.0, 1), 360.0)))
    assert "times as much as planned" in up.decision.reason


def test_a_rate_that_changes_is_no_burst_and_no_variance() -> None:
    """Twice as many queries, of the same law: what is too much is their number."""
    steps = poisson_then(300.0, 1.0, 60.0, 90.0, 180.0, 7)
    found = list(run(PipelineTuner(planned(SAMPLE), T0), steps, 180.0))
    assert found
    assert not any("times as much as planned" in one.decision.reason for one in found)
    for sample in (WAVE, np.cumsum(1.0 / np.linspace(10.0, 150.0, 30_000))):
        assert max(traffic_envelope(sample, 0.12)[1]) < 2.0


def test_several_dispatchers_add_up() -> None:
    """Each of three sees a third, none of them more than the plan's envelope."""
    arrivals = poisson_then(250.0, 1.0, 60.0, 120.0, 121.0, 3)
    ups = list(run(PipelineTuner(planned(SAMPLE), T0), arrivals, 120.0, dispatchers=3))
    assert ups
    assert 60.0 < ups[0].seconds < 63.0
    assert not list(
        run(PipelineTuner(planned(SAMPLE), T0), gamma_arrivals(150.0, 1.0, 600.0, 33), 600.0, dispatchers=3)
    )


# -- a sample whose rate changes


def wave(seed: int, *rates: float, seconds: float = 200.0) -> Floats:
    """Each of these rates for so long."""
    return np.concatenate(
        [seconds * i + gamma_arrivals(rate, 1.0, seconds, 10 * seed + i) for i, rate in enumerate(rates)]
    )


WAVE = wave(1, 100.0, 10.0, 100.0)


@pytest.mark.parametrize("seed", range(5))
def test_ten_times_the_load_is_a_change_though_the_sample_has_it(seed: int) -> None:
    """It is planned from a wave and cut while little comes: what was planned is back within a second."""
    tuner = PipelineTuner(planned(WAVE), T0)
    found = list(run(tuner, wave(20 + seed, 100.0, 10.0, 100.0, seconds=100.0), 300.0))
    assert [one.decision.action for one in found][:1] == ["down"]
    assert 110.0 < found[0].seconds < 140.0
    assert 200.0 < next(one for one in found if one.decision.action == "up").seconds < 201.0
    assert all(tuner.replicas[name] >= k for name, k in PLANNED.items())


@pytest.mark.parametrize("seed", range(3))
def test_the_wave_of_the_sample_with_all_its_replicas_is_no_change(seed: int) -> None:
    """Its largest counts are those of the stretches with the largest rate; others of the same law exceed them."""
    found = run(PipelineTuner(planned(WAVE), T0), wave(40 + seed, 100.0, 100.0, 100.0), 600.0)
    assert not list(found)


@pytest.mark.parametrize("spread", [1.0, 16.0, 250.0])
def test_a_limit_is_never_above_what_is_served(spread: float) -> None:
    """Of fewer replicas than planned: what they serve in the window and the objective, or their share of what is planned for."""
    plan = planned(WAVE)
    plan = replace(plan, dispersion=[spread] * len(plan.envelope))
    at_plan = limits(plan.envelope, plan.dispersion, plan.rate, plan.rate)
    fewer = {"a": 1, "b": 2, "c": 1}
    for (window, _), most in zip(plan.envelope, at_plan, strict=True):
        tuner = PipelineTuner(plan, T0, replicas=fewer)
        allowed = max(plan.rate / 3 / 0.8 * (window + 0.35), most / 3)
        counts = np.diff(np.linspace(0.0, allowed + 1.0, round(window / BIN_S) + 1).astype(int))
        told = [tuner.told(T0 + i * BIN_S, [int(n)], T0 + (i + 1) * BIN_S) for i, n in enumerate(counts)]
        assert any(one is not None and one.action == "up" for one in told), window


# -- less traffic


@pytest.mark.parametrize("seed", range(5))
def test_after_a_burst_replicas_return_without_oscillation(seed: int) -> None:
    """Row 102: within 10 to 40 s."""
    arrivals = poisson_then(300.0, 1.0, 60.0, 90.0, 240.0, seed)
    found = list(run(PipelineTuner(planned(SAMPLE), T0), arrivals, 240.0))
    assert found[-1].decision.replicas == PLANNED
    assert 100.0 <= found[-1].seconds <= 130.5
    assert {one.decision.action for one in found if one.seconds > 92.0} == {"down"}
    downs = [one.seconds for one in found if one.decision.action == "down"]
    assert all(b - a >= 10.0 - 1e-6 for a, b in pairwise(downs))


def test_calm_comes_before_cuts_and_little_traffic_keeps_one_replica() -> None:
    arrivals = poisson_then(300.0, 1.0, 60.0, 90.0, 240.0, 1)
    found = list(run(PipelineTuner(planned(SAMPLE), T0, calm_s=25.0), arrivals, 240.0))
    ups = [one.seconds for one in found if one.decision.action == "up"]
    first = next(one.seconds for one in found if one.decision.action == "down")
    assert first - max(at for at in ups if at < first) >= 25.0 - 1e-6
    quiet = poisson_then(10.0, 1.0, 60.0, 180.0, 240.0, 1)
    found = list(run(PipelineTuner(planned(SAMPLE), T0), quiet, 240.0))
    before = [one for one in found if one.seconds < 180.0]
    assert before[-1].decision.replicas == {"a": 1, "b": 1, "c": 1}
    up = next(one for one in found if one.seconds >= 180.0)
    assert up.seconds < 181.0
    assert all(up.decision.replicas[name] >= k for name, k in PLANNED.items())


def test_without_traffic_one_replica_stays_and_reports_out_of_time_count_for_nothing() -> None:
    (down,) = run(PipelineTuner(planned(SAMPLE), T0), np.array([0.5]), 120.0)
    assert down.decision.replicas == {"a": 1, "b": 1, "c": 1}
    tuner = PipelineTuner(planned(SAMPLE), T0)
    assert tuner.told(T0 - 1000.0, [10_000], T0 + 1.0) is None
    assert tuner.told(T0 + 1000.0, [10_000], T0 + 1.1) is None
    assert tuner.told(T0 + 1.1, [], T0 + 1.2) is None


# -- what is foreseen


def foreseeing(plan: PipelinePlan) -> PipelineTuner:
    """Replicas serve seven seconds after their order."""
    tuner = PipelineTuner(plan, T0, forecaster="combined")
    tuner.lead_s = 7.0
    return tuner


def test_rises_are_provided_for_before_they_are_too_much_and_by_fewer_orders() -> None:
    rng = np.random.default_rng(3)
    counts = rng.poisson(np.interp(np.arange(640), range(0, 601, 60), [150.0, 300.0] * 5 + [150.0]))
    waves = np.sort(np.repeat(np.arange(640), counts) + rng.random(counts.sum()))
    plan = planned(SAMPLE)
    foreseen, seen = (list(run(tuner, waves, 640.0)) for tuner in (foreseeing(plan), PipelineTuner(plan, T0)))

    def lacking(found: list[At]) -> float:
        """Replicas and seconds that were missing, seven seconds after each order."""
        ready = [(0.0, 3), *((one.seconds + 7.0, one.decision.replicas["a"]) for one in found)]
        return sum(
            max(0.0, count / 50.0 - next(k for at, k in reversed(ready) if at <= i)) for i, count in enumerate(counts)
        )

    assert lacking(foreseen) < 0.7 * lacking(seen)
    assert len(foreseen) < len(seen)
    assert any("foreseen" in one.decision.reason for one in foreseen)


@pytest.mark.parametrize(("cv", "idle_s"), [(0.5, 0.0), (1.0, 0.0), (1.0, 20.0)])
def test_a_forecast_of_steady_traffic_is_no_change(cv: float, idle_s: float) -> None:
    """idle_s: after the deployment, before the first query."""
    plan = planned(gamma_arrivals(150.0, cv, 600.0, 1))
    assert not list(run(foreseeing(plan), idle_s + gamma_arrivals(150.0, cv, 900.0, 101), 900.0))


def test_what_has_ended_is_not_foreseen_for_ever() -> None:
    found = list(run(foreseeing(planned(SAMPLE)), gamma_arrivals(150.0, 1.0, 60.0, 5), 240.0))
    assert found[-1].decision.replicas == {"a": 1, "b": 1, "c": 1}


# -- the app's target


def test_a_stricter_target_plans_and_keeps_more_headroom() -> None:
    """The same load on the same options: more replicas from the first, and again when it has doubled."""
    option = StageOption(vertex="v0", hardware="cpu", price_per_hour=0.1, batch_latency_ms={1: 50.0})
    arrivals = poisson_then(300.0, 2.0, 60.0, 240.0, 300.0, 3)
    found = []
    for target in (0.9, 0.99, 0.999):
        problem = PipelineProblem(
            name="p", pipeline=chain(1), latency_ms=150.0, options=(option,), percentile=target,
            arrivals=gamma_arrivals(150.0, 2.0, 300.0, 4),
        )  # fmt: skip
        plan = plan_pipeline(problem, effort=0, rounds=1)
        tuner = PipelineTuner(plan, T0)
        ups = [one.decision for one in run(tuner, arrivals, 240.0) if one.decision.action == "up"]
        found.append((plan.vertices["v0"].replicas, -plan.vertices["v0"].rho, max(one.replicas["v0"] for one in ups)))
    assert found[0] < found[1] < found[2]
    assert [one[2] for one in found] == sorted({one[2] for one in found})


# -- another tuner takes over


def test_tuners_go_on_from_the_replicas_there_are() -> None:
    plan = planned(SAMPLE)
    grown = {name: 2 * k for name, k in PLANNED.items()}
    tuner = PipelineTuner(plan, T0, replicas=grown)
    assert not list(run(tuner, gamma_arrivals(250.0, 1.0, 29.0, 4), 29.0))
    assert tuner.replicas == grown
    tuner = CoarseTuner(plan_for(130.0), T0, replicas={"v0": 6, "v1": 6})
    assert not decided(tuner, gamma_arrivals(130.0, 1.0, 60.0, 6), 60.0)
    assert tuner.replicas == {"v0": 6, "v1": 6}


@pytest.mark.parametrize("policy", ["inferline", "cg-mean"])
def test_replicas_are_added_as_far_as_the_plans_budget_pays(policy: str) -> None:
    free = plan_for(130.0, policy)
    priced = replace(free, vertices={name: replace(one, price_per_hour=0.5) for name, one in free.vertices.items()})
    cost = sum(one.replicas for one in priced.vertices.values()) * 0.5
    found: dict[float, dict[str, int]] = {}
    for times in (1.0, 2.0, 100.0):
        tuner = make_tuner(replace(priced, budget_per_hour=cost * times), T0)
        assert tuner is not None
        decided(tuner, step(400.0, 120.0, 121.0), 120.0)
        found[times] = tuner.replicas
    bills = [0.5 * sum(replicas.values()) for replicas in found.values()]
    assert bills[0] == cost < bills[1] <= 2.0 * cost < bills[2]
    tuner = make_tuner(free, T0)
    assert tuner is not None
    decided(tuner, step(400.0, 120.0, 121.0), 120.0)
    assert tuner.replicas == found[100.0]


def test_plans_without_traffic_have_no_tuner() -> None:
    with pytest.raises(ValueError, match="the plan of p has no rate or no envelope"):
        PipelineTuner(replace(planned(SAMPLE), rate=0.0), T0)
    assert make_tuner(replace(plan_for(130.0), rate=0.0), T0) is None


# -- The baselines' tuner adds whole units when those that there are do not serve what comes, and keeps them for two minutes.


def plan_for(rate: float, policy: str = "cg-mean") -> PipelinePlan:
    """Units of 50 queries/s: the second stage takes 20 ms."""
    options = tuple(
        StageOption(vertex=name, hardware="gpu", price_per_hour=1.0, batch_latency_ms={1: ms})
        for name, ms in (("v0", 5.0), ("v1", 20.0))
    )
    posed = PipelineProblem(
        name="p", pipeline=chain(2), latency_ms=300.0, options=options, arrivals=gamma_arrivals(rate, 1.0, 300.0, 1)
    )
    return plan_pipeline(posed, policy)


def decided(
    tuner: CoarseTuner | PipelineTuner, arrivals: Floats, seconds: float, dispatchers: int = 1
) -> list[tuple[float, TunerDecision]]:
    found = []
    counts = [
        np.bincount(((arrivals[d::dispatchers]) / BIN_S).astype(int), minlength=round(seconds / BIN_S) + 20)
        for d in range(dispatchers)
    ]
    for i in range(round(seconds / 0.1)):
        for mine in counts:
            now = T0 + (i + 1) * 0.1
            decision = tuner.told(T0 + i * 0.1, mine[10 * i : 10 * i + 10].tolist(), now)
            if decision is not None:
                found.append((now - T0, decision))
    return found


def step(rate: float, until_s: float, end_s: float) -> Floats:
    """130/s, from 60 s to `until_s` this rate."""
    parts = [gamma_arrivals(130.0, 1.0, 60.0, 2), 60.0 + gamma_arrivals(rate, 1.0, until_s - 60.0, 3)]
    return np.concatenate([*parts, until_s + gamma_arrivals(130.0, 1.0, end_s - until_s, 4)])


@pytest.mark.parametrize("dispatchers", [1, 3])
def test_units_for_the_rate_are_enough_while_it_stays(dispatchers: int) -> None:
    plan = plan_for(130.0)
    assert {stage.replicas for stage in plan.vertices.values()} == {3}
    assert not decided(CoarseTuner(plan, T0), gamma_arrivals(130.0, 1.0, 300.0, 5), 300.0, dispatchers)


def test_what_waits_counts_and_units_come_later_than_the_envelope_says() -> None:
    found = decided(CoarseTuner(plan_for(130.0), T0), step(230.0, 120.0, 121.0), 120.0)
    assert found[0][1].action == "up"
    assert all(len(set(decision.replicas.values())) == 1 for _, decision in found)
    assert found[-1][1].replicas["v0"] >= 5
    sooner = decided(PipelineTuner(plan_for(130.0, "inferline"), T0), step(230.0, 120.0, 121.0), 120.0)
    assert 60.0 < sooner[0][0] < found[0][0] < 75.0
    # A rate of twelve units for three seconds: the mean of ten seconds is less than what then waits asks for.
    burst = np.concatenate([gamma_arrivals(130.0, 1.0, 60.0, 2), 60.0 + gamma_arrivals(600.0, 1.0, 3.0, 3)])
    found = decided(CoarseTuner(plan_for(130.0), T0), burst, 66.0)
    (rate,) = {decision.lambda_max for at, decision in found if at == found[-1][0]}
    assert found[-1][1].replicas["v0"] * 50.0 > rate + 50.0


def test_units_stay_for_two_minutes_without_need_and_one_always() -> None:
    found = decided(CoarseTuner(plan_for(130.0), T0), step(230.0, 90.0, 360.0), 360.0)
    assert next(at for at, decision in found if decision.action == "down") >= 90.0 + IDLE_S - 10.0
    assert found[-1][1].replicas == {"v0": 3, "v1": 3}
    found = decided(CoarseTuner(plan_for(130.0), T0), np.array([0.5]), 200.0)
    assert found[-1][1].replicas == {"v0": 1, "v1": 1}


@pytest.mark.parametrize("policy", POLICIES)
def test_each_policy_has_its_tuner(policy: str) -> None:
    tuner = make_tuner(plan_for(130.0, policy), T0, {"v0": 4, "v1": 4})
    assert type(tuner) is (CoarseTuner if policy.startswith("cg-") else PipelineTuner)
    assert tuner.replicas == {"v0": 4, "v1": 4}


# -- items of answers


@pytest.mark.parametrize(("mean", "dispersion"), [(2.6, 1.0), (18.9, 4.0)])
@pytest.mark.parametrize("larger", [1.0, 2.0])
def test_a_stage_that_is_asked_for_more_items_gets_replicas_for_them(
    mean: float, dispersion: float, larger: float
) -> None:
    """They are 0.2 s behind the queries. After a minute they are as many as planned again."""
    plan = planned(SAMPLE)
    plan = replace(plan, vertices=plan.vertices | {"b": replace(plan.vertices["b"], scale=mean)})
    tuner, rng = PipelineTuner(plan, T0), np.random.default_rng(3)
    arrivals = gamma_arrivals(150.0, 1.0, 240.0, seed=77)
    bins = np.bincount((arrivals / BIN_S).astype(int), minlength=24_010)
    decided: list[At] = []
    for i in range(2400):
        counts = bins[10 * i : 10 * i + 10]
        behind = int(bins[max(0, 10 * i - 20) : max(0, 10 * i - 10)].sum())
        now = mean * (larger if 60 <= i / 10 < 120 else 1.0)
        items = rng.poisson(
            rng.gamma(now / (dispersion - 1), dispersion - 1, behind) if dispersion > 1 else [now] * behind
        )
        decision = tuner.told(
            T0 + i / 10, counts.tolist(), T0 + i / 10 + 0.1, {"b": (int(items.sum()), int((items**2).sum()))}
        )
        if decision is not None:
            decided.append(At(i / 10, decision))
    if larger == 1.0:
        assert not decided
        return
    first = decided[0]
    assert 60 < first.seconds < 90
    assert first.decision.reason.startswith("a query asks b for ")
    most = max(one.decision.replicas["b"] for one in decided)
    assert most in (2 * PLANNED["b"], 2 * PLANNED["b"] + 1)
    assert all(one.decision.replicas["a"] == PLANNED["a"] for one in decided)
    assert tuner.replicas == PLANNED, "it gives them back"
