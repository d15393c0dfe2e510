"""Deployed pipelines on stage, with real controllers, monitors and executors: replicas are kept, follow the traffic, survive the leader."""

from collections.abc import Iterator

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace

from bus.messages.catalog import Expectation, PipelineEdge, PipelineRecord, PipelineVertex, VariantRecord
from bus.messages.fleet import Release
from bus.messages.scaling import PipelineArrivals
from services.core.actor import Changed
from tests.support.simulated.controllers import kind
from tests.support.simulated.fleet import variant
from tests.support.simulated.planned_fleet import FIRST, ONE, SECOND, PipelineFleet, PipelinePool, plan, steady

PLANNED = {"a": 2, "b": 3}

# -- deploying


def test_a_deployed_plan_gets_its_replicas_in_the_same_turn_and_pays_for_them() -> None:
    fleet = PipelineFleet()
    fleet.deploy(plan(PLANNED))
    began = fleet.stage.now
    fleet.stage.run(0.05)
    assert {order.app for _, _, order in fleet.orders(0.0)} == {"p"}
    assert all(at - began < 0.01 for at, _, _ in fleet.orders(0.0))
    assert fleet.replicas_after(5.0) == {"a": 2, "b": 3}
    assert [(e.vertex, e.from_replicas, e.to_replicas) for e in fleet.events("deploy")] == [("a", 0, 2), ("b", 0, 3)]
    assert {(e.lambda_max, e.window_s) for e in fleet.events()} == {(150.0, None)}
    state = fleet.state()
    assert (state.epoch, state.replicas, state.variants) == (1, {"a": 2, "b": 3}, {"a": FIRST, "b": SECOND})
    assert state.missing == {}
    assert fleet.metric("infaas_pipeline_replicas") == {"a": 2, "b": 3}
    fleet.traffic(steady(150.0, 15.0), 15.0)
    costs = {event.app for what, event in fleet.stage.records if what == "cost" and event.variant == SECOND}
    assert costs == {"p"}


def test_another_target_under_a_deployed_plan_is_an_event_and_the_plan_goes_on() -> None:
    fleet = PipelineFleet()
    mine = plan(PLANNED)
    fleet.deploy(mine, seconds=3.0)
    fleet.deploy(mine, slo_target=0.999, seconds=6.0)
    found = fleet.events("target")
    assert [(one.vertex, one.from_replicas, one.to_replicas) for one in found] == [("a", 2, 2), ("b", 3, 3)], "once"
    why = "the target is 99.9 % of the queries in time, and the plan is for 99 %: plan and deploy again"
    assert {one.reason for one in found} == {why}
    assert fleet.replicas == PLANNED
    assert fleet.state().target == 0.999
    fleet.deploy(mine, slo_target=0.99, seconds=6.0)  # what it is for
    assert len(fleet.events("target")) == 2


def test_replicas_stay_without_demand_and_add_up_by_variant() -> None:
    """Trap 29: nobody asks the apps of the vertices, as dispatchers do not count the parts of planned vertices."""
    fleet = PipelineFleet()
    fleet.deploy(plan(PLANNED))
    for seed in range(9):
        fleet.traffic(steady(150.0, 10.0, seed), 10.0)
        assert fleet.replicas == PLANNED
    assert fleet.releases(0.0) == []
    fleet = PipelineFleet()
    both = {"a": FIRST, "b": FIRST}
    fleet.deploy(plan({"a": 2, "b": 1}, both))
    fleet.deploy(plan({"a": 1, "b": 1}, both), name="q", seconds=5.0)
    assert fleet.needed(FIRST) == 5
    fleet.deploy(None, name="q", seconds=5.0)
    assert fleet.needed(FIRST) == 3


