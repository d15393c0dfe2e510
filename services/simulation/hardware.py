"""Simulated machines: what is loaded on each device, how long a batch takes, how busy the device is, and what all costs.

Where batches overlap on a GPU (`executor.exclusive = false`, or contexts of one instance), they slow each other: `SharedSpeed`.

Interference where they do not: instances that compute on one device at about the same time slow each other down, most of all those with
short kernels beside long ones. With u_j the part of the last second that instance j computed, and t its profiled
time of one batch:

    factor_i = 1 + strength · t_others / (t_others + t_i) · max(0, Σ_{j≠i} u_j − FREE)

The strength belongs to the kind of device and comes from the scenario (0: none, as between Inferentia's cores).
"""

from bisect import insort
from collections.abc import Callable, Mapping
from math import exp

from bus.messages.catalog import VariantRecord
from services.core.cost import LatencyTable
from services.core.emulation import SharedSpeed
from services.core.placement import Device
from services.core.settings import ExecutorSettings
from services.simulation.scenario.model import CostSpec, MachineSpec

FREE = 0.5  # part of the time that others may compute without effect
MEMORY = 1.0  # s over which an instance's share of the time is averaged


class Resident:
    """An instance on a device. share: seconds that it computed in about the last MEMORY seconds before `at`, decaying."""

    __slots__ = ("at", "cores", "one", "record", "share", "table")

    def __init__(self, record: VariantRecord, cores: int) -> None:
        self.record = record
        self.table = LatencyTable(record)
        self.one = self.table.seconds(1)
        self.cores = cores
        self.share = 0.0
        self.at = 0.0

    def busy(self, now: float) -> float:
        """Part of the last second that it computed, 0..1."""
        return min(1.0, self.share * exp((self.at - now) / MEMORY) / MEMORY)

    def computes(self, now: float, seconds: float) -> None:
        self.share = self.share * exp((self.at - now) / MEMORY) + seconds
        self.at = now


ALONE = ExecutorSettings()


class SimulatedDevice:
    """One device of a simulated machine. strength: of its interference. slow, wrong: factors on the time of every batch, and by variant (faults).

    overlapping: the batches that overlap on a GPU. exclusive: only contexts of one instance do.
    """

    def __init__(self, spec: Device, strength: float, settings: ExecutorSettings = ALONE) -> None:
        self.spec = spec
        self.exclusive = settings.exclusive or spec.kind != "gpu"
        self.overlapping = SharedSpeed(settings.sharing)
        self.slow = 1.0
        self.wrong: Callable[[VariantRecord], float] | None = None
        self.residents: dict[str, Resident] = {}
        self._strength = strength
        self._begun = 0.0  # core-seconds of all batches begun so far
        self._used = 0.0  # ... that lay before the last sample
        self._open: list[tuple[float, int]] = []  # end and cores of batches that may not have ended at the last sample

    def load(self, instance: str, record: VariantRecord) -> None:
        cores = max(1, min(record.threads, self.spec.cores)) if self.spec.kind == "cpu" else 1
        self.residents[instance] = Resident(record, cores)

    def unload(self, instance: str) -> None:
        self.residents.pop(instance, None)

    def run(self, instance: str, items: int, length: int | None, now: float) -> float:
        """Begin a batch; returns its seconds. Raises KeyError for an instance that is not loaded."""
        resident = self.residents[instance]
        table = resident.table if length is None else resident.table.at(length)
        seconds = table.seconds(items) * self.slow
        if self.wrong is not None:
            seconds *= self.wrong(resident.record)
        if self._strength > 0 and len(self.residents) > 1:
            seconds *= self._interference(instance, resident, now)
            resident.computes(now, seconds)
        self._begun += seconds * resident.cores
        self._open.append((now + seconds, resident.cores))
        return seconds

    def overlap(self, instance: str, items: int, length: int | None, now: float) -> int:
        """Begin a batch that may overlap others; returns its number. `overlapping` says when it has ended."""
        resident = self.residents[instance]
        seconds = resident.table.at(length).seconds(items) * self.slow
        if self.wrong is not None:
            seconds *= self.wrong(resident.record)
        return self.overlapping.begin(seconds, now)

    def _interference(self, instance: str, resident: Resident, now: float) -> float:
        busy = weighted = 0.0
        for name, other in self.residents.items():
            if name != instance:
                share = other.busy(now)
                busy += share
                weighted += share * other.one
        if busy <= FREE:
            return 1.0
        others = weighted / busy
        return 1.0 + self._strength * others / (others + resident.one) * (busy - FREE)

    def used(self, now: float) -> float:
        """Core-seconds computed since the last call."""
        left = [(end, cores) for end, cores in self._open if end > now]
        self._open = left
        done = self._begun - sum((end - now) * cores for end, cores in left) + self.overlapping.busy(now)
        used, self._used = done - self._used, done
        return used

    def stop(self, now: float) -> None:
        """The process that computed has died: no batch goes on."""
        self._begun -= sum((end - now) * cores for end, cores in self._open if end > now)
        self._open.clear()

    @property
    def memory_mb(self) -> float:
        return sum(resident.record.profile.memory_mb for resident in self.residents.values())


