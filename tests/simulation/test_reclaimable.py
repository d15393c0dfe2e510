"""Instances that nobody needs, in the simulator: production's actors, real queues, and the machine's bill."""

from math import fsum

import pytest

from bus.messages.events import CostEvent, ScalingEvent, StateEvent
from bus.messages.fleet import EnsureLoaded, Release
from services.simulation.run import BEGINS, WARM_UP
from tests.support.data.small_scenarios import CPU, PRICES, Told, load, machine, scenario, settings, variant

SMALL = variant("small-cpu", "small", "cpu", 17.3, accuracy=0.7, memory_mb=400.0)
LARGE = variant("large-cpu", "large", "cpu", 61.7, accuracy=0.9, memory_mb=2800.0)
MARKED, NEEDED = 6.0, 12.0


def run() -> Told:
    """Both variants fill a machine. LARGE, which app b alone uses, is marked at 6 s, and its place is taken at 12 s."""
    told = Told(
        scenario(
            load((0.0, 20.0)),
            load((0.0, 8.0), (NEEDED - 0.5, 8.0), (NEEDED, 30.0), (NEEDED + 0.001, 0.0), (20.0, 0.0), apps=("b",)),
            duration_s=20.0,
            machines=(machine("cpu", devices=(CPU,), start=1, minimum=1, maximum=1, price_per_hour=4 * PRICES["cpu"]),),
            policy=settings(autoscaler={"policy": "off"}, monitor={"cost_s": 1.0}),
            variants=(SMALL, LARGE),
            links={"a": ("small",), "b": ("large",)},
        )
    )
    orders = (
        (MARKED, "release", Release(variant=LARGE.variant, reclaim=True, orderer="model-test", reason="not needed")),
        (NEEDED, "load", EnsureLoaded(variant=SMALL, at_least=3, app="a", orderer="model-test", reason="more load")),
    )
    for at, verb, order in orders:
        subject = told.system.subjects.worker("cpu-0", verb)
        told.kernel.at(WARM_UP + at, lambda what: told.kernel.publish(*what), (subject, order))
    return told


def test_it_serves_costs_its_app_nothing_and_gives_way() -> None:
    told = run()
    result = told.result()
    assert (result["open"], result["failed"]) == (0, 0)
    assert result["refused"] == 0, "what was queued there is answered, too"
    assert result["cost"] == pytest.approx(20.0 * 4 * PRICES["cpu"] / 3600.0), "the machine's bill"

    actions = [(e.variant, e.action, e.count) for _, e in told.log if isinstance(e, ScalingEvent) and e.time > BEGINS]
    assert actions == [
        (LARGE.variant, "release", 1),
        (LARGE.variant, "evict", 1),
        (SMALL.variant, "replicate", 1),
        (SMALL.variant, "replicate", 1),
    ]

    [unloading] = [e.time for _, e in told.log if isinstance(e, StateEvent) and e.to_state == "Unloading"]
    gone = [e.time for _, e in told.log if isinstance(e, StateEvent) and e.to_state == "Inactive"]
    assert gone[0] - unloading > 0.05, "its queue"
    served = [e.time for _, e in told.log if isinstance(e, StateEvent) and e.to_state == "Active" and e.time > BEGINS]
    assert min(served) - gone[0] > 0.5, "the loads began when it was gone"

    rows = [event for _, event in told.log if isinstance(event, CostEvent) and event.seconds > 0]
    periods: dict[float, list[CostEvent]] = {}
    for row in rows:
        periods.setdefault(row.time, []).append(row)
    for each in periods.values():
        [idle] = [row for row in each if row.variant is None]
        assert fsum(row.cost for row in each) == pytest.approx(idle.seconds * 4 * PRICES["cpu"] / 3600.0)
    marked = [r for r in rows if r.app == "b" and BEGINS + MARKED + 1.5 < r.time <= BEGINS + NEEDED]
    before = [r for r in rows if r.app == "b" and BEGINS + 1.5 < r.time <= BEGINS + MARKED]
    assert all(row.cost > 0 for row in before) and before
    assert all(row.cost == 0 for row in marked) and fsum(row.busy_seconds for row in marked) > 1.0
