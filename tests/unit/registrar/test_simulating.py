"""Simulated variants come with a registration or with the device, and go with the last device of their kind."""

from bus.codec import decode, encode
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, ExecutorExited, WorkerHeartbeat
from services.core.actor import Failed
from services.registrar.commands import ChangeSimulated
from services.registrar.policy import Rules
from tests.support.simulated.registrations import (
    Stage,
    app_record,
    build_order,
    complete,
    heartbeat,
    inspected,
    model_record,
    to_building,
    variant_record,
)

RULES = Rules()


def simulating(*kinds: str, worker: str = "w1", real: tuple[str, ...] = ()) -> WorkerHeartbeat:
    """A worker with its CPU and a device of each kind."""
    beat = heartbeat(worker)
    cpu = beat.devices[0]
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
    found = [decode(VariantRecord, value) for key, value in stage.catalog.items() if key.startswith("variant.")]
    return sorted(record.variant for record in found if record.simulated)


def with_catalogue() -> Stage:
    """A registrar that starts with one model registered."""
    earlier = Stage()
    for key, record in (("variant.mlp-v1-ort-fp32-t1-b8", variant_record()), ("model.mlp.1", model_record()), ("app.digits", app_record())):  # fmt: skip
        earlier.put("t-catalog", key, encode(record))
    return Stage(buckets=earlier)


def beats(stage: Stage, seconds: int, *worker: WorkerHeartbeat) -> None:
    for _ in range(seconds):
        for beat in worker:
            stage.tell(beat)
        stage.pass_time(1)


def test_a_registration_brings_those_of_the_devices_that_are_there() -> None:
    stage = Stage()
    stage.tell(simulating("gpu", "inferentia"))
    stage.register()
    stage.tell(inspected())
    stage.perform()
    order = build_order(stage)
    complete(stage, order)
    names = ["mlp-v1-simgpu-fp32-t1-b64", "mlp-v1-simgpu-fp32-t1-b8", "mlp-v1-siminferentia-fp32-t1-b8"]
    assert simulated(stage) == names
    assert stage.ends() == ["done"]
    assert set(stage.last().variants) == {*names, *(plan.variant for plan in order.plans)}


def test_without_such_a_device_there_is_none() -> None:
    stage = Stage()
    complete(stage, to_building(stage))
    beats(stage, 3, simulating(real=("gpu",)))
    assert simulated(stage) == []


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
    stage.sweep()
    assert not [do for do in stage.commands if isinstance(do.command, ChangeSimulated)]


def test_an_order_that_fails_is_given_again() -> None:
    stage = with_catalogue()
    stage.tell(simulating("gpu"))
    stage.sweep()
    order = stage.commands.pop()
    stage.sweep()
    assert stage.commands == [], "one at a time"
    stage.tell(Failed(order.id, "no bus"))
    stage.sweep()
    assert stage.commands.pop().command == order.command


def test_they_go_when_nobody_simulates_the_kind_any_more() -> None:
    stage = with_catalogue()
    beats(stage, 20, simulating("gpu"), simulating("inferentia", worker="w2"))
    beats(stage, int(RULES.worker_lost_s) - 1, simulating("gpu"))
    assert len(simulated(stage)) == 2, "a worker may be back in a moment"
    beats(stage, 3, simulating("gpu"))
    assert simulated(stage) == ["mlp-v1-simgpu-fp32-t1-b8"]
    later = Stage(buckets=stage)
    beats(later, int(RULES.worker_lost_s) + 2, heartbeat())
    assert simulated(later) == []


def test_a_registrar_that_slept_listens_before_it_deletes() -> None:
    stage = with_catalogue()
    beats(stage, 20, simulating("gpu"))
    stage.now += 100.0
    stage.sweep()
    assert stage.commands == []
    beats(stage, 5, simulating("gpu"))
    assert simulated(stage) == ["mlp-v1-simgpu-fp32-t1-b8"]


def test_the_exit_of_one_process_with_several_devices_costs_one_attempt() -> None:
    stage = Stage()
    stage.tell(simulating("gpu"))
    stage.register()
    for device in ("cpu", "gpu-0"):
        stage.tell(ExecutorExited(worker="w1", device=device, at=stage.now, reason="x"))
    assert len(stage.orders()) == 2
    assert stage.ends() == []
