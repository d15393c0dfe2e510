"""Several controllers on stage: one leads; when it is killed another goes on, and nothing happens twice."""

from collections import Counter

from tests.support.simulated.controllers import CloudFleet, kind
from tests.support.simulated.fleet import variant


def test_one_of_three_leads() -> None:
    fleet = CloudFleet(controllers=3, workers=1)
    fleet.stage.run(20.0)
    assert fleet.leader in ("c0", "c1", "c2")


def test_another_takes_over_within_5_seconds_and_goes_on_with_the_machine_that_boots() -> None:
    fleet = CloudFleet(kinds=(kind(boot_s=15.0),), controllers=2, workers=1)
    fleet.stage.run(12.0)
    first = fleet.leader
    fleet.used = 0.95
    while not fleet.started:
        fleet.stage.run(0.01)
    fleet.stage.kill(first)
    died = fleet.stage.now
    while fleet.acted[-1][1] == first:
        fleet.stage.run(0.01)
        assert fleet.stage.now - died <= 5.0
    fleet.stage.run(40.0)
    names = Counter(order.worker for order in fleet.started)
    assert len(names) == 2  # up to the maximum of 3, one after the other
    assert names["cpu-1-1"] == 2  # the second leader asked for the same machine again, which is idempotent
    assert next(event.worker for event in fleet.scalings("add_worker")) == "cpu-1-1"
    assert len(fleet.scalings("add_worker")) == 2
    assert len(fleet.workers) == 3
    assert {order.epoch for order in fleet.started} == {1, 2}


def test_a_leader_that_dies_between_its_note_and_its_order_is_followed_by_one_that_orders() -> None:
    fleet = CloudFleet(controllers=2, workers=1)
    fleet.stage.run(12.0)
    first = fleet.leader
    fleet.used = 0.95
    while fleet.machine("cpu-1-1") is None:
        fleet.stage.run(0.005)
    assert fleet.started == []
    fleet.stage.kill(first)
    fleet.stage.run(10.0)
    assert next(order.worker for order in fleet.started) == "cpu-1-1"
    assert fleet.started[0].epoch == 2
    assert "cpu-1-1" in fleet.workers


def test_a_drain_under_way_is_finished_by_the_next_leader() -> None:
    fleet = CloudFleet(controllers=2, workers=2, limits={"idle_s": 10.0})
    while not fleet.worker_events("Draining"):
        fleet.stage.run(0.05)
    fleet.stage.kill(fleet.leader)
    fleet.stage.run(12.0)
    assert len(fleet.workers) == 1
    assert [order.epoch for order in fleet.stopped] == [2]
    assert len(fleet.worker_events("Draining")) == 1
    assert len(fleet.scalings("remove_worker")) == 1


def test_a_leader_that_cannot_renew_stops_acting_before_another_begins() -> None:
    fleet = CloudFleet(variant(), controllers=2, workers=1, kinds=(kind(maximum=9),))
    fleet.stage.run(12.0)
    first = fleet.leader
    fleet.cut_off.add(first)
    fleet.use(0.95, 60.0)
    assert fleet.leader != first
    acts = [(at, name, epoch) for at, name, _, epoch in fleet.acted]
    others = [at for at, name, _ in acts if name != first]
    assert others
    assert all(at < others[0] for at, name, _ in acts if name == first)
    assert [epoch for _, _, epoch in acts] == sorted(epoch for _, _, epoch in acts)


def test_a_leader_that_is_stopped_hands_over_at_once() -> None:
    fleet = CloudFleet(controllers=2, workers=1)
    first = fleet.leader
    fleet.stage.stop(first)
    fleet.stage.run(1.0)
    assert fleet.leader != first
