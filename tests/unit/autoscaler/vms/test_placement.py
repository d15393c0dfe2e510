"""What a worker asks for goes to others: packed, once, refused by the receiver where it must, with a machine where nothing fits.

A worker asks where the policy is "off", and while the leader has no plan.
"""

from typing import Any

from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus, EnsureLoaded, WorkerHeartbeat
from bus.messages.scaling import AskForCapacity
from services.autoscaler.vms.fleet import FleetWorker
from services.autoscaler.vms.placement import FULL, pack
from tests.support.simulated.controllers import CloudFleet, kind
from tests.support.simulated.fleet import variant

NAME = "m-v1-ort-fp32-t1-b8"
WIDE = "wide-v1"


def ask(fleet: CloudFleet, worker: str = "w0", **more: Any) -> None:
    fields = {"app": "app", "why": "full", "variants": [NAME], "load": 10.0, "at": fleet.stage.now}
    fleet.stage.publish(fleet.subjects.controller("ask"), AskForCapacity(worker=worker, **(fields | more)))


def orders(fleet: CloudFleet) -> list[tuple[str, str, int]]:
    """(worker, variant, at least) of the load orders on the bus."""
    found = []
    for _, subject, body in fleet.stage.heard:
        if subject.endswith(".load") and ".worker." in subject:
            order = decode(EnsureLoaded, body)
            assert order.orderer == "vm-c0"
            assert order.epoch == 1
            found.append((subject.split(".")[2], order.variant.variant, order.at_least))
    return found


def fleet_of(*variants: Any, **more: Any) -> CloudFleet:
    fleet = CloudFleet(*(variants or (variant(NAME),)), **({"workers": 3, "kinds": (), "autoscaler": "off"} | more))
    fleet.stage.listen("infaas.worker.*.load")
    return fleet


def test_it_goes_to_the_fullest_worker_with_room_and_only_once() -> None:
    other = variant("other-v1", model="other")
    fleet = fleet_of(variant(NAME), other)
    fleet.stage.publish(fleet.subjects.worker("w2", "load"), EnsureLoaded(variant=other, orderer="vm-c0", epoch=1))
    fleet.stage.run(2.0)
    fleet.stage.heard.clear()
    for _ in range(20):
        ask(fleet)
        fleet.stage.run(0.1)
    assert orders(fleet) == [("w2", NAME, 1)]
    assert fleet.states(NAME) == {"w2": ["Active"]}


def test_other_needs_are_placed_beside_it() -> None:
    fleet = fleet_of()
    ask(fleet, latency_ms=50.0)
    ask(fleet, latency_ms=100.0)
    fleet.stage.run(1.0)
    assert len(orders(fleet)) == 2


def test_several_instances_are_spread_over_what_has_room() -> None:
    fleet = fleet_of()
    ask(fleet, instances=3)
    fleet.stage.run(3.0)
    assert sorted(count for _, _, count in orders(fleet)) == [1, 2]
    assert "w0" not in fleet.states(NAME)
    assert sum(len(states) for states in fleet.states(NAME).values()) == 3


def test_a_refusal_tries_the_next_worker() -> None:
    fleet = fleet_of()
    for name in ("w1", "w2"):
        fleet.stage.members[name].actor._orders._epoch = 9 if name == "w1" else 0  # has heard a later leader
    ask(fleet)
    fleet.stage.run(3.0)
    assert [worker for worker, _, _ in orders(fleet)] == ["w1", "w2"]
    assert fleet.states(NAME) == {"w2": ["Active"]}


def test_the_next_variant_that_would_do_is_taken_where_the_first_has_no_room() -> None:
    fleet = fleet_of(variant(WIDE, threads=4), variant(NAME))
    ask(fleet, variants=[WIDE, NAME])
    fleet.stage.run(2.0)
    assert [name for _, name, _ in orders(fleet)] == [NAME]


def test_a_machine_is_added_where_nothing_has_room_and_the_instance_goes_there() -> None:
    fleet = fleet_of(variant(NAME, threads=2), workers=1, kinds=(kind(boot_s=5.0),))
    while not fleet.states(NAME):
        ask(fleet)
        fleet.stage.run(0.5)
    fleet.stage.run(2.0)
    assert [order.worker for order in fleet.started] == ["cpu-1-1"]
    assert fleet.states(NAME) == {"cpu-1-1": ["Active"]}
    [event] = fleet.scalings("add_worker")
    assert "w0 asked for" in event.reason


def test_for_accuracy_what_has_room_is_used_and_neither_a_machine_added_nor_cores_promised_twice() -> None:
    fleet = fleet_of(variant(NAME, threads=2), workers=2, kinds=(kind(boot_s=5.0),))
    for number in range(10):
        ask(fleet, why="accuracy", latency_ms=float(number + 1))
        fleet.stage.run(0.1)  # before it is known that the first one computes nothing
    assert fleet.states(NAME) == {"w1": ["Active"]}
    assert fleet.started == []
    ask(fleet)  # one that is short of room is heard beside them
    fleet.stage.run(2.0)
    assert len(fleet.started) == 1


