"""What a worker asks to move goes to others: once, refused by the receiver where it must, with a machine where nothing fits."""

from typing import Any

import pytest
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.catalog import AppRecord, VariantRecord
from bus.messages.fleet import EnsureLoaded
from bus.messages.scaling import AskToMove
from services.autoscaler.vms.fleet import FleetWorker
from services.autoscaler.vms.placement import assign, place
from services.core.placement import Device, busy_quarters
from tests.support.data.events import beat, device, instance
from tests.support.simulated.autoscaled_fleet import GPU, ScalingFleet
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


def test_it_does_not_go_to_a_worker_that_has_asked_for_the_same_and_waits_there_until_that_is_long_ago() -> None:
    """Where all are as slow, as on shared cores, it would go to and fro."""
    fleet = fleet_of(workers=2)
    fleet.stage.run(4.0)
    ask(fleet, "w0")
    fleet.stage.run(4.0)
    assert orders(fleet) == [("w1", NAME, 1)]
    for _ in range(20):
        ask(fleet, "w1")
        fleet.stage.run(1.0)
    assert orders(fleet) == [("w1", NAME, 1)], "w0 asked less than half a minute ago"
    fleet.stage.run(10.0)
    ask(fleet, "w1")
    fleet.stage.run(4.0)
    assert orders(fleet) == [("w1", NAME, 1), ("w0", NAME, 1)]


def test_the_fullest_worker_with_room_keeps_others_empty_and_the_idlest_is_for_what_was_slowed_down() -> None:
    workers = [worker("a", 0.5, 5000.0), worker("b", 0.1)]
    chosen = (place(ON_GPU, workers, SHARE), place(ON_GPU, workers, SHARE, idlest=True))
    assert [one.name for one in chosen if one is not None] == ["a", "b"]
    assert place(ON_GPU, [worker("c", 0.0, SHARE * 16_000.0)], SHARE) is None


def test_refusals_try_the_next_worker_and_strangers_have_no_room() -> None:
    fleet = fleet_of()
    for name in ("w1", "w2"):
        fleet.stage.members[name].actor._orders._epoch = 9 if name == "w1" else 0  # has heard a later leader
    ask(fleet)
    fleet.stage.run(3.0)
    assert [worker for worker, _, _ in orders(fleet)] == ["w1", "w2"]
    assert fleet.states(NAME) == {"w2": ["Active"]}
    fleet = fleet_of(workers=1)
    empty = beat(worker="x", at=fleet.stage.now, devices=[])
    fleet.stage.publish(fleet.subjects.worker_heartbeat("x"), empty)
    ask(fleet)
    fleet.stage.run(2.0)
    assert orders(fleet) == []


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
    fleet.ask(seconds=2.0)
    [there] = fleet.states(NAME)
    fleet.devices[there].slow = 8.0
    for _ in range(400):
        fleet.ask(seconds=0.25)
        if there not in fleet.states(NAME):
            break
    [now] = fleet.states(NAME)
    assert (there, now) == ("w0", "w2")
    released = [event for event in fleet.scalings("unload") if event.worker == "w0"]
    assert "moved to w2" in released[0].reason


def test_two_cores_hold_as_many_replicas_as_their_memory_takes() -> None:
    """Six instances of one thread: the worker admits them, and the leader's plan keeps them."""
    fleet = CloudFleet(variant(NAME), workers=1, kinds=())
    (app,) = (record for record in fleet.records if isinstance(record, AppRecord))
    fleet.register(replace(app, replicas={"m": 6}), seconds=90.0)
    assert fleet.states(NAME) == {"w0": ["Active"] * 6}
    table = fleet.stage.members["w0"].actor._table  # type: ignore[attr-defined]
    assert not any(one.reclaimable for one in table.instances.values())


# -- A GPU that one variant keeps busy is left to it while others are free, and shared when capacity is short.
HOT, OTHERS = "hot", ("a", "b", "c")
SECOND = replace(GPU, name="gpu-1")
RATE = {HOT: 90.0, **dict.fromkeys(OTHERS, 4.0)}  # items/s: 0.73 and 0.09 of an instance's


def on_gpu(model: str, memory_mb: float = 2000.0) -> VariantRecord:
    """123 items/s in batches of 8, which take 65 ms. The memory of a device is for several."""
    name = f"{model}-v1-trt-fp32-t1-b8"
    record = variant(name, model=model, hardware="gpu", framework="trt", base_ms=25.0, per_item_ms=5.0)
    return replace(record, profile=replace(record.profile, memory_mb=memory_mb))


