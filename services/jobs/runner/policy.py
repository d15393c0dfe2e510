"""When a worker may take offline work, with which variant, and what a runner does with a chunk from the queue.

INFaaS, section 4.2: offline queries wait while the worker's utilisation is above 40 %, or while an online variant there is above its
profiled latency. The published code checks this every 500 ms (common_model_util.cc), counts the offline work itself, and loads a copy of
the variant for it. Here the offline work's own utilisation does not count, and offline work shares the loaded instances: online queries
go first.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal

from bus.codec import decode_kept
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from bus.messages.jobs import OVER, Chunk, JobRecord
from services.core.catalog import Catalog
from services.core.cost import latency_ms
from services.core.placement import adds_alike
from services.core.settings import JobsSettings
from services.jobs.policy import cost_per_item, eligible

TICK_S = 0.5  # between checks (the published code's period)
SILENT_S = 2.0  # without the worker's heartbeat
MOST_RETURNS = 100  # of chunks of a job whose record is unknown, before such chunks are dropped
_TROUBLED = ("Overloaded", "Interfered")


def obstacle(
    heartbeat: WorkerHeartbeat | None,
    device: str,
    record_of: Callable[[str], VariantRecord | None],
    settings: JobsSettings,
) -> str:
    """Why no offline work may be taken on this device now; empty when it may."""
    if heartbeat is None:
        return "the worker is silent"
    if heartbeat.draining or heartbeat.leaving:
        return "the worker is leaving"
    status = next((d for d in heartbeat.devices if d.device == device), None)
    if status is None or not status.alive:
        return f"the executor of {device} does not run"
    others, limit = max(0.0, status.utilisation - status.offline), settings.utilisation_below
    if others > limit:
        return f"{device} is used {others:.0%} by other work, offline work waits above {limit:.0%} (jobs.utilisation_below)"
    for instance in heartbeat.instances:
        why = _trouble(instance, record_of(instance.variant), settings)
        if why:
            return why
    return ""


def _trouble(instance: InstanceStatus, record: VariantRecord | None, settings: JobsSettings) -> str:
    """Why an online variant needs the worker for itself; empty when it does not, or when it serves no online queries."""
    worst = next((s for s in (instance.state, *instance.app_states.values()) if s in _TROUBLED), "")
    if worst:
        return f"{instance.variant} is {worst}"
    if record is None or instance.load <= 0 or instance.latency_ms <= 0 or not record.profile.rows:
        return ""
    profiled = latency_ms(record, max(1, round(instance.mean_batch))) / 1000.0
    taken = instance.latency_ms / 1000.0
    if taken > settings.latency_ratio * profiled and taken - profiled > settings.latency_least_ms / 1000.0:
        return f"{instance.variant} takes {taken * 1e3:.3g} ms a batch, its profile says {profiled * 1e3:.3g} ms"
    return ""


def ranked(
    records: Iterable[VariantRecord], devices: Iterable[DeviceStatus], prices: Mapping[str, float], items: int
) -> list[tuple[VariantRecord, str]]:
    """The variants that this worker has a device for, each with the device; the one with the cheapest item first."""
    found: list[tuple[float, str, VariantRecord, str]] = []
    present = sorted(devices, key=lambda device: not device.alive)  # a device whose executor is away may come back
    for record in records:
        for device in present:
            alike = (device.kind, device.simulated) == (record.hardware, record.simulated)
            if alike and adds_alike(record, device.arithmetic):
                cost = cost_per_item(record, items, prices, device.cores, device.memory_mb)
                found.append((cost, record.variant, record, device.device))
                break
    return [(record, device) for _, _, record, device in sorted(found, key=lambda one: one[:2])]


class RunnerView:
    """What a runner knows: the jobs, the catalogue, and its worker's last heartbeat.

    prices: US$ an hour by device kind. simulated: the whole system is simulated, and its variants count as real ones.
    """

    def __init__(self, prices: Mapping[str, float], settings: JobsSettings, *, simulated: bool) -> None:
        self.catalog = Catalog()
        self.heartbeat: WorkerHeartbeat | None = None
        self._heard_at = float("-inf")
        self._records: dict[str, JobRecord] = {}
        self._prices = prices
        self._settings = settings
        self._simulated = simulated
        self._returns: dict[str, int] = {}  # by job whose record is unknown: how often its chunks were returned

    # -- jobs

    def job(self, job: str) -> JobRecord | None:
        return self._records.get(job)

    def is_over(self, job: str) -> bool:
        """Whether the job has ended. The record of an unknown job may still come."""
        record = self._records.get(job)
        return record is not None and record.status.state in OVER

    def running(self) -> list[JobRecord]:
        return [record for record in self._records.values() if record.status.state == "running"]

    def changed(self, job: str, value: bytes | None) -> bool:
        """Take one entry of the jobs bucket; returns whether a job begins to run."""
        before = self._records.pop(job, None)
        record = decode_kept(JobRecord, value)
        if record is None:
            return False
        self._records[job] = record
        return record.status.state == "running" and (before is None or before.status.state != "running")

    def decide(self, chunk: Chunk) -> JobRecord | Literal["drop", "return"]:
        """What to do with a chunk from the queue: compute it for this job, drop it, or return it for another runner or for later."""
        record = self._records.get(chunk.job)
        if record is None or record.checkpoint.generation < chunk.generation:  # its record is still to come, or deleted
            times = self._returns[chunk.job] = self._returns.pop(chunk.job, 0) + 1
            if len(self._returns) > MOST_RETURNS:
                del self._returns[next(iter(self._returns))]
            return "drop" if times > MOST_RETURNS else "return"
        written = record.checkpoint
        if self.is_over(chunk.job) or (chunk.generation, chunk.number) < (written.generation, written.chunks):
            return "drop"
        return record if self.candidates(record) else "return"

    # -- the worker

    def heard(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        self.heartbeat, self._heard_at = heartbeat, now

    def candidates(self, record: JobRecord) -> list[tuple[VariantRecord, str]]:
        """The variants that this worker could compute a job with, and on which device, cheapest first."""
        status = record.status
        found = eligible(
            self.catalog,
            status.app,
            accuracy=status.accuracy,
            model=status.model,
            variant=status.variant,
            simulated=self._simulated,
        )
        devices = self.heartbeat.devices if self.heartbeat is not None else ()
        return ranked(found, devices, self._prices, record.chunk_items)

    def production(self, app: str, variant: str) -> tuple[float, str] | None:
        """As in `Route.live`."""
        record = self.catalog.variant(variant)
        return None if record is None else self.catalog.seen(app, [record])[0].production

    def instances(self, variant: str, device: str) -> list[InstanceStatus]:
        if self.heartbeat is None:
            return []
        return [one for one in self.heartbeat.instances if one.variant == variant and one.device == device]

    def obstacle(self, records: Sequence[JobRecord], now: float) -> str:
        """Why nothing of these jobs may be computed here now; empty when it may."""
        heartbeat = self.heartbeat if now - self._heard_at < SILENT_S else None
        if heartbeat is None:
            return "the worker is silent"
        wanted = [candidates[0][1] for record in records if (candidates := self.candidates(record))]
        if not wanted:
            apps = ", ".join(sorted({record.status.app for record in records}))
            return f"has no device for a variant of {apps} that would do"
        for device in sorted(set(wanted)):
            why = obstacle(heartbeat, device, self.catalog.variant, self._settings)
            if why:
                return why
        return ""
