"""What a monitor remembers of one device: the executor process that drives it, and what its instances take. Pure."""

from collections.abc import Iterable, Mapping
from math import fsum

from bus.messages.catalog import VariantRecord
from bus.messages.events import CostEvent
from bus.messages.fleet import DeviceStatus
from services.core.cost import device_share, price_per_hour
from services.core.lifecycle import COUNTED
from services.core.placement import NOTHING, Amount, Device, cores_needed, total
from services.monitor.instances import MonitoredInstance


class MonitoredDevice:
    """One device. incarnation: of the executor process now, first heard of at `met`; dead: of the last one that ended.

    is_machine: its utilisation and memory are the machine's, to be measured there.
    """

    def __init__(self, worker: str, spec: Device, prices: Mapping[str, float]) -> None:
        self.spec = spec
        self.price_per_hour = price_per_hour(spec.kind, prices, spec.cores)
        self.meter = Meter(worker, spec.kind, self.price_per_hour / 3600.0, simulated=spec.simulated)
        self.is_machine = spec.kind == "cpu" and not spec.simulated
        self.incarnation: int | None = None
        self.dead: int | None = None
        self.met = self.seen = self.silent_since = 0.0
        self.alive = False
        self.instances: dict[str, MonitoredInstance] = {}

    def open(self, now: float) -> None:
        """The monitor starts: time counts from now on."""
        self.met = self.seen = self.silent_since = now
        self.meter.open(now)

    def spoke(self, now: float) -> bool:
        """The executor was heard; True when it was silent before."""
        was, self.alive, self.seen = self.alive, True, now
        return not was

    def fell_silent(self, now: float) -> None:
        self.alive, self.silent_since = False, now

    def price_per_s(self, record: VariantRecord) -> float:
        """US$ per second of one instance here: its share of the device."""
        return self.share(record) * self.price_per_hour / 3600.0

    def share(self, record: VariantRecord) -> float:
        return device_share(record, self.spec.cores, self.spec.memory_mb)

    def limit(self, memory_share: float, cores_overcommit: float) -> Amount:
        """What its instances may take together."""
        return total(self.spec, memory_share, cores_overcommit)

    def committed(self) -> Amount:
        """What the instances that stay or are on their way take."""
        memory_mb = cores = 0.0
        for instance in self.instances.values():
            if instance.state in COUNTED:
                memory_mb += instance.memory_mb
                cores += cores_needed(instance.record)
        return Amount(memory_mb, cores)

    def held(self) -> Amount:
        """What is really taken now, or about to be: also by what is being unloaded, not by what is not yet ordered."""
        there = (i for i in self.instances.values() if i.state != "Loading" or i.ordered is not None)
        return sum((instance.takes for instance in there), NOTHING)

    def waiting(self) -> list[MonitoredInstance]:
        """Admitted instances whose load has not been ordered yet, first come first."""
        return [i for i in self.instances.values() if i.state == "Loading" and i.ordered is None]

    @property
    def utilisation(self) -> float:
        """By what its instances computed, 0..1: a share of its time, or of its cores' time where it has several."""
        return min(1.0, self._share((instance, instance.utilisation) for instance in self.instances.values()))

    @property
    def offline_use(self) -> float:
        """The part of the device that offline work used lately, 0..1: of a machine its cores, as its utilisation is counted."""
        return self._share((instance, instance.offline_use) for instance in self.instances.values())

    def _share(self, busy: Iterable[tuple[MonitoredInstance, float]]) -> float:
        """Of the device, when each instance computes so much of the time: on its threads, or on one core of an accelerator."""
        threaded = self.spec.kind == "cpu"
        cores = sum(used * (max(1, instance.record.threads) if threaded else 1) for instance, used in busy)
        return cores / max(1, self.spec.cores)

    def status(self, utilisation: float) -> DeviceStatus:
        """As heartbeats carry it: memory and cores used are those that instances have been promised."""
        committed = self.committed()
        return DeviceStatus(
            device=self.spec.name,
            kind=self.spec.kind,
            cores=self.spec.cores,
            memory_mb=self.spec.memory_mb,
            memory_used_mb=committed.memory_mb,
            cores_used=committed.cores,
            utilisation=utilisation,
            price_per_hour=self.price_per_hour,
            simulated=self.spec.simulated,
            alive=self.alive,
            incarnation=self.incarnation or 0,
            offline=min(utilisation, self.offline_use),
        )


