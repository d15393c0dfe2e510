"""What there is to serve with: devices and instances as heartbeats tell them, and what an instance can carry. Pure."""

from collections.abc import Mapping, Sequence
from math import inf

from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat
from services.autoscaler.models.coverage import accepted
from services.core.cost import HANDLING_MS, PER_CORE, LatencyTable, instance_price_per_s, load_seconds
from services.core.lifecycle import COUNTED, SERVING
from services.core.placement import Device, misfit
from services.core.planning.problem import Candidate, Demand

KEPT = 100_000  # rates
YOUNG = 3.0  # s for which a fresh instance counts as busy: its work is only about to come
ROOMY = 0.8  # of saturation: up to this load an instance elsewhere is taken to have room for ours
LEAST_SHARE = 0.01  # of its cores, that an instance takes without any load
LEAST_RATE = (
    0.3  # of the profile: an instance that is Overloaded below this says more about the machine than about itself
)


class Facts:
    """What follows from a variant's profile alone, kept: tables by variant, throughput by variant and latency."""

    def __init__(self) -> None:
        self._tables: dict[str, tuple[VariantRecord, LatencyTable]] = {}
        self._rates: dict[tuple[str, float], float] = {}

    def table(self, record: VariantRecord) -> LatencyTable:
        known = self._tables.get(record.variant)
        if known is None or known[0] is not record:
            known = self._tables[record.variant] = (record, LatencyTable(record))
            self._rates = {key: rate for key, rate in self._rates.items() if key[0] != record.variant}
        return known[1]

    def rate(self, record: VariantRecord, limit_s: float) -> float:
        """`throughput` of one instance."""
        table = self.table(record)
        key = (record.variant, limit_s)
        rate = self._rates.get(key)
        if rate is None:
            if len(self._rates) >= KEPT:
                self._rates.clear()
            rate = self._rates[key] = throughput(table, limit_s)
        return rate


