"""What workers had no room for, or should not keep, goes to others: once for each app and class of needs while it is pending. Pure.

The worker that receives an order accepts or refuses it; a refusal tries the next worker, then the next variant that would do, and
at last a machine is added, if the limits allow.
"""

from collections.abc import Callable, Collection, Iterable, Mapping
from math import ceil, floor, inf

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, EnsureLoaded, LoadReply, Release
from bus.messages.scaling import AskForCapacity
from services.autoscaler.vms.commands import ControllerEffects
from services.autoscaler.vms.fleet import Fleet, FleetWorker
from services.autoscaler.vms.policy import HardwareNeed
from services.core.catalog import Catalog
from services.core.cost import load_seconds
from services.core.lifecycle import SERVING
from services.core.placement import Amount, Device, cores_needed, misfit, total

REPLY_S = 2.0  # s after which a worker that has not answered is taken to refuse
PATIENCE_S = 30.0  # s beyond its load time for an instance to be there
SETTLED_S = 3.0  # s after which what was placed shows in everybody's figures, and the same may be asked again
COOL_S = 5.0  # s for which an ask that nothing could be done about is not looked at again
ACCURACY = "accuracy"  # why a worker asks that carries its load: what there is room for, no machine and no crowding

GROWN = 1.5  # times the load that a pending ask is for: more than that is not left to wait until it is settled

Key = tuple[str, float | None, float, bool, int]
# Has a machine started for a want; its name, or None when none may be. Asked again for the same want, it names the same one.
AddMachine = Callable[[HardwareNeed], str | None]


class Placed(Struct, frozen=True):
    """One order: so many instances of this variant on this worker, in all. time: of a device that they will use, together."""

    worker: str
    record: VariantRecord
    at_least: int
    at: float
    time: float


class Pending:
    """One ask, from the first order to its instances' being there."""

    def __init__(self, ask: AskForCapacity, now: float) -> None:
        self.ask = ask
        self.since = now
        self.orders: dict[str, Placed] = {}  # not answered yet, by reply subject
        self.placed: list[Placed] = []
        self.refused: set[tuple[str, str]] = set()
        self.machine = ""
        self.over = 0.0  # when to forget it; 0: it is being worked on


class InstancePlacement:
    """overcommit: how often a worker promises a core of its CPU; used where no better place is left."""

    def __init__(
        self, fleet: Fleet, catalog: Catalog, turn: ControllerEffects, memory_share: float, overcommit: float
    ) -> None:
        self._fleet = fleet
        self._catalog = catalog
        self._turn = turn
        self._share = memory_share
        self._overcommit = overcommit
        self._pending: dict[Key, Pending] = {}

    def ask(self, ask: AskForCapacity) -> None:
        """A worker asks; what is pending for the same app and needs is not begun anew, unless the load has grown: then the rest is."""
        load, number = 0.0, 0
        key: Key = (ask.app, ask.latency_ms, ask.accuracy, ask.why == ACCURACY, number)
        while (known := self._pending.get(key)) is not None:
            load, number = load + known.ask.load, number + 1
            key = (*key[:4], number)
        if number == 0 or ask.load > GROWN * load > 0:
            rest = max(1, ceil(ask.instances * (ask.load - load) / ask.load)) if number else ask.instances
            part = replace(ask, load=ask.load - load, instances=rest)
            self._pending[key] = Pending(part, self._turn.now)

    def forget(self) -> None:
        """Somebody else leads now."""
        self._pending.clear()

    def wants_hardware(self) -> set[tuple[str, bool]]:
        """What pending asks need machines for."""
        found = set()
        for pending in self._pending.values():
            for name in () if pending.over or pending.placed or pending.ask.why == ACCURACY else pending.ask.variants:
                record = self._catalog.variant(name)
                if record is not None:
                    found.add((record.hardware, record.simulated))
        return found

    def replied(self, subject: str, reply: LoadReply | None) -> None:
        """A worker has answered an order; None: it was not there to hear it."""
        for pending in self._pending.values():
            order = pending.orders.pop(subject, None)
            if order is None:
                continue
            if reply is None or reply.reason:
                pending.refused.add((order.worker, order.record.variant))
            else:
                pending.placed.append(order)

    def advance(self, add_machine: AddMachine) -> None:
        """Go on with everything that is pending."""
        now = self._turn.now
        for key, pending in list(self._pending.items()):
            if pending.over:
                if now >= pending.over:
                    del self._pending[key]
                continue
            self._advance(pending, add_machine)

    def _advance(self, pending: Pending, add_machine: AddMachine) -> None:
        now = self._turn.now
        for subject, order in list(pending.orders.items()):
            if now - order.at > REPLY_S:
                self.replied(subject, None)
        if pending.orders:
            return
        if pending.placed:
            if self._there(pending):
                self._arrived(pending)
                pending.over = now + SETTLED_S
            elif now - pending.since > PATIENCE_S + max(load_seconds(order.record) for order in pending.placed):
                pending.over = now
            return
        if self._place(pending, BUSY):
            return
        if pending.ask.why == ACCURACY:
            pending.over = now + COOL_S
            return
        pending.machine = self._machine(pending, add_machine) or ""
        if not pending.machine and not self._place(pending, self._overcommit):
            pending.over = now + COOL_S

    # -- orders

    def _place(self, pending: Pending, overcommit: float) -> bool:
        """Order the first variant that all fits, else the first of which something does."""
        ask, best = pending.ask, None
        workers = self._fleet.ready(self._turn.now)
        promised = self._promised()
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
                promised=promised,
            )
            if where and (best is None or sum(where.values()) == count):
                best = (record, where)
                if sum(where.values()) == count:
                    break
        if best is None:
            return False
        for worker, count in best[1].items():
            self._order(pending, best[0], worker, count)
        return True

    def _order(self, pending: Pending, record: VariantRecord, worker: str, count: int) -> None:
        turn, ask = self._turn, pending.ask
        at_least = len(self._fleet.workers[worker].of(record.variant)) + count
        subject = turn.reply_subject()
        time = count * self._time(ask, record, self._count(ask, record))
        pending.orders[subject] = Placed(worker, record, at_least, turn.now, time)
        why = f"{ask.worker} asked for it ({ask.why}){': ' + ask.reason if ask.reason else ''}"
        turn.order(
            worker,
            "load",
            EnsureLoaded(
                variant=record,
                at_least=at_least,
                app=ask.app or None,
                orderer=turn.name,
                reason=why,
                epoch=turn.epoch,
            ),
            subject,
        )

    @staticmethod
    def _count(ask: AskForCapacity, record: VariantRecord) -> int:
        """Instances of this variant that carry the load; of the first one as many as were asked for."""
        if record.variant == ask.variants[0]:
            return max(1, ask.instances)
        rate = record.profile.saturation_qps
        return max(1, ceil(ask.load / rate)) if rate > 0 else 1

    @staticmethod
    def _time(ask: AskForCapacity, record: VariantRecord, count: int) -> float:
        """The part of a device's time that each of so many instances will use."""
        rate = record.profile.saturation_qps
        return min(1.0, ask.load / count / rate) if rate > 0 else 0.0

    def _promised(self) -> dict[str, float]:
        """By worker: of its devices' time, what instances will use that are on their way, or have only just come."""
        found: dict[str, float] = {}
        for pending in self._pending.values():
            for order in (*pending.placed, *pending.orders.values()):
                found[order.worker] = found.get(order.worker, 0.0) + order.time
        return found

    def _machine(self, pending: Pending, add_machine: AddMachine) -> str | None:
        ask = pending.ask
        for name in ask.variants:
            record = self._catalog.variant(name)
            if record is None:
                continue
            reason = f"no worker has room for {name}, that {ask.worker} asked for ({ask.why})"
            found = add_machine(
                HardwareNeed(hardware=(record.hardware, record.simulated), reason=reason, record=record)
            )
            if found is not None:
                return found
        return None

    # -- done

    def _there(self, pending: Pending) -> bool:
        for order in pending.placed:
            worker = self._fleet.workers.get(order.worker)
            if worker is None:
                continue
            serving = sum(one.state in SERVING for one in worker.of(order.record.variant))
            if serving < order.at_least:
                return False
        return True

    def _arrived(self, pending: Pending) -> None:
        """What was slowed down elsewhere has been moved: the old one goes, now that the new one serves."""
        ask, turn = pending.ask, self._turn
        old = self._fleet.workers.get(ask.worker)
        if ask.why != "interfered" or old is None:
            return
        variant = pending.placed[0].record.variant
        slow = [one for one in old.of(variant) if one.state == "Interfered" or "Interfered" in one.app_states.values()]
        if slow:
            keep = len(old.of(variant)) - 1
            why = f"moved to {pending.placed[0].worker}: {ask.reason or 'it was slowed down here'}"
            turn.order(
                ask.worker,
                "release",
                Release(variant=variant, keep=keep, orderer=turn.name, reason=why, epoch=turn.epoch),
            )


