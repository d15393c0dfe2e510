"""Served for accuracy on fixed machines: less of it before anything is refused, more again when the load allows, and no flapping."""

import random
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest

from bus.codec import decode
from bus.messages.catalog import VariantRecord
from bus.messages.scaling import AskForCapacity
from services.core.cost import Goal
from tests.support.simulated.autoscaled_fleet import ScalingFleet
from tests.support.simulated.fleet import variant

LATENCY_MS = 1800.0
ACCURACY = {"good": 0.78, "quick": 0.69}
UP, DOWN = (3, 6, 8, 10, 12, 15, 18, 22, 27, 33, 40, 46), (36, 27, 20, 15, 10, 7, 7, 7)


def good(**changes: Any) -> VariantRecord:
    """11 items/s in batches of 8; two cores hold two of them."""
    return variant("good-v1-ort-fp32-t1-b8", model="good", base_ms=30.0, per_item_ms=90.0, accuracy=0.78, **changes)


def quick(**changes: Any) -> VariantRecord:
    """35 items/s in batches of 8."""
    return variant("quick-v1-ort-fp32-t1-b8", model="quick", base_ms=12.0, per_item_ms=27.0, accuracy=0.69, **changes)


def fleet(goal: Goal = "accuracy", **more: Any) -> ScalingFleet:
    return ScalingFleet(good(), quick(), goal=goal, **more)


def heard(stage: ScalingFleet, labels: Sequence[str]) -> tuple[float, float]:
    """Share of these queries answered in time, and the mean accuracy of those answers."""
    ends = [stage.replies(label)[0] for label in labels]
    fine = [
        ACCURACY[end["variant"].split("-")[0]] for end in ends if end.get("latency_ms", LATENCY_MS + 1) <= LATENCY_MS
    ]
    return len(fine) / len(ends), sum(fine) / max(1, len(fine))


def ramp(goal: Goal, solver: str) -> tuple[ScalingFleet, list[tuple[float, float]]]:
    stage = fleet(goal, solver=solver)
    steps = [stage.load(rate, 5, latency_ms=LATENCY_MS) for rate in (*UP, *DOWN)]
    stage.stage.run(2.0)
    return stage, [heard(stage, labels) for labels in steps]


@pytest.mark.slow
@pytest.mark.parametrize("solver", ["greedy", "ilp"])
def test_accuracy_goes_down_with_the_load_before_anything_is_refused_and_comes_back(solver: str) -> None:
    stage, steps = ramp("accuracy", solver)
    assert [share for share, _ in steps] == [1.0] * len(steps)
    accuracies = [accuracy for _, accuracy in steps]
    assert accuracies[UP.index(8)] == pytest.approx(0.78)
    assert (
        accuracies[UP.index(18)] > 0.74
    )  # two are nearly full: what would end close to its deadline goes to the quick one
    # Between them one is not enough, and until the second has been possible for the hold, some go to what is kept for that.
    assert min(accuracies[UP.index(8) : UP.index(18)]) > 0.73
    assert accuracies[UP.index(46)] < 0.715
    assert all(after <= before + 0.01 for before, after in pairwise(accuracies[UP.index(18) : len(UP)]))
    assert accuracies[-1] > 0.77
    reasons = [why for _, _, why in stage.scalings()]
    assert any(why.startswith("more accurate: 0.69 -> 0.78") for why in reasons)
    assert any("can carry" in why and "; accuracy " in why for why in reasons)
    _, cheap = ramp("cost", solver)
    assert cheap == [(1.0, pytest.approx(0.69))] * len(steps)
    assert sum(accuracies) / len(accuracies) > 0.69 + 0.04


