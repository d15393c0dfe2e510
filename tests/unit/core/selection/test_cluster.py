"""Real and simulated devices of one kind in one cluster: each variant is placed and priced on its own sort."""

from collections.abc import Mapping

import pytest

from bus.messages.catalog import AppRecord
from bus.messages.fleet import DeviceStatus
from services.core.cost import instance_price_per_s
from services.core.selection.cluster import ClusterView, RefusedLoad
from services.core.selection.eligibility import Ask
from services.core.selection.instances import STALE, Instance
from services.core.selection.policy import InfaasPolicy
from tests.support.data.events import beat, device, instance
from tests.support.simulated.fleet import PRICES, variant

REAL = variant("real", hardware="gpu")
SIMULATED = variant("simulated", hardware="gpu", simulated=True)


def gpu(memory_mb: float, used: float = 0.0, simulated: bool = True) -> DeviceStatus:
    return device("gpu-0", cores=1, memory_mb=memory_mb, utilisation=used, price_per_hour=3.06, simulated=simulated)


def view() -> ClusterView:
    view = ClusterView(PRICES)
    view.set_app(AppRecord(app="app", links={"m": "1"}), [REAL, SIMULATED])
    for worker, memory, used, simulated in (("a", 80_000, 0.9, False), ("b", 16_000, 0.1, True), ("c", 16_000, 0.0, True)):  # fmt: skip
        view.heartbeat(beat(worker=worker, at=1.0, devices=[gpu(memory, used, simulated)]), 1.0)
    return view


def test_prices_and_workers_are_those_of_the_same_sort_and_a_first_device_sets_one() -> None:
    assert view().least_utilised("gpu") == "a"
    assert view().least_utilised("gpu", simulated=True) == "c"
    assert view().least_utilised("gpu", frozenset({"c"}), simulated=True) == "b"
    assert view().least_utilised("inferentia", simulated=True) is None
    assert view().nominal_price_per_s(REAL) == pytest.approx(instance_price_per_s(REAL, PRICES, 1, 80_000))
    assert view().nominal_price_per_s(SIMULATED) == pytest.approx(instance_price_per_s(SIMULATED, PRICES, 1, 16_000))
    there = view()
    before = [float(there.apps["app"].cost[1])]
    for workers in ("b", "c"):
        there.lose_worker(workers)
    for devices in ([], [gpu(32_000)]):
        there.heartbeat(beat(worker="d", hardware="gpu", at=2.0, devices=devices), 2.0)
    assert float(there.apps["app"].cost[1]) == pytest.approx(before[0] / 2)


# -- What a dispatcher takes to wait at an instance: its own queries exactly, others' as heartbeats tell them, which
# are late.

NOW = 1000.0


class Told:
    """One instance, whose worker tells how many items it has every half second."""

    def __init__(self) -> None:
        self.view = ClusterView(PRICES)
        self.now = NOW
        self.view.set_app(AppRecord(app="app", links={"m": "1"}), [variant("v", model="m")])

    def heartbeat(self, queued: int, levels: Mapping[int, int] | None = None) -> Instance:
        self.now += 0.5
        self.view.heartbeat(beat(instance(queued=queued, levels=dict(levels or {})), at=self.now), self.now)
        return self.view.instances["i"]


def test_what_others_sent_waits_before_ours_and_ours_are_not_taken_for_it() -> None:
    told = Told()
    empty = told.heartbeat(0).predict(1, None, NOW + 1.0, NOW)
    instance = told.view.instances["i"]
    instance.take(2, NOW, NOW + 1.0)
    instance.release(2)
    assert told.heartbeat(2).predict(1, None, NOW + 1.0, NOW) == pytest.approx(empty)
    told = Told()
    told.heartbeat(0).take(2, NOW, NOW + 1.0)
    assert told.heartbeat(5).others == 3
    assert told.view.instances["i"].own == 2
    told = Told()
    instance = told.heartbeat(0)
    instance.take(4, NOW, NOW + 1.0)
    instance.release(4)
    seen = [told.heartbeat(4).others for _ in range(round(2 * STALE / 0.5) + 2)]
    assert (seen[0], seen[-1]) == (0, 4)