def test_without_a_machine_cores_are_promised_twice_rather_than_nothing() -> None:
    fleet = fleet_of(variant(NAME, threads=2), workers=2)
    for number in range(2):
        ask(fleet, latency_ms=float(number + 1))
        fleet.stage.run(2.0)
    assert fleet.states(NAME) == {"w1": ["Active", "Active"]}


def test_an_interfered_instance_is_moved_to_the_least_used_worker() -> None:
    fleet = fleet_of(variant(NAME, base_ms=10.0, per_item_ms=5.0))
    fleet.used_on = {"w1": 0.7, "w2": 0.3}
    fleet.ask()
    fleet.stage.run(2.0)
    [there] = fleet.states(NAME)
    device = fleet.devices[there]
    device.slow = 8.0
    for _ in range(400):
        fleet.ask()
        fleet.stage.run(0.25)
        if there not in fleet.states(NAME):
            break
    [now] = fleet.states(NAME)
    assert (there, now) == ("w0", "w2")
    released = [event for event in fleet.scalings("unload") if event.worker == "w0"]
    assert "moved to w2" in released[0].reason


def test_a_heartbeat_of_a_stranger_without_devices_is_no_room() -> None:
    fleet = fleet_of(workers=1)
    empty = WorkerHeartbeat(worker="x", hardware="cpu", incarnation=1, at=fleet.stage.now, devices=[], instances=[])
    fleet.stage.publish(fleet.subjects.worker_heartbeat("x"), empty)
    ask(fleet)
    fleet.stage.run(2.0)
    assert orders(fleet) == []


def test_a_load_that_has_grown_meanwhile_is_not_left_to_wait_until_the_first_is_settled() -> None:
    fleet = fleet_of()
    ask(fleet)
    fleet.stage.run(0.5)
    ask(fleet, load=12.0)
    fleet.stage.run(0.5)
    assert len(orders(fleet)) == 1
    ask(fleet, load=40.0, instances=4)  # 30 more than was asked for: three of four
    ask(fleet, load=40.0, instances=4)
    fleet.stage.run(0.5)
    placed = sum(len(states) for states in fleet.states(NAME).values())
    assert placed == 1 + 3


# -- Where instances go that take turns on a device: where it has time for them.

NOW = 1000.0
ON_GPU = replace(variant(), hardware="gpu")
SHARE = 0.8


def worker(name: str, used: float, memory_used_mb: float = 0.0) -> FleetWorker:
    device = DeviceStatus(
        device="gpu",
        kind="gpu",
        cores=1,
        memory_mb=16_000.0,
        memory_used_mb=memory_used_mb,
        cores_used=0.0,
        utilisation=used,
        price_per_hour=3.06,
    )
    found = FleetWorker(name, NOW)
    found.heard(
        WorkerHeartbeat(worker=name, hardware="gpu", incarnation=1, at=NOW, devices=[device], instances=[]), NOW
    )
    return found


def test_a_device_without_time_is_no_room_however_much_memory_it_has() -> None:
    workers = [worker("a", 0.5, 5000.0), worker("b", 0.1)]
    assert pack(ON_GPU, 1, workers, SHARE, share=0.2) == {"a": 1}  # the fullest that has room
    assert pack(ON_GPU, 1, workers, SHARE, share=0.4) == {"b": 1}
    assert pack(ON_GPU, 1, workers, SHARE) == {"a": 1}  # nothing is said of time
    assert pack(ON_GPU, 1, [worker("a", FULL)], SHARE, share=0.1) == {}


def test_what_is_promised_counts_as_used() -> None:
    workers = [worker("a", 0.0, 5000.0), worker("b", 0.0)]
    assert pack(ON_GPU, 1, workers, SHARE, share=0.4, promised={"a": 0.5}) == {"b": 1}
    assert pack(ON_GPU, 5, workers, SHARE, share=0.4, promised={"a": 0.5}) == {"b": 2}


def test_what_needs_all_of_a_device_has_one_to_itself() -> None:
    workers = [worker("a", 0.1), worker("b", 0.0)]
    assert pack(ON_GPU, 3, workers, SHARE, share=1.0) == {"b": 1}


def test_two_cores_hold_as_many_replicas_as_their_memory_takes() -> None:
    """Six instances of one thread: the worker admits them, and the leader's plan keeps them."""
    fleet = CloudFleet(variant(NAME), workers=1, kinds=())
    (app,) = (record for record in fleet.records if isinstance(record, AppRecord))
    fleet.register(replace(app, replicas={"m": 6}))
    fleet.stage.run(90.0)
    assert fleet.states(NAME) == {"w0": ["Active"] * 6}
    table = fleet.stage.members["w0"].actor._table  # type: ignore[attr-defined]
    assert not any(one.reclaimable for one in table.instances.values())
