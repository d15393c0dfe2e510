"""What a runner knows: jobs, catalogue, and its worker as the monitor tells it. Pure."""

from collections.abc import Iterable, Mapping
from typing import Literal

import msgspec

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import InstanceStatus, WorkerHeartbeat
from bus.messages.jobs import OVER, Chunk, JobRecord
from services.core.catalog import Catalog
from services.jobs.policy import eligible
from services.jobs.runner.policy import Knobs, obstacle, ranked

STRANGERS = 100  # times that chunks of a job that nobody knows are given back before they go
SILENT_S = 2.0  # without the worker's heartbeat
_decode = msgspec.msgpack.Decoder(JobRecord).decode


class View:
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
