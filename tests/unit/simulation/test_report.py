"""A run's figures are what their definitions say, and as large as its duration, not its load."""

import json
from math import ceil, inf
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.events import ScalingEvent, WorkerEvent
from services.simulation.report import KEPT, MEASURED, RunReport, Sample
from services.simulation.statistics import RELATIVE_ERROR, Quantiles


def report(duration: float = 20.0, every: float = 2.0) -> RunReport:
    hardware = {"big": "gpu", "small": "cpu", "never": "cpu"}
    return RunReport("mine", duration, every, base="infaas", hardware=hardware, targets={"a": 0.999})


def end(one: RunReport, cost: float = 0.0, open_queries: int = 0) -> dict[str, Any]:
    return one.finished(cost, events=1000, wall_s=0.5, open_queries=open_queries)


def scaled(action: str, count: int = 1, solve_ms: float | None = None) -> ScalingEvent:
    return ScalingEvent(
        time=1.0, scaler="model", worker="w", app="a", model="m", variant="big", action=action, count=count,
        reason="load rises", solver="ilp", solve_ms=solve_ms, objective=1.0,
    )  # fmt: skip


def test_each_query_ends_in_one_of_four_ways() -> None:
    one = report()
    for at in (0.0, 0.1, 0.2, 5.0, 5.1):
        one.offered("a", at)
    one.offered("b", 5.2)
    one.answered("a", 5.5, 0.1, 0.1, 0.7, "small")  # just in time
    one.answered("a", 5.6, 0.3, 0.1, 0.9, "big")  # late: its accuracy does not count
    one.answered("b", 5.7, 30.0, inf, None, "small")  # no objective; a variant without accuracy does not count
    one.refused("a", 6.0, "deadline")
    one.refused("a", 6.0, "overloaded")
    found = end(one, cost=3.0, open_queries=1)
    assert (found["queries"], found["answered"], found["late"], found["refused"], found["failed"]) == (6, 3, 1, 2, 1)
    assert found["refusals"] == {"deadline": 1, "overloaded": 1}
    assert found["open"] == 1
    assert found["slo_violation_ratio"] == pytest.approx(4 / 6)
    assert found["effective_accuracy"] == 0.7
    assert found["throughput_qps"] == pytest.approx(3 / 20)
    assert found["cost_per_1000"] == pytest.approx(1000.0)
    assert found["cost_per_1000_in_time"] == pytest.approx(1500.0)  # one of three was late
    assert found["variants"] == {"big": 1, "small": 2}
    assert found["hardware"] == {"big": "gpu", "small": "cpu"}
    assert found["p50_ms"] == pytest.approx(300, rel=0.01)
    a, b = found["apps"]["a"], found["apps"]["b"]
    assert (a["queries"], a["answered"], a["late"], a["refused"], a["failed"]) == (5, 2, 1, 2, 1)
    assert a["slo_violation_ratio"] == pytest.approx(4 / 5)
    assert (a["slo_target"], a["attainment"]) == (0.999, pytest.approx(1 / 5))
    assert (b["slo_target"], b["attainment"]) == (None, 1.0)
    assert (b["p99_ms"], b["effective_accuracy"]) == (pytest.approx(30_000, rel=0.01), None)
    assert found["simulated"] is True


def test_rows_are_equally_long_and_count_every_query() -> None:
    one = report()
    for number in range(40):
        one.offered("a", 0.5 * number)
        one.answered("a", 0.5 * number + 0.25, 0.25, 0.2 if number % 4 == 0 else 1.0, 0.5, "small")
    one.sample(Sample(time=4.0, instances={"small": 1}, workers={"cpu": 1}, cost_rate=0.1, utilisation=0.5))
    series = end(one)["series"]
    assert {len(row) for row in (*series.values(), *series["instances"].values()) if isinstance(row, list)} == {10}
    assert series["time"] == [2.0 * i for i in range(10)]
    assert series["offered_qps"] == series["answered_qps"] == [2.0] * 10
    assert series["violations"] == [1] * 10
    assert series["effective_accuracy"] == [0.5] * 10


