"""Devices and instances of this worker and of the others, and what an instance can carry. Pure."""

from collections.abc import Iterable, Mapping, Sequence
from math import inf

from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import FleetDigest, PoolDigest, VariantDigest, WorkerHeartbeat
from services.autoscaler.models.coverage import accepted
from services.core.cost import HANDLING_MS, LatencyTable, instance_price_per_s, load_seconds
from services.core.digest import YOUNG, busy_cores, cores_of
from services.core.lifecycle import SERVING, needed
from services.core.placement import fits
from services.core.planning.problem import CandidateVariant, RequirementClass

KEPT = 100_000  # rates that are cached
LEAST_SHARE = 0.01  # of its cores, that an instance takes without any load
LEAST_RATE = (
    0.3  # of the profiled rate: an instance that is Overloaded below it says more about the machine than about itself
)


class OtherWorkers:
    """The other workers, by a dispatcher's digest of the fleet. digest: None if none has come lately; then no others are known."""

    def __init__(self, worker: str, digest: FleetDigest | None) -> None:
        self._worker = worker
        self._holders: dict[str, str] = {}
        self._able: dict[tuple[str, bool], str] = {}
        self.pools: list[PoolDigest] = digest.pools if digest is not None else []
        self.variants: list[VariantDigest] = digest.variants if digest is not None else []
        self.alone = digest is None or digest.workers < 2
        for row in self.variants:
            name = self._first(row.holders)
            if name is not None:
                known = self._holders.get(row.variant)
                self._holders[row.variant] = name if known is None or name < known else known
        for pool in self.pools:
            name = self._first(pool.first)
            if name is not None:
                self._able[pool.kind, pool.simulated] = name

    def _first(self, names: Iterable[str]) -> str | None:
        return next((name for name in names if name != self._worker), None)

    def holder(self, records: Iterable[VariantRecord]) -> str | None:
        """The first other worker, by name, that has or is loading one of these variants."""
        found = None
        for record in records:
            name = self._holders.get(record.variant)
            if name is not None and (found is None or name < found):
                found = name
        return found

    def able(self, kinds: Iterable[tuple[str, bool]]) -> str | None:
        """The first other worker, by name, that has a device of one of these kinds."""
        return min((self._able[kind] for kind in kinds if kind in self._able), default=None)

    def instances(self, records: Iterable[VariantRecord], mine: WorkerHeartbeat) -> int:
        """How many instances of these variants the other workers have or are loading."""
        names = {record.variant for record in records}
        own = sum(one.variant in names and needed(one) for one in mine.instances)
        return max(0, sum(row.instances for row in self.variants if row.variant in names) - own)


class ProfileCache:
    """Caches what follows from a variant's profile alone: its latency table, and throughput by latency."""

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
        """`throughput` of one instance, in items/s."""
        table = self.table(record)
        key = (record.variant, limit_s)
        rate = self._rates.get(key)
        if rate is None:
            if len(self._rates) >= KEPT:
                self._rates.clear()
            rate = self._rates[key] = throughput(table, limit_s)
        return rate


