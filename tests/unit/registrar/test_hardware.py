"""Registered models get variants for a kind of device when a worker that really has one joins."""

from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest
from msgspec.structs import asdict, replace

from bus.codec import decode, encode
from bus.messages.fleet import DeviceStatus, ExecutorExited, WorkerHeartbeat
from bus.messages.work import BuildVariants, InspectModel
from services.core.actor import Done, Failed
from services.core.catalog import key_of
from services.core.placement import container_kind
from services.core.requests import TakeOver
from services.core.settings import RegistrarSettings
from services.registrar.commands import (
    AddVariants,
    AlreadyTaken,
    ChangeSimulated,
    ClaimRegistration,
    Finish,
    RegistrationClaimed,
    RegistrationRecord,
)
from services.registrar.policy import REGISTRAR_TIMEOUT_S, SILENCE_S, WORKER_LOST_S, plans
from tests.support.simulated.registrations import (
    REQUEST,
    Stage,
    app_record,
    build_order,
    building,
    built,
    complete,
    failed,
    finished,
    heartbeat,
    inspected,
    model_record,
    registered,
    variant_record,
)
from tests.unit.registrar.test_edge import Place, on_a_bus

WORKING = {"ort": "", "torch": "not installed", "ort-cuda": "", "tensorrt": "", "torch-cuda": "torch is not installed"}
CPU_ONLY = heartbeat("w1")


def with_gpu(worker: str = "g1", incarnation: int = 1, simulated: bool = False, kind: str = "gpu") -> WorkerHeartbeat:
    beat = heartbeat(worker, utilisation=0.0)
    device = DeviceStatus(
        device=f"{kind}-0", kind=kind, cores=1, memory_mb=81920, memory_used_mb=0, cores_used=0, utilisation=0,
        price_per_hour=3.06, simulated=simulated,
    )  # fmt: skip
    return replace(beat, devices=[*beat.devices, device], incarnation=incarnation)


def with_models(*models: str) -> Stage:
    """A registrar that starts with these registered."""
    earlier = Stage()
    for number, name in enumerate(models):
        earlier.put("t-catalog", f"variant.{name}-v1-ort-fp32-t1-b8", encode(variant_record(f"{name}-v1-ort-fp32-t1-b8", model=name)))  # fmt: skip
        earlier.put(
            "t-catalog", f"model.{name}.1", encode(model_record(name, created=float(number), inputs_key="images"))
        )
    earlier.put("t-catalog", "app.digits", encode(app_record(links=dict.fromkeys(models, "1"))))
    return Stage(buckets=earlier)


def beats(stage: Stage, seconds: int, *workers: WorkerHeartbeat) -> None:
    for _ in range(seconds):
        for beat in workers:
            stage.tell(beat)
        stage.pass_time(1)


def inspections(stage: Stage, worker: str = "g1") -> list[InspectModel]:
    return [order for order in stage.orders(worker) if isinstance(order, InspectModel)]


def inspect(stage: Stage, worker: str = "g1", **changes: object) -> InspectModel:
    """Answer the worker's last inspection."""
    order = inspections(stage, worker)[-1]
    fact = inspected(order.registration, worker, **({"hardware": order.hardware, "frameworks": WORKING} | changes))
    stage.settle(fact)
    return order


def on(stage: Stage, hardware: str) -> list[str]:
    found = stage.variants
    return sorted(record.variant for record in found if record.hardware == hardware and not record.simulated)


def finish(stage: Stage, worker: str = "g1") -> BuildVariants:
    order = build_order(stage, worker)
    for plan in order.plans:
        stage.tell(built(plan, order.registration, worker, hardware=plan.hardware))
    stage.settle(finished("build", order.registration, worker))
    return order


def test_a_registered_model_gets_its_variants_when_the_first_gpu_joins() -> None:
    stage = with_models("mlp")
    before = dict(stage.catalog)
    beats(stage, 3, CPU_ONLY)
    assert stage.orders() == []
    beats(stage, 2, CPU_ONLY, with_gpu())
    order = inspect(stage)
    assert (order.stored, order.hardware, order.object, order.validation) == (True, "gpu", "aa", "bb")
    assert order.inputs_key == "images"
    build = finish(stage)
    assert {plan.hardware for plan in build.plans} == {"gpu"}
    assert {key: value for key, value in stage.catalog.items() if key in before} == before, "the app stays as it is"
    names = [f"mlp-v1-{framework}-t1-b{most}" for framework in ("ort-cuda-fp16", "ort-cuda-fp32", "tensorrt-fp16", "tensorrt-fp32", "tensorrt-int8") for most in (64, 8)]  # fmt: skip
    assert on(stage, "gpu") == sorted(names)
    assert on(stage, "cpu") == ["mlp-v1-ort-fp32-t1-b8"]
    assert stage.ends(order.registration) == ["done"]
    assert stage.last(order.registration).app == "digits"
    beats(stage, 30, CPU_ONLY, with_gpu(incarnation=2))
    assert len(inspections(stage)) == 1
    assert stage.orders("w1") == []


