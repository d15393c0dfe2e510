"""What a worker's monitor decides: which instances it evicts, releases or keeps, and when a failed load may be tried again. Pure.

When an instance is Overloaded or Interfered is decided in `services.core.lifecycle`; where an Interfered one goes, in mitigation.py.

What makes room is what costs least to miss (`Uses`), on devices as in host memory.

Memory tiers (Rafiqi, section 3.4): a device is a cache of models. Unless `cache = "reserve"`, an instance that is idle makes room for a query.
It is demoted: its model stays in host memory, and the instance is Warm. Host memory is a cache, too: what leaves it is unloaded. What it takes
is counted from the order on, so that orders at once never take the same memory twice. A model that comes to the device leaves a copy in host
memory, as long as no Warm instance needs the place: then its way back takes no transfer.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf

from msgspec import Struct

from bus.fields import filled
from bus.messages.fleet import DemoteInstance, UnloadInstance
from services.core.actor import Effect
from services.core.catalog import UNREAD
from services.core.cost import load_seconds
from services.core.lifecycle import SERVING, Thresholds
from services.core.placement import NOTHING, Amount, quarantined_words, short_of
from services.core.settings import MonitorSettings
from services.monitor.effects import MonitorEffects
from services.monitor.instances import MonitoredInstance

ARRIVES_S = 0.1  # s after its load in which an instance that nothing has used yet is kept: the query that ordered it is on its way


SAME_USE_S = 1.0  # s; uses at shorter intervals are one
PAUSES = 32  # of a variant that are remembered


class Uses(Struct, eq=False):
    """When each variant is used on this worker, and what it costs to miss one of its instances. recent: the least recently used costs least (Rafiqi).

    Else that is the time to load it again, over the time until it is used next, for each part of the room that it gives. That time is guessed
    from the pauses between its last uses: the mean of what is left of those that were longer than the present one, and of one twice as long.
    So neither how often it is used nor how regularly is assumed, and what is used no more is soon forgotten. (Conditional on its age, as Beckmann
    et al., "LHD", NSDI 2018; by cost and size, as Cao and Irani, "GreedyDual-Size", USITS 1997.)
    """

    recent: bool
    _of: dict[str, tuple[float, deque[float]]] = {}  # by variant: when it was used last, and the pauses

    def used(self, variant: str, at: float) -> None:
        last, pauses = self._of.get(variant, (at, deque[float](maxlen=PAUSES)))
        if at - last >= SAME_USE_S:
            pauses.append(at - last)
        self._of[variant] = max(at, last), pauses

    def forget(self, variant: str) -> None:
        self._of.pop(variant, None)

    def missed(self, instance: MonitoredInstance, share: float, now: float, *, warm: bool) -> tuple[float, float]:
        """What is missed least is least. share: of the room that is needed, what it gives. warm: its model stays in host memory."""
        if self.recent:
            return instance.last_used, 0.0
        idle = max(SAME_USE_S, now - instance.last_used)
        _, pauses = self._of.get(instance.record.variant, (0.0, ()))
        left = [idle, *(pause - idle for pause in pauses if pause > idle)]
        costs = load_seconds(instance.record, warm=warm) * len(left) / sum(left)
        return (costs / min(1.0, share) if share > 0 else inf), instance.last_used


def share_of(takes: Amount, need: Amount) -> float:
    """The largest part of what is needed that this gives."""
    pairs = (takes.memory_mb, need.memory_mb), (takes.cores, need.cores), (takes.instances, need.instances)
    return max((given / wanted for given, wanted in pairs if wanted > 0), default=1.0)


def sufficient(leaving: Iterable[MonitoredInstance], need: Amount) -> list[MonitoredInstance] | None:
    """The first of these whose eviction frees so much, without those whose room the others make unnecessary. None if they do not suffice."""
    victims: list[MonitoredInstance] = []
    freed = NOTHING
    for instance in leaving:
        victims.append(instance)
        freed += instance.takes
        if short_of(need, freed).none:
            return needed_of(victims, need)
    return None


def needed_of(victims: list[MonitoredInstance], need: Amount) -> list[MonitoredInstance]:
    """These victims without those whose room the others make unnecessary; the last ones stay first."""
    freed = sum((victim.takes for victim in victims), NOTHING)
    for victim in victims[::-1]:
        if short_of(need, freed - victim.takes).none:
            victims.remove(victim)
            freed -= victim.takes
    return victims


def is_idle(instance: MonitoredInstance, now: float) -> bool:
    """Whether it neither runs a batch nor has anything waiting, nor will have in a moment. What ran alone at the last report ends in time."""
    awaited = not instance.used and now - instance.since < ARRIVES_S
    return instance.state in SERVING and now >= instance.busy_until and not awaited


@dataclass(eq=False)
class HostTier:
    """The host memory of one worker for Warm instances. instances: all of the worker, by name. limit_mb: for Warm ones; 0: there is none."""

    instances: Mapping[str, MonitoredInstance]
    uses: Uses
    effects: MonitorEffects
    limit_mb: float

    def used_mb(self) -> float:
        """MB that are taken or promised."""
        return sum(i.takes_of_host_mb for i in self.instances.values())

    def obstacle(self, instance: MonitoredInstance) -> str:
        """Why this instance can never be Warm here; empty if it can."""
        if instance.host_mb is None:
            return "its backend cannot keep a model in host memory"
        if self.limit_mb <= 0:
            return "monitor.host_mb is 0"
        if instance.host_mb > self.limit_mb:
            return f"it takes {instance.host_mb:.0f} MB of host memory, monitor.host_mb is {self.limit_mb:.0f}"
        return ""

    def demote(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect] | str:
        """Keep the model in host memory only. Copies, then the Warm instances that are missed least make room. Or why that cannot be."""
        obstacle = self.obstacle(instance)
        if obstacle:
            return obstacle
        if instance.copied and not instance.dropping:  # its copy's place is its own
            instance.copied = False
            found: list[Effect] | None = []
        else:
            why = f"makes room in host memory for {instance.record.variant}"
            found = self.make_room(instance.host_mb or 0.0, why, now)
        if found is None:
            return "host memory is full of models that are on their way to a device"
        found += self.effects.state_changes(instance, instance.move("Unloading", reason, now), now)
        instance.goes, instance.in_host, instance.ordered = "host", True, None
        return found + self.advance(now)

    def has_room(self, host_mb: float) -> bool:
        """Whether so much is free without dropping anything."""
        return self.used_mb() + host_mb <= self.limit_mb

    def make_room(self, host_mb: float, reason: str, now: float) -> list[Effect] | None:
        """Drop what is least missed until so many MB are free once it is gone: copies, then Warm instances. None if all of that is not enough."""
        everywhere = self.instances.values()
        staying = [i for i in everywhere if i.in_host and (i.state != "Unloading" or i.goes == "host")]
        copies = [i for i in everywhere if i.copied and not i.dropping and i.state != "Unloading"]
        excess = sum(i.host_mb or 0.0 for i in (*staying, *copies)) + host_mb - self.limit_mb
        candidates = sorted(copies, key=lambda each: -each.last_used)  # who was used last leaves the device last
        warm = [i for i in staying if i.state == "Warm" and not i.wanted]
        candidates += sorted(
            warm, key=lambda i: self.uses.missed(i, (i.host_mb or 0.0) / max(1e-9, excess), now, warm=False)
        )
        dropped: list[MonitoredInstance] = []
        for candidate in candidates:
            if excess <= 0:
                break
            dropped.append(candidate)
            excess -= candidate.host_mb or 0.0
        if excess > 0:
            return None
        found: list[Effect] = []
        for candidate in dropped:
            found += self.drop(candidate, reason, now) if candidate.in_host else self._drop_copy(candidate)
        return found

    def _drop_copy(self, instance: MonitoredInstance) -> list[Effect]:
        instance.dropping = True
        return [self.effects.order(instance.device, UnloadInstance(instance=instance.id, tier="host"))]

    def copy_is(self, instance: MonitoredInstance, there: bool, now: float) -> list[Effect]:
        """Its executor says whether host memory has a copy of the model of this instance, which serves. A lost order to drop it is repeated."""
        instance.copied = there
        if there:
            return self._drop_copy(instance) if instance.dropping else []
        instance.dropping = False
        return self.advance(now)

    def drop(self, warm: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """Unload a Warm instance."""
        changes = self.effects.state_changes(warm, warm.move("Unloading", reason, now), now)
        warm.goes = None
        return [*changes, self.effects.order(warm.device, UnloadInstance(instance=warm.id))]

    def advance(self, now: float) -> list[Effect]:
        """The orders to demote that waited until others had left host memory."""
        waiting = [
            i for i in self.instances.values() if i.state == "Unloading" and i.goes == "host" and i.ordered is None
        ]
        if not waiting:
            return []
        found: list[Effect] = []
        taken = self.used_mb() - sum(i.host_mb or 0.0 for i in waiting)
        for instance in waiting:
            taken += instance.host_mb or 0.0
            if taken > self.limit_mb:
                break
            instance.ordered = now
            found.append(self.effects.order(instance.device, DemoteInstance(instance=instance.id)))
        return found


RETRY_FIRST = 1.0  # s until a variant whose load failed may be tried again; doubles with each failure in a row
RETRY_LAST = 60.0  # s, at most


def thresholds_of(settings: MonitorSettings) -> Thresholds:
    """The thresholds of an instance's states. 0: by hardware (`services.core.lifecycle.thresholds_for`)."""
    return filled(Thresholds, settings, interfered_least_s=settings.interfered_least_ms / 1000.0)


