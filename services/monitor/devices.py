"""One device of a worker: its executor process, its instances, and the meter of what they cost. Pure."""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import fsum

from msgspec.structs import replace

from bus.fields import filled
from bus.messages.catalog import VariantRecord
from bus.messages.events import CostEvent
from bus.messages.fleet import DeviceStatus
from bus.messages.jobs import SYSTEM
from services.core.cost import device_share, price_per_hour
from services.core.placement import NOTHING, REMOTE, Amount, Device, total
from services.core.settings import MonitorSettings
from services.monitor.instances import WINDOW, MonitoredInstance


class MonitoredDevice:
    """What a monitor knows of one device.

    incarnation: of the present executor process, first heard at `met`; dead: of the last process that ended. seen: when the
    executor was heard last. is_machine: the device is this machine's CPU, whose utilisation and memory are measured.
    """

    def __init__(self, worker: str, spec: Device, prices: Mapping[str, float]) -> None:
        self.spec = spec
        self.price_per_hour = price_per_hour(spec.kind, prices, spec.cores)
        self.meter = Meter(
            worker, spec.kind, self.price_per_hour / 3600.0, simulated=spec.simulated, by_instance=spec.kind == REMOTE
        )
        self.is_machine = spec.kind == "cpu" and not spec.simulated
        self.incarnation: int | None = None
        self.dead: int | None = None
        self.met = self.seen = self.silent_since = 0.0
        self.ended = ""  # why its last executor ended
        self.alive = False
        self.listed = False  # its executor has said what it has, and the catalogue knows all of it
        self.exclusive = True
        self.computed = 0.0  # share of the last period in which it computed anything
        self.instances: dict[str, MonitoredInstance] = {}
        self._cpu: deque[tuple[float, float]] = deque()  # when the executor reported, CPU seconds of its process

    def open(self, now: float) -> None:
        """The monitor starts now."""
        self.met = self.seen = self.silent_since = now
        self.meter.open(now)

    def heard(self, now: float) -> bool:
        """The executor was heard. True if it was silent before."""
        was, self.alive, self.seen = self.alive, True, now
        return not was

    def became_silent(self, now: float) -> None:
        self.alive, self.silent_since = False, now
        self._cpu.clear()

    def reported(self, cpu_s: float | None, now: float) -> None:
        """The executor's process has used so many CPU seconds since it began."""
        if cpu_s is None or (self._cpu and cpu_s < self._cpu[-1][1]):  # not measured, or another process
            self._cpu.clear()
        if cpu_s is not None:
            self._cpu.append((now, cpu_s))
            while len(self._cpu) > 2 and now - self._cpu[1][0] >= WINDOW:
                self._cpu.popleft()

    @property
    def cpu_cores(self) -> float | None:
        """CPU cores that the executor's process used lately; None: not measured."""
        if len(self._cpu) < 2:
            return None
        (began, before), (ended, after) = self._cpu[0], self._cpu[-1]
        return (after - before) / (ended - began) if ended > began else None

    def price_per_s(self, record: VariantRecord) -> float:
        """US$ per second of one instance on this device."""
        return self.share(record) * self.price_per_hour / 3600.0

    def share(self, record: VariantRecord) -> float:
        return device_share(record, self.spec.cores, self.spec.memory_mb)

    def limit(self, settings: MonitorSettings) -> Amount:
        """What its instances may take together."""
        return total(
            self.spec, settings.memory_share, settings.cores_overcommit, settings.device_mb, settings.max_models
        )

    def committed(self) -> Amount:
        """What the loaded and loading instances take."""
        return self._taken(instance for instance in self.instances.values() if instance.counts)

    def reclaimable(self) -> Amount:
        """The part of `committed` that nobody needs. Loads of others may take it."""
        return self._taken(each for each in self.instances.values() if each.reclaimable and each.counts)

    def occupied(self) -> Amount:
        """What is taken now: with instances that are being unloaded, without loads that have not been ordered."""
        return self._taken(instance for instance in self.instances.values() if instance.on_device)

    def _taken(self, instances: Iterable[MonitoredInstance]) -> Amount:
        """Together they compute on no more cores than a CPU has, whatever the clocks say."""
        found = sum((instance.takes for instance in instances), NOTHING)
        return replace(found, cores=min(found.cores, self.spec.cores)) if self.spec.kind == "cpu" else found

    def waiting(self) -> list[MonitoredInstance]:
        """Admitted instances whose load has not been ordered yet, the oldest first."""
        return [instance for instance in self.instances.values() if instance.waits]

    @property
    def utilisation(self) -> float:
        """What its instances computed lately, 0..1: a share of its time; of a CPU, of all its cores' time."""
        if not self.exclusive:  # the times of its instances' batches overlap
            return self.computed
        return min(1.0, self._share((instance, instance.utilisation) for instance in self.instances.values()))

    @property
    def needed_use(self) -> float:
        """The part of `utilisation` that is not for instances which are reclaimable, 0..1."""
        needed = [each for each in self.instances.values() if not each.reclaimable]
        return min(1.0, self._share((instance, instance.utilisation) for instance in needed))

    @property
    def offline_use(self) -> float:
        """The part of `utilisation` that is offline work, 0..1."""
        return self._share((instance, instance.offline_use) for instance in self.instances.values())

    def _share(self, busy: Iterable[tuple[MonitoredInstance, float]]) -> float:
        """The share of the device that instances use, given the part of the time that each computes."""
        threaded = self.spec.kind == "cpu"
        cores = sum(used * (max(1, instance.record.threads) if threaded else 1) for instance, used in busy)
        return cores / max(1, self.spec.cores)

    def status(self, utilisation: float, foreign_use: float) -> DeviceStatus:
        """As heartbeats carry it. Used memory and cores are those that are promised to instances that somebody needs."""
        reclaimable = self.reclaimable()
        used = self.committed() - reclaimable
        return filled(
            DeviceStatus,
            self.spec,
            self,
            device=self.spec.name,
            memory_used_mb=used.memory_mb,
            cores_used=used.cores,
            utilisation=utilisation,
            incarnation=self.incarnation or 0,
            offline=min(utilisation, self.offline_use),
            memory_reclaimable_mb=reclaimable.memory_mb,
            cores_reclaimable=reclaimable.cores,
            foreign_use=foreign_use,
        )

    @property
    def host_used_mb(self) -> float:
        """Host memory of its instances that are there, or on their way."""
        return sum(instance.takes_of_host_mb for instance in self.instances.values())


