"""Where instances go that a worker had no room for, or should not keep: bin packing over the other workers. Pure.

An ask is handled once for each app and class of needs while it is pending. The worker that gets an order accepts or refuses it.
A refusal tries the next worker, then the next suitable variant, and at last a new machine, if the limits allow one.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from math import ceil, floor, inf

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, EnsureLoaded, LoadReply, Release
from bus.messages.scaling import AskForCapacity
from services.autoscaler.vms.commands import ControllerEffects, Turn
from services.autoscaler.vms.fleet import Fleet, FleetWorker
from services.autoscaler.vms.policy import HardwareNeed
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.cost import load_seconds
from services.core.lifecycle import SERVING
from services.core.placement import Amount, Device, cores_needed, misfit, total
from services.core.settings import MonitorSettings

REPLY_S = 2.0  # s after which a worker that has not answered counts as refusing
PATIENCE_S = 30.0  # s, beside its load time, for an instance to serve
SETTLED_S = 3.0  # s after which all figures show what was placed, so that the same may be asked again
COOL_S = 5.0  # s for which an ask that cannot be met is not tried again
ACCURACY = "accuracy"  # why a worker asks that carries its load: it gets free room, no new machine and no shared cores
GROWN = 1.5  # an ask for this many times the load of the pending ones is handled beside them
BUSY = 1.0  # threads for each CPU core if instances are placed for their load
FULL = 0.8  # part of the time of a device that takes instances in turn which may be used, if they are placed for their load

Key = tuple[str, float | None, float, bool, int]
# Has a machine started for a need. Returns its name, None if none may be started, and effects. Asked again, it names the same one.
AddMachine = Callable[[HardwareNeed], tuple[str | None, list[Effect]]]


class Placed(Struct, frozen=True):
    """One order. at_least: instances of this variant on this worker, in all. time: of its cores, or of a GPU, that they will use together."""

    worker: str
    record: VariantRecord
    at_least: int
    at: float
    time: float


class Pending:
    """One ask, from the first order until its instances serve."""

    def __init__(self, ask: AskForCapacity, now: float) -> None:
        self.ask = ask
        self.since = now
        self.orders: dict[str, Placed] = {}  # not answered yet, by reply subject
        self.placed: list[Placed] = []
        self.refused: set[tuple[str, str]] = set()
        self.machine = ""
        self.over = 0.0  # when it is forgotten; 0: it is under way


class InstancePlacement:
    """monitor: as the workers' monitors admit loads. Cores are promised more than once only if no better place is left."""

    def __init__(self, fleet: Fleet, catalog: Catalog, effects: ControllerEffects, monitor: MonitorSettings) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._effects = effects
        self._share = monitor.memory_share
        self._overcommit = monitor.cores_overcommit
        self._pending: dict[Key, Pending] = {}

    def ask(self, ask: AskForCapacity, now: float) -> None:
        """A worker asks. An ask for the same app and needs as a pending one is ignored; if its load has grown, the rest is handled."""
        load, number = 0.0, 0
        key: Key = (ask.app, ask.latency_ms, ask.accuracy, ask.why == ACCURACY, number)
        while (known := self._pending.get(key)) is not None:
            load, number = load + known.ask.load, number + 1
            key = (*key[:4], number)
        if number == 0 or ask.load > GROWN * load > 0:
            rest = max(1, ceil(ask.instances * (ask.load - load) / ask.load)) if number else ask.instances
            part = replace(ask, load=ask.load - load, instances=rest)
            self._pending[key] = Pending(part, now)

    def forget(self) -> None:
        """A new epoch begins."""
        self._pending.clear()

    def hardware(self) -> set[tuple[str, bool]]:
        """The hardware that pending asks need machines for."""
        found = set()
        for pending in self._pending.values():
            for name in () if pending.over or pending.placed or pending.ask.why == ACCURACY else pending.ask.variants:
                record = self._catalog.variant(name)
                if record is not None:
                    found.add((record.hardware, record.simulated))
        return found

    def replied(self, subject: str, reply: LoadReply | None) -> None:
        """A worker has answered an order. None: it has not, and counts as refusing."""
        for pending in self._pending.values():
            order = pending.orders.pop(subject, None)
            if order is None:
                continue
            if reply is None or reply.reason:
                pending.refused.add((order.worker, order.record.variant))
            else:
                pending.placed.append(order)

    def advance(self, add_machine: AddMachine, turn: Turn) -> list[Effect]:
        """Go on with all asks that are pending."""
        found: list[Effect] = []
        for key, pending in list(self._pending.items()):
            if not pending.over:
                found += self._advance(pending, add_machine, turn)
            elif turn.now >= pending.over:
                del self._pending[key]
        return found

    def _advance(self, pending: Pending, add_machine: AddMachine, turn: Turn) -> list[Effect]:
        now = turn.now
        for subject, order in list(pending.orders.items()):
            if now - order.at > REPLY_S:
                self.replied(subject, None)
        if pending.orders:
            return []
        if pending.placed:
            return self._wait(pending, turn)
        orders = self._place(pending, BUSY, turn)
        if orders:
            return orders
        if pending.ask.why == ACCURACY:
            pending.over = now + COOL_S
            return []
        machine, found = self._machine(pending, add_machine)
        pending.machine = machine or ""
        if not pending.machine:
            orders = self._place(pending, self._overcommit, turn)
            if not orders:
                pending.over = now + COOL_S
            found += orders
        return found

    def _wait(self, pending: Pending, turn: Turn) -> list[Effect]:
        """Until what was accepted serves."""
        now = turn.now
        if self._serves(pending):
            pending.over = now + SETTLED_S
            return self._release_old(pending, turn)
        if now - pending.since > PATIENCE_S + max(load_seconds(order.record) for order in pending.placed):
            pending.over = now
        return []

    # -- orders

    def _place(self, pending: Pending, overcommit: float, turn: Turn) -> list[Effect]:
        """Orders for the first variant of which all instances fit, else for the first of which some do."""
        ask, best = pending.ask, None
        workers = self._fleet.ready(turn.now)
        for name in ask.variants:
            record = self._catalog.variant(name)
            if record is None:
                continue
            count = self._count(ask, record)
            refused = {worker for worker, variant in pending.refused if variant == name}
            where = pack(
                record,
                count,
                workers,
                self._share,
                overcommit=overcommit,
                without=refused | {ask.worker},
                emptiest_first=ask.why == "interfered",
                share=self._time(ask, record, count) if overcommit == BUSY else 0.0,
                promised=self._promised(record.hardware) if overcommit == BUSY else {},
            )
            if where and (best is None or sum(where.values()) == count):
                best = (record, where)
                if sum(where.values()) == count:
                    break
        if best is None:
            return []
        return [self._order(pending, best[0], worker, count, turn) for worker, count in best[1].items()]

    def _order(self, pending: Pending, record: VariantRecord, worker: str, count: int, turn: Turn) -> Effect:
        ask = pending.ask
        at_least = len(self._fleet.workers[worker].of(record.variant)) + count
        subject = self._effects.reply_subject()
        time = count * self._time(ask, record, self._count(ask, record)) * (cores_needed(record) or 1.0)
        pending.orders[subject] = Placed(worker, record, at_least, turn.now, time)
        order = EnsureLoaded(
            variant=record,
            at_least=at_least,
            app=ask.app or None,
            orderer=self._effects.name,
            reason=f"{ask.worker} asked for it ({ask.why}){': ' + ask.reason if ask.reason else ''}",
            epoch=turn.epoch,
        )
        return self._effects.order(worker, "load", order, subject)

    @staticmethod
    def _count(ask: AskForCapacity, record: VariantRecord) -> int:
        """Instances of this variant that carry the load; of the first variant, as many as were asked for."""
        if record.variant == ask.variants[0]:
            return max(1, ask.instances)
        rate = record.profile.saturation_qps
        return max(1, ceil(ask.load / rate)) if rate > 0 else 1

    @staticmethod
    def _time(ask: AskForCapacity, record: VariantRecord, count: int) -> float:
        """The part of a device's time that each of so many instances will use, 0..1."""
        rate = record.profile.saturation_qps
        return min(1.0, ask.load / count / rate) if rate > 0 else 0.0

    def _promised(self, hardware: str) -> dict[str, float]:
        """By worker: what instances on this hardware will use of its time which do not compute yet."""
        found: dict[str, float] = {}
        for pending in self._pending.values():
            for order in (*pending.placed, *pending.orders.values()):
                if order.record.hardware == hardware:
                    found[order.worker] = found.get(order.worker, 0.0) + order.time
        return found

    def _machine(self, pending: Pending, add_machine: AddMachine) -> tuple[str | None, list[Effect]]:
        ask = pending.ask
        found: list[Effect] = []
        for name in ask.variants:
            record = self._catalog.variant(name)
            if record is None:
                continue
            reason = f"no worker has room for {name}, which {ask.worker} asked for ({ask.why})"
            need = HardwareNeed(hardware=(record.hardware, record.simulated), reason=reason, record=record)
            machine, effects = add_machine(need)
            found += effects
            if machine is not None:
                return machine, found
        return None, found

    # -- once they serve

    def _serves(self, pending: Pending) -> bool:
        for order in pending.placed:
            worker = self._fleet.workers.get(order.worker)
            if worker is None:
                continue
            serving = sum(one.state in SERVING for one in worker.of(order.record.variant))
            if serving < order.at_least:
                return False
        return True

    def _release_old(self, pending: Pending, turn: Turn) -> list[Effect]:
        """An instance that was interfered with has been moved: the old one is released, now that the new one serves."""
        ask = pending.ask
        old = self._fleet.workers.get(ask.worker)
        if ask.why != "interfered" or old is None:
            return []
        variant = pending.placed[0].record.variant
        slow = [one for one in old.of(variant) if one.state == "Interfered" or "Interfered" in one.app_states.values()]
        if not slow:
            return []
        keep = len(old.of(variant)) - 1
        why = f"moved to {pending.placed[0].worker}: {ask.reason or 'it was slowed down here'}"
        release = Release(variant=variant, keep=keep, orderer=self._effects.name, reason=why, epoch=turn.epoch)
        return [self._effects.order(ask.worker, "release", release)]