def test_samples_hold_from_their_time_on_and_late_comers_were_zero_before() -> None:
    one = report(duration=10.0)
    one.sample(Sample(time=0.0, instances={"small": 2}, workers={"cpu": 1}, cost_rate=0.1, utilisation=0.0))
    one.sample(
        Sample(time=4.0, instances={"small": 1, "big": 1}, workers={"cpu": 1, "gpu": 1}, cost_rate=0.3, utilisation=0.5)
    )
    one.sample(Sample(time=7.9, instances={"big": 1}, workers={"gpu": 1}, cost_rate=0.2, utilisation=0.75))
    one.sample(Sample(time=10.0, instances={"big": 9}, workers={"gpu": 9}, cost_rate=9.0, utilisation=1.0))
    one.sample(Sample(time=10.0, instances={}, workers={}, cost_rate=0.0, utilisation=0.0))  # again: nothing has passed
    found = end(one)
    series = found["series"]
    assert series["instances"] == {"big": [0, 0, 1, 1, 1], "small": [2, 2, 1, 1, 0]}
    assert series["workers"] == {"cpu": [1, 1, 1, 1, 0], "gpu": [0, 0, 1, 1, 1]}
    assert series["cost_rate"] == [0.1, 0.1, 0.3, 0.3, 0.2]
    assert found["mean_utilisation"] == pytest.approx(0.75)  # not the one at the start


def test_what_ends_after_the_duration_has_rows_of_its_own() -> None:
    one = report(duration=5.0)
    one.offered("a", 4.5)
    one.answered("a", 7.0, 2.5, 1.0, None, "small")
    one.sample(Sample(time=0.0, instances={}, workers={"cpu": 1}, cost_rate=0.1, utilisation=0.5))
    found = end(one, cost=0.5)
    assert (found["answered"], found["throughput_qps"]) == (1, 0.0)  # nobody got an answer in these 5 s
    series = found["series"]
    assert series["time"] == [0.0, 2.0, 4.0, 6.0]
    assert series["cost_rate"] == [0.1, 0.1, 0.1, 0.0]  # what is counted ends with the duration
    assert series["offered_qps"] == [0.0, 0.0, 1.0, 0.0]  # the third interval has but one second
    assert series["violations"] == [0, 0, 0, 1]


def test_accuracy_drop_is_from_the_best_window_before() -> None:
    one = report(duration=60.0)
    for window, (a, b) in enumerate([(0.6, 0.9), (0.8, 0.9), (None, None), (0.7, 0.5), (0.75, 0.9), (0.95, 0.9)]):
        for app, accuracy in (("a", a), ("b", b)):
            if accuracy is not None:
                one.offered(app, 10.0 * window + 1)
                one.answered(app, 10.0 * window + 2, 0.1, 1.0, accuracy, "small")
    one.offered("a", 59.0)
    one.answered("a", 59.5, 9.0, 1.0, 0.1, "small")  # late
    found = end(one)
    assert found["max_accuracy_drop"] == pytest.approx(0.85 - 0.6)
    assert found["apps"]["a"]["max_accuracy_drop"] == pytest.approx(0.8 - 0.7)
    assert found["apps"]["b"]["max_accuracy_drop"] == pytest.approx(0.9 - 0.5)
    rising = report(duration=30.0)
    for window in range(3):
        rising.answered("a", 10.0 * window, 0.1, 1.0, 0.5 + 0.1 * window, "small")
    assert end(rising)["max_accuracy_drop"] == 0.0
    assert end(report())["max_accuracy_drop"] is None


def test_scaling_decisions_are_counted_and_the_first_are_listed() -> None:
    one = report()
    one.event(scaled("load", 3, solve_ms=2.0), 1.5)
    one.event(scaled("add_worker", 0), 1.6)  # wanted, and not done
    one.event(WorkerEvent(time=1, worker="w", hardware="cpu", from_state="", to_state="up", reason=""), 1.7)
    for _ in range(KEPT):
        one.event(scaled("replicate"), 2.0)
    found = end(one)
    assert found["scale_actions"] == {"load": 1, "replicate": KEPT}
    listed = found["scaling"]["decisions"]
    assert (len(listed), found["scaling"]["more"]) == (KEPT, 2)
    assert (listed[0]["time"], listed[0]["action"], listed[0]["count"]) == (1.5, "load", 3)
    assert (listed[0]["reason"], listed[1]["action"]) == ("load rises", "add_worker")
    assert not any("solve_ms" in row for row in listed)
    assert found["solve_ms"] == {"count": 1, "p50": pytest.approx(2.0, rel=0.01), "p99": pytest.approx(2.0, rel=0.01)}


