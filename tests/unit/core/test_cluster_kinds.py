"""Real and simulated devices of one kind in one cluster: each variant is placed and priced on its own sort."""

import pytest

from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from services.core.cluster import ClusterView
from services.core.cost import instance_price_per_s
from tests.support.simulated.fleet import PRICES, variant

REAL = variant("real", hardware="gpu")
SIMULATED = variant("simulated", hardware="gpu", simulated=True)


def view() -> ClusterView:
    view = ClusterView(PRICES)
    view.set_app(AppRecord(app="app", links={"m": "1"}), [REAL, SIMULATED])
    for worker, memory, used, simulated in (("a", 80_000, 0.9, False), ("b", 16_000, 0.1, True), ("c", 16_000, 0.0, True)):  # fmt: skip
        device = DeviceStatus(
            device="gpu-0", kind="gpu", cores=1, memory_mb=memory, memory_used_mb=0, cores_used=0, utilisation=used,
            price_per_hour=3.06, simulated=simulated,
        )  # fmt: skip
        view.heartbeat(WorkerHeartbeat(worker=worker, hardware="gpu", incarnation=1, at=1.0, devices=[device], instances=[]), 1.0)  # fmt: skip
    return view


def test_the_least_used_worker_is_one_of_the_same_sort() -> None:
    assert view().least_utilised("gpu") == "a"
    assert view().least_utilised("gpu", simulated=True) == "c"
    assert view().least_utilised("gpu", frozenset({"c"}), simulated=True) == "b"
    assert view().least_utilised("inferentia", simulated=True) is None


def test_a_price_is_that_of_a_device_of_the_same_sort() -> None:
    assert view().nominal_price_per_s(REAL) == pytest.approx(instance_price_per_s(REAL, PRICES, 1, 80_000))
    assert view().nominal_price_per_s(SIMULATED) == pytest.approx(instance_price_per_s(SIMULATED, PRICES, 1, 16_000))


def test_a_device_that_a_known_worker_gets_sets_the_price() -> None:
    there = view()
    before = [float(there.apps["app"].cost[1])]
    for workers in ("b", "c"):
        there.lose_worker(workers)
    device = DeviceStatus(
        device="gpu-0", kind="gpu", cores=1, memory_mb=32_000, memory_used_mb=0, cores_used=0, utilisation=0,
        price_per_hour=3.06, simulated=True,
    )  # fmt: skip
    for devices in ([], [device]):
        beat = WorkerHeartbeat(worker="d", hardware="gpu", incarnation=1, at=2.0, devices=devices, instances=[])
        there.heartbeat(beat, 2.0)
    assert float(there.apps["app"].cost[1]) == pytest.approx(before[0] / 2)