# -- The cost meter of one device: what each loaded instance owes for a period, and what nobody owes. Pure.


class Account:
    """One instance in one period."""

    __slots__ = ("busy", "owner", "record", "seconds", "share", "weighted")

    def __init__(self, record: VariantRecord, share: float, owner: str | None) -> None:
        self.record = record
        self.share = share  # of the device, while loaded
        self.owner = owner
        self.seconds = 0.0  # loaded, in this period
        self.weighted = 0.0  # device-seconds owed
        self.busy: dict[str, float] = {}  # app -> seconds computed


class Meter:
    """Integrates over every change of what is loaded. price_per_s: US$ of the whole device; simulated: nobody's money."""

    def __init__(
        self, worker: str, kind: str, price_per_s: float, now: float = 0.0, *, simulated: bool = False
    ) -> None:
        self._simulated = simulated
        self.price_per_s = price_per_s
        self._worker = worker
        self._kind = kind
        self._opened = now
        self._at = now
        self._loaded: dict[str, Account] = {}
        self._left: list[Account] = []

    def open(self, now: float) -> None:
        """The first period begins."""
        self._opened = self._at = now

    def occupy(self, instance: str, record: VariantRecord, share: float, app: str | None, now: float) -> None:
        """An instance takes its share (0..1) from now on; again for one that is there: its share changes."""
        self._advance(now)
        account = self._loaded.get(instance)
        if account is None:
            self._loaded[instance] = Account(record, share, app)
        else:
            account.share = share

    def vacate(self, instance: str, now: float) -> None:
        """An instance is gone; what it owes of this period stays."""
        self._advance(now)
        account = self._loaded.pop(instance, None)
        if account is not None:
            self._left.append(account)

    def used(self, instance: str, busy: Mapping[str, float]) -> None:
        """An instance computed so many seconds for these apps; the last one named owns it from now on."""
        account = self._loaded.get(instance)
        if account is None:
            return
        for app, seconds in busy.items():
            account.busy[app] = account.busy.get(app, 0.0) + seconds
            account.owner = app

    def close(self, now: float) -> list[CostEvent]:
        """The rows of the period that ends now; the next one begins."""
        self._advance(now)
        seconds = self._at - self._opened
        rows = [row for account in (*self._left, *self._loaded.values()) for row in self._rows(account)]
        if seconds > 0:
            idle = seconds * self.price_per_s - fsum(row.cost for row in rows)
            rows.append(self._row(None, None, seconds, 0.0, max(0.0, idle)))
        self._opened = self._at
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
        crowd = max(1.0, fsum(account.share for account in self._loaded.values()))
        for account in self._loaded.values():
            account.seconds += elapsed
            account.weighted += elapsed * account.share / crowd

    def _rows(self, account: Account) -> list[CostEvent]:
        """An instance's period, split among the apps by the time it computed for them; else its owner's alone."""
        if account.seconds <= 0 and not account.busy:
            return []
        cost = account.weighted * self.price_per_s
        total = fsum(account.busy.values())
        if total <= 0:
            return [self._row(account.record, account.owner, account.seconds, 0.0, cost)]
        # The quotient first: tiny times lose nothing in it.
        parts = {app: busy / total for app, busy in account.busy.items()}
        return [
            self._row(account.record, app, account.seconds * part, account.busy[app], cost * part)
            for app, part in parts.items()
        ]

    def _row(
        self, record: VariantRecord | None, app: str | None, seconds: float, busy: float, cost: float
    ) -> CostEvent:
        return CostEvent(
            time=self._at,
            seconds=seconds,
            worker=self._worker,
            hardware=self._kind,
            app=app,
            model=record.model if record else None,
            variant=record.variant if record else None,
            busy_seconds=busy,
            cost=cost,
            simulated=self._simulated,
        )
