"""The controller on stage with real dispatchers, monitors and executors: machines come, go, fail; queries are all answered.

The paper's three rules and idleness decide where the policy is "off", and while there is no plan (test_planned_machines.py).
"""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.fleet import EnsureLoaded, Release
from bus.messages.scaling import AskToMove
from bus.messages.work import WorkFinished
from tests.support.data.examples import examples
from tests.support.simulated.controllers import NAME, CloudFleet, kind, slow
from tests.support.simulated.fleet import catalogue, variant


def test_busy_workers_get_one_more_that_boots_first() -> None:
    fleet = CloudFleet(kinds=(kind(boot_s=20.0),), workers=2)
    fleet.stage.run(10.0)
    fleet.use(0.85, 5.0)
    assert [order.worker for order in fleet.started] == ["cpu-1-1"]
    assert fleet.workers_after(15.0) == ["w0", "w1"]
    fleet.stage.run(6.0)
    assert (fleet.workers, len(fleet.started)) == (["cpu-1-1", "w0", "w1"], 1)
    [event] = fleet.scalings("add_worker")
    assert (event.worker, event.count) == ("cpu-1-1", 1)
    assert "cpu is used above 80% on all 2 workers" in event.reason
    assert [event.worker for event in fleet.worker_events("Booting")][-2:] == ["cpu-1-1", "cpu-1-1"]


def test_one_idle_worker_is_enough_and_where_nothing_may_be_started_nothing_is() -> None:
    fleet = CloudFleet(workers=2)
    fleet.used_on = {"w0": 0.95, "w1": 0.3}
    fleet.stage.run(20.0)
    assert fleet.started == []
    fleet = CloudFleet(kinds=(), workers=2)
    fleet.use(0.95, 120.0)
    assert fleet.leader == "c0"
    assert (fleet.started, fleet.stopped, fleet.scalings()) == ([], [], [])


def test_overloaded_workers_get_another_that_is_filled_with_what_they_run() -> None:
    fleet = CloudFleet(slow(), workers=1, autoscaler="off")
    asked = fleet.burst(150, 8, latency_ms=20_000)
    assert fleet.workers_after(20.0) == ["cpu-1-1", "w0"]
    assert fleet.states(NAME).keys() == {"cpu-1-1", "w0"}
    assert fleet.all_answered(asked)
    [event] = fleet.scalings("add_worker")
    assert "1 of 1 workers have Overloaded variants" in event.reason


def test_packing_empties_a_worker_which_is_drained_and_removed_and_a_burst_brings_one_back() -> None:
    fleet = CloudFleet(slow(), workers=1, limits={"idle_s": 10.0}, autoscaler="off")
    asked = fleet.burst(150, 8, latency_ms=20_000)
    assert fleet.workers_after(5.0) == ["cpu-1-1", "w0"]
    asked += fleet.burst(5, 40, latency_ms=2_000)  # low: one carries it
    [event] = fleet.scalings("remove_worker")
    assert "served nothing for" in event.reason
    [left] = fleet.workers
    assert [e.worker for e in fleet.worker_events("Draining")] == [event.worker]
    assert fleet.machine(event.worker) is None
    asked += fleet.burst(150, 8, latency_ms=20_000)
    assert len(fleet.workers) == 2
    fleet.stage.run(5.0)
    assert left in fleet.workers
    assert len({order.worker for order in fleet.started}) == 2  # a new name
    assert fleet.all_answered(asked)


def test_of_idle_workers_the_empty_one_goes_and_one_that_dies_while_it_drains_is_forgotten() -> None:
    fleet = CloudFleet(slow(), workers=2, limits={"idle_s": 10.0}, autoscaler="off")
    asked = [fleet.ask()]
    fleet.stage.run(3.0)
    [only] = fleet.states(NAME)
    assert fleet.workers_after(20.0) == [only]
    assert fleet.all_answered(asked)
    fleet = CloudFleet(slow(), workers=2, limits={"idle_s": 10.0})
    leaving = fleet.drained()
    fleet.stage.kill(leaving, seconds=70.0)
    assert [order.worker for order in fleet.stopped] == [leaving]
    assert fleet.machine(leaving) is None
    assert len(fleet.scalings("remove_worker")) == 1


