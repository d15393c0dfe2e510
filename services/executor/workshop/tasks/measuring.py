"""Latencies and memory of one model in this process, and where they were measured. Runs in the sandbox.

A measurement says when it cannot be trusted. On shared cores the same model measures twice as slow from one minute to the next, so
wall time is kept beside CPU time and the time spent waiting for a core. A cell counts as clean if wall time is within 12 % of CPU
time (one thread), or if the threads hardly waited for a core (several).
"""

import gc
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from msgspec import structs
from numpy import ndarray

from bus.messages.catalog import ProfileRow
from services.executor.backends.base import trim_memory
from services.shell.host.accelerators import cuda_memory_used_mb, processor

Array = ndarray[Any, Any]

CLEAN = 1.12  # wall time over CPU time
MOST_CALLS = 20_000
LEAST_CALLS = 5


@dataclass(frozen=True)
class LatencyCell:
    """One measurement of one batch, in ms a call. waited: share of the time in which a thread waited for a core. p99_low_ms, p99_high_ms: as in `ProfileRow`."""

    p50_ms: float
    p99_ms: float
    least_ms: float
    cpu_ms: float
    wall_over_cpu: float
    waited: float
    p99_low_ms: float | None = None
    p99_high_ms: float | None = None

    def clean(self, threads: int) -> bool:
        """threads: 0 if an accelerator computes and the CPU only waits."""
        return self.wall_over_cpu <= CLEAN if threads == 1 else self.waited <= CLEAN - 1.0

    def estimate_ms(self, threads: int) -> float:
        """The median of a clean cell; otherwise the least that it can be without neighbours."""
        if self.clean(threads):
            return self.p50_ms
        return min(self.least_ms, self.cpu_ms) if threads == 1 and self.cpu_ms > 0 else self.least_ms


