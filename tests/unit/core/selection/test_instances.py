"""Many instances of one variant: few are looked at, and still the load is even and nothing in time is missed."""

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus
from services.core.cost import LatencyTable
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask, usual
from services.core.selection.instances import CAUTION, MANY, ROOM, TURNS, Instance
from services.core.selection.policy import InfaasPolicy, note
from services.core.selection.sampler import InstanceSampler
from tests.support.data.events import beat, device
from tests.support.data.events import instance as status_of
from tests.support.data.examples import examples
from tests.support.simulated.fleet import PRICES, SIGNATURE, variant

RECORD = variant("m-v1-ort-fp32-t1-b1", max_batch=1, base_ms=100.0, per_item_ms=0.0)  # 100 ms, one at a time
NOW = 1000.0


def cpu(cores: int) -> DeviceStatus:
    return device(cores=cores, memory_mb=1000.0, cores_used=1.0, utilisation=0.5, price_per_hour=0.05)


def view(queued: list[int], busy: list[float] | None = None) -> ClusterView:
    """A worker for each instance, with so many queries in its queue, and busy for such a part of the time."""
    found = ClusterView(PRICES)
    found.set_app(AppRecord(app="app", links={"m": "1"}, signature=SIGNATURE), [RECORD])
    for n, waiting in enumerate(queued):
        share = busy[n] if busy else 0.5
        figures = {"queued": waiting, "load": share * 10.0, "latency_ms": 100.0, "mean_batch": 1.0}
        status = status_of(f"i{n:04}", RECORD.variant, **figures)
        found.heartbeat(beat(status, worker=f"w{n:04}", at=NOW, devices=[cpu(1)]), NOW)
    return found


def ask(seconds: float, now: float = NOW) -> Ask:
    return Ask(app="app", items=1, deadline=now + seconds, latency_s=seconds)


def test_queries_are_spread_evenly_over_many() -> None:
    fleet, policy = view([0] * 300), InfaasPolicy()
    for _ in range(1500):
        decision = policy.select(ask(10.0), NOW, fleet)
        note(ask(10.0), decision, NOW, fleet)
        assert decision.instance is not None
        fleet.instances[decision.instance].take(1, NOW, NOW + 10.0)
    taken = [instance.own for instance in fleet.instances.values()]
    assert (min(taken), max(taken)) == (5, 5)


@given(st.integers(MANY + 1, 150), st.integers(0, 1000))
@settings(max_examples=examples(30))
def test_the_only_one_in_time_is_found_wherever_it_is(count: int, place: int) -> None:
    queued = [50] * count
    queued[place % count] = 2
    fleet, policy = view(queued), InfaasPolicy()
    assert policy.select(ask(1.0), NOW, fleet).instance == f"i{place % count:04}"


def test_when_all_are_full_only_what_has_changed_is_looked_at() -> None:
    fleet, policy = view([50] * 100), InfaasPolicy()
    assert policy.select(ask(1.0), NOW, fleet).refusal is not None
    assert policy.select(ask(20.0), NOW, fleet).instance  # who has more time is not refused with them
    assert policy.select(ask(1.0), NOW, fleet).refusal is not None
    fleet.instances["i0042"].batch_done(0, NOW, NOW)
    assert policy.select(ask(1.0), NOW, fleet).instance == "i0042"
    fleet.remove("i0042")
    assert policy.select(ask(1.0), NOW, fleet).refusal is not None


steps = st.lists(
    st.tuples(
        st.sampled_from(["take", "done", "heard", "ended", "gone", "troubled", "later", "ask", "ask"]),
        st.integers(0, MANY + 5),
        st.integers(1, 4),
        st.sampled_from([0.15, 0.3, 0.5]),
    ),
    max_size=60,
)


