"""When an instance counts as troubled, and when it is well again."""

from itertools import product

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.fleet import State
from services.core.lifecycle import (
    BY_HARDWARE,
    COUNTED,
    EDGES,
    SERVING,
    Observed,
    Thresholds,
    judge,
    legal,
    thresholds_for,
)

LIMITS = Thresholds()
CALM = Observed(load=10.0, saturation=100.0, backlog_s=0.0, latency_s=0.02, profiled_s=0.02, items=20)


def seen(**changes: float) -> Observed:
    return msgspec.structs.replace(CALM, **changes)


@pytest.mark.parametrize(
    ("what", "state", "observed", "expected"),
    [
        ("calm", "Active", seen(), "Active"),
        ("at saturation", "Active", seen(load=100.0), "Overloaded"),
        ("just below saturation", "Active", seen(load=99.0), "Active"),
        ("still near saturation", "Overloaded", seen(load=90.0), "Overloaded"),
        ("load dropped", "Overloaded", seen(load=70.0), "Active"),
        ("backlog of a second", "Active", seen(backlog_s=0.81), "Overloaded"),
        ("backlog within bounds", "Active", seen(backlog_s=0.79), "Active"),
        ("backlog within bounds but not for this SLO", "Active", seen(backlog_s=0.1, slo_s=0.1), "Overloaded"),
        ("backlog within this SLO", "Active", seen(backlog_s=0.04, slo_s=0.1), "Active"),
        ("a long SLO does not stretch the bound", "Active", seen(backlog_s=0.81, slo_s=30.0), "Overloaded"),
        ("backlog not quite gone", "Overloaded", seen(backlog_s=0.7), "Overloaded"),
        ("backlog gone", "Overloaded", seen(backlog_s=0.6), "Active"),
        ("slow", "Active", seen(latency_s=0.06), "Interfered"),
        ("a little slow", "Active", seen(latency_s=0.049), "Active"),
        ("many times the profile but by less than a few ms", "Active", seen(latency_s=0.005, profiled_s=0.001), "Active"),
        ("slow, but few items say so", "Active", seen(latency_s=0.06, items=7), "Active"),
        ("slow at its peak", "Active", seen(latency_s=0.06, load=100.0), "Overloaded"),
        ("slowness made the backlog", "Active", seen(latency_s=0.06, backlog_s=2.0), "Interfered"),
        ("load made the backlog", "Active", seen(latency_s=0.06, backlog_s=2.0, load=60.0), "Overloaded"),
        ("still somewhat slow", "Interfered", seen(latency_s=0.035), "Interfered"),
        ("as profiled again", "Interfered", seen(latency_s=0.029), "Active"),
        ("one item is enough to stay", "Interfered", seen(latency_s=0.06, items=1), "Interfered"),
        ("nothing runs any more", "Interfered", seen(latency_s=0.0, items=0, load=0.0), "Active"),
        ("from one trouble to the other", "Interfered", seen(load=100.0), "Overloaded"),
        ("without a measured saturation", "Active", seen(saturation=0.0), "Active"),
    ],
)  # fmt: skip
def test_judgement(what: str, state: State, observed: Observed, expected: State) -> None:
    new, reason = judge(state, observed, LIMITS)
    assert new == expected, what
    assert bool(reason) == (new != state), reason


@pytest.mark.parametrize("state", ["Inactive", "Loading", "Unloading"])
def test_what_does_not_serve_is_not_judged(state: State) -> None:
    assert judge(state, seen(load=1e9, backlog_s=1e9), LIMITS) == (state, "")


def test_states_can_end_by_known_moves_and_reasons_give_figures() -> None:
    assert judge("Active", seen(load=120.0), LIMITS)[1] == "serves 120 items/s of 100 at saturation"
    assert judge("Active", seen(latency_s=0.06), LIMITS)[1].startswith("a batch takes 60 ms, its profile says 20 ms")
    assert all(legal(state, "Inactive") for state in EDGES if state != "Inactive")
    assert not legal("Inactive", "Overloaded")
    assert not legal("Unloading", "Active")
    assert not legal("Warm", "Active")
    assert {"Loading"} == COUNTED - SERVING


observations = st.builds(
    Observed, load=st.floats(0, 1e5), saturation=st.floats(0, 1e5), backlog_s=st.floats(0, 100),
    latency_s=st.floats(0, 10), profiled_s=st.floats(0, 10), items=st.integers(0, 1000), slo_s=st.floats(0, 30),
)  # fmt: skip


@given(st.sampled_from(sorted(SERVING)), observations)
def test_judging_is_legal_and_settles_at_once(state: State, observed: Observed) -> None:
    new, _ = judge(state, observed, LIMITS)
    assert new == state or legal(state, new)
    assert judge(new, observed, LIMITS)[0] == new, "the same observation must not make a state flap"


@pytest.mark.parametrize(
    ("hardware", "profiled_s", "instances", "row"),
    [
        ("cpu", 0.02, 1, (4.0, 1.0, 1.1, 1.5)),
        ("cpu", 0.02, 2, (2.5, 0.5, 0.8, 1.5)),
        ("inferentia", 0.02, 1, (2.5, 0.5, 0.8, 1.5)),
        ("gpu", 0.020, 1, (1.5, 0.3, 0.8, 1.25)),
        ("gpu", 0.010, 1, (1.5, 0.3, 0.8, 1.25)),
        ("gpu", 0.005, 2, (3.0, 0.3, 0.8, 1.25)),
        ("gpu", 0.001, 1, (5.0, 0.3, 0.8, 1.25)),
        ("gpu", 0.0, 1, (1.5, 0.3, 0.8, 1.25)),
    ],
)
def test_thresholds_are_those_of_the_hardware(
    hardware: str, profiled_s: float, instances: int, row: tuple[float, ...]
) -> None:
    found = thresholds_for(hardware, profiled_s, instances)
    given = (found.interfered_ratio, found.interfered_load_share, found.overloaded_backlog_s, found.clear_ratio)
    assert given == pytest.approx(row)


def test_what_is_set_holds_for_all_hardware() -> None:
    given = msgspec.structs.replace(BY_HARDWARE, interfered_ratio=3.0, overloaded_backlog_s=2.0, least_items=3)
    for hardware, instances in product(("cpu", "gpu", "inferentia"), (1, 2)):
        found = thresholds_for(hardware, 0.02, instances, given)
        assert (found.interfered_ratio, found.overloaded_backlog_s, found.least_items) == (3.0, 2.0, 3)
    assert thresholds_for("cpu", 0.02, 1, given).clear_ratio == 1.5
    low = msgspec.structs.replace(given, interfered_ratio=1.2)
    assert thresholds_for("cpu", 0.02, 1, low).clear_ratio == 1.2, "it must not stay longer than it takes to enter"


@pytest.mark.parametrize(
    ("hardware", "instances", "slower", "expected"),
    [
        ("cpu", 1, 3.9, "Active"),
        ("cpu", 1, 4.1, "Interfered"),
        ("cpu", 2, 2.6, "Interfered"),
        ("gpu", 1, 1.6, "Interfered"),
        ("gpu", 1, 1.4, "Active"),
    ],
)
def test_the_same_slowness_is_judged_by_hardware(hardware: str, instances: int, slower: float, expected: State) -> None:
    limits = thresholds_for(hardware, 0.02, instances)
    assert judge("Active", seen(latency_s=0.02 * slower), limits)[0] == expected
