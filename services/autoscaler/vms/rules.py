"""When machines are added and removed: the paper's three rules, and idleness (INFaaS, section 4.2.3). Pure.

    1  a kind of device is used above a threshold on every worker that has one          -> one more worker with it
    2  variants on a kind of device are Interfered on every worker that has one         -> one more worker with it
    3  more than a share of all workers have Overloaded variants                        -> one more with what those run on
    a worker that has served nothing for a while, and whose removal makes no rule ask for it  -> one worker less

Each reason adds one machine at a time: a machine that boots, or has just come, is the answer to it. The cheapest suitable kind of
machine is chosen. No kind grows beyond its maximum or shrinks below its minimum. All workers together, with those that boot,
never cost more than the budget.
"""

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import inf

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from services.core.placement import Device, misfit
from services.core.settings import MachineSettings

SETTLE_PERIODS = 5  # periods for which a new machine counts as booting

Hardware = tuple[str, bool]  # device kind, and whether it is simulated


class PricedKind(Struct, frozen=True, kw_only=True):
    """A kind of machine that may be started: its devices, its price in US$ per hour, and how many there may be."""

    name: str
    devices: tuple[Device, ...]
    price_per_hour: float
    minimum: int = 0
    maximum: int = 0
    boot_s: float = 0.0

    @property
    def hardware(self) -> frozenset[Hardware]:
        return frozenset((device.kind, device.simulated) for device in self.devices)

    def carries(self, record: VariantRecord, memory_share: float) -> bool:
        """Whether an empty machine has room for this variant."""
        return any(not misfit(record, device, memory_share) for device in self.devices)


class FleetLimits(Struct, frozen=True, kw_only=True):
    """What limits and guides the rules. kinds: of machines that may be started. budget_per_hour: US$ of all workers; inf: no limit."""

    kinds: Mapping[str, PricedKind]
    settings: MachineSettings = MachineSettings()
    budget_per_hour: float = inf

    @property
    def settle_s(self) -> float:
        """Seconds for which a new machine counts as booting."""
        return SETTLE_PERIODS * self.settings.period_s


class WorkerSummary(Struct, frozen=True, kw_only=True):
    """One worker, as the rules need it.

    state: "Booting" (ordered, or just come), "Ready", "Draining" (being removed), or "Silent". utilisation: of the least used
    device of each kind, 0..1. interfered: kinds of device with Interfered variants. overloaded: the same, with their number.
    idle_s: seconds for which it has served nothing. used: the part of its memory that instances take, 0..1.
    """

    name: str
    kind: str
    state: str
    price_per_hour: float
    hardware: frozenset[Hardware]
    utilisation: Mapping[Hardware, float] = {}
    interfered: frozenset[Hardware] = frozenset()
    overloaded: Mapping[Hardware, int] = {}
    idle_s: float = 0.0
    used: float = 0.0


class HardwareNeed(Struct, frozen=True, kw_only=True):
    """One more worker with this hardware is needed, and why. record: a variant that it must have room for, if any."""

    hardware: Hardware
    reason: str
    record: VariantRecord | None = None


class Add(Struct, frozen=True, kw_only=True):
    """Start a worker of this kind."""

    kind: str
    reason: str


class Remove(Struct, frozen=True, kw_only=True):
    """Drain this worker, then stop it. planned: it may still serve; the plan has room for its load elsewhere."""

    worker: str
    reason: str
    planned: bool = False


class Blocked(Struct, frozen=True, kw_only=True):
    """A worker is needed and may not be started. reason: empty if one boots already or no kind is left. kind: of machine."""

    reason: str = ""
    kind: str = ""


def hardware_needs(workers: Iterable[WorkerSummary], limits: FleetLimits) -> list[HardwareNeed]:
    """What the three rules ask for: at most one worker for each hardware."""
    ready = [worker for worker in workers if worker.state == "Ready"]
    found: dict[Hardware, str] = {}
    for hardware in sorted({each for worker in ready for each in worker.utilisation}):
        having = [worker for worker in ready if hardware in worker.utilisation]
        least = min(having, key=lambda worker: worker.utilisation[hardware])
        name = hardware_name(hardware)
        where = "on the only worker that has it" if len(having) == 1 else f"on all {len(having)} workers that have it"
        if least.utilisation[hardware] > limits.settings.utilisation_above:
            found[hardware] = (
                f"{name} is used above {limits.settings.utilisation_above:.0%} {where}; least on {least.name}, "
                f"{least.utilisation[hardware]:.0%}"
            )
        elif all(hardware in worker.interfered for worker in having):
            found[hardware] = f"variants on {name} are Interfered {where}"
    troubled = [worker for worker in ready if worker.overloaded]
    if ready and len(troubled) > limits.settings.overloaded_share * len(ready):
        counts: Counter[Hardware] = Counter()
        for worker in troubled:
            counts.update(worker.overloaded)
        hardware = min(counts, key=lambda each: (-counts[each], each))
        found.setdefault(
            hardware,
            f"{len(troubled)} of {len(ready)} workers have Overloaded variants, more than {limits.settings.overloaded_share:.0%}; "
            f"most of them run on {hardware_name(hardware)}",
        )
    return [HardwareNeed(hardware=hardware, reason=reason) for hardware, reason in found.items()]


