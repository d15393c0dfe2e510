"""Profiles of models whose latencies are known."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bus.messages.catalog import ProfileRow, Signature, TensorSpec
from services.core.cost import latency_ms
from services.executor.backends.base import RunFailed
from services.executor.workshop.sandbox.protocol import UploadRejected
from services.executor.workshop.tasks import measuring, profiling
from services.executor.workshop.tasks.measuring import LatencyCell, Mix
from services.executor.workshop.tasks.profiling import CellTable, Neighbours
from services.executor.workshop.tasks.validation import ValidationSet
from tests.support.servers.processes import eventually

# -- Models whose latencies are known: a batch of b takes BASE_MS + b ms.

BASE_MS = 10.0
SIZES = (1, 4, 8)
DATA = ValidationSet({"x": np.zeros((8, 2), "f4")}, np.zeros(8))
SIGNATURE = Signature(inputs=[TensorSpec(name="x", datatype="FP32", shape=[2])], outputs=[])


class Device:
    """Its models take `contention` times as long while another one computes."""

    def __init__(self, contention: float = 1.0) -> None:
        self.contention, self.computing, self.lock = contention, 0, threading.Lock()


class PacedModel:
    """Waits for the device, as for an accelerator. spinning: it takes so much CPU time of its own thread instead."""

    proof, memory_mb, inputs, outputs = "paced", 0.0, ("x",), ("y",)

    def __init__(self, device: Device, *, spinning: bool = False, fails_after: int = 10**9) -> None:
        self.device, self.spinning, self.left = device, spinning, fails_after

    def run(self, inputs):
        self.left -= 1
        if self.left < 0:
            raise RunFailed("the device is gone")
        with self.device.lock:
            self.device.computing += 1
            factor = self.device.contention if self.device.computing > 1 else 1.0
        try:
            seconds = (BASE_MS + len(inputs["x"])) * factor / 1000.0
            if self.spinning:
                until = time.thread_time() + seconds
                while time.thread_time() < until:
                    pass
            else:
                time.sleep(seconds)
        finally:
            with self.device.lock:
                self.device.computing -= 1
        return {"y": inputs["x"]}

    def run_single(self, array):
        return [self.run({"x": array})["y"]]

    def close(self):
        return


def measured(table: CellTable, sizes=SIZES) -> list[ProfileRow]:
    for _ in range(profiling.PASSES):  # the best of several: this machine is shared
        for size in sizes:
            table.add(size, 0, 0)
    return table.rows()


@pytest.mark.parametrize("spinning", [False, True])
def test_a_profile_returns_known_latencies_and_a_line_beyond_them(spinning):
    table = CellTable(PacedModel(Device(), spinning=spinning), DATA, SIGNATURE, 1 if spinning else 0)

    def known() -> bool:
        """After each further pass the estimates are as good or better: a busy machine needs more of them."""
        rows = measured(table)
        assert [row.batch for row in rows] == list(SIZES)
        assert all(row.p50_ms >= 0.999 * (BASE_MS + row.batch) for row in rows)
        return all(row.p50_ms <= 1.05 * (BASE_MS + row.batch) for row in rows)

    assert eventually(known)
    assert latency_ms(table.rows(), 16) == pytest.approx(BASE_MS + 16, rel=0.1)


def slower(ratio: float) -> bool:
    """Whether it is slower by a contention of 1.3. On a busy machine sleeps are longer, and by how much differs from one moment to the next."""
    return 1.05 < ratio < 1.6


def test_beside_neighbours_throughput_falls_by_the_contention():
    device = Device(contention=1.3)
    alone = CellTable(PacedModel(device), DATA, SIGNATURE, 0)
    expected = measured(alone)
    with closing(Neighbours([PacedModel(device), PacedModel(device)])) as neighbours:
        contended = alone.beside(neighbours, 0, time.monotonic() + 60.0, lambda share: None)
    assert not contended.disturbed()
    for one, other in zip(expected, contended.rows(), strict=True):
        assert (one.batch, one.length) == (other.batch, other.length)
        assert slower(other.p50_ms / one.p50_ms)
    assert device.computing == 0  # they have ended


def test_further_contexts_of_one_instance_are_measured_on_its_own_handle():
    """Two batches at a time each take 1.3 times as long."""
    model = PacedModel(Device(contention=1.3))
    table = CellTable(model, DATA, SIGNATURE, 0)
    expected = measured(table)
    with closing(Neighbours([model], own=False)) as others:
        rows = table.beside(others, 0, time.monotonic() + 60.0, lambda share: None).rows()
    for one, other in zip(expected, rows, strict=True):
        assert slower(other.p50_ms / one.p50_ms)
    assert model.run_single(np.zeros((1, 2), "f4"))  # it is open still


def test_a_neighbour_that_fails_is_no_neighbour():
    device = Device()
    table = CellTable(PacedModel(device), DATA, SIGNATURE, 0)
    table.add(1, 0, 0)
    with (
        closing(Neighbours([PacedModel(device, fails_after=2)])) as neighbours,
        pytest.raises(UploadRejected, match="the device is gone"),
    ):
        table.beside(neighbours, 0, time.monotonic() + 60.0, lambda share: None)


# -- Cells and what they say when a neighbour disturbed them; memory; the host.
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
    assert 0 < cell(p50, min(least, p50), cpu, ratio, waited).estimate_ms(threads) <= p50


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
    assert busy.least_ms <= (busy.p99_low_ms or 0.0) <= busy.p99_ms <= (busy.p99_high_ms or 1e9)
    assert busy.cpu_ms > 0


@pytest.mark.parametrize(
    ("count", "ends"),
    [(1, (0, None)), (60, (57, None)), (367, (358, None)), (368, (359, 367)), (20_000, (19_771, 19_827))],
)
def test_p99_lies_between_two_calls_that_depend_on_their_number(count: int, ends: tuple[int, int | None]) -> None:
    """The largest of fewer than 368 may lie below it: 0.99 ** 367 > 0.025."""
    assert measuring.ends_of_p99(count) == ends


def test_the_interval_of_p99_holds_it_in_19_of_20_measurements() -> None:
    rng = np.random.default_rng(1)
    low, high = measuring.ends_of_p99(800)
    assert high is not None
    drawn = np.sort(rng.exponential(size=(4000, 800)), axis=1)
    true = -np.log(0.01)
    assert np.mean((drawn[:, low] <= true) & (true <= drawn[:, high])) >= 0.945


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


def test_the_profile_of_a_cascade_has_the_mean_and_the_tail_of_real_batches() -> None:
    """A batch takes BASE_MS, and a second for each item that goes on."""
    mix = Mix(np.arange(40) % 4 == 0)
    kinds = []
    for pick in mix.picks:
        counts = {batch: int(mix.on[pick(batch)].sum()) for batch in (1, 8)}
        assert [len(pick(batch)) for batch in counts] == [1, 8]
        kinds.append([row(batch, BASE_MS + 1000.0 * count) for batch, count in counts.items()])
    single, eight = mix.rows(kinds)
    assert (single.p50_ms, single.p99_ms) == (pytest.approx(BASE_MS + 250.0), BASE_MS + 1000.0)
    assert eight.p50_ms == pytest.approx(BASE_MS + 1000.0 * 2 * (1 - 0.75**8))
    assert eight.p99_ms == BASE_MS + 5000.0


def row(batch: int, ms: float) -> ProfileRow:
    return ProfileRow(batch=batch, p50_ms=ms, p99_ms=2 * ms, cpu_ms=ms, wall_over_cpu=1.0)
