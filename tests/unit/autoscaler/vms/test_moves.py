"""What a worker asks to move goes to others: once, refused by the receiver where it must, with a machine where nothing fits."""

from typing import Any

from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord
from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import AskToMove
from services.autoscaler.vms.fleet import FleetWorker
from services.autoscaler.vms.placement import place
from tests.support.data.heartbeats import beat, device
from tests.support.simulated.controllers import CloudFleet, kind
from tests.support.simulated.fleet import variant

NAME = "m-v1-ort-fp32-t1-b8"
NOW = 1000.0
ON_GPU = replace(variant(), hardware="gpu")
SHARE = 0.8


def worker(name: str, used: float, memory_used_mb: float = 0.0) -> FleetWorker:
    gpu = device("gpu", cores=1, memory_mb=16_000.0, memory_used_mb=memory_used_mb, utilisation=used)
    found = FleetWorker(name, NOW)
    found.heard(beat(worker=name, at=NOW, devices=[gpu]), NOW)
    return found


def ask(fleet: CloudFleet, worker: str = "w0", **more: Any) -> None:
    fields = {"app": "app", "variant": NAME, "at": fleet.stage.now}
    fleet.stage.publish(fleet.subjects.controller("ask"), AskToMove(worker=worker, **(fields | more)))


def orders(fleet: CloudFleet) -> list[tuple[str, str, int]]:
    """(worker, variant, at least) of the load orders on the bus."""
    found = []
    for _, subject, body in fleet.stage.heard:
        if subject.endswith(".load") and ".worker." in subject:
            order = decode(EnsureLoaded, body)
            assert (order.orderer, order.epoch) == ("vm-c0", 1)
            found.append((subject.split(".")[2], order.variant.variant, order.at_least))
    return found


def fleet_of(*variants: Any, **more: Any) -> CloudFleet:
    fleet = CloudFleet(*(variants or (variant(NAME),)), **({"workers": 3, "kinds": (), "autoscaler": "off"} | more))
    fleet.stage.listen("infaas.worker.*.load")
    return fleet


def test_it_goes_to_the_idlest_worker_with_room_and_only_once() -> None:
    fleet = fleet_of()
    fleet.used_on = {"w1": 0.7, "w2": 0.3}
    fleet.stage.run(4.0)
    for _ in range(20):
        ask(fleet)
        fleet.stage.run(0.1)
    assert orders(fleet) == [("w2", NAME, 1)]
    assert fleet.states(NAME) == {"w2": ["Active"]}


def test_the_fullest_worker_with_room_keeps_others_empty_and_the_idlest_is_for_what_was_slowed_down() -> None:
    workers = [worker("a", 0.5, 5000.0), worker("b", 0.1)]
    chosen = (place(ON_GPU, workers, SHARE), place(ON_GPU, workers, SHARE, idlest=True))
    assert [one.name for one in chosen if one is not None] == ["a", "b"]
    assert place(ON_GPU, [worker("c", 0.0, SHARE * 16_000.0)], SHARE) is None


def test_a_refusal_tries_the_next_worker() -> None:
    fleet = fleet_of()
    for name in ("w1", "w2"):
        fleet.stage.members[name].actor._orders._epoch = 9 if name == "w1" else 0  # has heard a later leader
    ask(fleet)
    fleet.stage.run(3.0)
    assert [worker for worker, _, _ in orders(fleet)] == ["w1", "w2"]
    assert fleet.states(NAME) == {"w2": ["Active"]}


def test_a_machine_is_added_where_nothing_has_room_and_the_instance_goes_there() -> None:
    fleet = fleet_of(variant(NAME, threads=2), workers=1, kinds=(kind(boot_s=5.0),))
    while not fleet.states(NAME):
        ask(fleet)
        fleet.stage.run(0.5)
    fleet.stage.run(2.0)
    assert [order.worker for order in fleet.started] == ["cpu-1-1"]
    assert fleet.states(NAME) == {"cpu-1-1": ["Active"]}
    [event] = fleet.scalings("add_worker")
    assert "w0 asked to move" in event.reason


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
    empty = beat(worker="x", at=fleet.stage.now, devices=[])
    fleet.stage.publish(fleet.subjects.worker_heartbeat("x"), empty)
    ask(fleet)
    fleet.stage.run(2.0)
    assert orders(fleet) == []


def test_two_cores_hold_as_many_replicas_as_their_memory_takes() -> None:
    """Six instances of one thread: the worker admits them, and the leader's plan keeps them."""
    fleet = CloudFleet(variant(NAME), workers=1, kinds=())
    (app,) = (record for record in fleet.records if isinstance(record, AppRecord))
    fleet.register(replace(app, replicas={"m": 6}))
    fleet.stage.run(90.0)
    assert fleet.states(NAME) == {"w0": ["Active"] * 6}
    table = fleet.stage.members["w0"].actor._table  # type: ignore[attr-defined]
    assert not any(one.reclaimable for one in table.instances.values())