def test_a_plan_that_ends_gives_its_replicas_back_and_a_new_one_takes_its_place() -> None:
    fleet = PipelineFleet()
    fleet.deploy(plan(PLANNED), seconds=3.0)
    fleet.deploy(plan({"a": 2, "b": 1}, rate=100.0), seconds=3.0)
    assert [(e.vertex, e.from_replicas, e.to_replicas) for e in fleet.events("deploy")[2:]] == [("b", 3, 1)]
    assert fleet.replicas == {"a": 2, "b": 1}
    fleet.deploy(None, seconds=3.0)
    assert [(e.vertex, e.from_replicas, e.to_replicas) for e in fleet.events("end")] == [("a", 2, 0), ("b", 1, 0)]
    assert {(e.lambda_max, e.window_s, e.reason) for e in fleet.events("end")} == {
        (None, None, "the plan was taken back")
    }
    assert fleet.replicas == {"a": 1, "b": 1}  # as the apps of the vertices keep
    assert "pipeline.p" not in fleet.bucket


def test_the_event_says_by_which_change_a_plan_ended() -> None:
    fleet = PipelineFleet()
    fleet.deploy(plan({"a": 1}), seconds=3.0)
    fleet.deploy(None, ended="plan.p99_ms: the plan keeps 80 ms", seconds=3.0)
    assert [(e.vertex, e.reason) for e in fleet.events("end")] == [("a", "plan.p99_ms: the plan keeps 80 ms")]


def test_the_cheapest_variant_that_suffices_serves_where_the_planned_one_is_gone() -> None:
    fleet = PipelineFleet()
    poor, fine = "other-v1-ort-int8-t1-b8", "other-v1-ort-fp32-t1-b8"
    fleet.register(*fleet.app("other", poor, accuracy=0.5), *fleet.app("other", fine, accuracy=0.9))
    vertex = PipelineVertex(name="a", app="other", inputs={"x": "$.x"}, accuracy=0.8)
    one = PipelineRecord(vertices=[vertex], output={"y": "a.y"})
    fleet.deploy(plan({"a": 2}, {"a": "gone"}), pipeline=one, seconds=3.0)
    assert (fleet.needed(fine), fleet.needed(poor)) == (2, 0)
    fleet.deploy(plan({"a": 2}, {"a": "gone"}), pipeline=replace(one, vertices=[replace(vertex, accuracy=0.95)]))
    fleet.stage.run(3.0)
    assert fleet.state().missing == {"a": "other has no variant on cpu that suffices"}
    assert fleet.metric("infaas_pipeline_replicas_missing") == {"a": 2}


def test_another_variant_for_a_stage_leaves_the_numbers_as_they_are() -> None:
    fleet = PipelineFleet(workers=4)
    fleet.register(*fleet.app("second", SECOND, "second-v1-ort-fp32-t2-b8"))
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 3.0), 3.0)
    fleet.traffic(steady(400.0, 3.0), 3.0)
    before, events = fleet.state(), len(fleet.events())
    assert before.replicas["b"] > 3
    fleet.deploy(plan({"a": 2, "b": 3}, {"a": FIRST, "b": "second-v1-ort-fp32-t2-b8"}), seconds=3.0)
    assert (fleet.state().replicas, len(fleet.events())) == (before.replicas, events)
    assert fleet.needed("second-v1-ort-fp32-t2-b8") == before.replicas["b"]
    assert fleet.needed(SECOND) == 0


# -- following the traffic


def test_all_stages_are_ordered_in_the_turn_of_the_report_that_shows_the_change() -> None:
    """Row 101: each k' = ceil(k * lambda_max / lambda)."""
    fleet = PipelineFleet(workers=4, limits={"period_s": 10.0})
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 20.0), 20.0)
    assert fleet.events("up") == []
    began = fleet.stage.now
    fleet.traffic(steady(400.0, 5.0), 5.0)
    ups = fleet.events("up")
    first = [event for event in ups if event.time == ups[0].time]
    assert {event.vertex for event in first} == {"a", "b"}
    assert first[0].time - began < 2.0
    for event in first:
        assert event.lambda_max is not None
        assert event.to_replicas == int(np.ceil({"a": 2, "b": 3}[event.vertex] * event.lambda_max / 150.0))
    at_once = [(at, order) for at, _, order in fleet.orders(began) if at - first[0].time < 0.01]
    assert {order.variant.variant for _, order in at_once} == {FIRST, SECOND}
    fleet.stage.run(1.0)
    assert fleet.replicas == fleet.state().replicas


