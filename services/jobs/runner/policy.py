"""When a worker may take offline work, and with which variant. Pure.

INFaaS, section 4.2: offline queries are throttled while the worker's utilisation is above 40 % or an online variant there is above
its profiled latency. The published code looks again every 500 ms (common_model_util.cc), counts the offline work itself, and
loads a copy of its own; here the offline work's own use does not count, and it shares what is loaded: online queries go first.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Literal

import msgspec
from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.jobs import OVER, Chunk, JobRecord
from services.core.catalog import Catalog
from services.core.cost import latency_ms
from services.jobs.policy import cost_per_item, eligible

LOOK_S = 0.5  # between looks (the published code's period)
_TROUBLED = ("Overloaded", "Interfered")


class Knobs(Struct, frozen=True, kw_only=True):
    """See JobsSettings. latency_least_s: seconds by which a batch must exceed its profile to count. simulated: the whole system
    is, and its variants count as others do.
    """

    utilisation_below: float = 0.4
    latency_ratio: float = 1.25
    latency_least_s: float = 0.002
    in_flight: int = 2
    simulated: bool = False


def obstacle(
    beat: WorkerHeartbeat | None,
    device: str,
    record_of: Callable[[str], VariantRecord | None],
    knobs: Knobs,
) -> str:
    """Why no offline work may be taken on this device now; empty when the worker is calm."""
    if beat is None:
        return "the worker is silent"
    if beat.draining or beat.leaving:
        return "the worker is leaving"
    status = next((d for d in beat.devices if d.device == device), None)
    if status is None or not status.alive:
        return f"the executor of {device} does not run"
    others = max(0.0, status.utilisation - status.offline)
    if others > knobs.utilisation_below:
        return f"{device} is used {others:.0%} by other work, offline work waits above {knobs.utilisation_below:.0%}"
    for instance in beat.instances:
        why = _trouble(instance, record_of(instance.variant), knobs)
        if why:
            return why
    return ""


def _trouble(instance: InstanceStatus, record: VariantRecord | None, knobs: Knobs) -> str:
    """Why an online variant needs the worker for itself; empty when it does not. What serves nothing online needs nothing."""
    worst = next((s for s in (instance.state, *instance.app_states.values()) if s in _TROUBLED), "")
    if worst:
        return f"{instance.variant} is {worst}"
    if record is None or instance.load <= 0 or instance.latency_ms <= 0 or not record.profile.rows:
        return ""
    profiled = latency_ms(record, max(1, round(instance.mean_batch))) / 1000.0
    taken = instance.latency_ms / 1000.0
    if taken > knobs.latency_ratio * profiled and taken - profiled > knobs.latency_least_s:
        return f"{instance.variant} takes {taken * 1e3:.3g} ms a batch, its profile says {profiled * 1e3:.3g} ms"
    return ""


def ranked(
    records: Iterable[VariantRecord], devices: Iterable[DeviceStatus], prices: Mapping[str, float], items: int
) -> list[tuple[VariantRecord, str]]:
    """The variants that this worker has a device for, and which, cheapest item first."""
    found: list[tuple[float, str, VariantRecord, str]] = []
    present = sorted(devices, key=lambda device: not device.alive)  # one whose executor is away may come back
    for record in records:
        for device in present:
            if (device.kind, device.simulated) == (record.hardware, record.simulated):
                cost = cost_per_item(record, items, prices, device.cores, device.memory_mb)
                found.append((cost, record.variant, record, device.device))
                break
    return [(record, device) for _, _, record, device in sorted(found, key=lambda one: one[:2])]


# -- what a runner knows: jobs, catalogue, and its worker as the monitor tells it

STRANGERS = 100  # times that chunks of a job that nobody knows are given back before they go
SILENT_S = 2.0  # without the worker's heartbeat
_decode = msgspec.msgpack.Decoder(JobRecord).decode


class RunnerView:
    """prices: US$ an hour by device kind."""

    def __init__(self, prices: Mapping[str, float], knobs: Knobs) -> None:
        self.catalog = Catalog()
        self.beat: WorkerHeartbeat | None = None
        self._records: dict[str, JobRecord] = {}
        self._prices = prices
        self._knobs = knobs
        self._heard_at = float("-inf")
        self._strangers: dict[str, int] = {}  # jobs whose chunks came and whose records did not, and how often

    # -- jobs

    def job(self, job: str) -> JobRecord | None:
        return self._records.get(job)

    def is_over(self, job: str) -> bool:
        """Whether it has ended; one that is not known may still be on its way to us."""
        record = self._records.get(job)
        return record is not None and record.status.state in OVER

    def running(self) -> list[JobRecord]:
        return [record for record in self._records.values() if record.status.state == "running"]

    def changed(self, job: str, value: bytes | None) -> bool:
        """One entry of the jobs bucket. Whether a job begins to run."""
        before = self._records.pop(job, None)
        if value is None:
            return False
        try:
            record = self._records[job] = _decode(value)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return False
        return record.status.state == "running" and (before is None or before.status.state != "running")

    def fate(self, chunk: Chunk) -> JobRecord | Literal["drop", "give back"]:
        """What to do with a chunk from the queue: compute it for this job, drop it, or leave it to somebody else, or to later."""
        record = self._records.get(chunk.job)
        if record is None or record.checkpoint.generation < chunk.generation:  # on its way to us, or forgotten
            times = self._strangers[chunk.job] = self._strangers.pop(chunk.job, 0) + 1
            if len(self._strangers) > STRANGERS:
                del self._strangers[next(iter(self._strangers))]
            return "drop" if times > STRANGERS else "give back"
        written = record.checkpoint
        if self.is_over(chunk.job) or (chunk.generation, chunk.number) < (written.generation, written.chunks):
            return "drop"
        return record if self.candidates(record) else "give back"

    # -- the worker

    def heard(self, beat: WorkerHeartbeat, now: float) -> None:
        self.beat, self._heard_at = beat, now

    def candidates(self, record: JobRecord) -> list[tuple[VariantRecord, str]]:
        """The variants that this worker could compute a job with, and on which device, cheapest first."""
        status = record.status
        found = eligible(
            self.catalog,
            status.app,
            accuracy=status.accuracy,
            model=status.model,
            variant=status.variant,
            simulated=self._knobs.simulated,
        )
        return ranked(found, self.beat.devices if self.beat is not None else (), self._prices, record.chunk_items)

    def instances(self, variant: str, device: str) -> list[InstanceStatus]:
        beat = self.beat
        return [i for i in beat.instances if i.variant == variant and i.device == device] if beat is not None else []

    def obstacle(self, records: Iterable[JobRecord], now: float) -> str:
        """Why nothing of these jobs may be computed here now; empty when the worker is calm."""
        beat = self.beat if now - self._heard_at < SILENT_S else None
        if beat is None:
            return "the worker is silent"
        wanted = [candidates[0][1] for record in records if (candidates := self.candidates(record))]
        if not wanted:
            return "no device for a variant that would do"
        for device in sorted(set(wanted)):
            why = obstacle(beat, device, self.catalog.variant, self._knobs)
            if why:
                return why
        return ""