def served(
    devices: dict[str, tuple[Device, ...]], *, controlled: bool
) -> tuple[dict[tuple[str, str], set[str]], float]:
    """The hot model's load begins, then the others', one a second. Returns each device's models, and the share of queries answered.

    The hot model takes the least memory, so that its GPU would have the most room for others.
    """
    fleet = ScalingFleet(
        on_gpu(HOT, 500.0), *map(on_gpu, OTHERS), workers=len(devices), devices=devices, controlled=controlled
    )
    begins = {HOT: 0.0} | {model: 4.0 + i for i, model in enumerate(OTHERS)}
    due, asked, start = dict.fromkeys(RATE, 0.0), [], fleet.stage.now
    while fleet.stage.now - start < 14.0:
        for model, rate in RATE.items():
            due[model] += 0.02 * rate * (fleet.stage.now - start >= begins[model])
            while due[model] >= 1.0:
                due[model] -= 1.0
                asked.append(fleet.ask(model=model, latency_ms=400))
        fleet.stage.run(0.02)
    fleet.stage.run(1.0)
    found: dict[tuple[str, str], set[str]] = {}
    for running_on in devices:
        table = fleet.stage.members[running_on].actor._table  # type: ignore[attr-defined]
        for one in table.instances.values():
            found.setdefault((running_on, one.device), set()).add(one.record.model)
    return found, fleet.answered(asked)


@pytest.mark.parametrize("controlled", [True, False])
@pytest.mark.parametrize(
    "devices", [{"w0": (GPU,), "w1": (GPU,)}, {"w0": (GPU, SECOND)}], ids=["two workers", "two devices"]
)
def test_no_other_variant_is_placed_beside_a_hot_one_while_a_gpu_is_free(
    devices: dict[str, tuple[Device, ...]], controlled: bool
) -> None:
    models, answered = served(devices, controlled=controlled)
    assert {HOT} in models.values()
    assert set().union(*models.values()) == {HOT, *OTHERS}
    assert answered == 1.0


@pytest.mark.parametrize("controlled", [True, False])
def test_the_only_gpu_is_shared(controlled: bool) -> None:
    models, answered = served({"w0": (GPU,)}, controlled=controlled)
    assert models == {("w0", "gpu-0"): {HOT, *OTHERS}}
    assert 0.9 < answered < 1.0, "together they ask for a little more than it can do"


# -- the plan's part


def running_on(name: str, *running: str) -> FleetWorker:
    found = FleetWorker(name, 0.0)
    gpu = device("gpu-0", cores=1, memory_mb=16_000.0, utilisation=0.0, price_per_hour=3.0)
    there = [instance(f"{each}.{name}", each, device="gpu-0") for each in running]
    found.heard(beat(*there, worker=name, devices=[gpu]), 0.0)
    return found


def placed(group: list[FleetWorker], used: dict[str, float], counts: dict[str, int]) -> dict[str, list[str]]:
    """Worker to the models that the plan wants there."""
    records = {on_gpu(model).variant: on_gpu(model, 500.0 if model == HOT else 2000.0) for model in (HOT, *OTHERS)}
    of = {model: on_gpu(model).variant for model in (HOT, *OTHERS)}
    found = assign(
        group,
        {of[model]: (count, 0) for model, count in counts.items()},
        records,
        0.8,
        lambda _, __: False,
        {of[model]: share for model, share in used.items()},
    )
    return {
        one.name: sorted(records[name].model for name, (count, _) in has.items() if count) for one, has in found.items()
    }


def test_hot_variants_come_first_and_where_none_is_hot_instances_are_spread() -> None:
    used = {HOT: 0.8, "a": 0.05, "b": 0.05, "c": 0.05}
    counts = dict.fromkeys(used, 1)
    assert placed([running_on("w0"), running_on("w1")], used, counts) == {"w0": [HOT], "w1": ["a", "b", "c"]}
    assert placed([running_on("w0")], used, counts) == {"w0": ["a", "b", "c", HOT]}
    running = running_on("w1", on_gpu(HOT).variant)
    assert placed([running_on("w0"), running], used, counts) == {"w0": ["a", "b", "c"], "w1": [HOT]}
    used = dict.fromkeys((HOT, *OTHERS), 0.05)
    assert placed([running_on("w0"), running_on("w1")], used, dict.fromkeys(used, 1)) == {
        "w0": ["a", "c"],
        "w1": ["b", HOT],
    }


def test_only_gpus_are_left_alone() -> None:
    assert [busy_quarters(on_gpu("a"), used) for used in (-0.1, 0.0, 0.24, 0.25, 0.8, 1.0, 7.0)] == [
        0, 0, 0, 1, 3, 4, 4,
    ]  # fmt: skip
    assert busy_quarters(variant(), 1.0) == 0
