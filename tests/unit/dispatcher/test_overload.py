"""Dispatcher, monitor and executor under more load than they can carry, and with a neighbour that slows one of them: virtual time."""

import random
from typing import Any

import pytest

from bus.codec import decode
from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.core.selection.policy import InfaasPolicy
from services.core.settings import DispatcherSettings, Settings
from tests.support.data.events import change_of
from tests.support.simulated.fleet import SIGNATURE, Fleet, variant

SLOW = variant(base_ms=20.0, per_item_ms=5.0)  # 133 items/s in batches of 8
SATURATION = SLOW.profile.saturation_qps


def serving(workers: int, record: VariantRecord = SLOW, dispatchers: int = 1, dispatch: str = "spread") -> Fleet:
    """A fleet with one Active instance on each worker."""
    fleet = Fleet(record, workers=workers, dispatchers=dispatchers, policy=InfaasPolicy(dispatch=dispatch))
    fleet.stage.listen(fleet.subjects.worker_heartbeat())
    for n in range(workers):
        fleet.order(record, f"w{n}")
    fleet.stage.run(1.0)
    return fleet


def offer(fleet: Fleet, rate: float, seconds: float, seed: int = 1, **needs: Any) -> list[str]:
    """Poisson arrivals; the ids."""
    rng = random.Random(seed)
    stage = fleet.stage
    end, at, asked = stage.now + seconds, stage.now, []
    while (at := at + rng.expovariate(rate)) < end:
        stage.run(at - stage.now)
        asked.append(fleet.ask(**needs))
    stage.run(end - stage.now)
    return asked


def in_time(fleet: Fleet, labels: list[str]) -> int:
    """How many were answered with nothing missed; each has exactly one end."""
    ends = [fleet.replies(label) for label in labels]
    assert all(len(end) == 1 for end in ends)
    return sum("outputs" in end[0] and not end[0]["missed"] for end in ends)


