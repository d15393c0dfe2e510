"""`infaas.list.workers`: the kind of machine, and the state that people are shown."""

from typing import Any

from bus.messages.fleet import DeviceStatus, WorkerHeartbeat
from bus.messages.public import Listing, ListRequest
from services.core.catalog import Catalog
from services.core.cluster import ClusterView
from services.dispatcher.listing import listing
from tests.support.simulated.fleet import PRICES


def beat(*, alive: bool, **more: Any) -> WorkerHeartbeat:
    device = DeviceStatus(
        device="cpu", kind="cpu", cores=2, memory_mb=4000.0, memory_used_mb=0.0, cores_used=0.0, utilisation=0.1,
        price_per_hour=0.1, alive=alive,
    )  # fmt: skip
    return WorkerHeartbeat(worker="w", hardware="cpu", incarnation=1, at=0.0, devices=[device], instances=[], **more)


def shown(*beats: WorkerHeartbeat) -> tuple[str, str]:
    view = ClusterView(PRICES)
    for each in beats:
        view.heartbeat(each, 0.0)
    found = listing("workers", ListRequest(), 0.0, Catalog(), view)
    assert isinstance(found, Listing)
    [item] = found.items
    return item["kind"], item["state"]


def test_booting_ready_down_draining() -> None:
    silent, alive = beat(alive=False, kind="big"), beat(alive=True, kind="big")
    assert shown(silent) == ("big", "Booting")
    assert shown(silent, alive) == ("big", "Ready")
    assert shown(alive, silent) == ("big", "Down")
    assert shown(alive, beat(alive=True, kind="big", draining=True)) == ("big", "Draining")
    assert shown(alive, beat(alive=True, kind="big", draining=True, leaving=True)) == ("big", "Draining")


def test_a_worker_without_a_kind_is_of_its_hardwares() -> None:
    assert shown(beat(alive=True)) == ("cpu", "Ready")
