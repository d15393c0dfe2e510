"""The controller on stage with a provider that has machines of its own: nodes of a Swarm, as they come, go, and are shut."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bus.messages.scaling import AskToMove
from services.autoscaler.vms.commands import Node
from tests.support.data.examples import examples
from tests.support.simulated.controllers import NAME, PoolFleet, kind, slow

THREE = ("n0", "n1", "n2")


def labelled(fleet: PoolFleet) -> list[str]:
    return sorted(name for name, node in fleet.nodes.items() if node.worker)


def test_the_minimum_is_started_from_nothing_and_bears_the_machines_names() -> None:
    fleet = PoolFleet(pool=THREE, kinds=(kind(minimum=2, maximum=3),))
    assert fleet.workers_after(20.0) == ["n0", "n1"] == labelled(fleet)
    assert [(order.worker, order.kind, order.bought) for order in fleet.started] == [
        ("n0", "cpu", False),
        ("n1", "cpu", False),
    ]
    assert [order.order for order in fleet.started] == ["1-1", "1-2"]
    assert "0 of at least 2 are there" in fleet.scalings("add_worker")[0].reason


def test_labels_count_before_workers_speak_and_go_with_dead_machines() -> None:
    fleet = PoolFleet(pool=THREE, labelled=("n2",))
    assert fleet.workers_after(60.0) == ["n2"]
    assert fleet.scalings() == []
    fleet = PoolFleet(pool=("n0", "n1"), labelled=("n0",), controllers=0)
    fleet.change("n0", up=False)
    fleet.start_controller("c0")
    assert fleet.workers_after(30.0) == ["n1"]
    fleet.stage.run(60.0)
    assert labelled(fleet) == ["n1"]


def test_a_busy_worker_gets_another_on_a_free_machine_and_a_name_is_used_again_later() -> None:
    fleet = PoolFleet(slow(), pool=("n0", "n1"), limits={"idle_s": 10.0}, kinds=(kind(maximum=2),), autoscaler="off")
    fleet.stage.run(8.0)
    asked = fleet.burst(150, 10, latency_ms=20_000)
    assert fleet.workers_after(5.0) == ["n0", "n1"]
    asked += fleet.burst(5, 45, latency_ms=2_000)
    assert len(fleet.workers) == 1
    assert labelled(fleet) == fleet.workers
    first = {order.worker: order.order for order in fleet.started}
    asked += fleet.burst(150, 10, latency_ms=20_000)
    assert fleet.workers_after(5.0) == ["n0", "n1"]
    again = fleet.started[-1]
    assert again.order != first[again.worker]
    assert fleet.states(NAME).keys() == {"n0", "n1"}
    record = fleet.machine(again.worker)
    assert (record.state, record.order) == ("Ready", again.order)
    assert fleet.all_answered(asked)
    [stopped] = fleet.stopped
    assert stopped.order == first[stopped.worker]


def test_with_no_machine_free_nothing_is_added_and_it_is_told_once() -> None:
    fleet = PoolFleet(pool=("n0",), kinds=(kind(maximum=3),))
    fleet.stage.run(8.0)
    assert fleet.workers_after(60.0, used=0.95) == ["n0"]
    [event] = [event for event in fleet.scalings("add_worker") if event.count == 0]
    assert "no machine of kind cpu is free (1 with a worker)" in event.reason
    fleet.change("n0")
    fleet.nodes["n1"] = fleet.nodes["n0"].__class__(name="n1", kind="cpu")
    assert fleet.workers_after(20.0) == ["n0", "n1"]


def test_minimums_that_cannot_be_kept_are_told_and_other_kinds_are_started() -> None:
    fleet = PoolFleet(pool=("n0",), kinds=(kind("big", minimum=1, maximum=1), kind(minimum=1, maximum=1)))
    assert fleet.workers_after(60.0) == ["n0"]
    [event] = [event for event in fleet.scalings("add_worker") if event.count == 0]
    assert "no machine of kind big is free (there is none)" in event.reason
    fleet = PoolFleet(pool=("n0", "n1"), kinds=(kind("a-none", minimum=0), kind(maximum=3)))
    fleet.stage.run(8.0)
    assert fleet.workers_after(10.0, used=0.95) == ["n0", "n1"]


def test_a_machine_that_dies_is_given_up_replaced_and_does_not_come_back_as_a_ghost() -> None:
    fleet = PoolFleet(pool=THREE, kinds=(kind(minimum=2, maximum=3),))
    assert fleet.workers_after(15.0) == ["n0", "n1"]
    fleet.change("n1", up=False, seconds=12.0)
    assert "n2" in fleet.workers
    fleet.stage.run(15.0)
    assert labelled(fleet) == ["n0", "n2"]  # n1's label has gone though it is down
    assert fleet.machine("n1") is None
    fleet.change("n1", up=True)
    assert fleet.workers_after(60.0) == ["n0", "n2"]


def test_what_is_given_up_is_stopped_until_it_is_gone_also_by_the_next_leader() -> None:
    fleet = PoolFleet(pool=("n0", "n1"), kinds=(kind(minimum=1, maximum=2),), controllers=2)
    fleet.stage.run(15.0)
    [name] = fleet.workers
    fleet.change(name, up=False)
    fleet.stuck = {name}
    fleet.stage.run(80.0)
    assert fleet.machine(name).state == "Stopping"
    fleet.stage.kill(fleet.leader, seconds=10.0)
    assert labelled(fleet) == ["n0", "n1"]
    fleet.stuck = set()
    fleet.stage.run(70.0)
    assert fleet.machine(name) is None
    assert len(labelled(fleet)) == 1


def test_a_paused_machine_is_replaced_drained_and_not_chosen_while_it_is_so() -> None:
    fleet = PoolFleet(slow(), pool=("n0", "n1"), kinds=(kind(minimum=1, maximum=2),), autoscaler="off")
    assert fleet.workers_after(10.0) == ["n0"]
    asked = [fleet.ask()]
    fleet.stage.run(3.0)
    fleet.change("n0", availability="pause")
    history = []
    for _ in range(60):
        asked.append(fleet.ask())
        fleet.stage.run(0.5)
        history.append(fleet.states(NAME))
    assert all("Active" in [state for states in now.values() for state in states] for now in history)
    assert fleet.workers == ["n1"] == labelled(fleet)
    assert fleet.all_answered(asked)
    assert next(event.worker for event in fleet.worker_events("Draining")) == "n0"
    [event] = fleet.scalings("remove_worker")
    assert event.reason == "its node is set to pause"
    assert fleet.workers_after(30.0, used=0.95) == ["n1"]
    fleet.change("n0", availability="active")
    assert fleet.workers_after(30.0) == ["n0", "n1"]


def test_a_machine_that_is_let_in_again_before_it_has_gone_stays() -> None:
    fleet = PoolFleet(slow(), pool=("n0",), kinds=(kind(minimum=1, maximum=1),), autoscaler="off")
    fleet.stage.run(10.0)
    asked = [fleet.ask()]
    fleet.stage.run(3.0)
    fleet.change("n0", availability="pause")
    fleet.stage.run(10.0)  # it alone serves the app, and nothing can take its place
    assert fleet.workers == ["n0"]
    fleet.change("n0", availability="active", seconds=70.0)
    asked.append(fleet.ask())
    assert fleet.workers_after(2.0) == ["n0"]
    assert (fleet.stopped, fleet.all_answered(asked)) == ([], True)


def test_labels_go_where_operators_drain_or_take_them_off() -> None:
    fleet = PoolFleet(pool=("n0", "n1"), kinds=(kind(minimum=1, maximum=2),))
    fleet.stage.run(10.0)
    fleet.change("n0", availability="drain")  # the Swarm ends its worker at once
    assert fleet.workers_after(40.0) == ["n1"] == labelled(fleet)
    assert fleet.workers_after(30.0, used=0.95) == ["n1"]
    fleet = PoolFleet(pool=("n0", "n1"), kinds=(kind(minimum=2, maximum=2),))
    assert fleet.workers_after(15.0) == ["n0", "n1"]
    fleet.change("n1", worker="", seconds=9.0)
    assert any("not set to run a worker any more" in event.reason for event in fleet.worker_events("Failed"))
    fleet.stage.run(10.0)
    assert fleet.workers == ["n0", "n1"] == labelled(fleet)  # it is of the pool, and the minimum wants it


def test_a_machine_that_does_not_come_up_is_the_last_to_be_tried_again() -> None:
    fleet = PoolFleet(pool=("n0", "n1"), kinds=(kind(minimum=1, maximum=1),))
    fleet.dead_on_arrival = True
    fleet.stage.run(10.0)
    while labelled(fleet) == ["n0"]:
        fleet.stage.run(0.1)
    fleet.dead_on_arrival = False
    assert fleet.workers_after(20.0) == ["n1"] == labelled(fleet)


def test_a_machine_that_goes_down_while_it_boots_is_given_up_at_once() -> None:
    fleet = PoolFleet(pool=("n0", "n1"), kinds=(kind(minimum=1, maximum=1),))
    fleet.dead_on_arrival = True
    fleet.stage.run(6.0)
    assert labelled(fleet) == ["n0"]
    fleet.dead_on_arrival = False
    fleet.change("n0", up=False)
    assert fleet.workers_after(12.0) == ["n1"] == labelled(fleet)
    assert any("its node is down" in event.reason for event in fleet.worker_events("Failed"))


def test_late_heartbeats_of_an_earlier_worker_do_not_count_for_the_next() -> None:
    fleet = PoolFleet(pool=("n0",), kinds=(kind(minimum=1, maximum=1),))
    fleet.stage.run(10.0)
    old = fleet.stage.members["c0"].actor.fleet.workers["n0"].heartbeat
    assert old is not None
    fleet.change("n0", up=False, seconds=75.0)
    assert labelled(fleet) == []
    fleet.dead_on_arrival = True
    fleet.change("n0", up=True, seconds=5.0)
    assert labelled(fleet) == ["n0"]
    fleet.stage.publish(fleet.subjects.worker_heartbeat("n0"), old, seconds=5.0)
    assert fleet.machine("n0").state == "Booting"


def test_late_heartbeats_of_one_that_was_stopped_do_not_keep_its_place() -> None:
    fleet = PoolFleet(pool=("n0", "n1"), labelled=("n0", "n1"), kinds=(kind(maximum=2),), limits={"idle_s": 8.0})
    controller = fleet.stage.members["c0"].actor
    beats = {}
    while not fleet.stopped:
        fleet.stage.run(0.1)
        beats |= {name: worker.heartbeat for name, worker in controller.fleet.workers.items()}
    [order] = fleet.stopped
    fleet.stage.run(0.5)
    assert order.worker not in controller.fleet.workers
    fleet.stage.publish(fleet.subjects.worker_heartbeat(order.worker), beats[order.worker], seconds=1.0)
    assert order.worker in controller.fleet.workers
    fleet.stage.run(6.0)
    assert order.worker not in controller.fleet.workers


def test_a_provider_that_says_nothing_adds_nothing_until_it_speaks_again() -> None:
    fleet = PoolFleet(pool=("n0",), controllers=0)
    fleet.away = "no manager answers"
    fleet.start_controller("c0")
    assert fleet.workers_after(60.0) == []
    [event] = fleet.scalings("add_worker")
    assert "which machines are there is not known: no manager answers" in event.reason
    fleet.away = ""
    assert fleet.workers_after(15.0) == ["n0"]


def test_managers_that_are_away_for_a_while_neither_lose_nor_double_anything() -> None:
    fleet = PoolFleet(pool=THREE, kinds=(kind(minimum=1, maximum=3),), limits={"idle_s": 10.0})
    fleet.stage.run(10.0)
    fleet.away = "no manager answers"
    assert fleet.workers_after(10.0, used=0.95) == ["n0"]
    fleet.away = ""
    fleet.stage.run(20.0)
    assert len(fleet.workers) >= 2
    fleet.used = 0.1
    fleet.away = "no manager answers"
    fleet.stage.run(30.0)
    fleet.away = ""
    fleet.stage.run(90.0)
    assert len(fleet.workers) == 1
    assert labelled(fleet) == fleet.workers


def test_a_machine_is_bought_where_none_is_free_labelled_when_it_has_joined_and_given_back() -> None:
    fleet = PoolFleet(
        slow(),
        pool=("n0",),
        buys=20.0,
        limits={"idle_s": 10.0},
        kinds=(kind(maximum=2, boot_s=30.0),),
        autoscaler="off",
    )
    fleet.stage.run(8.0)
    asked = fleet.burst(150, 10, latency_ms=20_000)
    fleet.stage.run(30.0)
    assert (fleet.workers, fleet.made) == (["cpu-1-2", "n0"], ["cpu-1-2"])
    assert fleet.nodes["cpu-1-2"].bought
    asked += fleet.burst(5, 45, latency_ms=2_000)
    assert len(fleet.workers) == 1
    assert fleet.removed in ([], ["cpu-1-2"])  # the pool's own is not given back
    assert fleet.all_answered(asked)


def test_a_bought_machine_that_never_joins_is_given_back() -> None:
    fleet = PoolFleet(buys=1e6, kinds=(kind(minimum=1, maximum=1, boot_s=10.0),))
    fleet.stage.run(70.0)
    assert fleet.made == ["cpu-1-1"]
    fleet.stage.run(10.0)
    assert "cpu-1-1" in fleet.removed
    assert fleet.machine("cpu-1-1") is None


def test_a_dry_run_does_nothing_and_tells_once() -> None:
    fleet = PoolFleet(pool=THREE, labelled=("n0",), kinds=(kind(maximum=3),), dry_run=True)
    fleet.stage.run(10.0)
    assert fleet.workers_after(60.0, used=0.95) == ["n0"] == labelled(fleet)
    assert [key for key in fleet.bucket if key.startswith("machine.")] == []
    [event] = fleet.scalings()
    assert (event.action, event.worker, event.count) == ("add_worker", "n1", 0)
    assert event.reason.startswith("dry run: not started: cpu is used above 80%")
    assert [order.worker for order in fleet.rehearsed] == ["n1"]


def test_a_dry_run_removes_nothing_and_starts_no_minimum() -> None:
    fleet = PoolFleet(
        pool=THREE,
        labelled=("n0", "n1"),
        kinds=(kind(minimum=0, maximum=3), kind("big", minimum=1, maximum=1)),
        limits={"idle_s": 10.0},
        dry_run=True,
    )
    fleet.nodes["b0"] = fleet.nodes["n0"].__class__(name="b0", kind="big")
    assert fleet.workers_after(90.0) == ["n0", "n1"] == labelled(fleet)
    told = {(event.action, event.worker) for event in fleet.scalings()}
    assert told == {("add_worker", "b0"), ("remove_worker", "n0")}
    assert all(event.count == 0 and event.reason.startswith("dry run: ") for event in fleet.scalings())
    assert len(fleet.scalings()) == 2


def test_an_ask_gets_a_free_machine() -> None:
    fleet = PoolFleet(slow(), pool=("n0", "n1"), kinds=(kind(maximum=2),), autoscaler="off")
    fleet.stage.run(10.0)
    ask = AskToMove(worker="n0", at=fleet.stage.now, app="app", variant=NAME)
    fleet.stage.publish(fleet.subjects.controller("ask"), ask)
    assert fleet.workers_after(20.0) == ["n0", "n1"]
    assert fleet.states(NAME) == {"n1": ["Active"]}


# -- Whatever happens to machines of the provider's own: limits hold, no machine carries two workers, nothing that is shut
# or down is chosen, and in the end what is labelled is what serves.
NAMES = ("n0", "n1", "n2", "n3")
events = st.lists(
    st.tuples(
        st.sampled_from(
            ["busy", "busy", "calm", "calm", "down", "up", "pause", "drain", "active", "leave", "join", "away", "back",
             "stuck", "kill leader", "lose an answer"]
        ),
        st.sampled_from(NAMES),
        st.floats(0.5, 25.0),
    ),
    min_size=5,
    max_size=14,
)  # fmt: skip


@pytest.mark.slow
@settings(max_examples=examples(25), deadline=None)
@given(events, st.integers(0, 2), st.integers(2, 3), st.sampled_from([0.2, 0.3, float("inf")]), st.booleans())
def test_limits_hold_with_machines_that_come_and_go(
    script: list[tuple[str, str, float]], minimum: int, maximum: int, budget: float, buys: bool
) -> None:
    kinds = (kind(minimum=minimum, maximum=maximum, boot_s=10.0),)
    fleet = PoolFleet(
        pool=NAMES[:3], kinds=kinds, controllers=2, buys=8.0 if buys else None,
        limits={"idle_s": 6.0, "budget_per_hour": budget},
    )  # fmt: skip
    price, added = kinds[0].price_per_hour, 0
    for what, name, seconds in script:
        node = fleet.nodes.get(name)
        if what in ("busy", "calm"):
            fleet.used = 0.95 if what == "busy" else 0.1
        elif what == "away":
            fleet.away = "no manager answers"
        elif what == "back":
            fleet.away = ""
        elif what == "stuck":
            fleet.stuck ^= {name}
        elif what == "kill leader":
            for leader in [each for each, one in fleet._controllers() if one.lease.leads(fleet.stage.now)]:
                fleet.stage.kill(leader)
                added += 1
                fleet.start_controller(f"c{1 + added}")
        elif what == "lose an answer":
            fleet.mute = 1
        elif what == "join":
            fleet.nodes.setdefault(name, Node(name=name, kind="cpu"))
        elif node is not None and what == "leave":
            fleet.leave(name)
        elif node is not None and what in ("down", "up"):
            fleet.change(name, up=what == "up")
        elif node is not None:
            fleet.change(name, availability=what)
        end = fleet.stage.now + seconds
        while fleet.stage.now < end:
            fleet.stage.run(0.25)
            assert len(fleet.workers) <= maximum
            assert len(fleet.workers) * price <= budget
        if node is not None and what in ("down", "pause", "drain") and not fleet.away:
            told = end - seconds + 2.5  # a survey that was under way still showed it open
            assert not [at for at, _, act, _ in fleet.acted if act == f"start {name}" and at > told]
    fleet.away, fleet.stuck, fleet.used = "", set(), 0.1
    for name in NAMES:
        if name in fleet.nodes:
            fleet.change(name, up=True, availability="active")
        else:
            fleet.nodes[name] = Node(name=name, kind="cpu")
    fleet.stage.run(240.0)
    labelled = sorted(name for name, node in fleet.nodes.items() if node.worker)
    assert labelled == fleet.workers
    wanted = min(minimum, int(budget / price)) if budget < float("inf") else minimum
    assert len(labelled) >= wanted
    noted = {key.removeprefix("machine.") for key in fleet.bucket if key.startswith("machine.")}
    assert noted <= set(labelled)
    assert [epoch for _, _, _, epoch in fleet.acted] == sorted(epoch for _, _, _, epoch in fleet.acted)
