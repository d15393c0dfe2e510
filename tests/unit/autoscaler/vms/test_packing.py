"""Where instances go that take turns on a device: where it has time for them."""

from msgspec.structs import replace

from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from services.autoscaler.vms.fleet import Worker
from services.autoscaler.vms.packing import FULL, pack
from tests.support.simulated.fleet import variant

NOW = 1000.0
ON_GPU = replace(variant(), hardware="gpu")
SHARE = 0.8


def worker(name: str, used: float, memory_used_mb: float = 0.0) -> Worker:
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
    found = Worker(name, NOW)
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