# -- bin packing: the fullest worker that still has room comes first, so that others become empty (INFaaS, section 4.2.3)


def room(
    record: VariantRecord, status: DeviceStatus, memory_share: float, overcommit: float = BUSY, promised: float = 0.0
) -> int:
    """How many more instances of a variant the device has room for, by its last heartbeat. promised: cores that do not compute yet."""
    device = Device(
        name=status.device,
        kind=status.kind,
        cores=status.cores,
        memory_mb=status.memory_mb,
        simulated=status.simulated,
        arithmetic=status.arithmetic,
    )
    if not status.alive or misfit(record, device, memory_share):
        return 0
    free = total(device, memory_share, overcommit) - Amount(status.memory_used_mb, status.cores_used + promised)
    memory, cores = record.profile.memory_mb, cores_needed(record)
    most = min(free.memory_mb / memory if memory > 0 else inf, free.cores / cores if cores > 0 else inf)
    return max(0, floor(min(most, 1000.0) + 1e-9))


def pack(
    record: VariantRecord,
    count: int,
    workers: Iterable[FleetWorker],
    memory_share: float,
    *,
    overcommit: float = BUSY,
    without: Collection[str] = (),
    emptiest_first: bool = False,
    share: float = 0.0,
    promised: Mapping[str, float] = {},
) -> dict[str, int]:
    """Worker to the number of new instances there: `count` together, or as many as there is room for.

    share: of a device's time that each instance will use where instances take turns, 0..1. promised: by worker, the same, or cores,
    of orders whose instances do not compute yet.
    """
    rooms: list[tuple[float, bool, str, int]] = []
    for worker in workers:
        if worker.name in without:
            continue
        busy = promised.get(worker.name, 0.0)
        cores = busy if record.hardware == "cpu" else 0.0
        devices = [(room(record, device, memory_share, overcommit, cores), device) for device in worker.devices]
        if share > 0 and cores_needed(record) == 0:
            devices = [(min(number, _in_time(device, share, busy)), device) for number, device in devices]
        space = sum(number for number, _ in devices)
        if space > 0:
            free = [device for number, device in devices if number > 0]
            used = min(d.utilisation for d in free) if emptiest_first else -_fullness(free)
            rooms.append((used, not worker.warm(record.variant), worker.name, space))
    found: dict[str, int] = {}
    for _, _, name, space in sorted(rooms):
        here = min(space, count - sum(found.values()))
        if here > 0:
            found[name] = here
    return found


def _in_time(device: DeviceStatus, share: float, promised: float) -> int:
    """How many more instances the device has time for. One that needs all the time gets a device for itself."""
    free = FULL - max(0.0, device.utilisation - device.offline) - promised
    return max(0, floor(free / min(share, FULL) + 1e-9))


def _fullness(devices: Collection[DeviceStatus]) -> float:
    """The part of these devices' memory that is taken, 0..1."""
    memory = sum(device.memory_mb for device in devices)
    return sum(device.memory_used_mb for device in devices) / memory if memory > 0 else 0.0
