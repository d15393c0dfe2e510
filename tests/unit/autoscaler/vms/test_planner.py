"""The leader's plan on stage, with real dispatchers, monitors and executors: what is ordered, when, and what becomes of old plans."""

from itertools import pairwise
from typing import Any

from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import ObjectiveReport
from services.autoscaler.vms.commands import Turn
from services.autoscaler.vms.planner import BARRED_S, CALM_S, RECLAIM_S
from services.core.actor import Done
from services.core.settings import AutoscalerSettings
from services.simulation.edges import plans_for
from tests.support.simulated.autoscaled_fleet import CPU, GPU, ScalingFleet
from tests.support.simulated.controllers import NAME, CloudFleet, PoolFleet, kind, slow
from tests.support.simulated.fleet import variant

OTHER = "other-v1-ort-fp32-t1-b8"


def fleet_of(*variants: VariantRecord, **more: Any) -> CloudFleet:
    fleet = CloudFleet(*(variants or (slow(),)), **({"kinds": ()} | more))
    fleet.stage.listen("infaas.worker.*.load")
    fleet.stage.listen("infaas.controller.objectives")
    return fleet


def load(fleet: CloudFleet, rate: float, seconds: float, **needs: Any) -> list[str]:
    return fleet.burst(rate, seconds, **({"latency_ms": 500.0} | needs))


def answered(fleet: CloudFleet, asked: list[str]) -> float:
    fleet.stage.run(1.0)
    return sum("outputs" in fleet.replies(one)[0] for one in asked) / len(asked)


def orders(fleet: CloudFleet, orderer: str = "") -> list[tuple[float, str, EnsureLoaded]]:
    """(when, worker, order) of the leaders' load orders."""
    found = []
    for at, subject, body in fleet.stage.heard:
        if subject.startswith("infaas.worker.") and subject.endswith(".load"):
            order = decode(EnsureLoaded, body)
            if order.orderer.startswith(orderer or "vm-"):
                found.append((at, subject.split(".")[2], order))
    return found


def reports(fleet: CloudFleet) -> list[ObjectiveReport]:
    subject = "infaas.controller.objectives"
    return [decode(ObjectiveReport, body) for _, where, body in fleet.stage.heard if where == subject]


def reclaimable(fleet: CloudFleet) -> int:
    """Instances that are marked."""
    tables = (fleet.stage.members[name].actor._table for name in fleet.workers)  # type: ignore[attr-defined]
    return sum(bool(one.reclaimable) for table in tables for one in table.instances.values())


def count(fleet: CloudFleet, name: str = NAME) -> int:
    return sum(len(states) for states in fleet.states(name).values())


# -- when it plans


def test_a_surge_is_planned_for_at_once_and_not_in_the_next_period() -> None:
    fleet = fleet_of(workers=2, limits={"period_s": 10.0})
    load(fleet, 5, 25)
    assert count(fleet) == 1
    began = fleet.stage.now
    last = load(fleet, 200, 6)
    first = next(at for at, _, _ in orders(fleet) if at > began)
    assert first - began < 1.2  # the dispatcher reports each half second
    assert count(fleet) >= 3
    assert answered(fleet, last[600:]) == 1.0


def test_a_forecaster_hears_a_rate_each_second_however_seldom_plans_are_made() -> None:
    fleet = fleet_of(limits={"period_s": 10.0})
    load(fleet, 20, 40)
    [known] = fleet.stage.members[fleet.leader].actor._planner.problems.demand.loads()  # type: ignore[attr-defined]
    assert 38 <= len(known.past) <= 42


def test_the_slack_of_the_settings_is_room_to_spare() -> None:
    """One instance carries 20 items/s with ease, and four times as many hardly."""
    counts = {}
    for slack in (1.05, 8.0):
        fleet = fleet_of(workers=4, autoscaler=AutoscalerSettings(slack=slack))
        load(fleet, 20, 25)
        counts[slack] = count(fleet)
    assert counts[1.05] == 1
    assert counts[8.0] > 1


def test_it_tells_what_apps_want_and_get_and_workers_hear_it() -> None:
    fleet = fleet_of()
    load(fleet, 20, 20)
    last = reports(fleet)[-1]
    [app] = last.apps
    assert (last.epoch, app.app, app.slo_target, app.reached) == (1, "app", 0.99, 1.0)
    assert app.load is not None
    assert 15 < app.load < 25
    assert app.forecast is not None
    assert app.load <= app.forecast < 3 * app.load
    assert app.headroom is not None
    assert app.headroom > 1.0
    assert app.capacity == app.headroom * app.forecast
    assert last.instances == {NAME: 1}
    assert last.machines == {}  # none may come or go