def test_replicas_return_after_calm_without_oscillation() -> None:
    """Row 102: in 10 to 40 s."""
    fleet = PipelineFleet(workers=4)
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 35.0), 35.0)
    fleet.traffic(steady(400.0, 10.0, seed=2), 10.0)
    over = fleet.stage.now
    assert fleet.replicas["b"] >= 8
    fleet.traffic(steady(150.0, 9.0, seed=3), 9.0)
    assert fleet.replicas["b"] >= 8
    fleet.traffic(steady(150.0, 31.0, seed=4), 31.0)
    assert fleet.replicas == fleet.state().replicas == {"a": 2, "b": 3}
    fleet.traffic(steady(150.0, 60.0, seed=5), 60.0)
    assert [event for event in fleet.events("up") if event.time > over] == []
    assert fleet.replicas == PLANNED


def test_what_an_operator_expects_of_a_pipeline_is_there_before_it_comes() -> None:
    """Not 15 minutes ahead: replicas are ordered in time for their load."""
    fleet = PipelineFleet()
    mine, now = plan(PLANNED), fleet.stage.now
    fleet.deploy(mine, expects=[Expectation(at=now + 40.0, qps=450.0)], seconds=20.0)
    assert fleet.replicas == PLANNED
    fleet.stage.run(20.0)
    (first, *_) = ups = fleet.events("up")
    assert {one.vertex: one.to_replicas for one in ups} == {"a": 6, "b": 9}
    assert now + 20.0 < first.time < now + 40.0
    assert "foreseen" in first.reason
    assert fleet.replicas == {"a": 6, "b": 9}


def test_a_plan_that_was_begun_before_the_change_gives_nothing_back() -> None:
    fleet = PipelineFleet(workers=4)
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 5.0), 5.0)
    fleet.solve_s = 1.5
    fleet.deploy(plan({"a": 1}, {"a": FIRST}), name="q", pipeline=ONE)  # a reason to plan
    began = fleet.stage.now
    fleet.traffic(steady(400.0, 8.0, seed=2), 8.0)
    assert any(at < event.time < at + 1.5 for at, _, _ in fleet.plans for event in fleet.events("up"))
    assert fleet.releases(began) == []
    assert fleet.replicas["a"] == fleet.state().replicas["a"] + 1


def test_what_is_too_much_after_calm_goes_at_once_on_machines_that_may_leave() -> None:
    """Where other instances that are too much would stay for a while."""
    fleet = PipelineFleet(workers=2, kinds=(kind(maximum=4, boot_s=3.0),))
    fleet.deploy(plan({"a": 1, "b": 1}))
    fleet.traffic(steady(150.0, 35.0), 35.0)
    fleet.traffic(steady(400.0, 5.0, seed=2), 5.0)
    over = fleet.stage.now
    fleet.traffic(steady(150.0, 45.0, seed=3), 45.0)
    last = fleet.events("down")[-1]
    assert last.time > over
    [first, *_] = [
        at
        for at, subject, body in fleet.stage.heard
        if at >= last.time and subject.endswith(".release")
        and msgspec.msgpack.decode(body, type=Release).variant in (FIRST, SECOND)
    ]  # fmt: skip
    assert first - last.time < 1.0
    assert fleet.replicas == {"a": 1, "b": 1}