def measure_calls(call: Callable[[], object], seconds: float, threads: int) -> LatencyCell:
    """Call for about so many seconds, at least five times, or fewer times if one call takes long."""
    # The clock of one thread is exact; the process's may advance in ticks.
    cpu_ns = time.thread_time_ns if threads == 1 else time.process_time_ns
    walls: list[int] = []
    counter = time.perf_counter_ns
    gc.disable()
    try:
        call()
        waited = _waited_ns()
        cpu = cpu_ns()
        start = counter()
        end = start + int(seconds * 1e9)
        before = start
        while True:
            call()
            after = counter()
            walls.append(after - before)
            before = after
            count = len(walls)
            if count >= MOST_CALLS or (after >= end and (count >= LEAST_CALLS or after - start > 1_000_000_000)):
                break
        cpu = cpu_ns() - cpu
        waited = _waited_ns() - waited
    finally:
        gc.enable()
    total = before - start
    walls.sort()
    few, many = ends_of_p99(len(walls))
    return LatencyCell(
        p50_ms=walls[len(walls) // 2] / 1e6,
        p99_ms=walls[min(len(walls) - 1, int(len(walls) * 0.99))] / 1e6,
        least_ms=walls[0] / 1e6,
        cpu_ms=cpu / len(walls) / 1e6,
        wall_over_cpu=total / cpu if cpu > 0 else 1.0,
        waited=waited / total if total > 0 else 0.0,
        p99_low_ms=walls[few] / 1e6,
        p99_high_ms=None if many is None else walls[many] / 1e6,
    )


def ends_of_p99(count: int) -> tuple[int, int | None]:
    """The places, in so many sorted measurements, of the ends of the 95 % interval of their law's P99. None: it may lie beyond all of them.

    How many of them lie above it is binomial.
    """
    total = chance = 0.99**count
    above = least = 0
    while total <= 0.975:
        least += total <= 0.025
        above += 1
        chance *= (count - above + 1) / above / 99.0
        total += chance
    return max(0, count - 1 - above), count - least if least else None


def _waited_ns() -> int:
    """Nanoseconds that the slowest thread of this process has waited for a core. 0 if Linux does not report it."""
    most = 0
    try:
        for task in os.listdir("/proc/self/task"):
            with open(f"/proc/self/task/{task}/schedstat", "rb") as file:
                most = max(most, int(file.read().split()[1]))
    except (OSError, ValueError, IndexError):
        return 0
    return most


class Memory:
    """Growth of this process's resident memory since this was made, in MB: what a model keeps, and what its batches need."""

    def __init__(self) -> None:
        self.loaded()
        self._base = _status_mb("VmRSS")

    def loaded(self) -> None:
        """The model is loaded. What only its load needed is given back, as in executors, and counts no more."""
        gc.collect()
        trim_memory()
        try:
            Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
            self._peak = "VmHWM"
        except OSError:
            self._peak = "VmRSS"

    def peak_mb(self) -> float:
        """The highest growth since then."""
        return max(0.0, max(_status_mb("VmRSS"), _status_mb(self._peak)) - self._base)


class DeviceMemory:
    """The same for an accelerator's memory: growth of what all processes take of it."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._base = cuda_memory_used_mb(device)
        self._peak = 0.0

    def loaded(self) -> None:
        """Nothing: frameworks keep what a load needed."""

    def peak_mb(self) -> float:
        """The highest growth that was seen. Frameworks keep the memory that large batches needed."""
        self._peak = max(self._peak, cuda_memory_used_mb(self._device) - self._base)
        return self._peak


def memory_of(device: str) -> Memory | DeviceMemory:
    """Measures what a model that is loaded from now on takes of the device's memory, or of the host's if the device cannot be asked."""
    return DeviceMemory(device) if device.startswith("cuda") else Memory()


def _status_mb(field: str) -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) / 1024.0
    return 0.0


# -- a mixture of samples


@dataclass(frozen=True)
class Mix:
    """Batches of a cascade, by how many of their items go on to its second part. on: of each sample, whether it does."""

    on: Array

    @classmethod
    def of(cls, file: str) -> "Mix | None":
        return cls(np.load(file, allow_pickle=False)) if file else None

    @property
    def picks(self) -> list[Callable[[int], Array]]:
        """The samples of a batch of which none goes on, as many as usual where any does, and as many as 99 % of such batches have at most."""
        share, chance = float(self.on.mean()), np.random.default_rng(0)
        counts: tuple[Callable[[int], float], ...] = (
            lambda batch: 0.0 * batch,
            lambda batch: max(1.0, batch * share / (1.0 - (1.0 - share) ** batch)),
            lambda batch: max(1.0, float(np.quantile(chance.binomial(batch, share, 10_000), 0.99))),
        )

        def pick(batch: int, count: float) -> Array:
            goes = min(batch, round(count))
            return np.append(
                np.resize(np.flatnonzero(~self.on), batch - goes), np.resize(np.flatnonzero(self.on), goes)
            )

        return [lambda batch, count=count: pick(batch, count(batch)) for count in counts]  # type: ignore[misc]

    def rows(self, kinds: Sequence[list[ProfileRow]]) -> list[ProfileRow]:
        """The mean latency of a batch as its median, since costs and rates follow from that, and as its 99th percentile that of the third kind."""
        none, usual, most = ({(row.length, row.batch): row for row in rows} for rows in kinds)
        found = []
        for key in (key for key in none if key in usual and key in most):
            alone = float(1.0 - self.on.mean()) ** key[1]
            means = {
                name: alone * getattr(none[key], name) + (1.0 - alone) * getattr(usual[key], name)
                for name in ("p50_ms", "cpu_ms")
            }
            found.append(structs.replace(usual[key], **means, p99_ms=max(means["p50_ms"], most[key].p50_ms)))
        return found


def host(framework: str) -> dict[str, str]:
    """Where and when a profile was made: an int8 model's speed and answers depend on the instruction set."""
    here = processor()
    return {
        "isa": here.isa,
        "arithmetic": here.arithmetic,
        "cpu": here.model,
        "framework": framework,
        "date": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
    }
