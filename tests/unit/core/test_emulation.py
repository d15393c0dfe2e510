"""Simulated devices: the lines through the published figures, which variants get one, and what it says of itself."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import Profile, ProfileRow, VariantRecord
from services.core.cost import device_share, latency_ms, price_per_hour
from services.core.emulation import (
    KINDS,
    MOST,
    SharedSpeed,
    computable,
    emulated,
    originals,
    simulated_devices,
    with_tiers,
)
from tests.support.simulated.fleet import variant

PRICES = {"cpu": 0.048, "gpu": 3.06, "inferentia": 0.0905}


def resnet50(max_batch: int = 64, threads: int = 1, **changes: object) -> VariantRecord:
    """The paper's CPU instance: 200 ms an item whatever the batch."""
    rows = [
        ProfileRow(batch=n, p50_ms=200.0 * n, p99_ms=300.0 * n, cpu_ms=200.0 * n, wall_over_cpu=1.1)
        for n in (1, 8, 64)
        if n <= max_batch
    ]
    profile = Profile(rows=rows, load_ms=1500.0, memory_mb=98.0, saturation_qps=5.0, host={"cpu": "ours"})
    name = f"resnet50-v1-ort-fp32-t{threads}-b{max_batch}"
    record = replace(variant(name), profile=profile, max_batch=max_batch, threads=threads, precision="fp32")
    return replace(record, framework="ort", accuracy=0.75, **changes)


def test_devices_are_the_papers_gpu_and_inferentia_with_transfers_within_the_load() -> None:
    gpu = emulated(resnet50(), "gpu", "x")
    assert 300 <= 1000.0 / latency_ms(gpu, 1) <= 350
    assert 8000.0 / latency_ms(gpu, 8) == pytest.approx(750, rel=0.01)
    assert gpu.profile.memory_mb == pytest.approx(1340, rel=0.01)
    assert 5000 <= gpu.profile.load_ms <= 10000
    core = emulated(resnet50(8), "inferentia", "x")
    assert latency_ms(core, 1) == pytest.approx(20.0)
    assert 80 <= core.profile.saturation_qps <= 100
    instant = with_tiers(replace(resnet50().profile, load_ms=0.0, memory_mb=5000.0), "gpu")
    assert (instant.init_ms, instant.transfer_ms) == (0.0, 0.0)


def test_a_gpu_keeps_models_in_host_memory_and_an_inferentia_does_not() -> None:
    """Paper 001, section 3.4.1: 233 MB in 90 ms."""
    assert with_tiers(replace(resnet50().profile, memory_mb=233.0), "gpu").transfer_ms == pytest.approx(90.0, rel=0.01)
    gpu, inferentia, cpu = (
        emulated(resnet50(), "gpu", "x").profile,
        emulated(resnet50(8), "inferentia", "x").profile,
        resnet50().profile,
    )
    assert gpu.init_ms is not None
    assert gpu.transfer_ms is not None
    assert gpu.init_ms + gpu.transfer_ms == pytest.approx(gpu.load_ms)
    assert gpu.host_mb == gpu.memory_mb
    for one in (inferentia, with_tiers(cpu, "cpu")):
        assert (one.init_ms, one.transfer_ms, one.host_mb) == (None, None, None)


def test_dearer_kinds_carry_more() -> None:
    """CPU, Inferentia, GPU: each instance dearer than the one before, with more throughput for its price."""
    cpu = resnet50()
    others = [emulated(cpu, kind, kind) for kind in ("inferentia", "gpu")]
    prices = [PRICES["cpu"]]
    for record in others:
        device = simulated_devices({record.hardware: 1})[0]
        share = device_share(record, device.cores, device.memory_mb)
        prices.append(share * price_per_hour(record.hardware, PRICES, device.cores))
    assert prices == sorted(prices)
    per_price = [r.profile.saturation_qps / price for r, price in zip([cpu, *others], prices, strict=True)]
    assert per_price == sorted(per_price)


@pytest.mark.parametrize("kind", KINDS)
def test_it_never_looks_measured(kind: str) -> None:
    record = emulated(resnet50(8), kind, "some-name")
    assert (record.variant, record.hardware, record.simulated) == ("some-name", kind, True)
    assert record.profile.provenance.startswith("synthetic")
    assert "resnet50-v1-ort-fp32-t1-b8" in record.profile.provenance
    assert not record.profile.host
    assert (record.artifact, record.accuracy) == (resnet50(8).artifact, 0.75)


batches = st.lists(st.integers(1, 64), min_size=1, max_size=7, unique=True)


@given(batches, st.floats(0.001, 5000.0), st.sampled_from(sorted(KINDS)))
def test_latency_keeps_the_order_of_batches_and_never_falls_below_the_fixed_part(
    sizes: list[int], item_ms: float, kind: str
) -> None:
    rows = [ProfileRow(batch=n, p50_ms=item_ms * n, p99_ms=item_ms * n, cpu_ms=1.0, wall_over_cpu=1.0) for n in sizes]
    record = emulated(replace(resnet50(), profile=replace(resnet50().profile, rows=rows)), kind, "x")
    latencies = [row.p50_ms for row in sorted(record.profile.rows, key=lambda row: row.batch)]
    assert latencies == sorted(latencies)
    assert latencies[0] > KINDS[kind].fixed_ms
    assert record.profile.saturation_qps <= 1000.0 * KINDS[kind].speedup / item_ms