@given(steps)
@settings(max_examples=examples(60), deadline=None)
def test_of_many_none_is_in_time_when_none_is_found(given_steps: list[tuple[str, int, int, float]]) -> None:
    fleet, now = view([3] * (MANY + 6)), NOW
    group = fleet.apps["app"].groups[0]
    for turn, (what, place, items, seconds) in enumerate(given_steps):
        instance = fleet.instances.get(f"i{place:04}")
        if what == "later":
            now += 0.07 * items
        elif what == "ask":
            if len(group.active) > MANY:
                found = group.samplers["active"].soonest(items, None, seconds, now, turn)
                fitting = [i for i in group.active if i.predict(items, None, now + seconds, now) <= seconds]
                assert (found in fitting) if fitting else found is None
        elif instance is None:
            continue
        elif what == "take":
            instance.take(items, now, now + 1.0)
        elif what == "done":
            instance.release(instance.own)
            instance.batch_done(items, now, now)
        elif what == "heard":
            instance.observe_queue(items, now)
        elif what == "ended":
            instance.ended_without_batch(items)
        elif what == "gone":
            fleet.remove(instance.id)
        else:
            instance.status = msgspec.structs.replace(
                instance.status, state="Overloaded" if instance.status.state == "Active" else "Active"
            )
            fleet.apps["app"].place(instance)


class Counting(Instance):
    """Counts how often it is asked."""

    __slots__ = ()
    asked = 0

    def predict(self, items: int, length: int | None, deadline: float, now: float, giving_way: int = 0) -> float:
        Counting.asked += 1
        return super().predict(items, length, deadline, now, giving_way)


def test_few_are_looked_at() -> None:
    known = next(iter(view([0] * 1).instances.values()))
    device = known.worker.devices["cpu"]
    instances: list[Instance] = [Counting(known.status, RECORD, known.worker, device) for _ in range(1000)]
    crowd = InstanceSampler(instances)
    for at in range(500):
        crowd.soonest(1, None, 10.0, NOW + at, at).take(1, NOW + at, NOW + at + 10.0)
    assert Counting.asked < 500 * 4
    for instance in instances:
        instance.release(instance.own)
        instance.take(3, NOW, NOW + 10.0)
    Counting.asked = 0
    assert crowd.soonest(1, None, 10.0, NOW, 500) is not None
    assert Counting.asked <= 20


def test_packing_fills_the_fullest_and_the_usual_batch_is_the_most_frequent() -> None:
    busy = [0.1] * 100
    busy[33], busy[66] = 0.7, 0.95
    fleet, policy = view([0] * 100, busy), InfaasPolicy(dispatch="pack")
    assert policy.select(ask(1.0), NOW, fleet).instance == "i0033"
    fleet.remove("i0033")
    assert policy.select(ask(1.0), NOW, fleet).instance not in (None, "i0033")
    assert usual([1, 4, 4, 2]) == 4
    assert usual([2, 1]) == 1


# -- Prediction: a batch under way, full batches, and one's own batch, on a device whose cores may be shared

BATCHED = variant("b-v1-ort-fp32-t1-b8", model="b", base_ms=20.0, per_item_ms=5.0)  # 25 ms for one, 60 ms for eight
BATCHED_TABLE = LatencyTable(BATCHED)
OTHER = variant("c-v1-ort-fp32-t1-b8", model="c", base_ms=20.0, per_item_ms=5.0)


def on_one_device(cores: int, load: float = 0.0, names: tuple[str, ...] = ("b", "c")) -> tuple[Instance, ...]:
    """Instances of two variants on a device with so many cores, each of which serves so many items/s of late."""
    found = ClusterView(PRICES)
    found.set_app(AppRecord(app="app", links={"b": "1", "c": "1"}, signature=SIGNATURE), [BATCHED, OTHER])
    instances = [status_of(name, {"b": BATCHED, "c": OTHER}[name[0]].variant, load=load) for name in names]
    found.heartbeat(beat(*instances, at=NOW, devices=[cpu(cores)]), NOW)
    return tuple(found.instances[name] for name in names)


def test_an_idle_instance_takes_as_its_profile_says_and_those_that_will_join_are_charged_too() -> None:
    instance, _ = on_one_device(2)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(0.025)
    instance, _ = on_one_device(2, load=100.0)
    instance.take(1, NOW, NOW + 1.0)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(CAUTION * (0.025 + 0.035))  # two come in 25 ms


