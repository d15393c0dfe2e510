"""A load that takes long, in the simulator: what else is decided and done on its worker meanwhile."""

from itertools import pairwise

from bus.messages.events import ScalingEvent, StateEvent
from bus.messages.fleet import EnsureLoaded, Release
from services.executor.commands import LOADERS
from services.simulation.run import BEGINS, WARM_UP
from tests.support.data.small_scenarios import CPU, Told, load, machine, scenario, settings, variant

SLOW = variant("slow-cpu", "slow", "cpu", 30.0, load_ms=10_000.0)
QUICK = variant("quick-cpu", "quick", "cpu", 20.0, load_ms=150.0, memory_mb=100.0)
ORDERED = 3.0


def run(slow: int, orders: list[tuple[float, str, EnsureLoaded | Release]]) -> Told:
    """One machine that serves a little. The slow loads are ordered at 3 s, the others as given, in seconds after that."""
    told = Told(
        scenario(
            load((0.0, 4.0), apps=("b",)),
            duration_s=20.0,
            machines=(machine("cpu", devices=(CPU,), start=1, minimum=1, maximum=1),),
            policy=settings(autoscaler={"policy": "off"}),
            variants=(SLOW, QUICK),
            links={"a": ("slow",), "b": ("quick",)},
        )
    )
    slowly = EnsureLoaded(variant=SLOW, at_least=slow, app="a", orderer="model-test", reason="a build of ten seconds")
    for at, verb, order in [(0.0, "load", slowly), *orders]:
        subject = told.system.subjects.worker("cpu-0", verb)
        told.kernel.at(WARM_UP + ORDERED + at, lambda what: told.kernel.publish(*what), (subject, order))
    return told


def states(told: Told, variant: str, state: str) -> list[float]:
    """When instances of a variant came to this state, in seconds after the slow load was ordered."""
    begun = BEGINS + ORDERED
    return [
        event.time - begun
        for _, event in told.log
        if isinstance(event, StateEvent) and (event.variant, event.to_state) == (variant, state) and event.time > begun
    ]


def test_others_come_and_go_each_second_during_a_load_of_ten() -> None:
    orders: list[tuple[float, str, EnsureLoaded | Release]] = []
    for second in range(1, 10):
        more = EnsureLoaded(variant=QUICK, at_least=2, app="b", orderer="model-test", reason="more load")
        orders.append((float(second), "load", more))
        orders.append((second + 0.5, "release", Release(variant=QUICK.variant, keep=1, orderer="model-test")))
    told = run(1, orders)
    result = told.result()
    assert (result["open"], result["failed"], result["refused"]) == (0, 0, 0)
    [done] = states(told, SLOW.variant, "Active")
    assert 10.0 <= done < 10.1
    decided = [
        event.time - BEGINS - ORDERED
        for _, event in told.log
        if isinstance(event, ScalingEvent) and event.variant == QUICK.variant and event.time > BEGINS + ORDERED
    ]
    assert len(decided) == 18
    assert max(later - earlier for earlier, later in pairwise(decided)) < 0.6
    loaded = states(told, QUICK.variant, "Active")
    assert [round(at, 1) for at in loaded] == [second + 0.2 for second in range(1, 10)], "150 ms after each order"
    assert len(states(told, QUICK.variant, "Inactive")) == 9


def test_a_device_loads_so_many_at_once_and_the_next_ones_after_them() -> None:
    told = run(LOADERS + 1, [])
    told.result()
    done = [round(at) for at in states(told, SLOW.variant, "Active")]
    assert done == [10] * LOADERS, "the last one would be ready at 20 s, when all is over"