def test_lengths_stay_apart_and_the_longest_sets_the_throughput() -> None:
    rows = [
        ProfileRow(batch=n, p50_ms=float(n * m), p99_ms=1.0, cpu_ms=1.0, wall_over_cpu=1.0, length=m)
        for n in (1, 8)
        for m in (16, 128)
    ]
    record = emulated(replace(resnet50(8), profile=replace(resnet50(8).profile, rows=rows)), "gpu", "x")
    assert latency_ms(record, 8, 16) < latency_ms(record, 8, 128)
    assert record.profile.saturation_qps == pytest.approx(8000.0 / latency_ms(record, 8, 128))
    assert not computable(record, 1, 0.127)  # one item of the longest takes the CPU 128 ms
    assert computable(record, 1, 0.129)


def test_the_plainest_fp32_variant_of_each_batch_limit_gets_one() -> None:
    pool = [
        *(resnet50(batch, threads) for batch in (8, 64) for threads in (1, 2)),
        replace(resnet50(8), variant="a-torch", framework="torch"),
        replace(resnet50(8), variant="an-int8", precision="int8"),
        replace(resnet50(8), variant="sim", hardware="gpu", simulated=True),
        replace(resnet50(32), variant="real-gpu", hardware="gpu"),
    ]
    assert [r.variant for r in originals(pool, "gpu")] == ["resnet50-v1-ort-fp32-t1-b8", "resnet50-v1-ort-fp32-t1-b64"]
    small = originals(pool, "inferentia")
    assert [(r.max_batch, r.threads, r.framework) for r in small] == [(8, 1, "ort")]
    assert max(row.batch for row in emulated(small[0], "inferentia", "x").profile.rows) == 8
    assert originals([r for r in pool if r.precision != "fp32" or r.hardware != "cpu"], "gpu") == []


def test_devices_are_numbered_by_kind_and_outputs_real_where_the_cpu_keeps_up() -> None:
    quick = replace(
        resnet50(), profile=replace(resnet50().profile, rows=[replace(resnet50().profile.rows[0], p50_ms=0.2)])
    )
    record = emulated(quick, "gpu", "x")
    assert computable(record, 10, 0.0021)
    assert not computable(record, 11, 0.0021)
    assert not computable(resnet50(), 1, 1000.0), "without the figure nobody can promise it"
    devices = simulated_devices({"inferentia": 2, "gpu": 1})
    assert [device.name for device in devices] == ["gpu-0", "inferentia-0", "inferentia-1"]
    assert all(device.simulated for device in devices)
    assert {device.kind: device.cores for device in devices} == {"gpu": 1, "inferentia": 4}
    assert simulated_devices({}) == simulated_devices({"gpu": 0}) == []


@pytest.mark.parametrize(("counts", "said"), [({"tpu": 1}, "tpu.*gpu, inferentia"), ({"gpu": -1}, "gpu must be"), ({"gpu": MOST + 1}, "gpu must be")])  # fmt: skip
def test_other_kinds_and_counts_are_refused_by_name(counts: dict[str, int], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        simulated_devices(counts)


# -- batches that overlap

SECONDS = st.floats(0.001, 1.0)
BATCHES = st.lists(st.tuples(st.floats(0.0, 1.0), SECONDS), min_size=1, max_size=12)


def ends(strength: float, batches: list[tuple[float, float]]) -> list[float]:
    """When batches end that begin after these gaps and take so long alone, and that they began."""
    device, found, now = SharedSpeed(strength), {}, 0.0

    def until(now: float) -> None:
        while device.next_end() <= now:
            end = device.next_end()
            found.update(dict.fromkeys(device.advance(end), end))
        assert not device.advance(now)

    for gap, seconds in batches:
        now += gap
        until(now)
        device.begin(seconds, now)
    until(1e9)
    assert device.busy(1e9) <= sum(seconds for _, seconds in batches) + 1e-6
    return [found[number] for number in range(1, len(batches) + 1)]


@given(st.integers(1, 20), SECONDS, st.floats(0.0, 1.0))
def test_n_equal_batches_take_n_times_as_long_under_full_sharing(n: int, seconds: float, strength: float) -> None:
    together = [(0.0, seconds)] * n
    assert ends(1.0, together) == pytest.approx([n * seconds] * n)
    assert ends(strength, together) == pytest.approx([seconds * (1 + strength * (n - 1))] * n)


@given(BATCHES)
def test_full_sharing_loses_no_work_and_no_time(batches: list[tuple[float, float]]) -> None:
    """The device is done when a queue would be, whose batches run one after the other."""
    free = now = 0.0
    for gap, seconds in batches:
        now += gap
        free = max(free, now) + seconds
    assert max(ends(1.0, batches)) == pytest.approx(free, abs=1e-6)


@given(BATCHES, st.floats(0.0, 1.0))
def test_a_batch_takes_at_least_as_long_as_alone_and_no_longer_than_under_full_sharing(
    batches: list[tuple[float, float]], strength: float
) -> None:
    begun, now = [], 0.0
    for gap, seconds in batches:
        now += gap
        begun.append(now + seconds)
    none, some, full = ends(0.0, batches), ends(strength, batches), ends(1.0, batches)
    assert none == pytest.approx(begun, abs=1e-6)
    assert max(some) <= max(full) + 1e-6
    assert all(end >= alone - 1e-6 for end, alone in zip(some, begun, strict=True))


@given(SECONDS, st.floats(1.1, 50.0), st.floats(0.1, 1.0))
def test_the_shorter_of_two_batches_suffers_more(short: float, ratio: float, strength: float) -> None:
    """Always beside a long one, the short one is slowed by the ratio of their times, the long one by its inverse."""
    device = SharedSpeed(strength)
    device.begin(short, 0.0)
    device.begin(1000.0 * ratio * short, 0.0)
    assert device.next_end() == pytest.approx(short * (1 + strength * 1000.0 * ratio), rel=1e-6)
    assert max(ends(strength, [(0.0, short), (0.0, ratio * short)])) <= short * (ratio + 1) + 1e-6