def make_room(
    instances: Iterable[MonitoredInstance],
    missed: Callable[[MonitoredInstance], tuple[float, float]],
    need: Amount,
    apps_of: Callable[[MonitoredInstance], Iterable[str]],
    least: Callable[[str], int],
    now: float,
    idle_s: float,
) -> list[MonitoredInstance] | None:
    """The instances to unload so that so much becomes free. None if they do not suffice.

    Reclaimable instances go first, even busy ones; an app's last one that serves goes after the others. Then go instances that
    are idle, and each app that `apps_of` names keeps `least(app)` serving instances. Within each group what is `missed` least goes
    first. No instance goes whose room the others make unnecessary.

    instances: those on the device; the caller counts the room of those that are being unloaded. idle_s: unused for so long is idle.
    """
    present = sorted((i for i in instances if i.counts), key=missed)
    serving = Counter(app for instance in present if instance.state in SERVING for app in apps_of(instance))

    def kept(instance: MonitoredInstance, most: float) -> bool:
        """Whether one of its apps would have too few instances that serve. most: instances that an app may claim."""
        return instance.state in SERVING and any(serving[app] <= min(most, least(app)) for app in apps_of(instance))

    def idle(instance: MonitoredInstance) -> bool:
        return instance.state == "Active" and instance.queued == 0 and now - instance.last_used >= idle_s

    groups: tuple[Callable[[MonitoredInstance], bool], ...] = (
        lambda instance: instance.reclaimable and not kept(instance, 1),
        lambda instance: instance.reclaimable,
        lambda instance: not instance.reclaimable and idle(instance) and not kept(instance, inf),
    )

    def leaving() -> Iterator[MonitoredInstance]:
        gone: list[MonitoredInstance] = []
        for allowed in groups:
            for instance in present:
                if instance not in gone and allowed(instance):
                    if instance.state in SERVING:
                        serving.subtract(apps_of(instance))
                    gone.append(instance)
                    yield instance

    return sufficient(leaving(), need)


