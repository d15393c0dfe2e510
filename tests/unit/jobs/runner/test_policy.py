"""When a worker takes offline work: the table of the throttle."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.fleet import WorkerHeartbeat
from services.core.settings import JobsSettings
from services.jobs.runner.policy import obstacle, ranked
from tests.support.data.heartbeats import beat, device, instance
from tests.support.simulated.fleet import PRICES, variant

RECORD = variant("v")  # a batch of n takes 2 + 0.5 n ms
SETTINGS = JobsSettings()


def why(heard: WorkerHeartbeat | None, settings: JobsSettings = SETTINGS) -> str:
    return obstacle(heard, "cpu", {"v": RECORD}.get, settings)


@pytest.mark.parametrize(
    ("heard",),
    [
        (beat(),),
        (beat(devices=[device(utilisation=0.4)]),),  # not above 40 %
        (beat(devices=[device(utilisation=0.9, offline=0.5)]),),  # its own use does not count
        (beat(instance(load=100.0, latency_ms=2.5, mean_batch=1.0)),),  # as profiled
        (beat(instance(load=100.0, latency_ms=4.4, mean_batch=1.0)),),  # 1.76 times, but less than 2 ms longer
        (beat(instance(load=100.0, latency_ms=6.0, mean_batch=8.0)),),  # as profiled for its batches
        (beat(instance(load=0.0, latency_ms=50.0, mean_batch=1.0)),),  # serves nothing online
        (beat(instance(variant="unknown", load=1.0, latency_ms=50.0, mean_batch=1.0)),),
        (beat(instance(state="Loading")),),
    ],
)
def test_a_calm_worker_takes_offline_work(heard: WorkerHeartbeat) -> None:
    assert why(heard) == ""


@pytest.mark.parametrize(
    ("settings", "waits"),
    [
        ({}, True),
        ({"latency_ratio": 3.0}, False),
        ({"latency_least_ms": 5.0}, False),
    ],
)
def test_how_much_slower_online_batches_may_be_is_set(settings: dict[str, float], waits: bool) -> None:
    """A batch takes 6 ms, and its profile says 2.5."""
    heard = beat(instance(load=100.0, latency_ms=6.0, mean_batch=1.0))
    assert bool(why(heard, JobsSettings(**settings))) is waits


@pytest.mark.parametrize(
    ("heard", "says"),
    [
        (None, "the worker is silent"),
        (beat(draining=True), "the worker is leaving"),
        (beat(devices=[device(utilisation=0.41)]), "cpu is used 41% by other work, offline work waits above 40%"),
        (beat(devices=[device(utilisation=0.95, offline=0.5)]), "cpu is used 45%"),
        (beat(devices=[device(alive=False)]), "the executor of cpu does not run"),
        (beat(devices=[device("gpu-0")]), "the executor of cpu does not run"),
        (beat(instance(state="Overloaded")), "v is Overloaded"),
        (beat(instance(state="Interfered")), "v is Interfered"),
        (beat(instance(app_states={"app": "Interfered"})), "v is Interfered"),
        (beat(instance(load=1.0, latency_ms=5.0, mean_batch=1.0)), "v takes 5 ms a batch, its profile says 2.5 ms"),
        (beat(instance(), instance(variant="x", state="Overloaded")), "x is Overloaded"),
    ],
)  # fmt: skip
def test_a_busy_worker_takes_none_and_says_why(heard: WorkerHeartbeat | None, says: str) -> None:
    assert why(heard).startswith(says)


@given(st.floats(0, 1), st.floats(0, 1), st.floats(0, 1))
def test_work_is_taken_exactly_while_others_use_no_more_than_the_limit(used: float, own: float, limit: float) -> None:
    calm = why(beat(devices=[device(utilisation=used, offline=own)]), JobsSettings(utilisation_below=limit)) == ""
    assert calm == (max(0.0, used - own) <= limit)


def test_the_cheapest_item_comes_first_among_what_the_worker_has_devices_for() -> None:
    quick = variant("quick", base_ms=1.0)
    gpu = variant("gpu", hardware="gpu", base_ms=0.01, per_item_ms=0.001)
    fake = variant("fake", hardware="gpu", simulated=True, base_ms=0.01, per_item_ms=0.001)
    devices = [device(), device("gpu-0", cores=1, simulated=True)]
    found = [(record.variant, where) for record, where in ranked([RECORD, quick, gpu, fake], devices, PRICES, 8)]
    assert ("gpu", "gpu-0") not in found  # a simulated device runs no real variant
    assert found.index(("quick", "cpu")) < found.index(("v", "cpu"))
    assert ("fake", "gpu-0") in found
    away = [device("cpu-0", alive=False), device("cpu-1")]
    assert ranked([RECORD], away, PRICES, 8) == [(RECORD, "cpu-1")]
    assert ranked([RECORD], away[:1], PRICES, 8) == [(RECORD, "cpu-0")]
