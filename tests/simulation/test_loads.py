"""A load that takes long, in the simulator: what else is decided and done on its worker meanwhile."""

import json
from collections import Counter
from itertools import pairwise
from math import fsum
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from bus.messages.events import CostEvent, OutcomeEvent, ScalingEvent, StateEvent
from bus.messages.fleet import EnsureLoaded, Release
from bus.messages.public import Requirements
from services.core.placement import Device
from services.executor.commands import LOADERS
from services.simulation.run import WARM_UP, simulate_all
from services.simulation.scenario.model import BEGINS
from tests.support.clients.commands import ran
from tests.support.data.small_scenarios import (
    CPU,
    PRICES,
    Told,
    changed,
    load,
    machine,
    read,
    scenario,
    settings,
    variant,
)

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


# -- Cores: many apps share few, and none computes slower for it.

APPS = [f"app{n}" for n in range(16)]
OWN = [variant(f"own{n}", f"model{n}", "cpu", 20.0, threads=1 + n % 2, memory_mb=50.0) for n in range(len(APPS))]
BURST = 12.0


def test_a_burst_on_all_of_many_instances_computes_on_no_more_threads_than_there_are_cores() -> None:
    told = Told(
        scenario(
            load((0.0, 8.0), (BURST, 8.0), (BURST, 400.0), (BURST + 3.0, 400.0), (BURST + 3.0, 8.0), apps=tuple(APPS)),
            duration_s=20.0,
            machines=(machine("cpu", devices=(CPU,), start=1, minimum=1, maximum=1),),
            variants=tuple(OWN),
            links={app: (record.model,) for app, record in zip(APPS, OWN, strict=True)},
            needs=dict.fromkeys(APPS, Requirements(latency_ms=400.0)),
            interference={},
        )
    )
    seen: list[int] = []

    def look(_: None) -> None:
        device = told.system.machines["cpu-0"].devices["cpu"]
        seen.append(sum(cores for end, cores in device._open if end > told.kernel.now + 1e-9))

    for step in range(6000):
        told.kernel.at(WARM_UP + BURST + step / 1000.0, look, None)
    assert told.result()["failed"] == 0
    assert max(seen) == CPU.cores, "all cores compute, and never more threads than these"
    served = {event.variant for _, event in told.log if isinstance(event, StateEvent) and event.to_state == "Active"}
    assert len(served) == len(APPS), "two threads a core may be promised, and those that compute little take little"


def test_the_fifth_variant_of_a_chip_of_four_cores_goes_to_another_machine() -> None:
    chip = Device(name="inferentia", kind="inferentia", cores=4, memory_mb=8000.0, simulated=True, address="inferentia")
    apps = [f"app{n}" for n in range(7)]
    own = [variant(f"own{n}", f"model{n}", "inferentia", 10.0, load_ms=200.0) for n in range(len(apps))]
    told = Told(
        scenario(
            load((0.0, 40.0), apps=tuple(apps)),
            duration_s=15.0,
            machines=(machine("inf", devices=(chip,), start=2, minimum=2, maximum=2),),
            variants=tuple(own),
            links={app: (record.model,) for app, record in zip(apps, own, strict=True)},
            needs=dict.fromkeys(apps, Requirements(latency_ms=400.0)),
            prices=PRICES | {"inferentia": 0.2},
        )
    )
    held: set[tuple[str, int]] = set()

    def look(_: None) -> None:
        for name, one in told.system.machines.items():
            held.add((name, len(one.devices["inferentia"].residents)))

    for step in range(1, 300):
        told.kernel.at(WARM_UP + step / 20.0, look, None)
    result = told.result()
    assert (result["open"], result["failed"]) == (0, 0)
    assert max(count for _, count in held) == 4, "a core each, and never five"
    assert {name for name, count in held if count >= 3} == {"inf-0", "inf-1"}
    late = [event for _, event in told.log if isinstance(event, OutcomeEvent) and event.time > BEGINS + 5.0]
    assert {event.app for event in late if event.outcome == "ok"} == set(apps)


