"""The fleet digest: what the autoscaler of one worker must know about all other workers, as sums.

Each worker plans for itself. About the others it needs to know: what is free on device kinds that it does not have; how many instances
of a variant run there; and which worker is first, if one of several must act for all. This is the same for every worker.
"""

from collections.abc import Callable, Iterable

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import (
    FleetDigest,
    FleetRoster,
    InstanceStatus,
    PoolDigest,
    PoolRoster,
    VariantDigest,
    WorkerHeartbeat,
)
from services.core.cost import PER_CORE
from services.core.lifecycle import SERVING, needed

YOUNG = 3.0  # s for which a new instance counts as busy, since its work has not arrived yet
ROOMY = 0.8  # of saturation: an instance on another worker has room if its load is less
FIRST = 2  # how many workers are named: the first one needs to know which one is first without it

RecordOf = Callable[[str], VariantRecord | None]
Hardware = tuple[str, bool]  # kind of device, and whether it is simulated


class _Pool:
    """The sums of one PoolDigest."""

    __slots__ = ("cores", "memory", "names", "shapes", "used")

    def __init__(self) -> None:
        self.names: list[str] = []
        self.cores = self.memory = self.used = 0.0
        self.shapes: dict[tuple[int, float], None] = {}


class _Sums:
    """The sums of one VariantDigest."""

    __slots__ = (
        "answering", "best", "busy", "busy_full", "factors", "holders", "instances", "overloaded", "record", "roomy", "running",
        "serving", "young",
    )  # fmt: skip

    def __init__(self, record: VariantRecord | None) -> None:
        self.record = record
        self.roomy = ROOMY * record.profile.saturation_qps if record is not None else 0.0
        self.holders: list[str] = []
        self.instances = self.running = self.serving = self.answering = 0
        self.busy = self.busy_full = self.factors = self.best = 0.0
        self.overloaded = self.young = False

    def add(self, status: InstanceStatus, now: float) -> None:
        young = now - status.since < YOUNG
        busy = busy_cores(status, self.record, now)
        serves = status.state in SERVING
        if self.record is None or status.load < self.roomy:
            self.running += 1
            self.serving += serves
            self.busy += busy
        else:
            self.busy_full += busy
        if serves:
            self.answering += 1
            self.factors += status.busy_factor
            if status.load > self.best:
                self.best = status.load
        if young or status.state == "Loading":
            self.young = True
        if status.state == "Overloaded" and not young:
            self.overloaded = True


def busy_cores(status: InstanceStatus, record: VariantRecord | None, now: float) -> float:
    """How many of its cores this instance uses. An instance that is new, or not in state Active, counts as using all."""
    cores = cores_of(record) if record is not None else 1.0
    if status.state != "Active" or now - status.since < YOUNG:
        return cores
    saturation = record.profile.saturation_qps if record is not None else 0.0
    return cores * min(1.0, status.load * status.busy_factor / saturation) if saturation > 0 else 0.0


def cores_of(record: VariantRecord) -> float:
    """How many cores of its device an instance uses while it computes. A GPU runs one batch at a time, so it counts as one core."""
    return float(max(1, record.threads)) if record.hardware in PER_CORE else 1.0


def digest_of(
    name: str, heartbeats: Iterable[WorkerHeartbeat], record_of: RecordOf, now: float
) -> tuple[FleetDigest, FleetRoster]:
    """The digest and the roster of the last heartbeats of all living workers. name: the name of the dispatcher."""
    pools: dict[Hardware, _Pool] = {}
    variants: dict[tuple[str, Hardware], _Sums] = {}
    workers = 0
    for heartbeat in sorted(heartbeats, key=lambda heartbeat: heartbeat.worker):
        if heartbeat.draining or heartbeat.leaving:
            continue
        workers += 1
        devices: dict[str, tuple[Hardware, bool]] = {}
        for device in heartbeat.devices:
            hardware = (device.kind, device.simulated)
            devices[device.device] = hardware, device.alive
            if not device.alive:
                continue
            pool = pools.get(hardware)
            if pool is None:
                pool = pools[hardware] = _Pool()
            if not pool.names or pool.names[-1] != heartbeat.worker:
                pool.names.append(heartbeat.worker)
            pool.cores += device.cores
            pool.memory += device.memory_mb
            pool.used += device.memory_used_mb
            pool.shapes[device.cores, device.memory_mb] = None
        for status in heartbeat.instances:
            where = devices.get(status.device)
            if where is None or not needed(status):
                continue
            key = status.variant, where[0]
            sums = variants.get(key)
            if sums is None:
                sums = variants[key] = _Sums(record_of(status.variant))
            holders = sums.holders
            if len(holders) < FIRST and heartbeat.worker not in holders:
                holders.append(heartbeat.worker)
            sums.instances += 1
            if where[1]:
                sums.add(status, now)
    digest = FleetDigest(
        dispatcher=name,
        at=now,
        workers=workers,
        pools=[
            PoolDigest(*hardware, one.names[:FIRST], len(one.names), one.cores, one.memory, one.used, list(one.shapes))
            for hardware, one in sorted(pools.items())
        ],
        variants=[
            VariantDigest(
                variant, *hardware, one.holders, one.running, one.serving, one.busy, one.busy_full, one.answering,
                one.factors, one.best, one.overloaded, one.young, one.instances,
            )
            for (variant, hardware), one in sorted(variants.items(), key=lambda item: item[0])
        ],
    )  # fmt: skip
    roster = [PoolRoster(*hardware, one.names) for hardware, one in sorted(pools.items())]
    return digest, FleetRoster(dispatcher=name, at=now, pools=roster)
