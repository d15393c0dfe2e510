"""What a dispatcher takes to wait at an instance: its own queries exactly, others' as heartbeats tell them, which are late."""

import pytest

from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.core.cluster import STALE, ClusterView, Instance
from tests.support.simulated.fleet import PRICES, variant

NOW = 1000.0


class Told:
    """One instance, whose worker tells how many items it has every half second."""

    def __init__(self) -> None:
        self.view = ClusterView(PRICES)
        self.now = NOW
        self.view.set_app(AppRecord(app="app", links={"m": "1"}), [variant("v", model="m")])

    def heartbeat(self, queued: int) -> Instance:
        self.now += 0.5
        device = DeviceStatus(
            device="cpu", kind="cpu", cores=2, memory_mb=9000, memory_used_mb=0, cores_used=0, utilisation=0.1,
            price_per_hour=0.1,
        )  # fmt: skip
        status = InstanceStatus(instance="i", variant="v", device="cpu", state="Active", since=0.0, queued=queued)
        beat = WorkerHeartbeat(
            worker="w0", hardware="cpu", incarnation=1, at=self.now, devices=[device], instances=[status]
        )
        self.view.heartbeat(beat, self.now)
        return self.view.instances["i"]


def test_ours_that_are_done_since_the_worker_counted_are_not_taken_for_others() -> None:
    told = Told()
    empty = told.heartbeat(0).predict(1)
    instance = told.view.instances["i"]
    instance.take(2)
    instance.own -= 2
    assert told.heartbeat(2).predict(1) == pytest.approx(empty)


def test_what_others_sent_waits_before_ours() -> None:
    told = Told()
    told.heartbeat(0).take(2)
    assert told.heartbeat(5).others == 3
    assert told.view.instances["i"].own == 2


def test_a_queue_that_others_keep_full_is_seen_once_ours_are_long_gone() -> None:
    told = Told()
    instance = told.heartbeat(0)
    instance.take(4)
    instance.own -= 4
    seen = [told.heartbeat(4).others for _ in range(round(2 * STALE / 0.5) + 2)]
    assert seen[0] == 0
    assert seen[-1] == 4