# -- Many small models share few cores: what is loaded and nearly idle takes no core of others, only memory.

FORTY = [f"app{n}" for n in range(40)]
FIVE_EACH = 5.0  # queries/s
HEAVY = "heavy"


def forty(*more: Any, links: dict[str, tuple[str, ...]] | None = None, variants: tuple[Any, ...] = ()) -> Told:
    """Each app has a model of its own in three variants, two of which take a core or both, on one machine of two cores."""
    own = [
        variant(f"{app}-t{threads}-b{most}", f"m{app}", "cpu", 0.01, threads=threads, max_batch=most, load_ms=6.0, memory_mb=6.0)
        for app in FORTY
        for threads, most in ((1, 8), (1, 4), (2, 8))
    ]  # fmt: skip
    two = Device(name="cpu", kind="cpu", cores=2, memory_mb=4000.0, simulated=True)
    return Told(
        scenario(
            load((0.0, FIVE_EACH * len(FORTY)), apps=tuple(FORTY)),
            *more,
            duration_s=15.0,
            machines=(machine("cpu", devices=(two,), start=1, minimum=1, maximum=1, price_per_hour=2 * PRICES["cpu"]),),
            variants=(*own, *variants),
            links={app: (f"m{app}",) for app in FORTY} | (links or {}),
            needs=dict.fromkeys([*FORTY, HEAVY], Requirements(latency_ms=300.0)),
            interference={},
        )
    )


def test_forty_small_models_on_two_cores_are_all_loaded_when_their_first_queries_come_and_stay() -> None:
    told = forty()
    result = told.result()
    assert (result["open"], result["failed"], result["refused"]) == (0, 0, 0)
    outcomes = [event for _, event in told.log if isinstance(event, OutcomeEvent)]
    assert {event.outcome for event in outcomes} == {"ok"}, "from the first query on"
    actions = Counter((event.scaler, event.action) for _, event in told.log if isinstance(event, ScalingEvent))
    assert actions == {("dispatcher", "load"): len(FORTY)}, "the plan takes none of them for too much"
    rows = [event for _, event in told.log if isinstance(event, CostEvent)]
    assert fsum(row.cost for row in rows) == pytest.approx(
        sum(row.seconds for row in rows if row.variant is None) * 2 * PRICES["cpu"] / 3600.0
    ), "their shares of the cores, each a half or more, add up to the bill"
    assert {row.app for row in rows if row.cost > 0} >= set(FORTY)


def test_one_of_them_that_becomes_busy_harms_no_other() -> None:
    """It computes on a core nearly all the time for five seconds. Others wait for a batch of it at most."""
    told = forty(
        load((0.0, 1.0), (5.0, 1.0), (5.001, 45.0), (10.0, 45.0), (10.001, 1.0), apps=(HEAVY,)),
        links={HEAVY: ("heavy",)},
        variants=(variant("heavy-t1", "heavy", "cpu", 40.0, memory_mb=50.0, load_ms=50.0),),
    )
    result = told.result()
    assert (result["open"], result["failed"]) == (0, 0)
    outcomes = Counter((event.app == HEAVY, event.outcome) for _, event in told.log if isinstance(event, OutcomeEvent))
    assert outcomes[False, "ok"] > FIVE_EACH * len(FORTY) * 10
    assert {outcome for heavy, outcome in outcomes if not heavy} == {"ok"}, outcomes


# -- Machines that nobody has at first: what outgrows the others gets one of another kind, and it goes again.


