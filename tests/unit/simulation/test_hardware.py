"""Simulated devices: what a batch takes, how busy they are, what they cost."""

from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from services.core.cost import LatencyTable
from services.core.placement import Device
from services.simulation.hardware import FREE, MEMORY, RunningCost, SimulatedDevice, SimulatedMachine
from services.simulation.scenario.model import CostSpec, MachineSpec
from tests.support.data.small_scenarios import CPU, GPU, machine, variant

MS = st.floats(0.1, 500.0)
GAPS = st.lists(st.floats(0.0, 0.4), min_size=1, max_size=30)


def device(strength: float, *ms: float, hardware: str = "gpu") -> SimulatedDevice:
    """With an instance i0, i1, ... for each of these times of one item."""
    found = SimulatedDevice(GPU if hardware == "gpu" else CPU, strength)
    for number, one in enumerate(ms):
        found.load(f"i{number}", variant(f"v{number}", "m", hardware, one))
    return found


def keep_busy(one: SimulatedDevice, instance: str, share: float, now: float) -> None:
    """It has computed this share of the time of the last second."""
    one.residents[instance].computes(now, share * MEMORY)


# -- interference


@given(MS, MS, st.floats(0.0, 10.0), GAPS, st.integers(1, 8))
def test_a_batch_is_never_faster_than_its_profile(
    mine: float, other: float, strength: float, gaps: list[float], items: int
) -> None:
    one = device(strength, mine, other)
    now = 0.0
    for gap in gaps:
        now += gap
        one.run("i1", 1, None, now)
        assert one.run("i0", items, None, now) >= one.residents["i0"].table.seconds(items)


@given(MS, MS, GAPS)
def test_nobody_is_slowed_where_there_is_no_interference(mine: float, other: float, gaps: list[float]) -> None:
    one = device(0.0, mine, other)
    now = 0.0
    for gap in gaps:
        now += gap
        assert one.run("i1", 8, None, now) == one.residents["i1"].table.seconds(8)
        assert one.run("i0", 1, None, now) == one.residents["i0"].table.seconds(1)


@given(MS, st.floats(0.01, 10.0), GAPS)
def test_an_instance_does_not_slow_itself(mine: float, strength: float, gaps: list[float]) -> None:
    one = device(strength, mine, 1.0)
    now = 0.0
    for gap in gaps:
        now += gap
        assert one.run("i0", 8, None, now) == one.residents["i0"].table.seconds(8)


@given(MS, MS, st.floats(0.01, 10.0), st.floats(0.0, 1.0))
def test_others_are_noticed_only_beyond_the_free_part(mine: float, other: float, strength: float, share: float) -> None:
    one = device(strength, mine, other)
    keep_busy(one, "i1", share, 5.0)
    factor = one.run("i0", 1, None, 5.0) / one.residents["i0"].one
    assert share > FREE or factor == 1.0
    assert factor == pytest.approx(1.0 + strength * other / (mine + other) * max(0.0, share - FREE))


@given(MS, MS, MS, st.floats(0.1, 10.0), st.floats(0.6, 1.0))
def test_short_kernels_suffer_more(small: float, large: float, other: float, strength: float, share: float) -> None:
    assume(large > 1.01 * small)
    one = device(strength, small, large, other)
    keep_busy(one, "i2", share, 5.0)
    factors = [one._interference(name, one.residents[name], 5.0) for name in ("i0", "i1")]
    assert factors[0] > factors[1] > 1.0


@given(st.lists(st.tuples(MS, st.floats(0.0, 1.0)), min_size=1, max_size=6), MS, st.floats(0.1, 5.0))
def test_several_others_count_by_their_shares(others: list[tuple[float, float]], mine: float, strength: float) -> None:
    one = device(strength, mine, *(ms for ms, _ in others))
    for number, (_, share) in enumerate(others, 1):
        keep_busy(one, f"i{number}", share, 5.0)
    busy = sum(share for _, share in others)
    mean = sum(share * ms for ms, share in others) / busy if busy > 0 else 1.0
    expected = 1.0 + strength * mean / (mean + mine) * max(0.0, busy - FREE)
    assert one._interference("i0", one.residents["i0"], 5.0) == pytest.approx(expected)


def test_what_was_computed_is_forgotten_over_a_second() -> None:
    one = device(2.0, 5.0, 5.0)
    keep_busy(one, "i1", 1.0, 5.0)
    factors = [one._interference("i0", one.residents["i0"], now) for now in (5.0, 5.2, 5.5, 7.0)]
    assert factors == sorted(factors, reverse=True)
    assert factors[0] == pytest.approx(1.5)
    assert factors[-1] == 1.0


# -- what a batch takes


@given(MS, st.integers(1, 20), st.floats(1.0, 50.0))
def test_a_batch_takes_its_profile_times_the_fault(ms: float, items: int, slow: float) -> None:
    one = device(1.0, ms)
    one.slow = slow
    table = LatencyTable(variant("v", "m", "gpu", ms))
    assert one.run("i0", items, None, 1.0) == table.seconds(items) * slow