# -- machines


def test_all_machines_that_are_missing_are_added_at_once() -> None:
    fleet = fleet_of(workers=1, kinds=(kind(maximum=8, boot_s=5.0),))
    load(fleet, 20, 20)
    assert fleet.started == []
    load(fleet, 600, 2.5)
    times = [at for at, _, what, _ in fleet.acted if what.startswith("start ")]
    assert len(times) >= 3
    assert max(sum(abs(at - other) < 0.1 for other in times) for at in times) >= 3
    [first, *_] = fleet.scalings("add_worker")
    assert first.reason.startswith("the plan wants ")
    assert " cpu, there are 1, for " in first.reason
    assert " items/s in 5 s" in first.reason


def test_a_surplus_machine_leaves_after_as_long_as_another_one_takes_to_come() -> None:
    fleet = fleet_of(workers=3, kinds=(kind(boot_s=25.0),), limits={"idle_s": 10.0})
    began = fleet.stage.now
    asked = load(fleet, 5, 90)
    left = [event.time for event in fleet.scalings("remove_worker")]
    assert len(left) == 2  # one stays
    assert left[0] - began >= 25.0
    assert left[1] > left[0]
    assert fleet.scalings("remove_worker")[0].reason.startswith("the plan wants 1 cpu, there are 3, for ")
    assert answered(fleet, asked) == 1.0


def test_a_single_plan_that_wants_it_does_not_keep_a_surplus_machine() -> None:
    kept = kind(boot_s=20.0, minimum=2)  # so that it does not leave for being idle
    fleet = fleet_of(workers=2, kinds=(kept,), limits={"idle_s": 10.0, "period_s": 2.0})
    growth = fleet.stage.members["c0"].actor._growth  # type: ignore[attr-defined]
    began = fleet.stage.now
    for wanted in (1, 1, 2, 1, 1, 2, 1, 1, 1, 1, 1, 1):
        turn = Turn(fleet.stage.now, 1)
        removes = growth.follow({"cpu": wanted}, 5.0, lambda worker: (0, 0.0), turn)
        if removes:
            break
        fleet.stage.run(2.0)
    assert 20.0 <= fleet.stage.now - began < 26.0
    assert removes


def test_a_surplus_that_is_needed_again_meanwhile_stays() -> None:
    fleet = fleet_of(workers=2, kinds=(kind(boot_s=20.0, maximum=2),), limits={"idle_s": 10.0})
    for _ in range(3):
        load(fleet, 5, 14)
        load(fleet, 230, 4)
    assert len(fleet.workers) == 2
    assert fleet.scalings("remove_worker") == []


def test_none_that_serves_leaves_for_one_that_boots_and_may_never_come() -> None:
    fleet = fleet_of(workers=2, kinds=(kind(boot_s=5.0, minimum=2),), limits={"idle_s": 5.0})
    fleet.dead_on_arrival = True
    load(fleet, 600, 2.5)
    assert [event.worker for event in fleet.scalings("add_worker")] == [one.worker for one in fleet.started] != []
    load(fleet, 5, 30)
    assert fleet.scalings("remove_worker") == []
    assert len(fleet.workers) == 2


def test_what_a_machine_hands_over_serves_elsewhere_before_it_goes() -> None:
    other = slow(OTHER, model="other", load_ms=4000.0)
    fleet = fleet_of(slow(load_ms=4000.0), other, workers=2, kinds=(kind(boot_s=5.0),), limits={"idle_s": 5.0})
    for worker, record in (("w0", slow(load_ms=4000.0)), ("w1", other)):
        fleet.stage.publish(fleet.subjects.worker(worker, "load"), EnsureLoaded(variant=record, app="app"))
    asked: list[str] = []
    seen = []
    for _ in range(600):
        asked += [fleet.ask(variant=name, latency_ms=8000.0) for name in (NAME, OTHER)]
        fleet.stage.run(0.1)
        if len(fleet.worker_events("Draining")) > len(seen):
            seen.append({name: fleet.states(name) for name in (NAME, OTHER)})
    assert len(fleet.workers) == 1
    [stays] = fleet.workers
    assert len(seen) == 1
    assert all("Active" in states.get(stays, []) for states in seen[0].values())
    fleet.stage.run(5.0)
    assert answered(fleet, asked) == 1.0


