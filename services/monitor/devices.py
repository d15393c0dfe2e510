"""What a monitor remembers of one device: the executor process that drives it, and what its instances take. Pure."""

from collections.abc import Iterable, Mapping

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus
from services.core.cost import device_share, price_per_hour
from services.core.lifecycle import COUNTED
from services.core.placement import NOTHING, Amount, Device, cores_needed, total
from services.monitor.instances import Instance
from services.monitor.meter import Meter


class DeviceState:
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
        self.instances: dict[str, Instance] = {}

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

    def waiting(self) -> list[Instance]:
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

    def _share(self, busy: Iterable[tuple[Instance, float]]) -> float:
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