def test_a_variant_is_loaded_on_no_cpu_that_adds_otherwise_than_the_one_it_was_measured_on() -> None:
    int8 = variant("int8", precision="int8", arithmetic="exact", base_ms=0.5)
    found = ClusterView(PRICES)
    found.set_app(AppRecord(app="app", links={"m": "1"}), [variant("fp32"), int8])
    for worker, used, arithmetic in (("plain", 0.0, "saturating"), ("vnni", 0.9, "exact")):
        cpu = device(memory_mb=8000, utilisation=used, arithmetic=arithmetic)
        found.heartbeat(beat(worker=worker, at=1.0, devices=[cpu]), 1.0)
    asked = Ask(app="app", items=1, deadline=100.0)
    load = InfaasPolicy().select(asked, 1.0, found).load
    assert load is not None and (load.record.variant, load.worker) == ("int8", "vnni")
    found.lose_worker("vnni")
    load = InfaasPolicy().select(asked, 1.0, found).load
    assert load is not None and (load.record.variant, load.worker) == ("fp32", "plain")


@pytest.mark.parametrize(("seconds", "told"), [(0.01, (1, 0.01)), (0.001, None), (-1.0, None)])
def test_only_a_query_that_would_be_in_time_alone_makes_those_that_give_way_leave_time(
    seconds: float, told: tuple[int, float] | None
) -> None:
    """A batch of one takes 2.5 ms; items of priority 5 are there."""
    there = Told()
    instance = there.heartbeat(0)
    instance.take(8, NOW, NOW + 1.0)
    there.view.lowest_priority = 5
    there.view.had_no_time(Ask(app="app", items=1, deadline=NOW + seconds, priority=1), NOW)
    assert instance.no_time == (told and pytest.approx(told))


def test_what_others_sent_gives_way_by_the_priorities_that_the_executor_tells() -> None:
    """Own ones are of priority 1. Those of others count like them, until the executor says what waits."""
    told = Told()
    instance = told.heartbeat(0)
    instance.take(4, NOW, NOW + 1.0, 1)
    told.heartbeat(12, {9: 12})
    assert (instance.others, instance.outranked(1)) == (8, 0), "a heartbeat is older than what the executor says itself"
    told.view.told(instance, {1: 5, 9: 3})
    assert [instance.outranked(priority) for priority in (1, 8, 9)] == [6, 6, 0]
    told.view.told(instance, {1: 4})
    assert instance.outranked(1) == 6, "the next ones will be as the last ones were"


def test_lower_priorities_are_heard_of_and_refusals_of_lost_workers_forgotten() -> None:
    told = Told()
    instance = told.heartbeat(6, {5: 2, 9: 4})
    assert [instance.outranked(priority) for priority in (1, 5, 9)] == [6, 4, 0]
    assert told.view.lowest_priority == 9
    there = Told()
    there.heartbeat(0)
    there.view.load_refused("v", "w0", RefusedLoad("no room", NOW + 5.0, lasting=True))
    assert there.view.closed_to("v", NOW) == {"w0"}
    there.view.lose_worker("w0")
    assert not there.view.refusals("v")


def test_what_a_lost_device_had_loaded_is_nowhere_any_more() -> None:
    there = Told()
    lost = there.heartbeat(0)
    assert there.view.by_variant["v"] == {"i": lost}
    assert there.view.lose_device("w0", lost.device) == [lost]
    assert not there.view.by_variant["v"] and not there.view.instances and not there.view.workers["w0"].instances


def test_what_a_cluster_without_a_living_executor_lacks() -> None:
    there = ClusterView(PRICES)
    assert there.missing == "a living executor"
    for alive, word in ((True, ""), (False, "a living executor"), (True, "")):
        there.heartbeat(beat(devices=[device(alive=alive)]), 2.0)
        assert there.missing == word
    there.lose_worker("w0")
    assert there.missing == "a living executor"


def test_nothing_is_kept_of_variants_that_no_app_has_and_no_worker_holds() -> None:
    there = Told()
    held = there.heartbeat(0)
    there.view.load_refused("v", "w0", RefusedLoad("no room", NOW + 5.0))
    [app] = there.view.apps
    there.view.drop_app(app)
    assert there.view.records.keys() == there.view.by_variant.keys() == {"v"}, "it serves until it is unloaded"
    there.view.remove(held.id)
    assert not there.view.records and not there.view.by_variant and not there.view.refusals("v")