def test_the_budget_is_never_exceeded_and_the_plan_goes_on_where_the_least_costs_more() -> None:
    fleet = fleet_of(workers=1, kinds=(kind(maximum=6, boot_s=2.0),), limits={"budget_per_hour": 0.2})
    load(fleet, 20, 10)
    load(fleet, 500, 6)
    assert len(fleet.started) == 1  # of 0.096 US$/h each
    assert len(fleet.workers) == 2
    assert max(plan.growth.budget for _, _, plan in fleet.plans if plan.growth.budget) == 0.2
    fleet = fleet_of(workers=2, kinds=(kind(minimum=2, maximum=3),), limits={"budget_per_hour": 0.1})
    load(fleet, 20, 10)
    load(fleet, 200, 5)
    assert reports(fleet)[-1].machines == {"cpu": 2}
    assert fleet.started == []
    assert count(fleet) >= 3


def test_a_dry_run_tells_what_the_plan_would_do_and_does_nothing() -> None:
    fleet = PoolFleet(slow(), pool=("n0", "n1"), labelled=("n0",), kinds=(kind(maximum=2),), dry_run=True)
    fleet.stage.run(8.0)
    load(fleet, 20, 10)
    load(fleet, 300, 5)
    assert fleet.workers == ["n0"]
    [event] = fleet.scalings("add_worker")
    assert (event.worker, event.count) == ("n1", 0)
    assert event.reason.startswith("dry run: not started: the plan wants 2 cpu, there are 1, for ")
    assert [order.worker for order in fleet.rehearsed] == ["n1"]


def test_the_plan_goes_to_machines_of_the_providers_own() -> None:
    fleet = PoolFleet(slow(), pool=("n0", "n1"), kinds=(kind(maximum=2),), limits={"idle_s": 10.0})
    fleet.stage.run(8.0)
    load(fleet, 20, 10)
    load(fleet, 300, 15)
    assert fleet.workers == ["n0", "n1"]
    assert fleet.states(NAME).keys() == {"n0", "n1"}
    load(fleet, 5, 90)
    assert len(fleet.workers) == 1


# -- plans that come too late


def planning(solve_s: float) -> tuple[CloudFleet, str]:
    """A fleet in which a plan is under way that takes so long, and the leader that waits for it."""
    fleet = fleet_of(workers=2, controllers=2)
    load(fleet, 20, 10)
    fleet.solve_s, before = solve_s, len(fleet.plans)
    while len(fleet.plans) == before:
        load(fleet, 200, 0.1)
    return fleet, fleet.leader


def test_a_leader_that_dies_in_mid_plan_is_followed_by_one_that_plans_anew() -> None:
    fleet, first = planning(3.0)
    fleet.stage.kill(first)
    died = fleet.stage.now
    fleet.solve_s = None
    load(fleet, 200, 12)
    later = [(worker, order) for at, worker, order in orders(fleet) if at > died]
    assert later
    assert {(order.orderer, order.epoch) for _, order in later} == {(f"vm-{fleet.leader}", 2)}
    assert count(fleet) >= 3


def test_a_leader_that_was_cut_off_in_mid_plan_orders_nothing_by_it() -> None:
    fleet, first = planning(4.8)
    fleet.cut_off.add(first)
    cut = fleet.stage.now
    load(fleet, 200, 3.5)
    fleet.solve_s = None
    load(fleet, 200, 8)
    assert fleet.leader != first
    assert [at for at, _, _ in orders(fleet, f"vm-{first}") if at > cut] == []
    assert count(fleet) >= 3


def test_a_result_of_an_earlier_epoch_changes_nothing() -> None:
    fleet = fleet_of(workers=2, controllers=2)
    load(fleet, 20, 10)
    first = fleet.leader
    load(fleet, 200, 4)
    command = fleet.plans[-1][2]
    fleet.stage.kill(first, seconds=8.0)
    told, ordered = len(reports(fleet)), len(orders(fleet))
    _, result = plans_for(command)
    fleet.stage.send(fleet.leader, Done(("plan", "1"), result), seconds=0.2)
    assert (len(reports(fleet)), len(orders(fleet))) == (told, ordered)


def test_machines_that_have_gone_meanwhile_get_no_orders_and_the_others_do() -> None:
    fleet = fleet_of(workers=3)
    load(fleet, 20, 10)
    [busy] = fleet.states(NAME)
    gone = next(name for name in fleet.workers if name != busy)
    fleet.solve_s = 1.0
    while fleet.plans[-1][2].present.needs[0].load < 100.0:
        load(fleet, 300, 0.1)
    fleet.kill_worker(gone)
    fleet.stage.members["c0"].actor.fleet.forget(gone)  # type: ignore[attr-defined]
    asked = fleet.stage.now
    load(fleet, 300, 1.2)
    assert {worker for at, worker, _ in orders(fleet) if at > asked} == set(fleet.workers)
    fleet.solve_s = None
    load(fleet, 300, 6)
    assert count(fleet) >= 4


