"""Who makes room, who goes first, and when a failed load may be tried again."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.fleet import InstanceSample, State
from services.core.lifecycle import SERVING
from services.core.placement import Amount
from services.monitor.instances import MonitoredInstance
from services.monitor.policy import LoadFailures, make_room, scaler, to_keep, to_release
from tests.support.simulated.monitored_worker import variant

SLIGHTLY = 1e-6  # MB, for sums in another order


def instance(
    name: str,
    used: float,
    *,
    app: str | None = None,
    state: State = "Active",
    queued: int = 0,
    memory_mb: float = 100.0,
    reclaimable: bool = False,
) -> MonitoredInstance:
    made = MonitoredInstance(name, variant(name, memory_mb=memory_mb), "cpu", state, 0.0, app)
    made.last_used, made.queued, made.reclaimable = used, queued, reclaimable
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
    for one in instances:
        used = one.last_used
        one.observe(InstanceSample(one.id, one.id, 0, 0.0, 9, 9, 1.0, 1.0, []), 1.0, 50.0)
        one.last_used = used
    assert room(instances, 10.0, cores=2.0) == ["b", "c"], "what they compute"
    assert room(instances, 10.0, cores=4.0) is None
    assert room([instance("idle", 10.0)], 10.0, cores=1.0) is None, "it computes nothing that would become free"


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


def test_a_loading_instance_does_not_replace_the_last_one_that_serves() -> None:
    both = [instance("a", 10.0, app="faces"), instance("coming", 20.0, app="faces", state="Loading")]
    assert room(both, 50.0) is None


def test_reclaimable_instances_go_first_even_busy_ones() -> None:
    instances = [
        instance("idle", 1.0),
        instance("busy", 99.5, queued=3, state="Overloaded", reclaimable=True),
        instance("coming", 99.0, state="Loading", reclaimable=True),
        instance("old", 50.0, reclaimable=True),
    ]
    assert room(instances, 100.0) == ["old"]
    assert room(instances, 200.0) == ["old", "coming"]
    assert room(instances, 300.0) == ["old", "coming", "busy"]
    assert room(instances, 400.0) == ["old", "coming", "busy", "idle"]
    assert room(instances, 401.0) is None


def test_the_last_reclaimable_instance_of_an_app_goes_after_the_others() -> None:
    last = instance("last", 1.0, app="faces", reclaimable=True)
    other = instance("other", 50.0, app="digits", reclaimable=True)
    digits = instance("digits", 99.9, app="digits")
    assert room([last, other, digits], 100.0) == ["other"]
    assert room([last, other, digits], 200.0) == ["other", "last"]
    assert room([last, instance("idle", 2.0)], 100.0) == ["last"], "nobody needs it, whatever the app's minimum"
    assert room([last, other, digits], 100.0, least=0) == ["last"]


def test_what_the_others_make_unnecessary_stays() -> None:
    small, large = instance("small", 1.0, reclaimable=True), instance("large", 2.0, memory_mb=300.0, reclaimable=True)
    assert room([small, large], 250.0) == ["large"]
    idle = instance("idle", 50.0, memory_mb=300.0)
    assert room([small, idle], 300.0) == ["idle"], "the reclaimable one alone would not do"


@given(
    st.lists(
        st.tuples(
            st.floats(0, 99),
            st.sampled_from([None, "x", "y"]),
            st.integers(0, 1),
            st.floats(1, 200),
            st.booleans(),
            st.sampled_from(["Active", "Loading", "Overloaded", "Unloading"]),
        ),
        max_size=12,
    ),
    st.floats(1, 1000),
    st.integers(0, 3),
)
def test_room_is_enough_and_leaves_every_app_its_least(
    drawn: list[tuple[float, str | None, int, float, bool, State]], need: float, least: int
) -> None:
    instances = [
        instance(f"i{n}", used, app=app, queued=queued, memory_mb=memory, reclaimable=reclaimable, state=state)
        for n, (used, app, queued, memory, reclaimable, state) in enumerate(drawn)
    ]
    spare = sum(i.memory_mb for i in instances if i.reclaimable and i.state != "Unloading")
    gone = room(instances, need, least)
    if gone is None:
        assert spare < need + SLIGHTLY
        return
    victims = [i for i in instances if i.id in gone]
    assert sum(i.memory_mb for i in victims) >= need - SLIGHTLY
    for one in victims:
        assert sum(i.memory_mb for i in victims if i is not one) < need + SLIGHTLY, "none goes without need"
    needed = [i for i in victims if not i.reclaimable]
    assert not needed or spare < need + SLIGHTLY, "nothing that is needed goes while reclaimable instances suffice"
    assert all(i.state == "Active" and not i.queued for i in needed)
    for app in {app for i in needed for app in i.apps if app}:
        assert sum(app in i.apps and i.state in SERVING for i in instances if i.id not in gone) >= least


def test_a_mark_is_taken_from_the_busiest_first() -> None:
    instances = [
        instance("needed", 99.0),
        instance("idle", 60.0, reclaimable=True),
        instance("busy", 50.0, queued=3, reclaimable=True),
        instance("coming", 99.0, state="Loading", reclaimable=True),
    ]
    assert [i.id for i in to_keep(instances, 2)] == ["busy", "idle"]
    assert len(to_keep(instances, 9)) == 3
    assert to_keep(instances, -1) == []
    assert [i.id for i in to_release(instances, 1)] == ["coming", "idle", "busy"], "before any that is needed"


def test_release_takes_what_is_not_loaded_yet_then_the_idle() -> None:
    instances = [
        instance("busy", 50.0, queued=3), instance("idle", 60.0), instance("idler", 40.0),
        instance("coming", 99.0, state="Loading"), instance("going", 1.0, state="Unloading"),
    ]  # fmt: skip
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
