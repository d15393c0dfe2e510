"""A GPU that one variant keeps busy is left to it while others are free, and shared when capacity is short."""

import pytest
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from services.autoscaler.vms.fleet import FleetWorker
from services.autoscaler.vms.placement import assign
from services.core.placement import Device, busy_quarters
from tests.support.data.heartbeats import beat, device, instance
from tests.support.simulated.autoscaled_fleet import GPU, ScalingFleet
from tests.support.simulated.fleet import variant

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
    for worker in devices:
        table = fleet.stage.members[worker].actor._table  # type: ignore[attr-defined]
        for one in table.instances.values():
            found.setdefault((worker, one.device), set()).add(one.record.model)
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


def worker(name: str, *running: str) -> FleetWorker:
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


def test_the_plan_gives_a_hot_variant_a_worker_first_and_the_others_what_is_left() -> None:
    used = {HOT: 0.8, "a": 0.05, "b": 0.05, "c": 0.05}
    counts = dict.fromkeys(used, 1)
    assert placed([worker("w0"), worker("w1")], used, counts) == {"w0": [HOT], "w1": ["a", "b", "c"]}
    assert placed([worker("w0")], used, counts) == {"w0": ["a", "b", "c", HOT]}
    running = worker("w1", on_gpu(HOT).variant)
    assert placed([worker("w0"), running], used, counts) == {"w0": ["a", "b", "c"], "w1": [HOT]}


def test_where_none_is_hot_instances_are_spread() -> None:
    used = dict.fromkeys((HOT, *OTHERS), 0.05)
    assert placed([worker("w0"), worker("w1")], used, dict.fromkeys(used, 1)) == {"w0": ["a", "c"], "w1": ["b", HOT]}


def test_only_gpus_are_left_alone() -> None:
    assert [busy_quarters(on_gpu("a"), used) for used in (-0.1, 0.0, 0.24, 0.25, 0.8, 1.0, 7.0)] == [
        0, 0, 0, 1, 3, 4, 4,
    ]  # fmt: skip
    assert busy_quarters(variant(), 1.0) == 0
