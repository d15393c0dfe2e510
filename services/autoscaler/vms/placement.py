"""Which worker gets how many instances, of what the plan wants on workers that are alike, of planned replicas that are missing, or
of one that moves. Pure.

Instances move to another worker because they are slowed down where they are and their worker has no better place. The monitor of the worker asks. The worker that gets the order accepts or refuses it. A refusal tries the next worker, and at last a
new machine, if the limits allow one. The old instance goes once the new one serves.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heapreplace
from itertools import islice
from typing import Any

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DeviceStatus, LoadReply, Release
from bus.messages.scaling import AskToMove
from services.autoscaler.vms.commands import ControllerEffects, Turn
from services.autoscaler.vms.fleet import Fleet, FleetWorker, devices_of
from services.autoscaler.vms.rules import Hardware, HardwareNeed
from services.core.actor import Effect
from services.core.catalog import Catalog
from services.core.cost import cores_of, load_seconds
from services.core.lifecycle import COUNTED, SERVING, needed
from services.core.placement import Device, adds_alike, busy_quarters, how_many_fit
from services.core.settings import MonitorSettings

Barred = Callable[[FleetWorker, VariantRecord], bool]  # whether a worker takes no more of a variant for now


def hardware_of(record: VariantRecord) -> tuple[str, bool]:
    return record.hardware, record.simulated


class _Place:
    """What is free on one device. used: the part of its time that instances there are planned to compute, 0..1."""

    __slots__ = ("device", "memory", "slots", "time", "used")

    def __init__(self, device: Device, share: float) -> None:
        self.device = device
        self.memory = share * device.memory_mb
        self.slots = device.cores
        self.time = 1.0 if device.kind == "gpu" else float(device.cores)
        self.used = 0.0


class Room:
    """What is free on the devices of a worker. computing: cores of the instances there."""

    def __init__(self, worker: FleetWorker, share: float) -> None:
        self.computing = 0.0
        self._places = {device.name: _Place(device, share) for device in devices_of(worker)}

    def _open(self, record: VariantRecord) -> list[_Place]:
        memory = record.profile.memory_mb
        return [
            place
            for place in self._places.values()
            if (place.device.kind, place.device.simulated) == hardware_of(record)
            and place.memory + 1e-6 >= memory
            and adds_alike(record, place.device.arithmetic)
            and (record.hardware in ("cpu", "gpu") or place.slots >= 1)
        ]

    def fits(self, record: VariantRecord) -> bool:
        return bool(self._open(record))

    def idle(self, record: VariantRecord) -> bool:
        """Whether an instance would find cores there that it need not share."""
        return any(place.time >= cores_of(record) for place in self._open(record))

    def quarters(self, record: VariantRecord) -> int:
        """`busy_quarters` of the device there that an instance would get."""
        return min((busy_quarters(record, place.used) for place in self._open(record)), default=0)

    def take(self, record: VariantRecord, device: str = "", used: float = 0.0) -> None:
        """Put an instance on this device, else on the one that is used less and has most memory, as the monitor does.

        used: the part of the time that it computes, 0..1.
        """
        place = self._places.get(device) or min(
            self._open(record), key=lambda each: (busy_quarters(record, each.used), -each.memory), default=None
        )
        if place is not None:
            place.used += used
            place.memory -= record.profile.memory_mb
            place.slots -= 1
            place.time -= cores_of(record)
            self.computing += cores_of(record)


def _in_turn(
    workers: Iterable[FleetWorker], rank: Callable[[FleetWorker], tuple[Any, ...] | None]
) -> Iterator[FleetWorker]:
    """The worker with the least rank, again and again; None: it takes no more. What is put on a worker changes the rank of no other."""
    heap = [(at, worker) for worker in workers if (at := rank(worker)) is not None]
    heapify(heap)
    while heap:
        worker = heap[0][1]
        yield worker
        if (at := rank(worker)) is None:
            heappop(heap)
        else:
            heapreplace(heap, (at, worker))


def assign(
    group: Sequence[FleetWorker],
    counts: Mapping[str, tuple[int, int]],
    records: Mapping[str, VariantRecord],
    share: float,
    barred: Barred,
    used: Mapping[str, float] = {},
) -> dict[FleetWorker, dict[str, tuple[int, int]]]:
    """How many instances each worker has, and how many of them only stand by. Those that run stay; others go where most is free.

    counts: by variant, of all these workers together: those that are claimed, and those that stand by. share: of devices' memory,
    for instances. used: by variant, the part of the time that a claimed instance is planned to compute, 0..1. A GPU that one
    variant
    keeps busy is left to it while others are free (`busy_quarters`).
    """
    found: dict[FleetWorker, dict[str, tuple[int, int]]] = {worker: {} for worker in group}
    rooms = {worker: Room(worker, share) for worker in group}

    def give(worker: FleetWorker, variant: str, *, claimed: bool) -> None:
        count, spare = found[worker].get(variant, (0, 0))
        found[worker][variant] = (count + claimed, spare + (not claimed))

    def rank(record: VariantRecord, each: FleetWorker) -> tuple[Any, ...] | None:
        room = rooms[each]
        if not room.fits(record) or barred(each, record):
            return None
        return room.quarters(record), room.computing, not each.warm(record.variant), each.name

    more: list[tuple[VariantRecord, int]] = []
    for variant, (count, spare) in sorted(counts.items()):
        running = [(worker, one) for worker in group for one in worker.held(variant)]
        running.sort(key=lambda each: (each[1].reclaimable, each[1].state == "Loading", each[0].name))
        for number, (worker, one) in enumerate(running[: count + spare]):
            give(worker, variant, claimed=number < count)
            rooms[worker].take(records[variant], one.device, used.get(variant, 0.0) if number < count else 0.0)
        if count + spare > len(running):
            more.append((records[variant], count + spare - len(running)))
    more.sort(key=lambda each: (-each[0].profile.memory_mb, each[0].variant))
    more.sort(key=lambda each: -busy_quarters(each[0], used.get(each[0].variant, 0.0)))
    for record, left in more:
        for worker in islice(_in_turn(group, partial(rank, record)), left):
            rooms[worker].take(record, used=used.get(record.variant, 0.0))
            give(worker, record.variant, claimed=True)
    return found


def place_more(
    workers: Sequence[FleetWorker],
    wanted: Mapping[str, int],
    ordered: Mapping[tuple[str, str], int],
    records: Mapping[str, VariantRecord],
    share: float,
    barred: Barred,
) -> tuple[dict[tuple[FleetWorker, str], int], dict[str, int]]:
    """Where instances go that are missing of what is wanted in all: (worker, variant) to how many it then has; and what finds no
    room.

    Nothing that somebody needs gives way. Reclaimable instances are claimed first. Workers with idle cores come before others.
    ordered: by worker and variant, the instances that it has been ordered to have. records: of all variants that workers may have.
    """
    have: Counter[tuple[str, str]] = Counter()
    spare: Counter[tuple[str, str]] = Counter()
    rooms = {worker.name: Room(worker, share) for worker in workers}
    for worker in workers:
        for one in worker.instances:
            if one.state in COUNTED and one.variant in records:
                if needed(one):
                    have[worker.name, one.variant] += 1
                    rooms[worker.name].take(records[one.variant], one.device)
                else:
                    spare[worker.name, one.variant] += 1
    for (name, variant), count in ordered.items():
        for _ in range(count - have[name, variant] if name in rooms and variant in records else 0):
            have[name, variant] += 1
            rooms[name].take(records[variant])

    def rank(record: VariantRecord, each: FleetWorker) -> tuple[Any, ...] | None:
        room, has = rooms[each.name], spare[each.name, record.variant] > 0
        if not has and (not room.fits(record) or barred(each, record)):
            return None
        return not has, not room.idle(record), not each.warm(record.variant), room.computing, each.name

    found: dict[tuple[FleetWorker, str], int] = {}
    short: dict[str, int] = {}
    for variant in sorted(wanted, key=lambda each: (-records[each].profile.memory_mb, each)):
        record = records[variant]
        missing = wanted[variant] - sum(have[worker.name, variant] for worker in workers)
        for worker in islice(_in_turn(workers, partial(rank, record)), max(0, missing)):
            spare[worker.name, variant] -= spare[worker.name, variant] > 0
            rooms[worker.name].take(record)
            have[worker.name, variant] += 1
            found[worker, variant] = have[worker.name, variant]
            missing -= 1
        if missing > 0:
            short[variant] = missing
    return found, short


def place(
    record: VariantRecord,
    workers: Iterable[FleetWorker],
    memory_share: float,
    overcommit: float = 1.0,
    *,
    idlest: bool = False,
) -> FleetWorker | None:
    """The worker that takes one more instance: the fullest that has room, so that others become empty (INFaaS, section 4.2.3).
    None: none has.

    idlest: the one whose device is used least instead. Of equals, one that has it in host memory.
    """
    rooms: list[tuple[float, bool, str, FleetWorker]] = []
    for worker in workers:
        open_ = [device for device in worker.devices if how_many_fit(record, device, memory_share, overcommit)]
        if open_:
            used = min(device.utilisation for device in open_) if idlest else -_fullness(open_)
            rooms.append((used, not worker.warm(record.variant), worker.name, worker))
    return min(rooms, key=lambda each: each[:3])[3] if rooms else None


def _fullness(devices: Collection[DeviceStatus]) -> float:
    """The part of these devices' memory that is taken, 0..1."""
    memory = sum(device.memory_mb for device in devices)
    return sum(device.memory_used_mb for device in devices) / memory if memory > 0 else 0.0