class Transfers:
    """When models go over a device's bus to host memory, from and to: one at a time."""

    def __init__(self) -> None:
        self._taken: list[tuple[float, float]] = []  # begin and end, in order

    def take(self, now: float, after: float, seconds: float) -> float:
        """Seconds until a transfer is done that can begin in `after` seconds. It gets the first gap that is long enough."""
        self._taken = [(begin, end) for begin, end in self._taken if end > now]
        starts = now + after
        for begin, end in self._taken:
            if starts + seconds <= begin:
                break
            starts = max(starts, end)
        insort(self._taken, (starts, starts + seconds))
        return starts + seconds - now


class SimulatedMachine:
    """A worker's hardware. strengths: of interference, by kind of device. now: when it appears, seconds."""

    def __init__(
        self,
        worker: str,
        spec: MachineSpec,
        strengths: Mapping[str, float],
        now: float,
        settings: ExecutorSettings = ALONE,
    ) -> None:
        self.worker = worker
        self.spec = spec
        self.devices = {
            device.name: SimulatedDevice(device, strengths.get(device.kind, 0.0), settings) for device in spec.devices
        }
        self.used = dict.fromkeys(self.devices, 0.0)  # core-seconds until now
        self._sampled = now
        self._at_sample = dict(self.used)

    def advance(self, now: float) -> None:
        for name, device in self.devices.items():
            self.used[name] += device.used(now)

    def utilisation_of(self, kind: str, now: float) -> float:
        """Utilisation of the cores of all devices of a kind since the last call, 0..1, as a monitor samples it."""
        self.advance(now)
        elapsed, self._sampled = now - self._sampled, now
        cores, used = 0, 0.0
        for name, device in self.devices.items():
            if device.spec.kind == kind:
                cores += device.spec.cores
                used += self.used[name] - self._at_sample[name]
            self._at_sample[name] = self.used[name]
        return min(1.0, used / (cores * elapsed)) if cores and elapsed > 0 else 0.0


class RunningCost:
    """The cost of a run: the integral of a rate that is constant between changes. begins: time from which it counts, seconds."""

    def __init__(self, spec: CostSpec, begins: float) -> None:
        self.total = 0.0
        self._spec = spec
        self._at = begins
        self._machines = 0.0  # US$/s
        self._memory = 0.0  # US$/s

    @property
    def rate(self) -> float:
        """The rate now, US$/s."""
        return self._machines if self._spec.meter == "worker" else self._memory

    def machine(self, spec: MachineSpec, number: int, now: float) -> None:
        """Add machines (a negative number: remove)."""
        self.advance(now)
        self._machines += number * spec.price_per_hour / 3600.0

    def instance(self, record: VariantRecord, number: int, now: float) -> None:
        """Add instances (a negative number: remove)."""
        self.advance(now)
        self._memory += number * record.profile.memory_mb / 1024.0 * self._spec.per_gb_s.get(record.hardware, 0.0)

    def advance(self, now: float) -> None:
        if now > self._at:
            self.total += (now - self._at) * self.rate
            self._at = now