def test_without_a_plan_the_rules_decide() -> None:
    fleet = fleet_of(workers=1, kinds=(kind(),))
    fleet.unsolved = True
    load(fleet, 20, 10)
    fleet.used = 0.95
    load(fleet, 20, 10)
    assert reports(fleet) == []
    assert "cpu is used above 80%" in fleet.scalings("add_worker")[0].reason


# -- instances


def test_a_refused_load_is_not_ordered_again_for_a_while_and_then_is() -> None:
    fleet = fleet_of(workers=1)
    load(fleet, 5, 10)
    monitor = fleet.stage.members["w0"].actor
    monitor._orders._epoch = 9  # type: ignore[attr-defined]  # has heard a later leader
    before = len(orders(fleet))
    load(fleet, 150, 25)
    times = [at for at, _, _ in orders(fleet)[before:]]
    assert 2 <= len(times) <= 5
    assert min(b - a for a, b in pairwise(times)) >= BARRED_S
    assert count(fleet) == 1
    monitor._orders._epoch = 0  # type: ignore[attr-defined]
    load(fleet, 150, 12)
    assert count(fleet) == 2


def test_a_refused_load_goes_to_another_worker() -> None:
    fleet = fleet_of(workers=3)
    load(fleet, 5, 10)
    [busy] = fleet.states(NAME)
    refuses = next(name for name in fleet.workers if name != busy)
    fleet.stage.members[refuses].actor._orders._epoch = 9  # type: ignore[attr-defined]
    load(fleet, 300, 6)
    assert fleet.states(NAME).keys() == set(fleet.workers) - {refuses}
    assert count(fleet) >= 4


def test_what_is_not_needed_where_it_is_paid_anyway_is_reclaimable_at_once_serves_on_and_is_needed_again_without_a_load() -> (
    None
):
    fleet = fleet_of(workers=1)
    load(fleet, 5, 10)
    load(fleet, 150, 15)
    assert (count(fleet), reclaimable(fleet)) == (2, 0)
    loads = len(orders(fleet))
    fell = fleet.stage.now
    while not reclaimable(fleet):
        load(fleet, 5, 0.5)
        assert fleet.stage.now - fell < 6.0  # until the plan has seen it
    assert fleet.scalings()[-1].action == "release"
    assert fleet.states(NAME) == {"w0": ["Active", "Active"]}
    again = load(fleet, 150, 10)
    assert (count(fleet), reclaimable(fleet)) == (2, 0)
    assert answered(fleet, again) == 1.0  # both served at once
    assert [event.action for event in fleet.scalings()].count("replicate") == 1
    assert fleet.scalings()[-1].action == "keep"
    assert len(orders(fleet)) > loads


def test_what_was_needed_again_a_moment_ago_is_not_marked_again_until_it_has_rested() -> None:
    """A load that goes to and fro would put a mark and take it off each time, for nothing."""
    fleet = fleet_of(workers=1)
    load(fleet, 5, 10)
    for _ in range(4):
        load(fleet, 150, 15)
        load(fleet, 5, 20)
    assert [event.action for event in fleet.scalings()] == ["replicate", "release", "keep"]
    load(fleet, 5, CALM_S)
    assert [event.action for event in fleet.scalings()][3:] == ["release"]
    assert reclaimable(fleet) == 1


def test_a_load_that_has_room_makes_nothing_reclaimable_before_its_time() -> None:
    wide = replace(CPU, memory_mb=16_000.0)  # room is memory: the cores of what is hardly used are free
    elastic = kind(minimum=0, maximum=1, device=wide)
    fleet = fleet_of(slow(), slow(OTHER, model="other"), workers=1, kinds=(elastic,), device=wide)
    load(fleet, 150, 10, variant=NAME)
    assert count(fleet) >= 2
    fell = fleet.stage.now
    load(fleet, 5, 7, variant=NAME)
    for n in range(40):
        load(fleet, 5, 0.2, variant=NAME)
        load(fleet, 60 + 10 * n, 0.2, variant=OTHER)
    assert [event for event in fleet.scalings() if event.variant == OTHER and fell + 7 < event.time < fell + RECLAIM_S]
    load(fleet, 5, 40, variant=NAME)
    released = [event.time for event in fleet.scalings() if event.variant == NAME and event.action == "release"]
    assert released
    assert min(released) - fell >= RECLAIM_S