def test_simulated_gpus_and_containers_get_no_variants() -> None:
    stage = with_models("mlp")
    beats(stage, 5, with_gpu(simulated=True))
    assert inspections(stage) == []
    earlier = with_models("mlp")
    earlier.put("t-catalog", "model.mlp.1", encode(model_record(format="container")))
    stage = Stage(buckets=earlier)
    beats(stage, 5, CPU_ONLY, with_gpu())
    assert stage.orders("g1") == []


def test_containers_are_none_and_build_nothing() -> None:
    beat = with_gpu("c1", kind=container_kind("mlp", "1"))
    container = replace(beat, devices=beat.devices[1:], hardware="container")
    stage = with_models("mlp")
    beats(stage, 5, container)
    stage.register(replace(REQUEST, model="cnn"))
    beats(stage, 5, container)
    assert stage.orders("c1") == []


def test_one_model_after_the_other_the_newest_first() -> None:
    stage = with_models("old", "new")
    beats(stage, 5, with_gpu())
    assert len(inspections(stage)) == 1
    inspect(stage)
    assert {plan.variant.partition("-")[0] for plan in build_order(stage, "g1").plans} == {"new"}
    finish(stage)
    beats(stage, 3, with_gpu())
    inspect(stage)
    finish(stage)
    assert {name.partition("-")[0] for name in on(stage, "gpu")} == {"old", "new"}


def test_one_model_at_a_time_and_none_without_such_a_device() -> None:
    stage = with_models("old", "new")
    beats(stage, 5, with_gpu("g1"), with_gpu("g2"))
    assert len(inspections(stage, "g1") + inspections(stage, "g2")) == 1
    stage = registered()
    beats(stage, 3, simulating(real=("gpu",)))
    assert simulated(stage) == []


def test_a_new_registration_gets_them_after_those_for_the_cpu() -> None:
    stage = Stage()
    beats(stage, 1, with_gpu())
    stage.register()
    stage.settle(inspected("r1", "g1"))
    order = build_order(stage, "g1")
    assert {plan.hardware for plan in order.plans} == {"cpu"}
    complete(stage, order, "g1")
    assert stage.ends() == ["done"]
    beats(stage, 2, with_gpu())
    assert inspect(stage).stored
    finish(stage)
    assert on(stage, "cpu")
    assert on(stage, "gpu")


def test_who_waits_for_a_new_model_comes_first() -> None:
    stage = with_models("one", "two")
    beats(stage, 2, with_gpu())
    fit = inspections(stage)[-1]
    stage.register(replace(REQUEST, model="three"))
    stage.pass_time(3, ["w1"])  # a worker with a CPU only takes it, while the other one is busy
    assert [order.registration for order in inspections(stage, "w1")] == ["r1"]
    assert [order.registration for order in inspections(stage)] == [fit.registration]
    stage.register(replace(REQUEST, model="four", registration="r2"))
    stage.tell(finished("inspect", fit.registration, "g1", reason="no"))
    beats(stage, 3, with_gpu())
    assert inspections(stage)[-1].registration == "r2"


def test_what_failed_is_tried_again_when_the_worker_starts_anew() -> None:
    stage = with_models("mlp")
    beats(stage, 2, with_gpu())
    first = inspect(stage, frameworks=dict.fromkeys(WORKING, "no driver"))
    assert stage.ends(first.registration) == ["failed"]
    assert "no driver" in (stage.last(first.registration).reason or "")
    beats(stage, 30, with_gpu())
    assert len(inspections(stage)) == 1
    beats(stage, 2, with_gpu(incarnation=2))
    assert len(inspections(stage)) == 2
    inspect(stage)
    finish(stage)
    assert on(stage, "gpu")


def test_variants_that_fail_do_not_stop_the_others() -> None:
    stage = with_models("mlp")
    beats(stage, 2, with_gpu())
    order = inspect(stage)
    build = build_order(stage, "g1")
    for plan in build.plans:
        if plan.framework == "tensorrt":
            stage.tell(failed(plan, order.registration, "g1", "no engine"))
        else:
            stage.tell(built(plan, order.registration, "g1", hardware="gpu"))
    stage.settle(finished("build", order.registration, "g1"))
    assert all("ort-cuda" in name for name in on(stage, "gpu"))
    assert {failure.reason for failure in stage.last(order.registration).failures} == {"no engine"}


