"""Profiles of models whose latencies are known."""

import threading
import time
from contextlib import closing

import numpy as np
import pytest

from bus.messages.catalog import ProfileRow, Signature, TensorSpec
from services.core.cost import latency_ms
from services.executor.backends.base import RunFailed
from services.executor.workshop.sandbox.protocol import UploadRejected
from services.executor.workshop.tasks import profiling
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
    device = Device(contention=1.3)
    model = PacedModel(device)
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