def test_the_last_instance_of_an_app_is_loaded_elsewhere_before_its_worker_goes() -> None:
    other = variant("other-v1", model="other", base_ms=10.0)
    fleet = CloudFleet(slow(), workers=1, limits={"idle_s": 10.0}, autoscaler="off")
    fleet.register(*catalogue(other, app="elsewhere"))
    asked = [fleet.ask(variant=NAME)]
    fleet.stage.run(2.0)
    assert fleet.states(NAME) == {"w0": ["Active"]}
    fleet.start_worker("w1", seconds=1.0)
    order = EnsureLoaded(variant=other, app="elsewhere")
    fleet.stage.publish(fleet.subjects.worker("w1", "load"), order, seconds=1.0)
    history = []
    for _ in range(60):  # w1 is busy with something else; w0, which alone serves the app's model, is idle
        asked.append(fleet.ask("elsewhere"))
        fleet.stage.run(0.5)
        history.append(fleet.states(NAME))
    assert fleet.workers == ["w1"]
    assert all("Active" in [state for states in now.values() for state in states] for now in history)
    asked.append(fleet.ask(variant=NAME, latency_ms=200))
    fleet.stage.run(1.0)
    assert fleet.all_answered(asked)


def test_what_nobody_needs_keeps_no_worker_and_is_loaded_nowhere_else() -> None:
    other = variant("other-v1", model="other", base_ms=10.0)
    fleet = CloudFleet(slow(), workers=2, limits={"idle_s": 10.0}, autoscaler="off")
    fleet.register(*catalogue(other, app="elsewhere"))
    for worker, record, app in (("w0", other, "elsewhere"), ("w1", slow(), "app")):
        fleet.stage.publish(fleet.subjects.worker(worker, "load"), EnsureLoaded(variant=record, app=app))
    fleet.stage.run(1.0)
    fleet.stage.publish(fleet.subjects.worker("w1", "release"), Release(variant=NAME, reclaim=True))
    fleet.stage.run(1.0)
    assert fleet.states(NAME) == {"w1": ["Active"]}
    assert fleet.workers_after(20.0) == ["w0"]
    assert fleet.states(NAME) == {}


def test_a_worker_that_builds_a_model_is_not_idle() -> None:
    fleet = CloudFleet(workers=2, kinds=(kind(minimum=0),), limits={"idle_s": 10.0})
    for worker in fleet.workers:
        fleet.stage.publish(fleet.subjects.workshop(worker, "build"), b"whatever it is to build")
    fleet.stage.run(60.0)
    assert fleet.stopped == []
    done = WorkFinished(registration="r", worker="w1", order="build")
    fleet.stage.publish(fleet.subjects.registrar("finished"), done, seconds=20.0)
    assert [order.worker for order in fleet.stopped] == ["w1"]


def test_a_drain_is_taken_back_when_the_worker_is_needed() -> None:
    fleet = CloudFleet(slow(), workers=2, limits={"idle_s": 10.0}, autoscaler="off")
    leaving = fleet.drained()
    other = next(name for name in fleet.workers if name != leaving)
    fleet.stage.publish(
        fleet.subjects.controller("ask"),
        AskToMove(worker=other, at=fleet.stage.now, app="app", variant=NAME),
        seconds=5.0,
    )
    assert fleet.states(NAME) == {leaving: ["Active"]}
    assert (fleet.stopped, fleet.started) == ([], [])
    assert fleet.machine(leaving).state == "Ready"


def test_what_fails_to_start_is_told_tried_again_ever_later_and_holds_nothing_up() -> None:
    fleet = CloudFleet(slow(), workers=1, kinds=(kind(maximum=2),), autoscaler="off")
    fleet.broken = "no more quota"
    fleet.use(0.95, 60.0)
    tries = [at for at, _, what, _ in fleet.acted if what.startswith("start")]
    gaps = [after - before for before, after in itertools.pairwise(tries)]
    assert len(tries) >= 4
    assert gaps[-1] > gaps[0]
    failed = fleet.worker_events("Failed")
    assert len(failed) >= 4
    assert "no more quota" in failed[0].reason
    assert fleet.workers == ["w0"]
    asked = [fleet.ask()]
    fleet.broken = ""
    fleet.stage.run(60.0)
    assert len(fleet.workers) == 2
    assert fleet.all_answered(asked)
    names = {what.split()[1] for _, _, what, _ in fleet.acted if what.startswith("start")}
    assert len(names) == len(failed) + 1  # none is used again


def test_the_maximum_and_the_budget_hold_however_long_the_trouble_lasts() -> None:
    fleet = CloudFleet(workers=1, kinds=(kind(maximum=4),), limits={"budget_per_hour": 0.3})
    fleet.use(0.95, 120.0)
    assert len(fleet.workers) == 3  # of 0.096 US$/h each
    blocked = [event for event in fleet.scalings("add_worker") if event.count == 0]
    assert len(blocked) == 1
    assert "the budget is 0.3" in blocked[0].reason
    assert fleet.scalings("add_worker")[0].reason.endswith("all workers then cost 0.192 of 0.3 US$/h")