def test_a_gpu_that_leaves_ends_it_and_others_go_on() -> None:
    stage = with_models("mlp")
    beats(stage, 2, with_gpu())
    fit = inspections(stage)[-1].registration
    beats(stage, int(WORKER_LOST_S + SILENCE_S) + 10, CPU_ONLY)
    assert stage.ends(fit) == ["failed"]
    assert "gpu" in (stage.last(fit).reason or "")
    assert stage.orders("w1") == []


def test_another_registrar_was_faster_and_nobody_hears_of_it() -> None:
    stage = with_models("mlp")
    stage.tell(with_gpu())
    stage.tick()
    (claim,) = [do for do in stage.commands if do.id[0] == "claim"]
    stage.commands.remove(claim)
    stage.tell(Done(claim.id, AlreadyTaken("registration")))
    assert stage.records == []
    assert inspections(stage) == []


def test_the_work_of_a_dead_registrar_goes_on_for_the_same_hardware() -> None:
    first = with_models("mlp")
    beats(first, 2, with_gpu())
    second = Stage("b", buckets=first)
    beats(second, int(REGISTRAR_TIMEOUT_S) + 3, with_gpu())
    (order,) = inspections(second)
    assert order == inspections(first)[-1]
    assert (order.stored, order.hardware) == (True, "gpu")


def test_the_exit_of_one_process_costs_one_attempt_whatever_its_devices() -> None:
    stage = with_models("mlp")
    beats(stage, 2, with_gpu())
    for device in ("cpu", "gpu-0"):
        stage.tell(ExecutorExited(worker="g1", device=device, at=stage.now, reason="x"))
    assert len(inspections(stage)) == 2
    assert stage.ends(inspections(stage)[-1].registration) == []
    stage = Stage()
    stage.tell(simulating("gpu"))
    stage.register()
    for device in ("cpu", "gpu-0"):
        stage.tell(ExecutorExited(worker="w1", device=device, at=stage.now, reason="x"))
    assert len(stage.orders()) == 2
    assert stage.ends() == []


def test_plans_name_only_what_the_worker_has() -> None:
    def found(format: str, hardware: str, **frameworks: str) -> list[tuple[str, str, str]]:
        fact = inspected(hardware=hardware, frameworks={"ort": "", "torch": "", **frameworks}, operators=["Conv"])
        made = plans("m", "1", format, fact, 8, RegistrarSettings(max_batches=(8, 64)))
        assert {plan.threads for plan in made} <= {1}
        assert {plan.max_batch for plan in made} <= {8, 64}
        assert {plan.hardware for plan in made} <= {hardware}
        return sorted({(plan.framework, plan.precision, plan.format) for plan in made})

    torch = {"torch-cuda": ""}
    assert found("pt2", "gpu", **torch) == [("torch-cuda", "fp16", "pt2"), ("torch-cuda", "fp32", "pt2")]
    assert found("onnx", "gpu", **torch) == []
    assert found("onnx", "gpu", tensorrt="") == [("tensorrt", p, "onnx") for p in ("fp16", "fp32", "int8")]
    assert found("pt2", "tpu", **torch) == []


@pytest.mark.parametrize("measured", [{"contended": True}, {"contexts": 2}])
def test_the_registration_keeps_what_is_needed_later(measured: dict[str, Any]) -> None:
    stage, order = building(replace(REQUEST, inputs_key="images", labels_key="classes", **measured))
    assert measured.items() <= asdict(order).items()
    complete(stage, order)
    (record,) = [value for key, value in stage.catalog.items() if key.startswith("model.")]
    assert b"images" in record
    assert b"classes" in record
    beats(stage, 2, with_gpu())
    inspect(stage)
    assert measured.items() <= asdict(finish(stage)).items()  # measured in the same way there


# -- simulated variants come with a registration or with the device, and go with the last device of their kind


def simulating(*kinds: str, worker: str = "w1", real: tuple[str, ...] = ()) -> WorkerHeartbeat:
    """A worker with its CPU and a device of each kind."""
    cpu = heartbeat(worker).devices[0]
    more = [
        DeviceStatus(
            device=f"{kind}-0", kind=kind, cores=1, memory_mb=16384, memory_used_mb=0, cores_used=0, utilisation=0,
            price_per_hour=3.06, simulated=kind not in real,
        )
        for kind in (*kinds, *real)
    ]  # fmt: skip
    return heartbeat(worker, devices=[cpu, *more])


def simulated(stage: Stage) -> list[str]:
    """The names of the catalogue's simulated variants."""
    found = stage.variants
    return sorted(record.variant for record in found if record.simulated)


def with_catalogue() -> Stage:
    """A registrar that starts with one model registered."""
    earlier = Stage()
    for key, record in (("variant.mlp-v1-ort-fp32-t1-b8", variant_record()), ("model.mlp.1", model_record()), ("app.digits", app_record())):  # fmt: skip
        earlier.put("t-catalog", key, encode(record))
    return Stage(buckets=earlier)