class FleetSupply:
    """Devices and instances: this worker's by its heartbeat, and the sums of other workers' for kinds of device that it lacks.

    Resources are named like "cpu/cores", and "away/gpu/cores" on other workers.
    """

    def __init__(
        self,
        mine: WorkerHeartbeat,
        others: OtherWorkers,
        records: Mapping[str, VariantRecord],
        prices: Mapping[str, float],
        memory_share: float,
        profiles: ProfileCache,
        now: float,
    ) -> None:
        self._profiles = profiles
        self._prices, self._share, self._now = prices, memory_share, now
        self._records = records
        self._here = {(d.kind, d.simulated) for d in mine.devices if d.alive}
        # Cores, memory and arithmetic of devices; that of other workers' is not known.
        self._shapes: dict[tuple[str, bool], list[tuple[int, float, str]]] = {}
        self._spare: dict[str, float] = {}
        self.running: dict[str, int] = {}
        self.serving: dict[str, int] = {}
        self._factors: dict[str, tuple[float, int]] = {}  # their sum, and of how many
        self._measured: dict[str, float] = {}  # cores that the candidates' instances use
        self._best: dict[str, float] = {}  # the most that one of its instances serves now
        self._overloaded: set[str] = set()
        self._young: set[str] = set()
        self._warm: set[str] = set()  # variants that this worker has in host memory
        self._count(mine)
        self._count_others(others)

    def is_here(self, record: VariantRecord) -> bool:
        return (record.hardware, record.simulated) in self._here

    def _count(self, mine: WorkerHeartbeat) -> None:
        devices = {d.device: d for d in mine.devices if d.alive}
        for device in devices.values():
            self._shapes.setdefault((device.kind, device.simulated), []).append(
                (device.cores, device.memory_mb, device.arithmetic)
            )
            pool = self._pool(device.kind, simulated=device.simulated)
            self._add(f"{pool}/memory", self._share * device.memory_mb - device.memory_used_mb)
            self._add(f"{pool}/cores", float(device.cores))
        for status in mine.instances:
            device_of = devices.get(status.device)
            if device_of is not None and status.state == "Warm":
                self._warm.add(status.variant)
            if device_of is None or not needed(status):
                continue
            name = status.variant
            record = self._records.get(name)
            busy = busy_cores(status, record, self._now)
            if record is None:
                self._add(f"{self._pool(device_of.kind, simulated=device_of.simulated)}/cores", -busy)
                continue
            serves = status.state in SERVING
            self.running[name] = self.running.get(name, 0) + 1
            self.serving[name] = self.serving.get(name, 0) + serves
            self._measured[name] = self._measured.get(name, 0.0) + busy
            if serves:
                total, number = self._factors.get(name, (0.0, 0))
                self._factors[name] = total + status.busy_factor, number + 1
                self._best[name] = max(self._best.get(name, 0.0), status.load)
            if status.state == "Overloaded" and self._now - status.since >= YOUNG:
                self._overloaded.add(name)
            if status.state == "Loading" or self._now - status.since < YOUNG:
                self._young.add(name)

    def _count_others(self, others: OtherWorkers) -> None:
        for pool in others.pools:
            if (pool.kind, pool.simulated) not in self._here:
                self._shapes[pool.kind, pool.simulated] = [(*shape, "") for shape in pool.shapes]
                name = self._pool(pool.kind, simulated=pool.simulated)
                self._add(f"{name}/memory", self._share * pool.memory_mb - pool.memory_used_mb)
                self._add(f"{name}/cores", pool.cores)
        for row in others.variants:
            if (row.kind, row.simulated) in self._here:
                continue
            name = row.variant
            known = name in self._records
            busy = row.busy_full if known else row.busy_full + row.busy
            self._add(f"{self._pool(row.kind, simulated=row.simulated)}/cores", -busy)
            if not known:
                continue
            self.running[name], self.serving[name], self._measured[name] = row.running, row.serving, row.busy
            if row.answering:
                self._factors[name], self._best[name] = (row.factors, row.answering), row.best
            if row.overloaded:
                self._overloaded.add(name)
            if row.young:
                self._young.add(name)

    def _pool(self, kind: str, *, simulated: bool) -> str:
        away = "" if (kind, simulated) in self._here else "away/"
        return f"{away}{'simulated ' * simulated}{kind}"

    def _add(self, pool: str, amount: float) -> None:
        self._spare[pool] = self._spare.get(pool, 0.0) + amount

    def candidate(
        self, record: VariantRecord, serves: tuple[str, ...], limit_s: float, *, barred: bool, stays: bool = False
    ) -> CandidateVariant | None:
        """The variant as a candidate for plans; None if no device could run it. stays: what runs of it is kept."""
        shapes = [
            (cores, memory)
            for cores, memory, arithmetic in self._shapes.get((record.hardware, record.simulated), ())
            if fits(record, cores, memory, self._share, arithmetic)
        ]
        if not shapes:
            return None
        cores, memory = shapes[0]
        alone_ms = self._profiles.table(record).seconds(1) * 1000.0
        total, number = self._factors.get(record.variant, (1.0, 1))
        factor = max(1.0, total / number)
        rate = self._profiles.rate(record, limit_s) / factor
        name = record.variant
        if name in self._overloaded:
            rate = max(min(rate, self._best[name]), LEAST_RATE * rate)  # what it serves now is all that it can serve
        price = instance_price_per_s(record, self._prices, cores, memory)
        running = self.running.get(record.variant, 0)
        pool = self._pool(record.hardware, simulated=record.simulated)
        here = self.is_here(record)
        return CandidateVariant(
            name=record.variant,
            apps=serves,
            model=record.model,
            hardware=record.hardware,
            latency_ms=alone_ms,
            saturation_qps=rate,
            cost_per_s=price,
            load_s=load_seconds(record, warm=record.variant in self._warm),
            accuracy=record.accuracy,
            uses={f"{pool}/cores": cores_of(record), f"{pool}/memory": record.profile.memory_mb},
            running=running,
            least=running if stays or not here else 0,
            most=running if barred else None,
            cost_per_1000=price * (alone_ms + HANDLING_MS),  # as services.core.cost.cost_per_1000 has it, one at a time
        )

    def settled(self, candidates: Sequence[CandidateVariant]) -> bool:
        """Whether the running instances of these have run for a while, so that what they serve shows what they can serve."""
        return not any(one.name in self._young for one in candidates)

    def totals(
        self, candidates: Sequence[CandidateVariant], demands: Sequence[RequirementClass], slack: float
    ) -> dict[str, float]:
        """By resource, what the candidates may take together: what the running ones take, and what is free.

        A core is free if running instances neither use it now nor will for the load that is to be carried.
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

    def time_shared(self, candidates: Sequence[CandidateVariant]) -> dict[str, float]:
        """Cores of this worker on which the candidates' instances may compute, each for a share of the time."""
        pools = {self._cores_of(one) for one in candidates if self.is_here(self._records[one.name])}
        return {pool: max(0.0, self._spare.get(pool, 0.0)) for pool in sorted(pools)}

    def in_time(
        self, candidates: Sequence[CandidateVariant], demands: Sequence[RequirementClass], slack: float
    ) -> list[CandidateVariant]:
        """The candidates, with the cores of this worker that an instance uses at most: for all load that it may get."""
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
    def _cores_of(one: CandidateVariant) -> str:
        return next(pool for pool in one.uses if pool.endswith("/cores"))


def _utilisations(
    candidates: Sequence[CandidateVariant], demands: Sequence[RequirementClass], slack: float
) -> dict[str, float]:
    """By variant, the share of its time that its largest demand takes, if that is spread over all that may answer it."""
    found = dict.fromkeys((one.name for one in candidates), 0.0)
    for demand, indices in zip(demands, accepted(candidates, demands), strict=True):
        able = [candidates[c] for c in indices]
        capacity = sum(one.saturation_qps * one.running for one in able)
        share = min(1.0, slack * demand.load / capacity) if capacity > 0 else 0.0
        for one in able:
            found[one.name] = max(found[one.name], share)
    return found


def throughput(table: LatencyTable, limit_s: float) -> float:
    """Items/s that one instance serves if each item must be answered within `limit_s` seconds.

    At full load an item waits for the batch under way before its own batch begins, so both must fit into the limit: it is the
    throughput of the largest such batch. If not even two single items fit, the instance must idle so much that the mean wait
    (M/D/1) fits into what is left.
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