def test_a_batch_under_way_is_charged_for_what_is_left_of_it_then_full_batches_then_ones_own() -> None:
    instance, _ = on_one_device(2)
    instance.take(1, NOW, NOW + 1.0)  # it begins at once
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(CAUTION * (0.025 + 0.025))
    assert instance.predict(1, None, NOW + 1.0, NOW + 0.02) == pytest.approx(CAUTION * (0.005 + 0.025))
    instance.take(9, NOW + 0.01, NOW + 1.0)
    assert instance.predict(1, None, NOW + 1.0, NOW + 0.01) == pytest.approx(CAUTION * (0.015 + 0.060 + 0.030))
    instance.release(1)
    instance.batch_done(9, NOW + 0.025, NOW + 0.026)  # eight of the nine began when the first was done
    assert instance.predict(1, None, NOW + 1.0, NOW + 0.026) == pytest.approx(CAUTION * (0.059 + 0.030))


def test_with_several_contexts_a_query_waits_for_the_first_one_that_is_free() -> None:
    """Two contexts on four cores, batches of one: the second query finds a context, the third waits for half a batch's time."""
    instance, other = on_one_device(4)
    instance.limit_batches(1, 2)
    assert not (instance.scarce or other.scarce)
    instance.take(1, NOW, NOW + 1.0)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(0.025)
    instance.take(1, NOW, NOW + 1.0)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(CAUTION * (0.0125 + 0.025))
    instance.take(8, NOW, NOW + 1.0)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(CAUTION * (0.0125 + 8 * 0.0125 + 0.025))
    instance.release(2)
    instance.batch_done(8, NOW + 0.025, NOW + 0.025)
    assert instance.predict(1, None, NOW + 1.0, NOW + 0.025) == pytest.approx(CAUTION * (0.0125 + 6 * 0.0125 + 0.025))


def test_contexts_need_cores_and_smaller_limits_make_more_batches() -> None:
    instance, other = on_one_device(2)
    assert not (instance.scarce or other.scarce)
    instance.limit_batches(0, 2)
    assert instance.scarce
    assert other.scarce
    instance.limit_batches(0, 1)
    assert not (instance.scarce or other.scarce)
    # As with a fixed size: nine that wait are nine batches of one, not one of eight.
    instance, _ = on_one_device(2)
    instance.limit_batches(1, 1)
    instance.take(9, NOW, NOW + 1.0)  # one begins at once
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(CAUTION * 10 * 0.025)
    instance.limit_batches(0, 1)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(CAUTION * (0.025 + 0.060 + 0.025))


@pytest.mark.parametrize("cores", [1, 2])
def test_while_it_is_shut_nothing_is_in_time_there(cores: int) -> None:
    instance, _ = on_one_device(cores, load=100.0)
    instance.shut()
    assert instance.predict(1, None, NOW + 1.0, NOW) > 1e6
    instance.reopen()
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(0.025)


def test_instances_that_end_leave_batches_and_cores_to_the_others() -> None:
    instance, _ = on_one_device(2)
    instance.take(2, NOW, NOW + 1.0)
    instance.release(1)
    instance.ended_without_batch(1)
    assert instance.predict(1, None, NOW + 1.0, NOW + 0.02) == pytest.approx(CAUTION * (0.010 + 0.025))
    instance, other = on_one_device(1)
    other.take(8, NOW, NOW + 1.0)
    other.cores.remove(other)
    assert instance.predict(1, None, NOW + 1.0, NOW) == pytest.approx(0.025)