def test_plans_without_traffic_keep_their_replicas_and_traffic_that_ends_scales_down() -> None:
    fleet = PipelineFleet()
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 10.0), 10.0)
    assert fleet.replicas_after(60.0) == {"a": 1, "b": 1}
    fleet = PipelineFleet()
    fleet.deploy(plan({"a": 2, "b": 1}, rate=0.0, envelope=[], dispersion=[]))
    fleet.traffic(steady(400.0, 5.0), 5.0)
    assert fleet.replicas == {"a": 2, "b": 1}


def test_a_policy_that_does_not_plan_for_all_workers_keeps_and_releases_replicas_too() -> None:
    fleet = PipelineFleet(workers=4, autoscaler="off")
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 35.0), 35.0)
    assert fleet.replicas == PLANNED
    fleet.traffic(steady(400.0, 5.0, seed=2), 5.0)
    assert fleet.replicas == fleet.state().replicas
    assert fleet.replicas["b"] >= 8
    fleet.traffic(steady(150.0, 45.0, seed=3), 45.0)
    assert fleet.replicas == PLANNED


# -- beside other load


def test_other_apps_get_instances_of_their_own_of_a_reserved_variant() -> None:
    fleet = PipelineFleet(workers=4)
    fleet.deploy(plan(PLANNED))
    for seed in range(20):
        for _ in range(400):
            fleet.stage.at(0.0025 * _, lambda: fleet.ask("second", latency_ms=200.0))
        fleet.traffic(steady(150.0, 1.0, seed), 1.0)
    assert fleet.needed(SECOND) > 3
    fleet.traffic(steady(150.0, 60.0), 60.0)
    assert fleet.needed(SECOND) == 3


def test_what_others_need_of_a_reserved_variant_stays_theirs_when_replicas_are_added() -> None:
    fleet = PipelineFleet(workers=4)
    fleet.deploy(plan({"a": 1, "b": 3}))
    for number in range(8000):
        fleet.stage.at(0.0025 * number, lambda: fleet.ask("second", latency_ms=200.0))
    fleet.traffic(steady(150.0, 15.0), 15.0)
    theirs = fleet.needed(SECOND) - 3
    assert theirs > 0
    fleet.solve_s = 60.0  # no plan can help
    fleet.stage.run(1.0)
    fleet.traffic(steady(400.0, 2.0, seed=2), 2.0)
    assert fleet.events("up")
    assert fleet.needed(SECOND) == fleet.state().replicas["b"] + theirs


def test_a_load_for_another_app_never_takes_the_place_of_a_replica() -> None:
    """Devices have room for few instances, and the replicas are idle."""
    big = {"profile": replace(variant().profile, memory_mb=900.0)}
    fleet = PipelineFleet(workers=1)
    fleet.register(
        *fleet.app("big", "big-v1-ort-fp32-t1-b8", **big), *fleet.app("third", "third-v1-ort-fp32-t1-b8", **big)
    )
    fleet.deploy(plan({"a": 3}, {"a": "big-v1-ort-fp32-t1-b8"}), pipeline=ONE, seconds=5.0)
    assert fleet.needed("big-v1-ort-fp32-t1-b8") == 3
    for seed in range(30):
        fleet.ask("third", latency_ms=1000.0)
        fleet.traffic(steady(150.0, 1.0, seed), 1.0)
    assert fleet.needed("big-v1-ort-fp32-t1-b8") == 3


# -- machines


def test_machines_are_added_and_kept_for_replicas() -> None:
    fleet = PipelineFleet(workers=1, kinds=(kind(maximum=4, boot_s=3.0),), limits={"idle_s": 10.0})
    fleet.deploy(plan({"a": 3, "b": 3}))
    fleet.traffic(steady(150.0, 60.0), 60.0)
    assert len(fleet.workers) == 3  # of two cores each
    assert fleet.replicas == {"a": 3, "b": 3}
    fleet.deploy(None, seconds=120.0)
    assert len(fleet.workers) == 1
    name = "big-v1-ort-fp32-t1-b8"
    fleet = PipelineFleet(workers=1, kinds=(kind(maximum=4, boot_s=3.0),), limits={"idle_s": 10.0}, autoscaler="off")
    fleet.register(*fleet.app("big", name, profile=replace(variant().profile, memory_mb=1500.0)))
    fleet.deploy(plan({"a": 3}, {"a": name}), pipeline=ONE)
    fleet.traffic(steady(150.0, 60.0), 60.0)
    assert fleet.needed(name) == 3
    assert len(fleet.workers) == 2
    assert fleet.worker_events("Draining") == []