REPLY_S = 2.0  # s after which a worker that has not answered counts as refusing
PATIENCE_S = 30.0  # s, beside its load time, for an instance to serve
SETTLED_S = 3.0  # s after which all figures show what was moved, so that the same may be asked again
COOL_S = 5.0  # s for which an ask that cannot be met is not tried again
SLOW_S = 30.0  # s for which a worker that asked is no place for the same variant: it would only go to and fro

# Has a machine started for a need. Returns its name, None if none may be started, and effects. Asked again, it names the same one.
AddMachine = Callable[[HardwareNeed], tuple[str | None, list[Effect]]]


class _Move(Struct, eq=False):
    """One ask, from the first order until its instance serves.

    there, at_least: where it was accepted, and how many the worker then has.
    """

    ask: AskToMove
    record: VariantRecord
    since: float
    ordered: tuple[str, str, int, float] | None = None  # reply subject, worker, at least, when: not answered yet
    there: str = ""
    at_least: int = 0
    refused: set[str] = set()
    over: float = 0.0  # when it is forgotten; 0: it is under way


class Moves(Struct, eq=False):
    """monitor: as the workers' monitors admit loads. Cores are promised more than once only if no better place is left."""

    fleet: Fleet
    catalog: Catalog
    effects: ControllerEffects
    monitor: MonitorSettings
    _pending: dict[tuple[str, str], _Move] = {}
    _asked: dict[tuple[str, str], float] = {}  # when a worker asked last, by worker and variant

    def ask(self, ask: AskToMove, now: float) -> None:
        """A worker asks. While the same is pending it is ignored."""
        record = self.catalog.variant(ask.variant)
        if record is not None:
            self._asked = {key: at for key, at in self._asked.items() if now - at <= SLOW_S}
            self._asked[ask.worker, ask.variant] = now
            self._pending.setdefault((ask.worker, ask.variant), _Move(ask, record, now))

    def forget(self) -> None:
        """A new epoch begins."""
        self._pending.clear()
        self._asked.clear()

    def hardware(self) -> set[Hardware]:
        """The hardware that pending moves need machines for."""
        waiting = (one for one in self._pending.values() if not one.over and not one.there)
        return {(one.record.hardware, one.record.simulated) for one in waiting}

    def replied(self, subject: str, reply: LoadReply | None) -> None:
        """A worker has answered an order. None: it has not, and counts as refusing."""
        for move in self._pending.values():
            if move.ordered is None or move.ordered[0] != subject:
                continue
            _, worker, at_least, _ = move.ordered
            move.ordered = None
            if reply is None or reply.reason:
                move.refused.add(worker)
            else:
                move.there, move.at_least = worker, at_least

    def advance(self, add_machine: AddMachine, turn: Turn) -> list[Effect]:
        """Go on with all that are pending."""
        found: list[Effect] = []
        for key, move in list(self._pending.items()):
            if not move.over:
                found += self._advance(move, add_machine, turn)
            elif turn.now >= move.over:
                del self._pending[key]
        return found

    def _advance(self, move: _Move, add_machine: AddMachine, turn: Turn) -> list[Effect]:
        if move.ordered is not None and turn.now - move.ordered[3] > REPLY_S:
            self.replied(move.ordered[0], None)
        if move.ordered is not None:
            return []
        if move.there:
            return self._wait(move, turn)
        if slow := self._slow(move, turn.now):
            others = {worker.name for worker in self.fleet.ready(turn.now)} - {move.ask.worker}
            if others <= slow:
                # it is as slow wherever it could go, and another machine is for plans to ask for
                move.over = turn.now + COOL_S
                return []
        found = self._order(move, 1.0, turn)
        if found:
            return found
        record = move.record
        reason = f"no worker has room for {record.variant}, which {move.ask.worker} asked to move"
        need = HardwareNeed(hardware=(record.hardware, record.simulated), reason=reason, record=record)
        machine, found = add_machine(need)
        if machine is None:
            orders = self._order(move, self.monitor.cores_overcommit, turn)
            if not orders:
                move.over = turn.now + COOL_S
            found += orders
        return found

    def _slow(self, move: _Move, now: float) -> set[str]:
        """The other workers that have asked to move the same variant of late."""
        of = move.ask
        found = {name for (name, variant), at in self._asked.items() if variant == of.variant and now - at <= SLOW_S}
        return found - {of.worker}

    def _order(self, move: _Move, overcommit: float, turn: Turn) -> list[Effect]:
        others = {move.ask.worker, *move.refused, *self._slow(move, turn.now)}
        workers = [one for one in self.fleet.ready(turn.now) if one.name not in others]
        worker = place(move.record, workers, self.monitor.memory_share, overcommit, idlest=True)
        if worker is None:
            return []
        at_least = len(worker.of(move.record.variant)) + 1
        subject = self.effects.reply_subject()
        move.ordered = subject, worker.name, at_least, turn.now
        why = f"{move.ask.worker} asked to move it{': ' + move.ask.reason if move.ask.reason else ''}"
        return [self.effects.load(worker.name, move.record, at_least, move.ask.app, why, turn, subject)]

    def _wait(self, move: _Move, turn: Turn) -> list[Effect]:
        """Until the new one serves; then the old one is released."""
        there, variant = self.fleet.workers.get(move.there), move.record.variant
        serving = there is None or sum(one.state in SERVING for one in there.of(variant)) >= move.at_least
        if not serving:
            if turn.now - move.since > PATIENCE_S + load_seconds(move.record):
                move.over = turn.now
            return []
        move.over = turn.now + SETTLED_S
        old = self.fleet.workers.get(move.ask.worker)
        if old is None:
            return []
        if not any(one.state == "Interfered" or "Interfered" in one.app_states.values() for one in old.of(variant)):
            return []
        why = f"moved to {move.there}: {move.ask.reason or 'it was slowed down here'}"
        keep = len(old.of(variant)) - 1
        release = Release(variant=variant, keep=keep, orderer=self.effects.name, reason=why, epoch=turn.epoch)
        return [self.effects.send(move.ask.worker, "release", release)]