def test_a_registration_brings_those_of_the_devices_that_are_there() -> None:
    stage = Stage()
    stage.tell(simulating("gpu", "inferentia"))
    stage.register()
    stage.settle(inspected())
    order = build_order(stage)
    complete(stage, order)
    names = ["mlp-v1-simgpu-fp32-t1-b64", "mlp-v1-simgpu-fp32-t1-b8", "mlp-v1-siminferentia-fp32-t1-b8"]
    assert simulated(stage) == names
    assert stage.ends() == ["done"]
    assert set(stage.last().variants) == {*names, *(plan.variant for plan in order.plans)}


def test_a_kind_that_joins_later_gets_its_variants_once() -> None:
    stage = with_catalogue()
    beats(stage, 2, heartbeat())
    assert simulated(stage) == []
    beats(stage, 2, heartbeat(), simulating("inferentia", worker="w2"))
    assert simulated(stage) == ["mlp-v1-siminferentia-fp32-t1-b8"]
    beats(stage, 2, simulating("inferentia", worker="w2"), simulating("gpu", worker="w3"))
    assert simulated(stage) == ["mlp-v1-simgpu-fp32-t1-b8", "mlp-v1-siminferentia-fp32-t1-b8"]
    stage.commands.clear()
    stage.tell(simulating("gpu", "inferentia"))
    stage.tick()
    assert not [do for do in stage.commands if isinstance(do.command, ChangeSimulated)]


def test_an_order_that_fails_is_given_again() -> None:
    stage = with_catalogue()
    stage.tell(simulating("gpu"))
    stage.tick()
    order = stage.commands.pop()
    stage.tick()
    assert stage.commands == [], "one at a time"
    stage.tell(Failed(order.id, "no bus"))
    stage.tick()
    assert stage.commands.pop().command == order.command


def test_they_go_when_nobody_simulates_the_kind_any_more() -> None:
    stage = with_catalogue()
    beats(stage, 20, simulating("gpu"), simulating("inferentia", worker="w2"))
    beats(stage, int(WORKER_LOST_S) - 1, simulating("gpu"))
    assert len(simulated(stage)) == 2, "a worker may be back in a moment"
    beats(stage, 3, simulating("gpu"))
    assert simulated(stage) == ["mlp-v1-simgpu-fp32-t1-b8"]
    later = Stage(buckets=stage)
    beats(later, int(WORKER_LOST_S) + 2, heartbeat())
    assert simulated(later) == []


def test_a_registrar_that_slept_listens_before_it_deletes() -> None:
    stage = with_catalogue()
    beats(stage, 20, simulating("gpu"))
    stage.now += 100.0
    stage.tick()
    assert {do.id[0] for do in stage.commands} <= {"prune"}
    beats(stage, 5, simulating("gpu"))
    assert simulated(stage) == ["mlp-v1-simgpu-fp32-t1-b8"]


# -- the edge, for models that are registered already: it reserves no version, and keeps the kind

WORK = RegistrationRecord(
    registration="fit-1",
    request=replace(REQUEST, registration="fit-1"),
    registrar="a",
    created=1.0,
    version="1",
    hardware="gpu",
)


@pytest.fixture
def place() -> AbstractAsyncContextManager[Place]:
    return on_a_bus()


async def test_a_registered_version_is_worked_on_by_one_registrar(place: Place) -> None:
    await place.catalog.put("model.mlp.1", encode(model_record()))
    assert await place.do(ClaimRegistration(record=WORK, next_version=2)) == RegistrationClaimed(WORK)
    assert await place.do(ClaimRegistration(record=WORK, next_version=2)) == RegistrationClaimed(WORK)
    other = replace(WORK, registrar="b", created=2.0)
    assert await place.do(ClaimRegistration(record=other, next_version=2)) == AlreadyTaken("registration")
    assert await place.keys() == {"model.mlp.1", "work.fit-1"}
    ours = await place.do(TakeOver(work="fit-1", owner="b", previous="a"))
    assert ours == replace(WORK, registrar="b")
    assert decode(RegistrationRecord, (await place.status.get("work.fit-1")).value or b"") == ours
    await place.do(Finish(registration="fit-1", model="mlp", version="1", uploads=()))
    assert await place.keys() == {"model.mlp.1"}


async def test_variants_are_added_to_what_is_registered_and_to_nothing_else(place: Place) -> None:
    record = variant_record("mlp-v1-tensorrt-fp16-t1-b64", hardware="gpu", framework="tensorrt", precision="fp16")
    command = AddVariants(model="mlp", version="1", variants=(record,))
    refused = await place.do(command)
    assert "mlp" in refused.message
    assert await place.keys() == set()
    await place.catalog.put("model.mlp.1", encode(model_record()))
    for _ in range(2):
        assert await place.do(command) is None
    assert await place.keys() == {"model.mlp.1", key_of(record)}
