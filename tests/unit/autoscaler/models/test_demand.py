"""Rates: noise is averaged out, steps are seen at once."""

import random

from hypothesis import given
from hypothesis import strategies as st

from bus.messages.scaling import ClassDemand, DemandReport
from services.autoscaler.models.demand import FORGET, ClassLoad, LoadEstimator, share_of
from services.core.demand import rate_of


def rate(steps: list[tuple[float, int]]) -> float:
    return rate_of([seconds for seconds, _ in steps], [items for _, items in steps])


def poisson(rng: random.Random, mean: float) -> int:
    count, at = 0, rng.expovariate(1.0)
    while at < mean:
        count, at = count + 1, at + rng.expovariate(1.0)
    return count


def test_noise_is_averaged_out() -> None:
    rng = random.Random(1)
    rates = [rate([(0.5, poisson(rng, 50)) for _ in range(10)]) for _ in range(500)]
    within = sum(abs(r - 100) < 15 for r in rates) / len(rates)
    assert within > 0.97  # one period alone would be within 15 % in seven of ten cases


def test_few_queries_by_chance_are_no_step() -> None:
    rng = random.Random(3)
    rates = [rate([(0.5, poisson(rng, 2)) for _ in range(11)]) for _ in range(2000)]  # 4/s, the mean of 5.5 s
    assert sum(r > 9 for r in rates) <= 2


def test_a_threefold_step_is_seen_in_the_first_period() -> None:
    rng = random.Random(2)
    seen = [rate([(0.5, poisson(rng, 60)), *((0.5, poisson(rng, 20)) for _ in range(9))]) for _ in range(200)]
    assert sum(r > 80 for r in seen) / len(seen) > 0.97


def test_the_end_of_a_load_is_seen_too() -> None:
    assert rate([(0.5, 0), (0.5, 0), (0.5, 50), (0.5, 50), (0.5, 50)]) == 0.0


@given(st.lists(st.tuples(st.floats(0.1, 2), st.integers(0, 1000)), max_size=12))
def test_a_rate_is_one_that_some_recent_part_had(steps: list[tuple[float, int]]) -> None:
    found = rate(steps)
    means = [sum(n for _, n in steps[:i]) / sum(s for s, _ in steps[:i]) for i in range(1, len(steps) + 1)]
    assert (not steps and found == 0.0) or any(abs(found - mean) <= 1e-6 * max(1.0, mean) for mean in means)


def report(dispatcher: str, *rows: ClassDemand, seconds: float = 0.5) -> DemandReport:
    return DemandReport(dispatcher=dispatcher, at=0.0, seconds=seconds, rows=list(rows))


def test_dispatchers_add_up_and_one_that_falls_silent_no_longer_counts() -> None:
    loads = LoadEstimator()
    now = 100.0
    for _ in range(6):
        now += 0.5
        loads.take(report("d0", ClassDemand("app", "w", 10, 50.0)), now)
        loads.take(report("d1", ClassDemand("app", "w", 20, 49.0), ClassDemand("app", "", 5, 49.0)), now)
    (load,) = loads.classes(now)
    assert load.by_worker == {"": 10.0, "w": 60.0}
    assert (load.counted, load.turned_away) == (210, 30)
    assert load.needs.latency_ms == 49.0  # the strictest
    for _ in range(4):
        now += 0.5
        loads.take(report("d0", ClassDemand("app", "w", 10, 50.0)), now)
    (load,) = loads.classes(now)
    assert load.by_worker == {"w": 20.0}
    (load,) = loads.classes(now + 10)
    assert load.by_worker == {}
    assert loads.classes(now + FORGET + 1) == []


def told(*pairs: tuple[int, int]) -> ClassLoad:
    """The load after half-seconds in which so many items were taken, and so many by nobody."""
    loads, now = LoadEstimator(), 100.0
    for taken, refused in pairs:
        now += 0.5
        loads.take(report("d0", ClassDemand("app", "w", taken, 50.0), ClassDemand("app", "", refused, 50.0)), now)
    (load,) = loads.classes(now)
    return load


def test_a_burst_of_refusals_in_a_steady_load_is_no_step() -> None:
    steady = told(*[(2, 0)] * 9, (1, 5))  # 4/s as always: one queue was full for a moment
    assert steady.rate == (19 + 5) / 5.0


def test_refusals_of_a_load_that_has_grown_are_seen_at_once() -> None:
    assert told(*[(2, 0)] * 9, (3, 37)).rate > 75.0


def test_what_a_worker_takes_no_longer_counts_as_refused_at_once() -> None:
    gone = told(*[(25, 0)] * 8, (0, 25), (0, 25))
    assert gone.by_worker == {"": 50.0}


def test_refusals_that_have_ended_no_longer_count() -> None:
    assert "" not in told(*[(5, 40)] * 6, *[(2, 0)] * 4).by_worker


def test_refused_load_is_shared_by_what_workers_take_of_the_app() -> None:
    needs = ClassDemand("app", "", 0, 50.0)
    mixed = ClassLoad(needs, {"w0": 30.0, "w1": 10.0, "": 8.0}, 0.0)
    assert share_of("w0", mixed, [mixed], ["w0", "w1"]) == 36.0
    assert share_of("w1", mixed, [mixed], ["w0", "w1"]) == 12.0
    nobody = ClassLoad(needs, {"": 8.0}, 0.0)
    assert share_of("w1", nobody, [nobody], ["w1", "w2"]) == 8.0
    assert share_of("w2", nobody, [nobody], ["w1", "w2"]) == 0.0
    other = ClassLoad(ClassDemand("app", "", 0, 500.0), {"w2": 5.0}, 0.0)
    assert share_of("w2", nobody, [nobody, other], ["w1", "w2"]) == 8.0