def test_a_machine_that_must_go_is_drained_when_its_replicas_serve_elsewhere() -> None:
    fleet = PipelinePool(pool=("n1", "n2", "n3"), labelled=("n1", "n2"), workers=0, kinds=(kind(minimum=2),))
    fleet.stage.run(5.0)
    fleet.register(*fleet.app("slow", "slow-v1-ort-fp32-t1-b8", load_ms=4000.0))
    fleet.deploy(plan({"a": 4}, {"a": "slow-v1-ort-fp32-t1-b8"}), pipeline=ONE)
    fleet.traffic(steady(150.0, 10.0), 10.0)
    assert len(fleet.states("slow-v1-ort-fp32-t1-b8")) == 2
    fleet.change("n1", availability="pause")
    for seed in range(150):
        fleet.traffic(steady(150.0, 0.2, seed), 0.2)
        table = [states for name, states in fleet.states("slow-v1-ort-fp32-t1-b8").items() if not fleet.drains(name)]
        assert sum(state == "Active" for states in table for state in states) >= 4
    assert "n1" not in fleet.workers


def test_why_a_replica_is_missing_is_told() -> None:
    fleet = PipelineFleet(workers=1)
    name = "big-v1-ort-fp32-t1-b8"
    fleet.register(*fleet.app("big", name, profile=replace(variant().profile, memory_mb=1500.0)))
    fleet.deploy(plan({"a": 3}, {"a": name}), pipeline=ONE, seconds=5.0)
    [event] = fleet.events("deploy")
    assert f"no worker has room on cpu for {name}" in event.reason
    assert "no worker has room" in fleet.state().missing["a"]
    assert fleet.metric("infaas_pipeline_replicas") == {"a": 3}
    assert fleet.metric("infaas_pipeline_replicas_missing") == {"a": 1}
    fleet.start_worker("w1", seconds=5.0)
    assert fleet.needed(name) == 3
    assert fleet.state().missing == {}


def test_unknown_hardware_is_named_and_unreadable_records_are_ignored() -> None:
    fleet = PipelineFleet(workers=1)
    name = "fast-v1-trt-fp16-t1-b8"
    fleet.register(*fleet.app("fast", name, hardware="gpu"))
    fleet.deploy(plan({"a": 1}, {"a": name}), pipeline=ONE, seconds=3.0)
    assert fleet.state().missing == {"a": "no worker has gpu"}
    fleet = PipelineFleet()
    fleet.stage.send("c0", Changed("infaas-control", "pipeline.p", b"\xc1"))
    fleet.stage.publish(fleet.subjects.pipeline("arrivals"), PipelineArrivals("d0", "unknown", 1.0, [3]))
    fleet.deploy(plan({"a": 1, "b": 1}))
    assert fleet.replicas_after(3.0) == {"a": 1, "b": 1}


@pytest.mark.parametrize("policy", ["infaas", "off"])
def test_replicas_of_a_worker_that_dies_are_loaded_elsewhere(policy: str) -> None:
    fleet = PipelineFleet(workers=3, autoscaler=policy)
    fleet.deploy(plan({"a": 2, "b": 2}), seconds=5.0)
    fleet.kill_worker(min(fleet.states(SECOND)))
    assert fleet.replicas_after(15.0) == {"a": 2, "b": 2}


# -- the lead