def test_what_still_reached_a_worker_that_is_to_drain_is_answered_before_it_is_stopped() -> None:
    fleet = CloudFleet(slow(), workers=2, limits={"idle_s": 10.0}, autoscaler="off")
    for worker in fleet.workers:
        order = EnsureLoaded(variant=slow(), orderer="test")
        fleet.stage.publish(fleet.subjects.worker(worker, "load"), order)
    while fleet.machine("w0") is None:
        fleet.stage.run(0.002)
    fleet.devices["w0"].slow = 400.0
    asked = [fleet.ask()]  # the drain is decided, and nobody has heard of it yet
    fleet.stage.run(6.0)
    assert [event.worker for event in fleet.worker_events("Draining")] == ["w0"]
    assert fleet.stopped == []
    assert not fleet.all_answered(asked)
    fleet.stage.run(10.0)
    assert fleet.all_answered(asked)
    assert [order.worker for order in fleet.stopped] == ["w0"]


def test_a_start_that_nobody_answers_is_asked_for_again_under_the_same_name() -> None:
    fleet = CloudFleet(workers=1, kinds=(kind(boot_s=40.0, maximum=2),))
    fleet.mute = 2
    fleet.stage.run(10.0)
    fleet.use(0.95, 70.0)
    assert [order.worker for order in fleet.started] == ["cpu-1-1"] * 3
    assert fleet.workers == ["cpu-1-1", "w0"]
    assert fleet.worker_events("Failed") == []


def test_a_machine_that_never_speaks_is_given_up_and_stopped() -> None:
    fleet = CloudFleet(workers=1, kinds=(kind(),))
    fleet.dead_on_arrival = True
    fleet.stage.run(10.0)
    fleet.use(0.95, 66.0)
    assert len(fleet.started) == 1
    assert [order.worker for order in fleet.stopped] == ["cpu-1-1"]
    assert fleet.machine("cpu-1-1") is None
    assert "sent no heartbeat in time" in fleet.worker_events("Failed")[0].reason


# -- Whatever happens on stage: never more machines than the maximum or the budget allows, never fewer than the minimum, no
# stop before a drain, no name twice, and all queries answered.
events = st.lists(
    st.tuples(
        st.sampled_from(["busy", "calm", "calm", "burst", "kill leader", "cut off", "break", "mend", "lose an answer"]),
        st.floats(0.5, 15.0),
    ),
    min_size=4,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(events, st.integers(2, 4), st.sampled_from([0.2, 0.3, 0.4, float("inf")]))
def test_limits_and_order_hold_on_any_course(script: list[tuple[str, float]], maximum: int, budget: float) -> None:
    record = variant(base_ms=10.0, per_item_ms=10.0)
    kinds = (kind(minimum=1, maximum=maximum, boot_s=3.0),)
    fleet = CloudFleet(record, workers=1, controllers=3, kinds=kinds, limits={"idle_s": 6.0, "budget_per_hour": budget})
    price, asked, added = kinds[0].price_per_hour, [], 0
    for what, seconds in script:
        if what in ("busy", "calm"):
            fleet.used = 0.95 if what == "busy" else 0.2
        elif what == "burst":
            asked += [fleet.ask(latency_ms=60_000) for _ in range(200)]
        elif what in ("kill leader", "cut off"):
            leaders = [name for name, one in fleet._controllers() if one.lease.leads(fleet.stage.now)]
            for name in leaders:
                if what == "cut off":
                    fleet.cut_off = {name}
                else:
                    fleet.stage.kill(name)
                    added += 1
                    fleet.start_controller(f"c{2 + added}")
        elif what in ("break", "mend"):
            fleet.broken = "no more quota" if what == "break" else ""
        else:
            fleet.mute = 1
        end = fleet.stage.now + seconds
        while fleet.stage.now < end:
            fleet.stage.run(0.25)
            machines = len(fleet.workers)
            assert 1 <= machines <= maximum
            assert machines * price <= budget
    fleet.cut_off = set()
    fleet.stage.run(45.0)
    assert len([n for n, c in fleet._controllers() if c.lease.leads(fleet.stage.now)]) == 1
    names = [event.worker for event in fleet.scalings("add_worker") if event.count]
    assert len(names) == len(set(names))
    drained = {event.worker for event in fleet.worker_events("Draining")}
    served = {event.worker for event in fleet.worker_events("Ready")}
    assert {order.worker for order in fleet.stopped} & served <= drained
    assert [epoch for _, _, _, epoch in fleet.acted] == sorted(epoch for _, _, _, epoch in fleet.acted)
    for one in asked:
        [reply] = fleet.replies(one)
        assert "outputs" in reply