def test_who_is_gone_cannot_compute_and_what_computed_stops() -> None:
    one = device(1.0, 5.0)
    one.unload("i0")
    one.unload("i0")
    with pytest.raises(KeyError):
        one.run("i0", 1, None, 0.0)
    assert one.memory_mb == 0.0
    one = device(0.0, 40.0, hardware="cpu")
    seconds = one.run("i0", 8, None, 0.0)
    one.stop(seconds / 4)
    assert one.used(seconds) == pytest.approx(seconds / 4)
    one.run("i0", 8, None, seconds)
    assert one.used(2 * seconds) == pytest.approx(seconds)


# -- use


BATCHES = st.lists(st.tuples(st.floats(0.0, 0.3), st.integers(0, 2), st.integers(1, 8)), min_size=1, max_size=40)


@given(BATCHES, st.lists(st.floats(0.01, 1.0), min_size=1, max_size=8))
def test_use_is_the_integral_of_what_computed(batches: list[tuple[float, int, int]], periods: list[float]) -> None:
    """Whenever one looks: a batch counts for the time that it has run until then, times its cores."""
    one = SimulatedDevice(CPU, 0.0)
    for number, threads in enumerate((1, 2, 9)):
        one.load(f"i{number}", variant(f"v{number}", "m", "cpu", 40.0, threads=threads))
    cores = (1, 2, 4)  # no more than there are
    looks: list[float] = []
    for period in periods:
        looks.append((looks[-1] if looks else 0.0) + period)
    begun: list[tuple[float, float, int]] = []
    now, looked = 0.0, 0.0

    def look(at: float) -> None:
        nonlocal looked
        expected = sum(n * max(0.0, min(at, end) - max(looked, start)) for start, end, n in begun)
        assert one.used(at) == pytest.approx(expected, abs=1e-9)
        looked = at

    for gap, instance, items in batches:
        now += gap
        while looks and looks[0] <= now:
            look(looks.pop(0))
        begun.append((now, now + one.run(f"i{instance}", items, None, now), cores[instance]))
    for at in [at for at in looks if at > now]:
        look(at)
    look(max(looked, now) + 100.0)


def test_a_machines_utilisation_is_of_all_its_cores_of_a_kind_since_the_last_time() -> None:
    one = SimulatedMachine("w", machine(devices=(CPU, CPU_TWO, GPU)), {}, 10.0)
    one.devices["cpu"].load("a", variant("a", "m", "cpu", 500.0))
    one.devices["gpu"].load("b", variant("b", "m", "gpu", 500.0))
    one.devices["cpu"].run("a", 1, None, 10.0)
    one.devices["gpu"].run("b", 1, None, 10.0)
    assert one.utilisation_of("cpu", 10.0) == 0.0
    one.advance(10.3)  # somebody else looks, too
    assert one.utilisation_of("cpu", 11.0) == pytest.approx(0.5 / (4 + 2))
    assert one.utilisation_of("cpu", 12.0) == 0.0
    assert one.used == pytest.approx({"cpu": 0.5, "cpu2": 0.0, "gpu": 0.5})
    assert one.utilisation_of("tpu", 13.0) == 0.0


CPU_TWO = Device(name="cpu2", kind="cpu", cores=2, memory_mb=2000.0, simulated=True)


def test_interference_is_by_the_kind_of_device() -> None:
    one = SimulatedMachine("w", machine(), {"gpu": 3.0}, 0.0)
    assert one.devices["gpu"]._strength == 3.0
    assert one.devices["cpu"]._strength == 0.0


# -- cost

CHANGES = st.lists(st.tuples(st.floats(0.0, 50.0), st.integers(0, 2)), max_size=20)


@given(CHANGES, st.sampled_from(["worker", "memory"]), st.floats(0.0, 100.0))
def test_the_bill_is_the_integral_of_the_rate(changes: list[tuple[float, int]], meter: Any, begins: float) -> None:
    """Of machines or of instances' memory, as the scenario says; from its beginning on."""
    kinds: list[MachineSpec] = [machine(price_per_hour=price) for price in (0.1, 3.06, 0.0)]
    records = [variant(f"v{n}", "m", kind, 5.0, memory_mb=mb) for n, (kind, mb) in enumerate(MEMORIES)]
    bill = RunningCost(CostSpec(meter=meter, per_gb_s={"cpu": 0.5, "gpu": 2.0}), begins)
    prices = [0.1 / 3600, 3.06 / 3600, 0.0] if meter == "worker" else [0.5 * 0.5, 2.0 * 4.0, 0.0]
    now, rate, expected = 0.0, 0.0, 0.0
    counts = [0, 0, 0]
    for gap, which in changes:
        expected += rate * (max(begins, now + gap) - max(begins, now))
        now += gap
        number = -1 if counts[which] == 3 else 1
        counts[which] += number
        bill.machine(kinds[which], number, now)
        bill.instance(records[which], number, now)
        rate = sum(count * price for count, price in zip(counts, prices, strict=True))
        assert bill.rate == pytest.approx(rate)
    bill.advance(now + 10.0)
    expected += rate * (max(begins, now + 10.0) - max(begins, now))
    bill.advance(now)  # looking back changes nothing
    assert bill.total == pytest.approx(expected, abs=1e-9)


MEMORIES = (("cpu", 512.0), ("gpu", 4096.0), ("inferentia", 100.0))