@pytest.mark.parametrize("cores", [1, 2])
def test_instances_that_share_cores_wait_for_each_other(cores: int) -> None:
    instance, other = on_one_device(cores)
    other.take(1, NOW, NOW + 1.0)
    other.take(8, NOW, NOW + 1.0)
    first, last = instance.predict(1, None, NOW + 0.5, NOW), instance.predict(1, None, NOW + 2.0, NOW)
    if cores == 2:
        assert first == last == pytest.approx(0.025)
    else:  # the batch under way goes first in any case, the full one only if it is more urgent
        assert first == pytest.approx(CAUTION * (0.025 + 0.025))
        assert last == pytest.approx(CAUTION * (0.025 + 0.060 + 0.025))


def test_a_long_batch_under_way_keeps_only_its_own_core() -> None:
    """The other core is free once the short one has ended: for what is more urgent first, then for this query."""
    instance, long, short = on_one_device(2, names=("b", "c", "c2"))
    long.take(8, NOW, NOW + 1.0)  # 60 ms
    short.take(1, NOW, NOW + 1.0)  # 25 ms
    assert instance.predict(1, None, NOW + 0.5, NOW) == pytest.approx(CAUTION * (0.025 + 0.025))
    short.take(1, NOW, NOW + 1.0)
    assert instance.predict(1, None, NOW + 0.5, NOW) == pytest.approx(CAUTION * (0.025 + 0.025))
    assert instance.predict(1, None, NOW + 2.0, NOW) == pytest.approx(CAUTION * (0.025 + 0.025 + 0.025))


@pytest.mark.parametrize("seconds", [1.0, 30.0])
def test_a_flooded_model_that_fills_its_queues_leaves_room_for_a_quiet_one_with_the_same_deadlines(
    seconds: float,
) -> None:
    """Its two instances have the device's two cores. One query at a time comes, as soon as there is room for it."""
    quiet, *flooded = on_one_device(2, names=("b", "c", "c2"))
    now = NOW
    answers: list[bool] = []
    while now < NOW + 3.0 * seconds:
        for instance in flooded:
            while instance.predict(1, None, now + seconds, now) <= seconds:
                instance.take(1, now, now + seconds)
        if now > NOW + 2.0 * seconds:
            answers.append(quiet.predict(1, None, now + seconds, now) <= seconds)
        now += 0.06
        for instance in flooded:
            instance.release(8)
            instance.batch_done(instance.own, now, now)
    assert answers
    assert all(answers)
    assert min(instance.own * instance.per_item for instance in flooded) > 0.6 * seconds, (
        "it has its queues all the same"
    )


def test_a_queue_that_takes_all_the_time_left_leaves_room_for_a_quiet_model() -> None:
    """Its executor lets the quiet one go first. A flood's queue grows so long where its device becomes slower."""
    quiet, flooded = on_one_device(1)
    for _ in range(2_600):
        flooded.take(1, NOW, NOW + 20.0)
    assert flooded.predict(1, None, NOW + 20.0, NOW) > 20.0
    assert quiet.predict(1, None, NOW + 20.0, NOW) < CAUTION * ROOM * (
        (TURNS + 1.0) * (quiet.by_size[8] + flooded.by_size[8]) + 0.025
    )


@given(
    st.lists(st.tuples(st.sampled_from(["take", "done", "heard"]), st.integers(1, 12)), max_size=30),
    st.integers(1, 12),
)
@settings(max_examples=examples(100))
def test_more_that_waits_never_makes_a_query_sooner_and_nothing_is_sooner_than_its_own_batch(
    steps: list[tuple[str, int]], items: int
) -> None:
    instance, _ = on_one_device(2)
    now = NOW
    for what, count in steps:
        now += 0.01
        if what == "take":
            instance.take(count, now, now + 1.0)
        elif what == "done":
            instance.release(min(count, instance.own))
            instance.batch_done(instance.own + instance.others, now, now)
        else:
            instance.observe_queue(count, now)
        predicted = instance.predict(items, None, now + 1.0, now)
        assert predicted >= BATCHED_TABLE.seconds(items) - 1e-12
        assert instance.running <= instance.own + instance.others
        before = instance.own
        instance.take(8, now, now + 1.0)
        assert instance.predict(items, None, now + 1.0, now) >= predicted - 1e-12
        instance.release(8)
        assert instance.own == before
