"""Cells and what they say when a neighbour disturbed them; memory; the host."""

import time

from hypothesis import given
from hypothesis import strategies as st

from services.executor.workshop.tasks import measuring
from services.executor.workshop.tasks.measuring import LatencyCell

durations = st.floats(0.001, 1000.0)


def cell(p50=2.0, least=1.0, cpu=1.5, ratio=1.0, waited=0.0) -> LatencyCell:
    return LatencyCell(p50_ms=p50, p99_ms=p50 * 2, least_ms=least, cpu_ms=cpu, wall_over_cpu=ratio, waited=waited)


def test_a_clean_cell_is_its_median_and_a_disturbed_one_what_it_must_have_been():
    assert cell(ratio=1.1).estimate_ms(1) == 2.0
    assert cell(ratio=1.3).estimate_ms(1) == 1.0
    assert cell(ratio=1.3, cpu=0.5).estimate_ms(1) == 0.5
    # Several threads: the ratio says nothing, waiting for a core does.
    assert cell(ratio=9.0).estimate_ms(2) == 2.0
    assert cell(ratio=0.5, waited=0.2).estimate_ms(2) == 1.0


@given(durations, durations, durations, st.floats(0.1, 10), st.floats(0, 1), st.integers(1, 4))
def test_an_estimate_is_never_above_the_median(p50, least, cpu, ratio, waited, threads):
    one = cell(p50, min(least, p50), cpu, ratio, waited)
    assert 0 < one.estimate_ms(threads) <= p50


def test_sleeping_is_seen_as_disturbance_and_working_is_not():
    asleep = measuring.measure_calls(lambda: time.sleep(0.002), 0.05, 1)
    assert asleep.wall_over_cpu > measuring.CLEAN
    assert not asleep.clean(1)
    assert asleep.cpu_ms < asleep.p50_ms
    busy = min(
        (measuring.measure_calls(lambda: sum(range(20_000)), 0.05, 1) for _ in range(5)),
        key=lambda one: one.wall_over_cpu,
    )
    assert busy.least_ms <= busy.p50_ms <= busy.p99_ms
    assert busy.cpu_ms > 0


def test_long_calls_are_made_few_times():
    calls = []

    def call():
        calls.append(1)
        time.sleep(0.4)

    measuring.measure_calls(call, 0.01, 1)
    assert 1 < len(calls) <= 1 + measuring.LEAST_CALLS


def test_memory_counts_what_came_after():
    memory = measuring.Memory()
    held = bytearray(64 * 2**20)
    held[:: 2**12] = b"x" * len(held[:: 2**12])
    assert memory.peak_mb() >= 60
    del held
    assert memory.peak_mb() >= 60  # the peak stays
    memory.loaded()
    assert memory.peak_mb() < 60  # what only the load needed does not count
    assert measuring.Memory().peak_mb() < 60


def test_a_host_is_described():
    host = measuring.host("onnxruntime 1")
    assert set(host) == {"isa", "cpu", "arithmetic", "framework", "date"}
    assert all(host.values())