def test_an_idle_device_stands_by_for_an_app_with_little_headroom_and_is_not_charged_to_it() -> None:
    fleet = fleet_of(workers=2)
    asked = load(fleet, 40, 30)
    assert count(fleet) == 2
    [why] = [order.reason for _, _, order in orders(fleet) if "idle" in order.reason]
    assert why.startswith("a device is idle, and app carries only ")
    assert reclaimable(fleet) == 1
    assert answered(fleet, asked) == 1.0


def on_gpu(record: VariantRecord, memory_mb: float = 4000.0) -> VariantRecord:
    return replace(record, hardware="gpu", profile=replace(record.profile, memory_mb=memory_mb))


def both(fleet: ScalingFleet) -> None:
    """Queries of one variant, then of another."""
    fleet.load(20, 8, variant=NAME, latency_ms=500.0)
    assert fleet.running(NAME) == 1
    fleet.load(20, 12, variant=OTHER, latency_ms=500.0)
    assert fleet.running(OTHER) == 1


def test_on_a_full_device_the_plan_releases_first_and_loads_in_the_same_turn() -> None:
    """Each fills the device. The second is loaded when the plan finds that it is wanted more."""
    fleet = ScalingFleet(
        on_gpu(slow(), 12_000.0),
        on_gpu(slow(OTHER, model="other"), 12_000.0),
        controlled=True,
        devices={"w0": (GPU,)},
    )
    both(fleet)
    assert fleet.running(NAME) == 0
    events = [event for what, event in fleet.stage.records if what == "scaling" and event.scaler == "vm"]
    [release] = [event for event in events if event.action == "release"]
    [loaded] = [event for event in events if event.variant == OTHER]
    assert (release.variant, loaded.action) == (NAME, "load")
    assert events.index(release) < events.index(loaded)
    assert loaded.time - release.time < 0.5


def test_where_instances_are_paid_they_are_unloaded_plainly() -> None:
    fleet = fleet_of(workers=1, autoscaler=AutoscalerSettings(bill="instances", hold_s=3.0))
    load(fleet, 5, 10)
    load(fleet, 150, 12)
    assert count(fleet) == 2
    fell = fleet.stage.now
    while count(fleet) == 2:
        load(fleet, 5, 0.5)
        assert fleet.stage.now - fell < 60.0
        assert reclaimable(fleet) == 0
    assert [event.action for event in fleet.scalings()][-1] == "unload"
    assert fleet.scalings()[-1].reason == "the plan needs 1 here"
    assert fleet.stage.now - fell >= 3.0


# -- the replicas of one model


def throughput(fleet: CloudFleet, queries: int = 400) -> float:
    """Queries/s of a burst, while nothing more can be loaded in time."""
    began = fleet.stage.now
    asked = [fleet.ask(latency_ms=60_000.0) for _ in range(queries)]
    while not all(fleet.replies(one) for one in asked):
        fleet.stage.run(0.1)
    assert all("outputs" in fleet.replies(one)[0] for one in asked)
    return queries / (fleet.stage.now - began)


def test_four_replicas_of_a_model_serve_four_times_as_much_as_one() -> None:
    fleet = fleet_of(slow(load_ms=60_000.0), workers=4)
    fleet.ask(latency_ms=100_000.0, seconds=70.0)
    assert count(fleet) == 1
    one = throughput(fleet)
    (app,) = (record for record in fleet.records if isinstance(record, AppRecord))
    fleet.register(replace(app, replicas={"m": 4}), seconds=300.0)
    assert {worker: len(states) for worker, states in fleet.states(NAME).items()} == dict.fromkeys(fleet.workers, 1)
    assert reclaimable(fleet) == 0
    assert throughput(fleet) >= 3.8 * one
    fleet.register(app, seconds=120.0)
    assert count(fleet) - reclaimable(fleet) == 1, "nobody asks for more any more"


def test_the_replicas_are_of_the_best_variant_also_without_any_query() -> None:
    cheap = variant("m-v1-ort-int8-t1-b8", precision="int8", base_ms=1.0, per_item_ms=1.0)
    fleet = fleet_of(slow(), cheap, workers=2)
    (app,) = (record for record in fleet.records if isinstance(record, AppRecord))
    assert fleet.states(cheap.variant) == {}
    fleet.register(replace(app, replicas={"m": 2}), seconds=60.0)
    assert (count(fleet, cheap.variant), count(fleet)) == (2, 0)