def test_many_answers_of_one_accuracy_have_that_accuracy() -> None:
    one = report(duration=40.0)
    for number in range(4000):
        one.answered("a", number / 100, 0.1, 1.0, 0.7, "small")
    found = end(one)
    assert found["effective_accuracy"] == 0.7
    assert found["max_accuracy_drop"] == 0.0
    assert set(found["series"]["effective_accuracy"]) == {0.7}


def test_nothing_happened() -> None:
    found = end(report())
    assert (found["queries"], found["slo_violation_ratio"], found["cost_per_1000"], found["p50_ms"]) == (
        0,
        0.0,
        None,
        None,
    )
    assert found["series"]["violations"] == [0] * 10
    json.dumps(found, allow_nan=False)


Call = tuple[str, float, float]


@given(
    calls=st.lists(st.tuples(st.sampled_from("oart"), st.floats(0, 30), st.floats(0.001, 5)), max_size=200),
    every=st.sampled_from([0.3, 1.0, 2.0, 7.0, 10.0, 45.0]),
    duration=st.sampled_from([1.0, 10.0, 21.5, 40.0]),
)
def test_series_add_up_and_equal_calls_give_equal_bytes(calls: list[Call], every: float, duration: float) -> None:
    def run(wall: float) -> dict[str, Any]:
        one = report(duration, every)
        for number, (kind, at, seconds) in enumerate(sorted(calls, key=lambda call: call[1])):
            app = f"app{number % 3}"
            if kind == "o":
                one.offered(app, at)
            elif kind == "a":
                one.answered(app, at, seconds, 2.0, 0.5, "small")
            elif kind == "r":
                one.refused(app, at, "deadline")
            else:
                one.decided(wall * seconds)
        return one.finished(1.0, 10, wall, 0)

    found = run(1.0)
    series = found["series"]
    rows = [row for row in series.values() if isinstance(row, list)]
    assert len({len(row) for row in rows}) == 1
    assert len(rows[0]) <= max(duration, 30) / every + 2
    spans = [duration - t if 0 < duration - t < every else every for t in series["time"]]
    for row, total in (("offered_qps", "queries"), ("answered_qps", "answered")):
        assert sum(q * s for q, s in zip(series[row], spans, strict=True)) == pytest.approx(found[total])
    assert sum(series["violations"]) == found["late"] + found["refused"]
    again = run(3.0)
    same = [json.dumps({k: v for k, v in one.items() if k not in MEASURED}) for one in (found, again)]
    assert same[0] == same[1]
    assert found["events_per_s"] != again["events_per_s"]


# -- Quantiles from counts: within the stated error of the true ones, whatever the values.


def counted(values: list[float], settle_every: int = 10**9) -> Quantiles:
    found = Quantiles()
    for number, value in enumerate(values, 1):
        found.fresh.append(value)
        if number % settle_every == 0:
            found.settle()
    return found


@given(
    values=st.lists(st.floats(1e-9, 1e9), min_size=1, max_size=300),
    share=st.floats(0.001, 1.0),
)
def test_a_quantile_is_near_the_value_of_its_rank(values: list[float], share: float) -> None:
    true = sorted(values)[max(1, ceil(share * len(values))) - 1]
    (found,) = counted(values).quantiles(share)
    assert found == pytest.approx(true, rel=RELATIVE_ERROR)
    assert RELATIVE_ERROR <= 0.01


@given(values=st.lists(st.floats(0, 1e4), max_size=60), cut=st.integers(0, 60), often=st.integers(1, 7))
def test_parts_together_are_the_whole(values: list[float], cut: int, often: int) -> None:
    parts = counted(values[:cut], often)
    parts.merge(counted(values[cut:]))
    assert parts.count == len(values)
    assert parts.bins == counted(values, 1).bins
    assert parts.quantiles(0.5, 0.99) == counted(values, 13).quantiles(0.5, 0.99)


def test_nothing_and_zero() -> None:
    assert Quantiles().quantiles(0.5, 0.99) == [None, None]
    assert counted([0.0, 0.0, 0.5]).quantiles(0.5, 1.0) == [0.0, pytest.approx(0.5, rel=RELATIVE_ERROR)]


def test_its_size_is_that_of_the_range_not_of_the_count() -> None:
    found = Quantiles()
    for _ in range(50):
        found.fresh.extend(i / 1e4 for i in range(1, 10_001))
        found.settle(least=4096)
    assert len(found.fresh) == 0
    assert len(found.bins) < 64 * 15
    assert found.count == 500_000
