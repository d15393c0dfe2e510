"""How busy a worker is: its machine, or on a machine that workers share what its own instances compute."""

import pytest

from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.vms.fleet import READINGS, Fleet
from tests.support.data.events import beat, device, instance

CPU = ("cpu", False)


def busy(at: float, load: float) -> WorkerHeartbeat:
    figures = {"load": load, "mean_batch": 1.0 if load else 0.0, "latency_ms": 10.0}
    return beat(instance("v.w0-1", **figures), at=at, devices=[device(memory_mb=9000, utilisation=0.95)])


@pytest.mark.parametrize(
    ("shared", "load", "used"),
    [(False, 0.0, 0.95), (True, 0.0, 0.0), (True, 40.0, 0.4), (True, 90.0, 0.9), (True, 99.0, 0.95)],
)
def test_neighbours_on_a_shared_machine_are_no_use_of_the_workers(shared: bool, load: float, used: float) -> None:
    """Two threads, 10 ms an item: 40 items/s keep them busy for 0.4 of the time."""
    fleet = Fleet({}, (lambda variant: 2) if shared else None)
    for i in range(READINGS + 10):
        fleet.heartbeat(busy(100.0 + i, load), 100.0 + i)
    (seen,) = fleet.summaries(112.0, 5.0)
    assert seen.utilisation[CPU] == pytest.approx(used)