def to_release(instances: Sequence[MonitoredInstance], keep: int) -> list[MonitoredInstance]:
    """Which of one variant's instances are more than `keep`: first reclaimable ones, then those that are loading, then the least busy."""
    present = [instance for instance in instances if instance.counts]
    present.sort(key=lambda i: (not i.reclaimable, i.state != "Loading", i.queued, i.last_used))
    return present[: max(0, len(present) - max(0, keep))]


def to_keep(instances: Sequence[MonitoredInstance], count: int) -> list[MonitoredInstance]:
    """Which `count` of one variant's reclaimable instances are needed again: those that `to_release` would choose last."""
    reclaimable = [instance for instance in instances if instance.reclaimable]
    return to_release(reclaimable, 0)[::-1][: max(0, count)]


def scaler(orderer: str) -> str:
    """The scaler of a scaling event: "model" or "vm" for orders of the two autoscalers, "monitor" for its own, else "dispatcher"."""
    return next((name for name in ("model", "vm", "monitor") if orderer.startswith(name)), "dispatcher")


class LoadFailures:
    """Loads that failed on one worker, by variant.

    quarantine_after: failures in a row until a variant is quarantined; 0: never. quarantined: variant to reason. A quarantined
    variant is not tried again until an operator releases it. One whose file cannot be read is: the recorder mends the file.
    """

    def __init__(self, quarantine_after: int = 0) -> None:
        self.quarantined: dict[str, str] = {}
        self._after = quarantine_after
        self._of: dict[str, tuple[int, float, str]] = {}

    def failed(self, variant: str, reason: str, now: float) -> bool:
        """Count a failure. True if it puts the variant into quarantine.

        A failure during the pause after another is not counted: both loads began before that pause.
        """
        count, until, _ = self._of.get(variant, (0, now, ""))
        if now < until:
            return False
        count += 1
        pause = min(RETRY_LAST, RETRY_FIRST * 2.0 ** min(count - 1, 10))
        self._of[variant] = (count, now + pause, reason)
        if not self._after or count < self._after or variant in self.quarantined or reason.startswith(UNREAD):
            return False
        self.quarantined[variant] = f"its last {count} loads failed: {reason}"
        return True

    def succeeded(self, variant: str) -> None:
        self._of.pop(variant, None)

    def release(self, variant: str) -> bool:
        """The variant may be tried again at once. False if it was not quarantined."""
        self._of.pop(variant, None)
        return self.quarantined.pop(variant, None) is not None

    def obstacle(self, variant: str, now: float) -> str:
        """Why the variant may not be loaded now; empty if it may."""
        why = self.quarantined.get(variant)
        if why is not None:
            return quarantined_words(variant, "here", why)
        count, until, reason = self._of.get(variant, (0, 0.0, ""))
        if now >= until:
            return ""
        times = "the last load" if count == 1 else f"the last {count} loads"
        return f"{times} failed ({reason}); it is tried again in {until - now:.0f} s at the earliest"