def followed(fleet: PipelineFleet) -> Iterator[float]:
    """Kill the leader; the seconds until another leads."""
    fleet.stage.kill(fleet.leader)
    died = fleet.stage.now
    while not any(actor.lease.leads(fleet.stage.now) for _, actor in fleet._controllers()):
        fleet.stage.run(0.05)
        yield fleet.stage.now - died


def test_the_next_leader_goes_on_with_the_replicas_that_the_last_one_wanted() -> None:
    fleet = PipelineFleet(workers=4, controllers=2)
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(150.0, 10.0), 10.0)
    fleet.traffic(steady(400.0, 4.0, seed=2), 4.0)
    before, epoch = fleet.state(), fleet.state().epoch
    assert before.replicas["b"] >= 8
    assert max(followed(fleet)) < 10.0
    count, killed = len(fleet.events()), fleet.stage.now
    fleet.traffic(steady(400.0, 8.0, seed=3), 8.0)
    after = fleet.state()
    assert after.epoch > epoch
    assert all(after.replicas[vertex] >= before.replicas[vertex] for vertex in before.replicas)
    assert fleet.replicas == after.replicas
    assert all(event.action == "up" for event in fleet.events()[count:])
    assert [release for release in fleet.releases(killed) if release.variant in (FIRST, SECOND)] == []
    fleet.traffic(steady(150.0, 45.0, seed=4), 45.0)
    assert fleet.replicas == PLANNED


def test_the_next_leader_ends_and_begins_what_changed_while_nobody_led() -> None:
    fleet = PipelineFleet(workers=4, controllers=2)
    fleet.deploy(plan({"a": 1, "b": 1}))
    fleet.deploy(plan({"a": 1, "b": 2}, rate=100.0), name="q", seconds=3.0)
    fleet.stage.kill(fleet.leader)
    fleet.deploy(None)
    fleet.deploy(plan({"a": 2, "b": 2}, rate=120.0), name="q", seconds=15.0)
    later = [event for event in fleet.events() if event.time > fleet.stage.now - 15.0]
    assert [(e.pipeline, e.action, e.vertex, e.from_replicas, e.to_replicas) for e in later] == [
        ("q", "deploy", "a", 1, 2),
        ("p", "end", "a", 1, 0),
        ("p", "end", "b", 1, 0),
    ]
    assert fleet.replicas == {"a": 2, "b": 2}
    assert "pipeline.p" not in fleet.bucket
    assert fleet.state("q").epoch == 2


def test_only_the_leader_acts() -> None:
    fleet = PipelineFleet(workers=4, controllers=3)
    fleet.deploy(plan(PLANNED))
    fleet.traffic(steady(400.0, 5.0), 5.0)
    assert {order.orderer for _, _, order in fleet.orders(0.0)} == {f"vm-{fleet.leader}"}
    seen = [(event.time, event.vertex, event.action) for event in fleet.events()]
    assert len(seen) == len(set(seen))


def test_a_record_that_could_not_be_written_is_written_later() -> None:
    fleet = PipelineFleet()
    fleet.cut_off.add("c0")
    fleet.deploy(plan({"a": 1, "b": 1}), seconds=1.0)
    assert "pipeline.p" not in fleet.bucket
    fleet.cut_off.clear()
    fleet.stage.run(15.0)
    assert fleet.state().replicas == {"a": 1, "b": 1}


def test_a_vertex_that_is_a_pipeline_has_no_instances_of_its_own() -> None:
    fleet = PipelineFleet()
    fleet.deploy(None)
    outer = PipelineRecord(
        vertices=[PipelineVertex(name="a", app="first"), PipelineVertex(name="inner", app="p")],
        edges=[PipelineEdge(source="a", target="inner")],
    )
    fleet.deploy(plan({"a": 1, "inner": 2}, {"a": FIRST, "inner": ""}), name="outer", pipeline=outer)
    assert fleet.replicas_after(3.0) == {"a": 1, "b": 0}
    assert fleet.state("outer").missing == {}
    assert isinstance(next(iter(fleet.records)), VariantRecord)