def test_a_load_that_outgrows_one_kind_of_machine_gets_another_kind(tmp_path):
    scenario = read(
        tmp_path,
        changed(
            ("scenario.duration_s", 130),
            ("app", [{"name": "faces", "latency_ms": 1000}]),
            ("variant.1.app", "faces"),
            ("worker.0.start", 1),
            ("worker.0.max", 1),  # 8 cores: two instances of A, 10/s
            ("worker.1.start", 0),
            ("worker.1.resources", {"gpu_memory_gb": 16}),
            ("worker.1.boot_s", 5),
            ("load", [{"app": "faces", "rate": [[0, 0.5], [90, 0.5], [95, 60]]}]),
        ),
    )
    [result] = simulate_all(scenario)["policies"]
    workers = dict(zip(result["series"]["time"], result["series"]["workers"]["gpu"], strict=True))
    assert workers[88.0] == 0  # one that the first queries brought, of which little is known, has gone
    assert workers[128.0] == max(workers.values()) == 1  # one carries it all
    violations = zip(result["series"]["time"], result["series"]["violations"], strict=True)
    assert sum(count for t, count in violations if t < 90 or t >= 102) == 0
    [added] = [row for row in result["scaling"]["decisions"] if row["action"] == "add_worker" and row["time"] > 0]
    assert added["reason"].startswith("the plan wants 1 gpu, there are 0, for ")
    assert 90.0 < added["time"] < 94.0


# -- Instances that nobody needs, in the simulator: production's actors, real queues, and the machine's bill.
SMALL = variant("small-cpu", "small", "cpu", 17.3, accuracy=0.7, memory_mb=400.0)
LARGE = variant("large-cpu", "large", "cpu", 61.7, accuracy=0.9, memory_mb=2800.0)
MARKED, NEEDED = 6.0, 12.0


def both_filled() -> Told:
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
    told = both_filled()
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


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_load_that_was_expected_finds_capacity(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What `infaas expect` says of a step: machines take 60 s to boot, and a model 10 s to load."""
    text = """
[scenario]
duration_s = 260
[[worker]]
kind = "cpu"
devices = { cpu = 4 }
start = 1
max = 4
boot_s = 60
[[variant]]
app = "a"
name = "v"
hardware = "cpu"
base_ms = 40
per_item_ms = 40
max_batch = 4
load_s = 10
[[app]]
name = "a"
latency_ms = 400
EXPECT
[[load]]
app = "a"
rate = [[0, 1], [149.9, 1], [150, 100]]
"""
    missed = {}
    for said in ("", "expect = [{ qps = 100, at = 150 }]"):
        file = tmp_path / "step.toml"
        file.write_text(text.replace("EXPECT", said))
        [policy] = json.loads(ran(capsys, ["simulate", str(file), "--json"]).out)["policies"]
        missed[bool(said)] = policy["slo_violation_ratio"]
    assert missed[False] > 0.1 and missed[True] < 0.02, missed


def test_of_a_kind_without_a_minimum_the_last_machine_goes_and_the_first_query_starts_one_and_is_held() -> None:
    """Where apps keep no instance. One that cannot be held so long is refused, with the time after which to ask again."""
    spare = machine("cpu", devices=(CPU,), start=0, minimum=0, maximum=2, boot_s=2.0)
    given = scenario(
        load((0.0, 0.0), (400.0, 0.0), (400.01, 2.0), apps=("a", "b")),
        duration_s=420.0,
        machines=(spare,),
        variants=(QUICK,),
        needs={"a": Requirements(latency_ms=90.0), "b": Requirements(latency_ms=20_000.0)},
    )
    told = Told(replace(given, apps=tuple(replace(app, min_instances=0) for app in given.apps)))
    result = told()
    scaled = [e for _, e in told.log if isinstance(e, ScalingEvent) and e.time > BEGINS]
    assert [e.action for e in scaled if "_worker" in e.action] == ["remove_worker", "add_worker"]
    assert result["apps"]["b"]["answered"] == result["apps"]["b"]["queries"] > 10
    first = [message for at, _, message in told.ends if BEGINS + 400.0 < at < BEGINS + 402.0]
    assert first
    assert all(one.error.code == "deadline" and one.error.retry_after_ms > 0 for one in first)
