"""What a worker is ordered to load, release and drain, what it loads of itself when it starts, and why it refuses. Pure."""

from collections.abc import Iterator

from msgspec import Struct

from bus.codec import decode_kept
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, LoadAccepted, LoadRefused, Release
from bus.messages.scaling import Drain, LeaderRecord
from services.core.actor import After, Effect, Tick
from services.core.cost import cost_per_1000
from services.core.settings import MonitorSettings
from services.monitor.devices import MonitoredDevice
from services.monitor.effects import MonitorEffects
from services.monitor.loading import InstanceTable
from services.monitor.policy import scaler

LEADER = "controller"  # key of the control bucket: who leads
MOST_INSTANCES = 256  # of one variant on one worker; an order for more is a mistake
WAITS_S = 5.0  # s for which an order waits until an instance is idle
ROOM_S = 0.05  # s after which it is tried again


class WorkerOrders(Struct, eq=False):
    """Obeys the orders to load, release and drain that a worker gets, or refuses them with a reason.

    leaving: the worker is being stopped. draining: it takes nothing new, so that it can be stopped.

    An order of the controller carries its epoch, which grows with each leader. The worker refuses an order whose epoch is below
    the largest that it has seen: its sender does not lead any more. Epoch 0: the order is not the controller's.
    """

    worker: str
    table: InstanceTable
    effects: MonitorEffects
    settings: MonitorSettings
    leaving: bool = False
    preloaded: dict[str, int | None] = {}  # by device: the executor process that has got its orders
    _epoch: int = 0
    _waiting: dict[str, tuple[EnsureLoaded, float]] = {}  # by variant: until when it waits for room
    _draining: str = ""  # why

    @property
    def draining(self) -> bool:
        return self.table.draining

    @property
    def usual_state(self) -> str:
        """The state of a worker that works as it should."""
        return "Draining" if self.draining else "Ready"

    def ensure(self, order: EnsureLoaded, now: float) -> tuple[LoadAccepted | LoadRefused, list[Effect]]:
        record = order.variant
        have = [instance for instance in self.table.of(record.variant) if not instance.reclaimable]
        found: list[Effect] = []
        why, by = order.reason or f"ordered by {order.orderer or 'somebody'}", scaler(order.orderer)
        obstacle = self._outdated(order.epoch) or self._closed()
        if order.at_least > MOST_INSTANCES:
            obstacle = f"at_least is {order.at_least}; one worker takes at most {MOST_INSTANCES} instances of a variant"
        if len(have) < order.at_least and not obstacle:
            claimed = self.table.claim(record.variant, order.at_least - len(have), order.app, now)
            if claimed:
                owner, count = order.app or claimed[0].owner, len(claimed)
                found.append(self.effects.scaling(by, "keep", record, owner, why, now, count, order.planned))
                have += claimed
        while len(have) < order.at_least and not obstacle:
            provided = self.table.provide(record, order.app, why, now, for_query=by == "dispatcher")
            if isinstance(provided, str):
                obstacle = provided
                break
            instance, effects = provided
            action = "promote" if instance.in_host else order.action or ("replicate" if have else "load")
            have.append(instance)
            found += effects
            found.append(self.effects.scaling(by, action, record, order.app, why, now, planned=order.planned))
        if obstacle and not self._waits_for_room(order, by, now):
            return self._refused(record.variant, obstacle, lasting=self.table.never_loads(record)), found
        if obstacle:
            found.append(After("room", ROOM_S, Tick("room")))
        accepted = LoadAccepted(worker=self.worker, variant=record.variant, instances=[i.id for i in have])
        return accepted, found

    def release(self, order: Release, now: float) -> tuple[LoadAccepted | LoadRefused, list[Effect]]:
        obstacle = self._outdated(order.epoch)
        if obstacle:
            return self._refused(order.variant, obstacle), []
        why = order.reason or f"ordered by {order.orderer or 'somebody'}"
        action, obey = ("release", self.table.mark) if order.reclaim else ("unload", self.table.release)
        released, found = obey(order.variant, order.keep, why, now)
        if released:
            first = released[0]
            by, count = scaler(order.orderer), len(released)
            found.append(self.effects.scaling(by, action, first.record, first.owner, why, now, count, order.planned))
        left = [instance.id for instance in self.table.of(order.variant)]
        return LoadAccepted(worker=self.worker, variant=order.variant, instances=left), found

    def drain(self, order: Drain, now: float) -> tuple[LoadAccepted | LoadRefused, list[Effect]]:
        """Take nothing new. Instances stay and answer what is queued; the reply lists them."""
        obstacle = self._outdated(order.epoch) or ("this worker is leaving" if self.leaving else "")
        if obstacle:
            return self._refused("", obstacle), []
        found: list[Effect] = []
        if order.resume == self.draining:
            self.table.draining = not order.resume
            self._draining = order.reason or f"ordered by {order.orderer or 'somebody'}"
            self.effects.heartbeat_due = True
            found = self.effects.worker_state(self.usual_state, self._draining, now)
        return LoadAccepted(worker=self.worker, variant="", instances=list(self.table.instances)), found

    def leader_changed(self, value: bytes | None) -> None:
        """The leader's record in the control bucket has this value now. So a new monitor refuses outdated orders, too."""
        record = decode_kept(LeaderRecord, value)
        if record is not None:
            self._epoch = max(self._epoch, record.epoch)

    def _closed(self) -> str:
        if self.leaving:
            return "this worker is leaving"
        return f"this worker is draining: {self._draining}" if self.draining else ""

    def _outdated(self, epoch: int) -> str:
        """Why an order of this epoch is refused; empty if it is obeyed."""
        if 0 < epoch < self._epoch:
            return f"the order is of epoch {epoch}, and a later leader has spoken in epoch {self._epoch}"
        self._epoch = max(self._epoch, epoch)
        return ""

    def _refused(self, variant: str, reason: str, *, lasting: bool = False) -> LoadRefused:
        return LoadRefused(worker=self.worker, variant=variant, reason=reason, lasting=lasting)

    def _waits_for_room(self, order: EnsureLoaded, by: str, now: float) -> bool:
        """Whether it is carried out as soon as an instance is idle: unless `cache = "reserve"`, all that is idle makes room for a query."""
        variant = order.variant
        waits = self.settings.cache != "reserve" and by == "dispatcher" and not self._closed()
        if waits and order.at_least <= MOST_INSTANCES and self.table.would_fit(variant, now):
            self._waiting[variant.variant] = order, now + WAITS_S
            return True
        return False

    def try_again(self, now: float) -> list[Effect]:
        """The orders that wait for room may have it now."""
        waiting, self._waiting = self._waiting, {}
        found: list[Effect] = []
        for variant, (order, until) in waiting.items():
            found += self.ensure(order, now)[1]
            if variant in self._waiting:
                self._waiting[variant] = order, until
        self._waiting = {variant: each for variant, each in self._waiting.items() if now < each[1]}
        return found

    # -- preloading

    def preload(self, device: MonitoredDevice, now: float) -> list[Effect]:
        """The device's executor has listed what it has. If it has just started, it loads what the operator wants there from the start."""
        tier = self.settings.preload
        if tier == "none" or self.preloaded.get(device.spec.name) == device.incarnation or self._closed():
            return []
        self.preloaded[device.spec.name] = device.incarnation
        found: list[Effect] = []
        for record in self._to_preload(device):
            found += self.table.preload(record, device, now, warm=tier == "warm")
        return found

    def _to_preload(self, device: MonitoredDevice) -> Iterator[VariantRecord]:
        """The variants for this device: first the cheapest of each model in use, then the others."""
        catalog = self.table.catalog
        rest: list[VariantRecord] = []
        seen: set[tuple[str, str]] = set()
        kind = (device.spec.kind, device.spec.simulated)
        records = [one for one in catalog.variants if (one.hardware, one.simulated) == kind and one.profile.rows]
        for record in sorted(records, key=lambda one: (one.dominated, cost_per_1000(one, device.price_per_s(one)))):
            model = (record.model, record.version)
            if model in seen:
                rest.append(record)
            else:
                seen.add(model)
                yield record
        yield from rest