@dataclass(slots=True, eq=False)
class Account:
    """What one instance owes for the present period."""

    record: VariantRecord
    share: float  # of the device, while loaded
    owner: str | None
    claimed: bool = True  # False: it is reclaimable
    seconds: float = 0.0  # loaded, in this period
    weighted: float = 0.0  # device-seconds owed
    busy: dict[str, float] = field(default_factory=dict)  # app -> seconds computed


@dataclass(slots=True, eq=False)
class Meter:
    """The cost meter of one device: what each instance owes for a period, and what is idle.

    An instance costs its share of the device for the time that it is loaded. If shares add up to more than the device (cores may
    be shared), they shrink in proportion. The rest is booked as idle, with the shares of reclaimable instances: nobody has a claim
    to them. So the rows of a period add up to the device's price.

    price_per_s: US$ of the whole device. simulated: the device is simulated, so nobody pays. by_instance: the price is that of one instance;
    then shares do not shrink, and nothing is idle.
    """

    worker: str
    kind: str
    price_per_s: float
    opened: float = 0.0
    simulated: bool = False
    by_instance: bool = False
    _loaded: dict[str, Account] = field(default_factory=dict)
    _left: list[Account] = field(default_factory=list)
    _at: float = field(init=False)

    def __post_init__(self) -> None:
        self._at = self.opened

    def open(self, now: float) -> None:
        """The first period begins."""
        self.opened = self._at = now

    def occupy(self, instance: str, record: VariantRecord, share: float, app: str | None, now: float) -> None:
        """An instance takes this share (0..1) of the device from now on. A second call changes the share."""
        self._advance(now)
        account = self._loaded.get(instance)
        if account is None:
            self._loaded[instance] = Account(record, share, app)
        else:
            account.share = share

    def vacate(self, instance: str, now: float) -> None:
        """An instance is gone. What it owes for this period is kept."""
        self._advance(now)
        account = self._loaded.pop(instance, None)
        if account is not None:
            self._left.append(account)

    def release(self, instance: str, now: float) -> None:
        """An instance is reclaimable from now on."""
        self._advance(now)
        self._loaded[instance].claimed = False

    def claim(self, instance: str, app: str | None, now: float) -> None:
        """A reclaimable instance is needed again. app: by whom; None: by its last owner."""
        self._advance(now)
        account = self._loaded[instance]
        account.claimed, account.owner = True, app or account.owner

    def used(self, instance: str, busy: Mapping[str, float]) -> None:
        """An instance computed so many seconds for these apps. The last app is its owner from now on."""
        account = self._loaded.get(instance)
        if account is None:
            return
        for app, seconds in busy.items():
            account.busy[app] = account.busy.get(app, 0.0) + seconds
            if app != SYSTEM:
                account.owner = app

    def forget(self, gone: Callable[[str], bool]) -> None:
        """Apps were deleted: while an instance is idle from now on, nobody pays for them."""
        for account in self._loaded.values():
            account.owner = None if account.owner is None or gone(account.owner) else account.owner

    def close(self, now: float) -> list[CostEvent]:
        """The rows of the period that ends now. The next period begins."""
        self._advance(now)
        seconds = self._at - self.opened
        rows = [row for account in (*self._left, *self._loaded.values()) for row in self._rows(account)]
        if seconds > 0:
            idle = 0.0 if self.by_instance else seconds * self.price_per_s - fsum(row.cost for row in rows)
            rows.append(self._row(None, None, seconds, 0.0, max(0.0, idle)))
        self.opened = self._at
        self._left.clear()
        for account in self._loaded.values():
            account.seconds = account.weighted = 0.0
            account.busy = {}
        return rows

    def _advance(self, now: float) -> None:
        elapsed = now - self._at
        if elapsed <= 0:
            return
        self._at = now
        taken = fsum(account.share for account in self._loaded.values() if account.claimed)
        shares = 1.0 if self.by_instance else max(1.0, taken)
        for account in self._loaded.values():
            account.seconds += elapsed
            if account.claimed:
                account.weighted += elapsed * account.share / shares

    def _rows(self, account: Account) -> list[CostEvent]:
        """An instance's period, split by the time it computed for each app. If it computed nothing, its owner pays. The system pays only for the time
        that it had it computed.
        """
        if account.seconds <= 0 and not account.busy:
            return []
        seconds, cost, rows = account.seconds, account.weighted * self.price_per_s, []
        if own := account.busy.pop(SYSTEM, 0.0):
            part = min(1.0, own / seconds) if seconds > 0 else 1.0
            rows = [self._row(account.record, SYSTEM, seconds * part, own, cost * part)]
            seconds, cost = seconds * (1.0 - part), cost * (1.0 - part)
        total = fsum(account.busy.values())
        if total <= 0:
            return [*rows, self._row(account.record, account.owner, seconds, 0.0, cost)]
        # The quotient first, so that tiny times keep their precision.
        parts = {app: busy / total for app, busy in account.busy.items()}
        return rows + [
            self._row(account.record, app, seconds * part, account.busy[app], cost * part)
            for app, part in parts.items()
            if part > 0
        ]

    def _row(
        self, record: VariantRecord | None, app: str | None, seconds: float, busy: float, cost: float
    ) -> CostEvent:
        return CostEvent(
            time=self._at,
            seconds=seconds,
            worker=self.worker,
            hardware=self.kind,
            app=app,
            model=record.model if record else None,
            variant=record.variant if record else None,
            busy_seconds=busy,
            cost=cost,
            simulated=self.simulated,
        )