class Additions(Struct, frozen=True):
    """Which machine may be started beside these workers. pauses: whether a start of this kind has just failed. obstacle: why none of a kind can be had."""

    workers: Sequence[WorkerSummary]
    limits: FleetLimits
    pauses: Callable[[str], bool] = lambda _: False
    obstacle: Callable[[str], str] = lambda _: ""

    def for_need(self, need: HardwareNeed, memory_share: float) -> Add | Blocked:
        """The machine to start for a need."""
        if any(worker.state == "Booting" and need.hardware in worker.hardware for worker in self.workers):
            return Blocked()
        counts = Counter(worker.kind for worker in self.workers)
        record = need.record
        fitting = [
            kind
            for kind in self.limits.kinds.values()
            if need.hardware in kind.hardware and (record is None or kind.carries(record, memory_share))
        ]
        able = [kind for kind in fitting if counts[kind.name] < kind.maximum and not self.pauses(kind.name)]
        if not able:
            return Blocked()
        kind = min(able, key=lambda each: (bool(self.obstacle(each.name)), each.price_per_hour, each.name))
        return self.of(kind, need.reason)

    def of(self, kind: PricedKind, reason: str) -> Add | Blocked:
        """One more machine of this kind, if there may be one."""
        budget = self.limits.budget_per_hour
        if sum(worker.kind == kind.name for worker in self.workers) >= kind.maximum or self.pauses(kind.name):
            return Blocked()
        after = total_price(self.workers) + kind.price_per_hour
        why = self.obstacle(kind.name)
        if not why and after > budget * (1 + 1e-9):
            why = f"a {kind.name} would bring all workers to {after:.4g} US$/h, the budget is {budget:.4g}"
        if why:
            return Blocked(reason=f"{reason}; {why}", kind=kind.name)
        limit = f" of {budget:.4g}" if budget < inf else ""
        return Add(kind=kind.name, reason=f"{reason}; all workers then cost {after:.4g}{limit} US$/h")

    def below_minimum(self, closed: Collection[str] = ()) -> Add | list[Blocked]:
        """The machine to start because a kind is below its minimum. Else the kinds that are below it, and why none is started.

        A silent worker does not count, since it serves nobody. If it comes back, an idle one is removed later. closed: workers that must
        go, which do not count either.
        """
        away = ("Draining", "Silent")
        counts = Counter(one.kind for one in self.workers if one.state not in away and one.name not in closed)
        blocked = []
        for kind in self.limits.kinds.values():
            there = sum(worker.kind == kind.name for worker in self.workers)
            if counts[kind.name] < kind.minimum and there < kind.maximum and not self.pauses(kind.name):
                chosen = self.of(kind, f"{counts[kind.name]} of at least {kind.minimum} are there")
                if isinstance(chosen, Add):
                    return chosen
                blocked.append(chosen)
        return blocked


def removal(
    workers: Sequence[WorkerSummary], limits: FleetLimits, spared: Callable[[str], bool] = lambda _: False
) -> Remove | None:
    """The emptiest idle worker that can be removed, if none is being removed. spared: whether a worker is not to be removed now."""
    if any(worker.state == "Draining" for worker in workers):
        return None
    staying = Counter(worker.kind for worker in workers if worker.state == "Ready")
    candidates = [
        worker
        for worker in workers
        if worker.state == "Ready"
        and worker.idle_s >= limits.settings.idle_s
        and worker.kind in limits.kinds
        and staying[worker.kind] > limits.kinds[worker.kind].minimum
        and not spared(worker.name)
    ]
    for worker in sorted(candidates, key=lambda each: (each.used, -each.price_per_hour, each.name)):
        rest = [other for other in workers if other is not worker]
        if not any(need.hardware in worker.hardware for need in hardware_needs(rest, limits)):
            least = limits.kinds[worker.kind].minimum
            why = f"served nothing for {worker.idle_s:.0f} s; {staying[worker.kind] - 1} {worker.kind} stay, at least {least}"
            return Remove(worker=worker.name, reason=why)
    return None


def total_price(workers: Iterable[WorkerSummary]) -> float:
    """US$ per hour of all workers, with those that boot or are silent."""
    return sum(worker.price_per_hour for worker in workers)


def hardware_name(hardware: Hardware) -> str:
    return f"simulated {hardware[0]}" if hardware[1] else hardware[0]