# -- On which workers instances go: bin packing, the fullest that still has room first, so that others empty
# (INFaaS, 4.2.3). Pure.

BUSY = 1.0  # threads for each CPU core when instances are placed for their load, not for being there
FULL = 0.8  # part of its time that a device which takes instances in turn may be used, for the same reason


def room(record: VariantRecord, status: DeviceStatus, memory_share: float, overcommit: float = BUSY) -> int:
    """How many more instances of a variant the device has room for, by its last heartbeat."""
    device = Device(
        name=status.device,
        kind=status.kind,
        cores=status.cores,
        memory_mb=status.memory_mb,
        simulated=status.simulated,
    )
    if not status.alive or misfit(record, device, memory_share):
        return 0
    free = total(device, memory_share, overcommit) - Amount(status.memory_used_mb, status.cores_used)
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
    """Worker to the number of new instances there, `count` together, or as many as there is room for.

    share: of a device's time that each will use where instances take turns (cores are not counted); promised: the same by worker,
    of what has been ordered and does not compute yet.
    """
    rooms: list[tuple[float, str, int]] = []
    for worker in workers:
        if worker.name in without:
            continue
        devices = [(room(record, device, memory_share, overcommit), device) for device in worker.devices]
        if share > 0 and cores_needed(record) == 0:
            busy = promised.get(worker.name, 0.0)
            devices = [(min(number, _in_time(device, share, busy)), device) for number, device in devices]
        space = sum(number for number, _ in devices)
        if space > 0:
            free = [device for number, device in devices if number > 0]
            used = min(d.utilisation for d in free) if emptiest_first else -_fullness(free)
            rooms.append((used, worker.name, space))
    found: dict[str, int] = {}
    for _, name, space in sorted(rooms):
        here = min(space, count - sum(found.values()))
        if here > 0:
            found[name] = here
    return found


def _in_time(device: DeviceStatus, share: float, promised: float) -> int:
    """How many more the device has time for; one that needs all of it has to have it for itself."""
    free = FULL - max(0.0, device.utilisation - device.offline) - promised
    return max(0, floor(free / min(share, FULL) + 1e-9))


def _fullness(devices: Collection[DeviceStatus]) -> float:
    """The part of these devices' memory that is taken."""
    memory = sum(device.memory_mb for device in devices)
    return sum(device.memory_used_mb for device in devices) / memory if memory > 0 else 0.0