def test_an_upgrade_waits_until_it_has_been_possible_for_the_hold_and_no_capacity_is_missing_meanwhile() -> None:
    stage = fleet(hold_s=6.0)
    began = stage.stage.now
    stage.load(6, 20, latency_ms=LATENCY_MS)
    first = next(at for at, counts in stage.counts if good().variant in counts)
    assert first - began >= 6.0
    rates = {good().variant: 10.6, quick().variant: 35.0}
    serving = [
        (at, sum(rates[name] * states.get("Active", 0) for name, states in counts.items()))
        for at, counts in stage.counts
        if at > began + 1.0
    ]
    assert all(capacity >= 6 for _, capacity in serving)
    assert stage.running(good().variant) == 1
    assert stage.running(quick().variant) == 1  # to fall back on


def poisson(stage: ScalingFleet, rate: float, seconds: float, luck: random.Random) -> list[str]:
    labels, end = [], stage.stage.now + seconds
    while stage.stage.now < end:
        stage.stage.run(luck.expovariate(rate))
        labels.append(stage.ask(latency_ms=LATENCY_MS))
    return labels


@pytest.mark.parametrize("rate", [5, 11, 17, 19, 21, 33])
def test_a_constant_load_settles_and_stays_as_it_is(rate: int) -> None:
    stage, luck = fleet(), random.Random(rate)
    poisson(stage, rate, 25.0, luck)
    before = len(stage.scalings())
    labels = poisson(stage, rate, 30.0, luck)
    assert len(stage.scalings()) <= before + 1
    stage.stage.run(2.0)
    assert heard(stage, labels)[0] > 0.99


def test_a_step_is_taken_by_what_is_kept_for_it() -> None:
    """One of what would serve less accurately stays, whatever the load, for those that come while the accurate ones are full."""
    stage = fleet()
    stage.load(8, 20, latency_ms=LATENCY_MS)
    assert (stage.running(good().variant), stage.running(quick().variant)) == (1, 1)
    step = stage.load(25, 3, latency_ms=LATENCY_MS)
    stage.stage.run(2.0)
    assert heard(stage, step)[0] == 1.0
    low = fleet()
    low.load(3, 20, latency_ms=LATENCY_MS)
    assert (low.running(good().variant), low.running(quick().variant)) == (1, 1)


def test_other_workers_with_room_serve_what_would_be_served_less_accurately_here() -> None:
    """While there is no plan, a worker asks the controller for what it has no room for."""
    stage = fleet(workers=2, controlled=True, unsolved=True)
    for rate in (6, 10, 20, 28, 28):
        last = stage.load(rate, 8, latency_ms=LATENCY_MS)
    stage.stage.run(2.0)
    assert stage.running(good().variant) >= 3  # one worker's cores hold two
    share, accuracy = heard(stage, last)
    assert share == 1.0
    assert accuracy > 0.77  # one worker alone: 0.717
    asks = [
        decode(AskForCapacity, body) for _, subject, body in stage.stage.heard if subject.endswith("controller.ask")
    ]
    assert {ask.why for ask in asks} == {"accuracy"}
    assert asks[0].variants == [good().variant]
    assert "more accurate" in asks[0].reason


def test_the_plan_for_all_workers_serves_as_accurately_as_their_room_allows_and_refuses_nothing() -> None:
    stage = fleet(workers=2, controlled=True)
    steps = [stage.load(rate, 8, latency_ms=LATENCY_MS) for rate in (6, 10, 20, 28, 28)]
    stage.stage.run(2.0)
    assert stage.running(good().variant) >= 3  # one worker's cores hold two
    shares, accuracies = zip(*(heard(stage, labels) for labels in steps), strict=True)
    assert shares[1:] == (1.0,) * 4
    assert accuracies[-1] > 0.76  # one worker alone: 0.717
    assert not [subject for _, subject, _ in stage.stage.heard if subject.endswith("controller.ask")]
    assert stage.scalings("model") == []


def test_a_worker_that_is_alone_asks_nobody() -> None:
    stage = fleet()
    for rate in (6, 20, 28, 28):
        stage.load(rate, 6, latency_ms=LATENCY_MS)
    assert not [subject for _, subject, _ in stage.stage.heard if subject.endswith("controller.ask")]
