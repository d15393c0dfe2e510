"""Who makes room, who goes first, and when a failed load may be tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.fleet import State
from services.core.placement import Amount
from services.monitor.instances import MonitoredInstance
from services.monitor.policy import LoadFailures, make_room, scaler, to_release
from tests.support.simulated.monitored_worker import variant


def instance(
    name: str,
    used: float,
    *,
    app: str | None = None,
    state: State = "Active",
    queued: int = 0,
    memory_mb: float = 100.0,
) -> MonitoredInstance:
    made = MonitoredInstance(name, variant(name, memory_mb=memory_mb), "cpu", state, 0.0, app)
    made.last_used, made.queued = used, queued
    return made


def room(instances: list[MonitoredInstance], need_mb: float, least: int = 1, cores: float = 0.0) -> list[str] | None:
    need = Amount(need_mb, cores)
    victims = make_room(
        instances, need, lambda i: [app for app in i.apps if app], lambda _: least, now=100.0, idle_s=1.0
    )
    return None if victims is None else [victim.id for victim in victims]


def test_the_least_recently_used_go_first() -> None:
    instances = [instance("a", 30.0), instance("b", 10.0), instance("c", 20.0)]
    assert room(instances, 100.0) == ["b"]
    assert room(instances, 150.0) == ["b", "c"]
    assert room(instances, 301.0) is None


def test_cores_are_made_free_too() -> None:
    instances = [instance("a", 30.0), instance("b", 10.0), instance("c", 20.0)]
    assert room(instances, 10.0, cores=2.0) == ["b", "c"]
    assert room(instances, 10.0, cores=4.0) is None


def test_the_last_instance_of_an_app_stays() -> None:
    only = [instance("a", 10.0, app="faces")]
    assert room(only, 50.0) is None
    assert room([*only, instance("b", 20.0, app="faces")], 50.0) == ["a"]
    assert room([*only, instance("b", 20.0, app="faces")], 150.0) is None
    assert room(only, 50.0, least=0) == ["a"]


@pytest.mark.parametrize("busy", [{"queued": 1}, {"used": 99.5}, {"state": "Loading"}, {"state": "Overloaded"}])
def test_what_is_in_use_stays(busy: dict[str, object]) -> None:
    fields: dict[str, object] = {"used": 10.0} | busy
    assert room([instance("a", **fields)], 50.0) is None  # type: ignore[arg-type]


@given(
    st.lists(
        st.tuples(st.floats(0, 99), st.sampled_from([None, "x", "y"]), st.integers(0, 1), st.floats(1, 200)),
        max_size=12,
    ),
    st.floats(1, 1000),
    st.integers(0, 3),
)
def test_room_is_enough_and_leaves_every_app_its_least(
    drawn: list[tuple[float, str | None, int, float]], need: float, least: int
) -> None:
    instances = [
        instance(f"i{n}", used, app=app, queued=queued, memory_mb=memory)
        for n, (used, app, queued, memory) in enumerate(drawn)
    ]
    gone = room(instances, need, least)
    if gone is None:
        return
    assert sum(i.memory_mb for i in instances if i.id in gone) >= need
    assert not any(i.queued for i in instances if i.id in gone)
    for app in ("x", "y"):
        before = sum(app in i.apps for i in instances)
        after = sum(app in i.apps for i in instances if i.id not in gone)
        assert after >= min(before, least)


def test_release_takes_what_is_not_loaded_yet_then_the_idle() -> None:
    instances = [
        instance("busy", 50.0, queued=3),
        instance("idle", 60.0),
        instance("idler", 40.0),
        instance("coming", 99.0, state="Loading"),
        instance("going", 1.0, state="Unloading"),
    ]
    assert [i.id for i in to_release(instances, 1)] == ["coming", "idler", "idle"]
    assert to_release(instances, 4) == []
    assert len(to_release(instances, -1)) == 4


def test_a_failed_load_waits_longer_each_time() -> None:
    failures = LoadFailures()
    assert failures.obstacle("v", 0.0) == ""
    pauses = []
    now = 0.0
    for _ in range(9):
        failures.failed("v", "no such operator", now)
        pause = 0.0
        while failures.obstacle("v", now + pause):
            pause += 0.5
        pauses.append(pause)
        now += pause
    assert pauses == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0]
    assert "the last 9 loads failed (no such operator)" in failures.obstacle("v", now - 1.0)
    failures.succeeded("v")
    assert failures.obstacle("v", now - 1.0) == ""


@pytest.mark.parametrize(
    ("orderer", "name"),
    [("dispatcher-ab12", "dispatcher"), ("", "dispatcher"), ("model-autoscaler-w1", "model"), ("vm-1", "vm")],
)
def test_scalers_by_name(orderer: str, name: str) -> None:
    assert scaler(orderer) == name
