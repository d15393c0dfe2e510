"""Loads and transfers of a simulated device on virtual time."""

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DemoteInstance, InstanceLoaded, InstanceUnloaded, LoadInstance
from bus.subjects import Subjects
from services.core.actor import Envelope, Inlet
from services.core.emulation import with_tiers
from services.core.placement import Device
from services.core.settings import Settings
from services.executor.actor import make_executor
from services.simulation.edges import SimulatedExecutorEdge
from services.simulation.hardware import SimulatedDevice, Transfers
from services.simulation.kernel import Kernel
from tests.support.simulated.fleet import variant

SUBJECTS = Subjects()
INIT, TRANSFER = 30.0, 0.09  # s, of 234 MB: paper 001, section 3.4.1
PLAIN = replace(variant(load_ms=1000.0 * (INIT + TRANSFER)), hardware="gpu")
RECORD = replace(PLAIN, profile=with_tiers(replace(PLAIN.profile, memory_mb=234.0), "gpu"))


class Monitor:
    """Keeps when each instance was somewhere."""

    def __init__(self) -> None:
        subjects = [
            (SUBJECTS.monitor("w", "loaded"), InstanceLoaded),
            (SUBJECTS.monitor("w", "unloaded"), InstanceUnloaded),
        ]
        self.inlets = tuple(Inlet(subject=subject, message=message) for subject, message in subjects)
        self.watches = ()
        self.heard: list[tuple[float, str, str]] = []

    def handle(self, envelope: Envelope) -> tuple[()]:
        message: Any = envelope.message
        if isinstance(message, InstanceLoaded | InstanceUnloaded):
            self.heard.append((envelope.now, message.instance, getattr(message, "tier", "nowhere")))
        return ()


class SimulatedGpu:
    """An executor on virtual time with a device of 16 GB."""

    def __init__(self) -> None:
        self.kernel = Kernel(0.0, lambda *_: None)
        self.monitor = Monitor()
        self.kernel.enter("monitor", self.monitor)
        spec = Device(name="gpu-0", kind="gpu", cores=1, memory_mb=16384.0, simulated=True)
        self.device = SimulatedDevice(spec, 0.0)
        self.held = 0
        edge = SimulatedExecutorEdge(self.kernel, self.device, lambda one: one.profile.load_ms / 1000.0, self._holds)
        self.kernel.enter("gpu-0", make_executor(Settings(), SUBJECTS, "w", spec, 1), edge)

    def _holds(self, _: VariantRecord, number: int) -> None:
        self.held += number

    def order(self, name: str, message: Any) -> None:
        self.kernel.publish(SUBJECTS.executor("w", "gpu-0", name), message)

    def load(self, *instances: str, record: VariantRecord = RECORD, **fields: Any) -> None:
        for instance in instances:
            self.order("load", LoadInstance(instance=instance, variant=record, **fields))

    def demote(self, *instances: str) -> None:
        for instance in instances:
            self.order("demote", DemoteInstance(instance=instance))

    def takes(self) -> list[tuple[float, str, str]]:
        """Runs until nothing is under way; what has happened, with seconds since now."""
        began, heard = self.kernel.now, len(self.monitor.heard)
        self.kernel.run(began + 1000.0)
        return [(pytest.approx(at - began, abs=0.01), one, tier) for at, one, tier in self.monitor.heard[heard:]]


def test_the_second_load_takes_the_transfer_and_not_the_making() -> None:
    gpu = SimulatedGpu()
    gpu.load("a")
    assert gpu.takes() == [(INIT + TRANSFER, "a", "device")]
    assert (gpu.device.memory_mb, gpu.held) == (234.0, 1)
    gpu.demote("a")
    assert gpu.takes() == [(TRANSFER, "a", "host")]
    assert (gpu.device.memory_mb, gpu.held) == (0.0, 0)
    gpu.load("a")
    assert gpu.takes() == [(TRANSFER, "a", "device")]
    assert (gpu.device.memory_mb, gpu.held) == (234.0, 1)


def test_preloading_to_host_memory_takes_no_memory_of_the_device() -> None:
    gpu = SimulatedGpu()
    gpu.load("a", tier="host")
    assert gpu.takes() == [(INIT, "a", "host")]
    assert (gpu.device.memory_mb, gpu.held) == (0.0, 0)


def test_transfers_come_one_after_the_other_and_not_after_what_is_still_made() -> None:
    gpu = SimulatedGpu()
    gpu.load("a", "b", tier="host")
    assert gpu.takes() == [(INIT, "a", "host"), (INIT, "b", "host")]
    gpu.load("slow", "a", "b")
    assert gpu.takes() == [
        (TRANSFER, "a", "device"),
        (2 * TRANSFER, "b", "device"),
        (INIT + TRANSFER, "slow", "device"),
    ]


def test_a_device_that_keeps_nothing_in_host_memory_unloads_it() -> None:
    gpu = SimulatedGpu()
    gpu.load("a", record=PLAIN)
    gpu.takes()
    gpu.demote("a")
    assert gpu.takes() == [(0.0, "a", "nowhere")]
    assert (gpu.device.memory_mb, gpu.held) == (0.0, 0)


@given(st.lists(st.tuples(st.floats(0, 5), st.floats(0, 20), st.floats(0.01, 3)), max_size=30))
def test_no_two_transfers_overlap_and_none_begins_before_it_can(asked: list[tuple[float, float, float]]) -> None:
    bus, now, taken = Transfers(), 0.0, []
    for gap, after, seconds in asked:
        now += gap
        end = now + bus.take(now, after, seconds)
        assert end - seconds >= now + after - 1e-9
        taken.append((end - seconds, end))
    assert all(end <= begin + 1e-9 for (_, end), (begin, _) in pairwise(sorted(taken)))