class Supply:
    """Devices and instances as heartbeats tell them. Pools are named "cpu/cores", and "away/gpu/cores" on other workers."""

    def __init__(
        self,
        worker: str,
        beats: Mapping[str, WorkerHeartbeat],
        records: Mapping[str, VariantRecord],
        prices: Mapping[str, float],
        memory_share: float,
        facts: Facts,
        now: float,
    ) -> None:
        self._facts = facts
        self._prices, self._share, self._now = prices, memory_share, now
        self._records = records
        self._here = {(d.kind, d.simulated) for d in beats[worker].devices if d.alive}
        self._devices: dict[tuple[str, bool], list[DeviceStatus]] = {}
        self._spare: dict[str, float] = {}
        self.running: dict[str, int] = {}
        self.serving: dict[str, int] = {}
        self._factors: dict[str, list[float]] = {}
        self._measured: dict[str, float] = {}  # cores that the candidates' instances use
        self._best: dict[str, float] = {}  # the most that one of its instances serves now
        self._overloaded: set[str] = set()
        self._young: set[str] = set()
        for name, beat in sorted(beats.items()):
            if name == worker:
                self._count(beat, self._here)
            elif not beat.draining and not beat.leaving:
                self._count(beat, None)

    def is_here(self, record: VariantRecord) -> bool:
        return (record.hardware, record.simulated) in self._here

    def _count(self, beat: WorkerHeartbeat, here: set[tuple[str, bool]] | None) -> None:
        devices = {d.device: d for d in beat.devices if d.alive and (here is not None or (d.kind, d.simulated) not in self._here)}  # fmt: skip
        for device in devices.values():
            self._devices.setdefault((device.kind, device.simulated), []).append(device)
            pool = self._pool(device.kind, simulated=device.simulated)
            free = self._share * device.memory_mb - device.memory_used_mb
            self._add(f"{pool}/memory", free)
            self._add(f"{pool}/cores", float(device.cores))
        for status in beat.instances:
            device_of = devices.get(status.device)
            if device_of is None or status.state not in COUNTED:
                continue
            record = self._records.get(status.variant)
            busy = self._busy(status, record)
            roomy = here is not None or record is None or status.load < ROOMY * record.profile.saturation_qps
            if record is None or not roomy:
                self._add(f"{self._pool(device_of.kind, simulated=device_of.simulated)}/cores", -busy)
            if record is None:
                continue
            if roomy:
                self.running[record.variant] = self.running.get(record.variant, 0) + 1
                self.serving[record.variant] = self.serving.get(record.variant, 0) + (status.state in SERVING)
                self._measured[record.variant] = self._measured.get(record.variant, 0.0) + busy
            if status.state in SERVING:
                self._factors.setdefault(record.variant, []).append(status.factor)
                self._best[record.variant] = max(self._best.get(record.variant, 0.0), status.load)
            if status.state == "Overloaded" and self._now - status.since >= YOUNG:
                self._overloaded.add(record.variant)
            if status.state == "Loading" or self._now - status.since < YOUNG:
                self._young.add(record.variant)

    def _pool(self, kind: str, *, simulated: bool) -> str:
        away = "" if (kind, simulated) in self._here else "away/"
        return f"{away}{'simulated ' * simulated}{kind}"

    def _add(self, pool: str, amount: float) -> None:
        self._spare[pool] = self._spare.get(pool, 0.0) + amount

    def _busy(self, status: InstanceStatus, record: VariantRecord | None) -> float:
        """Cores that this instance uses of those that it may."""
        cores = cores_of(record) if record is not None else 1.0
        if status.state != "Active" or self._now - status.since < YOUNG:
            return cores
        saturation = record.profile.saturation_qps if record is not None else 0.0
        return cores * min(1.0, status.load * status.factor / saturation) if saturation > 0 else 0.0

    def candidate(
        self, record: VariantRecord, serves: tuple[str, ...], limit_s: float, *, barred: bool
    ) -> Candidate | None:
        """The variant as planning sees it; None when no device could have it."""
        devices = [
            d
            for d in self._devices.get((record.hardware, record.simulated), ())
            if not misfit(record, Device(name=d.device, kind=d.kind, cores=d.cores, memory_mb=d.memory_mb, simulated=d.simulated), self._share)
        ]  # fmt: skip
        if not devices:
            return None
        device = devices[0]
        alone_ms = self._facts.table(record).seconds(1) * 1000.0
        factors = self._factors.get(record.variant, [1.0])
        factor = max(1.0, sum(factors) / len(factors))
        rate = self._facts.rate(record, limit_s) / factor
        name = record.variant
        if name in self._overloaded:
            rate = max(min(rate, self._best[name]), LEAST_RATE * rate)  # what it serves is all that it can
        price = instance_price_per_s(record, self._prices, device.cores, device.memory_mb)
        running = self.running.get(record.variant, 0)
        pool = self._pool(record.hardware, simulated=record.simulated)
        here = self.is_here(record)
        return Candidate(
            name=record.variant,
            apps=serves,
            model=record.model,
            hardware=record.hardware,
            latency_ms=alone_ms,
            saturation_qps=rate,
            cost_per_s=price,
            load_s=load_seconds(record),
            accuracy=record.accuracy,
            uses={f"{pool}/cores": cores_of(record), f"{pool}/memory": record.profile.memory_mb},
            running=running,
            least=0 if here else running,
            most=running if barred else None,
            cost_per_1000=price * (alone_ms + HANDLING_MS),  # as services.core.cost.cost_per_1000 has it, one at a time
        )

    def settled(self, candidates: Sequence[Candidate]) -> bool:
        """Whether what runs of these has run for a while, so that what it serves says what it can."""
        return not any(one.name in self._young for one in candidates)

    def totals(self, candidates: Sequence[Candidate], demands: Sequence[Demand], slack: float) -> dict[str, float]:
        """What the candidates may take together: what those that run have, and what is free.

        Cores count as free as far as instances that run neither use them now nor will for the load to be carried.
        """
        spare = dict(self._spare)
        planned = _utilisations(candidates, demands, slack)
        for one in candidates:
            pool = self._cores_of(one)
            used = max(self._measured.get(one.name, 0.0), planned[one.name] * one.running * one.uses[pool])
            spare[pool] = spare.get(pool, 0.0) - used
        totals = {pool: max(0.0, amount) for pool, amount in spare.items()}
        for one in candidates:
            for pool, amount in one.uses.items():
                totals[pool] = totals.get(pool, 0.0) + amount * one.running
        return totals

    def time_shared(self, candidates: Sequence[Candidate]) -> dict[str, float]:
        """Cores of this worker that the candidates' instances may compute on, each for a share of the time."""
        pools = {self._cores_of(one) for one in candidates if self.is_here(self._records[one.name])}
        return {pool: max(0.0, self._spare.get(pool, 0.0)) for pool in sorted(pools)}

    def in_time(self, candidates: Sequence[Candidate], demands: Sequence[Demand], slack: float) -> list[Candidate]:
        """The same, with the cores of this worker that an instance can use at most: for all the load that may come to it."""
        need = dict.fromkeys((one.name for one in candidates), 0.0)
        for demand, indices in zip(demands, accepted(candidates, demands), strict=True):
            for c in indices:
                need[candidates[c].name] += slack * demand.load
        found = []
        for one in candidates:
            share = min(1.0, max(LEAST_SHARE, need[one.name] / one.saturation_qps))
            pool = self._cores_of(one)
            here = self.is_here(self._records[one.name])
            found.append(replace(one, uses=one.uses | {pool: share * one.uses[pool]}) if here else one)
        return found

    @staticmethod
    def _cores_of(one: Candidate) -> str:
        return next(pool for pool in one.uses if pool.endswith("/cores"))


def _utilisations(candidates: Sequence[Candidate], demands: Sequence[Demand], slack: float) -> dict[str, float]:
    """By variant: the share of its time that its busiest demand needs, were it spread over all that may answer it."""
    found = dict.fromkeys((one.name for one in candidates), 0.0)
    for demand, indices in zip(demands, accepted(candidates, demands), strict=True):
        able = [candidates[c] for c in indices]
        capacity = sum(one.saturation_qps * one.running for one in able)
        share = min(1.0, slack * demand.load / capacity) if capacity > 0 else 0.0
        for one in able:
            found[one.name] = max(found[one.name], share)
    return found


def cores_of(record: VariantRecord) -> float:
    """Of the device's cores, while it computes; a GPU runs one batch at a time, whoever's it is."""
    return float(max(1, record.threads)) if record.hardware in PER_CORE else 1.0


def throughput(table: LatencyTable, limit_s: float) -> float:
    """Items/s that one instance serves when each must be answered within `limit_s`.

    At full load an item waits for the batch under way before its own begins, so both must fit: the largest such batch.
    Where not even two single items fit, the instance must idle so much that waits stay within what is left (mean wait
    of M/D/1).
    """
    handling = HANDLING_MS / 1000.0
    batch = table.max_batch if limit_s == inf else table.largest_batch_within(limit_s / 2)
    if batch >= 1:
        return max(n / (table.seconds(n) + handling) for n in _sizes(batch))
    alone = table.seconds(1)
    wait = max(limit_s - alone, 0.01 * alone)
    return (2 * wait / (2 * wait + alone)) / (alone + handling)


def _sizes(most: int) -> list[int]:
    return [most] + [1 << i for i in range(most.bit_length()) if 1 << i < most]