def beat(fleet: Fleet, worker: str) -> WorkerHeartbeat:
    """The worker's last heartbeat."""
    subject = fleet.subjects.worker_heartbeat(worker)
    return decode(WorkerHeartbeat, [body for _, heard, body in fleet.stage.heard if heard == subject][-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slo_ms", "workers", "times"),
    [(200.0, 1, 1.5), (200.0, 2, 1.5), (1000.0, 1, 1.5), (1000.0, 2, 1.5), (500.0, 1, 3.0)],
)
def test_beyond_saturation_goodput_stays(slo_ms: float, workers: int, times: float) -> None:
    fleet = serving(workers)
    capacity = workers * SATURATION
    offer(fleet, times * capacity, 2.0, latency_ms=slo_ms)
    asked = offer(fleet, times * capacity, 4.0, seed=2, latency_ms=slo_ms)
    assert {i.state for n in range(workers) for i in beat(fleet, f"w{n}").instances} == {"Overloaded"}
    fleet.stage.run(3.0)
    assert in_time(fleet, asked) / 4.0 >= 0.9 * capacity
    codes = {reply["error"]["code"] for label in asked for reply in fleet.replies(label) if "error" in reply}
    assert codes <= {"overloaded", "deadline"}


@pytest.mark.parametrize(("slow", "between"), [(1.5, 1.0), (1.0, 1.5), (1.5, 1.3)])
@pytest.mark.parametrize("slo_ms", [100.0, 250.0])
def test_goodput_stays_also_where_nothing_goes_as_fast_as_profiled(slo_ms: float, slow: float, between: float) -> None:
    """Short batches fill queues to the last millisecond: what is admitted too much makes everything late."""
    record = variant(base_ms=0.1, per_item_ms=2.5)
    fleet = Fleet(record)
    fleet.ask(seconds=1.0)
    device = fleet.devices["w0"]
    device.slow, device.between, device.spread = slow, between, 0.3
    capacity = record.profile.saturation_qps / (slow * between)
    offer(fleet, 1.5 * capacity, 2.0, latency_ms=slo_ms)
    asked = offer(fleet, 1.5 * capacity, 3.0, seed=2, latency_ms=slo_ms)
    fleet.stage.run(2.0)
    assert in_time(fleet, asked) / 3.0 >= 0.95 * capacity


def test_after_the_peak_everything_is_in_time_again() -> None:
    fleet = serving(1)
    offer(fleet, 2.0 * SATURATION, 3.0, latency_ms=500.0)
    fleet.stage.run(2.0)
    assert {i.state for i in beat(fleet, "w0").instances} == {"Active"}
    asked = offer(fleet, 0.5 * SATURATION, 3.0, seed=2, latency_ms=500.0)
    fleet.stage.run(2.0)
    assert in_time(fleet, asked) == len(asked)


def test_an_interfered_instance_gets_no_more_than_probes() -> None:
    fleet = serving(2)
    slowed = fleet.devices["w0"]
    slowed.slow = 6.0
    offer(fleet, 0.6 * SATURATION, 4.0)
    assert {i.state for i in beat(fleet, "w0").instances} == {"Interfered"}
    assert {i.state for i in beat(fleet, "w1").instances} == {"Active"}
    before = sum(map(len, slowed.batches))
    asked = offer(fleet, 0.6 * SATURATION, 4.0, seed=2)
    fleet.stage.run(2.0)
    probes = sum(map(len, slowed.batches)) - before
    assert 0 < probes <= 0.12 * len(asked), "a tenth of the queries looks whether it is well again"
    assert in_time(fleet, asked) == len(asked)
    slowed.slow = 1.0
    offer(fleet, 0.6 * SATURATION, 5.0, seed=3)
    assert {i.state for i in beat(fleet, "w0").instances} == {"Active"}, "the probes have shown it"


def test_an_interfered_instance_alone_serves_on() -> None:
    fleet = serving(1)
    fleet.devices["w0"].slow = 5.0
    offer(fleet, 0.1 * SATURATION, 4.0)
    assert {i.state for i in beat(fleet, "w0").instances} == {"Interfered"}
    asked = offer(fleet, 0.1 * SATURATION, 4.0, seed=2)
    fleet.stage.run(3.0)
    assert in_time(fleet, asked) == len(asked)


def test_one_apps_trouble_does_not_mark_another_on_the_same_instance() -> None:
    fleet = serving(1)
    hasty = AppRecord(app="hasty", links={SLOW.model: SLOW.version}, signature=SIGNATURE)
    for name in ("w0", "d0"):
        fleet.stage.send(name, change_of(hasty))
    seen: set[tuple[str, str]] = set()
    patient: list[str] = []
    for _ in range(20):
        patient += [fleet.ask() for _ in range(36)]  # a quarter of a second of work, well within its 30 s
        for _ in range(9):
            fleet.ask("hasty", latency_ms=100.0, seconds=0.043)
            view = fleet.dispatcher().view
            [status] = beat(fleet, "w0").instances
            seen.add((status.state, status.app_states.get("hasty", status.state)))
            if status.app_states.get("hasty") == "Overloaded":
                assert not view.apps["hasty"].groups[0].active
                assert view.apps["hasty"].groups[0].troubled
                assert view.apps["app"].groups[0].active
                assert not view.apps["app"].groups[0].troubled
    assert ("Active", "Overloaded") in seen, seen
    fleet.stage.run(2.0)
    assert in_time(fleet, patient) == len(patient)
    told = {(e.app, e.to_state) for kind, e in fleet.stage.records if kind == "state"}
    assert ("hasty", "Overloaded") in told
    assert ("app", "Overloaded") not in told


def test_what_an_instance_hands_back_is_served_by_another_that_is_in_time() -> None:
    """The first instance is found slower than it was thought to be; the view does not know yet, and would choose it again."""
    fleet = serving(2)
    instances = fleet.dispatcher().view.instances
    first, second = sorted(instances)
    fleet.stage.run(0.2)
    instances[second].take(1, fleet.stage.now, fleet.stage.now + 1.0)  # so that the first is chosen
    executor = fleet.stage.members[f"{instances[first].worker.name}/cpu"].actor
    executor.instances[first].queue.factor, executor.instances[first].known_at = 20.0, fleet.stage.now
    answer = fleet.reply(fleet.ask(latency_ms=200.0), 1.0)
    assert answer["worker"] == instances[second].worker.name
    assert not answer["missed"]


def test_what_two_dispatchers_send_to_one_instance_is_served_by_an_idle_one() -> None:
    """Each knows of its own queries alone: the instance can do them in time, and those of both it cannot. All take 285 ms there."""
    fleet = serving(2, dispatchers=2, dispatch="pack")
    asked = fleet.asks(34, latency_ms=200.0, seconds=1.0)
    assert in_time(fleet, asked) == 34


def test_what_comes_to_a_batch_that_ends_too_late_for_it_is_served_by_an_idle_one() -> None:
    """That batch is of another dispatcher's query. At its end it would be too late for an idle instance, too."""
    fleet = serving(2, variant(base_ms=112.0, per_item_ms=0.0), dispatchers=2)
    asked = []
    for _ in range(10):
        fleet.stage.run(0.3)
        asked.append(fleet.ask(latency_ms=168.0))
        fleet.stage.run(0.02)
        asked.append(fleet.ask(latency_ms=168.0))
    fleet.stage.run(1.0)
    assert in_time(fleet, asked) == 20


@pytest.mark.parametrize(("priority", "served"), [(1, True), (5, True), (9, False)])
def test_where_not_all_can_be_in_time_the_larger_number_gives_way(priority: int, served: bool) -> None:
    fleet = serving(1)
    others = fleet.asks(60, latency_ms=400.0, priority=9, seconds=0.01)
    first = fleet.asks(8, latency_ms=200.0, priority=priority, seconds=2.0)
    assert (in_time(fleet, first) == 8) is served
    assert in_time(fleet, first + others) >= 40  # five batches of eight, whoever is in them


def by_level(
    fleet: Fleet, rate: float, seconds: float, levels: dict[int, float], slo_ms: float, seed: int = 3
) -> dict[int, list[str]]:
    """Poisson arrivals, of each priority its share; the ids by priority."""
    rng = random.Random(seed)
    asked: dict[int, list[str]] = {level: [] for level in levels}
    at, end = fleet.stage.now, fleet.stage.now + seconds
    while (at := at + rng.expovariate(rate)) < end:
        fleet.stage.run(at - fleet.stage.now)
        [level] = rng.choices(list(levels), list(levels.values()))
        asked[level].append(fleet.ask(latency_ms=slo_ms, priority=level))
    fleet.stage.run(end + 3.0 - fleet.stage.now)
    return asked


QUICK = variant(base_ms=1.0, per_item_ms=0.5)  # 1,600 items/s in batches of 8


@pytest.mark.parametrize(
    ("record", "slo_ms", "workers", "dispatchers"),
    [(SLOW, 400.0, 1, 1), (SLOW, 400.0, 2, 2), pytest.param(QUICK, 200.0, 1, 2, marks=pytest.mark.slow)],
)
def test_at_twice_the_capacity_the_high_level_is_in_time_and_the_low_one_gives_way(
    record: VariantRecord, slo_ms: float, workers: int, dispatchers: int
) -> None:
    fleet = serving(workers, record, dispatchers)
    capacity = workers * record.profile.saturation_qps
    seconds = min(4.0, 1600.0 / capacity)
    asked = by_level(fleet, 2.0 * capacity, seconds, {1: 0.35, 9: 0.65}, slo_ms)
    high, low = (in_time(fleet, asked[level]) for level in (1, 9))
    assert high >= 0.97 * len(asked[1])
    assert low < 0.5 * len(asked[9])
    assert high + low >= 0.9 * capacity * seconds, "nothing of the capacity is lost"


def test_while_all_can_be_in_time_priority_changes_no_order() -> None:
    def ends(*levels: int) -> list[tuple[float, str]]:
        fleet = serving(1)
        asked = by_level(fleet, 0.6 * SATURATION, 4.0, dict.fromkeys(levels, 1.0), 1000.0)
        assert all(in_time(fleet, labels) == len(labels) for labels in asked.values())
        return [(at, subject) for at, subject, _ in fleet.stage.heard if subject.startswith("_INBOX")]

    rng_alike = (1, 9), (5, 6)
    first, second = (ends(*levels) for levels in rng_alike)
    assert first == second


def test_a_burst_of_the_high_level_takes_the_place_of_more_than_a_hundred_that_wait() -> None:
    fleet = serving(1, QUICK, 2)
    low = fleet.asks(640, latency_ms=400.0, priority=9, seconds=0.01)
    high = fleet.asks(400, latency_ms=400.0, priority=1, seconds=2.0)
    assert in_time(fleet, high) == 400
    assert in_time(fleet, low) >= 200


def test_of_what_waits_for_a_worker_the_larger_number_gives_way_first() -> None:
    """Three may wait. What comes takes the place of a larger number, of equals the one with the latest deadline."""
    fleet = Fleet(SLOW, workers=0, settings=Settings(dispatcher=DispatcherSettings(max_queue=3)))
    low = [fleet.ask(latency_ms=ms, priority=9) for ms in (9000.0, 8000.0)]
    middle = fleet.ask(latency_ms=9000.0, priority=5, seconds=0.3)
    high = [fleet.ask(latency_ms=9000.0, priority=1)]
    fleet.stage.run(0.3)
    assert fleet.replies(low[0])[0]["error"]["code"] == "overloaded"
    assert not fleet.replies(low[1])
    high += [fleet.ask(latency_ms=9000.0, priority=1) for _ in range(2)]
    fleet.stage.run(0.3)
    last = fleet.ask(latency_ms=9000.0, priority=1, seconds=0.3)
    assert [fleet.replies(label)[0]["error"]["code"] for label in (low[1], middle, last)] == ["overloaded"] * 3
    fleet.start_worker("w0", seconds=3.0)
    assert in_time(fleet, high) == 3


# -- batches that leave room: 40 ms an item, so that a full batch would fill the objective

EACH = variant(base_ms=0.0, per_item_ms=40.0, max_batch=64)
CALL = variant(base_ms=10.0, per_item_ms=30.0, max_batch=64)  # an ONNX model's call costs something, too


def evenly(
    fleet: Fleet, rates: dict[int, float], seconds: float, slo_ms: dict[int, float], later: float = 0.0
) -> dict[int, list[str]]:
    """Evenly spaced queries of each priority; the ids by priority. later: s by which those of priority 1 begin after the others."""
    asked: dict[int, list[str]] = {level: [] for level in rates}
    begin = fleet.stage.now
    due = [
        (n / rate, level)
        for level, rate in rates.items()
        for n in range(round(rate * later) if level == 1 else 0, round(rate * (seconds + later)))
    ]
    for at, priority in sorted(due):
        fleet.stage.run(max(0.0, begin + at - fleet.stage.now))
        asked[priority].append(fleet.ask(latency_ms=slo_ms[priority], priority=priority))
    fleet.stage.run(3.0)
    return asked


@pytest.mark.parametrize(("record", "items"), [(EACH, 200), (CALL, 240)])
@pytest.mark.parametrize("dispatchers", [1, 2, 3, 6])
def test_beside_long_batches_of_a_low_level_the_high_one_is_in_time(
    record: VariantRecord, items: int, dispatchers: int
) -> None:
    """All of it. items: so many can be computed in that time in batches of six. Without room 44 have time.

    The dispatchers take turns, so the first one gets all of the high level, and of six it gets nothing else.
    """
    fleet = serving(1, record, dispatchers)
    asked = evenly(fleet, {1: 10.0, 9: 50.0}, 8.0, {1: 500.0, 9: 500.0})
    assert in_time(fleet, asked[1]) == len(asked[1]) == 80
    assert in_time(fleet, asked[9]) >= 0.9 * (items - 80), "the rest of the capacity is theirs"


def test_heartbeats_say_how_many_of_each_priority_wait() -> None:
    """Four are computed in 160 ms, so that most of them wait at the next heartbeat, or the one after it."""
    fleet = serving(1, variant(base_ms=0.0, per_item_ms=40.0, max_batch=4))
    for level in (*[9] * 38, 1, 1):
        fleet.ask(latency_ms=10_000.0, priority=level)
    fleet.stage.run(1.01)
    [status] = beat(fleet, "w0").instances
    assert set(status.levels) == {1, 9}
    assert sum(status.levels.values()) <= status.queued


@pytest.mark.parametrize("record", [EACH, CALL])
@pytest.mark.parametrize("dispatchers", [1, 2])
def test_a_high_level_is_in_time_though_batches_take_a_fifth_more_or_less(
    record: VariantRecord, dispatchers: int
) -> None:
    fleet = serving(1, record, dispatchers)
    [device] = fleet.devices.values()
    device.spread = 0.2
    asked = evenly(fleet, {1: 10.0, 9: 50.0}, 16.0, {1: 500.0, 9: 500.0})
    assert in_time(fleet, asked[1]) == len(asked[1]) == 160


def test_a_low_level_alone_is_served_as_without_priorities() -> None:
    def ends(level: int) -> list[tuple[float, str]]:
        fleet = serving(1, SLOW)
        evenly(fleet, {level: 200.0}, 3.0, {level: 400.0})
        return [(at, subject) for at, subject, _ in fleet.stage.heard if subject.startswith("_INBOX")]

    assert ends(9) == ends(5)


@pytest.mark.parametrize(("slo_ms", "share"), [(200.0, 0.9), (100.0, 0.75)])
def test_a_high_level_is_let_in_though_long_batches_ran_before_its_first_query(slo_ms: float, share: float) -> None:
    """A batch of the low level takes 340 ms, more than the high level has: its first ones have no time, and those after them have."""
    fleet = serving(1, variant(base_ms=20.0, per_item_ms=5.0, max_batch=64))
    asked = evenly(fleet, {1: 10.0, 9: 250.0}, 4.0, {1: slo_ms, 9: 1000.0}, later=3.0)
    assert len(asked[1]) == 40
    assert in_time(fleet, asked[1]) >= share * 40
