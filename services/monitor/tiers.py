"""Memory tiers of a worker: which instances leave a device, and which stay in host memory (Rafiqi, section 3.4). Pure.

A device is a cache of models. Under `cache = "lru"` the least recently used instance that is idle makes room. It is demoted: its model stays
in host memory, and the instance is Warm. Host memory is a cache, too: its least recently used instance is unloaded. What it takes is counted
from the order on, so that orders at once never take the same memory twice. A model that comes to the device leaves a copy in host memory, as
long as no Warm instance needs the place: then its way back takes no transfer.
"""

from collections.abc import Iterable, Mapping

from services.core.actor import Effect
from services.core.lifecycle import SERVING
from services.core.placement import NOTHING, Amount, short_of
from services.monitor.effects import MonitorEffects
from services.monitor.instances import MonitoredInstance

ARRIVES_S = 0.1  # s after its load in which an instance that nothing has used yet is kept: the query that ordered it is on its way


def least_recently_used(
    instances: Iterable[MonitoredInstance], need: Amount, now: float
) -> list[MonitoredInstance] | None:
    """The idle instances whose eviction frees so much, the least recently used first. None if they do not suffice."""
    victims: list[MonitoredInstance] = []
    freed = NOTHING
    for instance in sorted(instances, key=lambda each: each.last_used):
        if short_of(need, freed).none:
            break
        if is_idle(instance, now):
            victims.append(instance)
            freed += instance.takes
    return needed_of(victims, need) if short_of(need, freed).none else None


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


class HostTier:
    """The host memory of one worker for Warm instances. instances: all of the worker, by name. limit_mb: for Warm ones; 0: there is none."""

    def __init__(self, instances: Mapping[str, MonitoredInstance], effects: MonitorEffects, limit_mb: float) -> None:
        self._instances = instances
        self._effects = effects
        self._limit = limit_mb

    def used_mb(self, device: str | None = None) -> float:
        """MB that are taken or promised, by instances of this device or of all."""
        return sum(i.takes_of_host_mb for i in self._instances.values() if device in (None, i.device))

    def obstacle(self, instance: MonitoredInstance) -> str:
        """Why this instance can never be Warm here; empty if it can."""
        if instance.host_mb is None:
            return "its backend cannot keep a model in host memory"
        if self._limit <= 0:
            return "monitor.host_mb is 0"
        if instance.host_mb > self._limit:
            return f"it takes {instance.host_mb:.0f} MB of host memory, monitor.host_mb is {self._limit:.0f}"
        return ""

    def demote(self, instance: MonitoredInstance, reason: str, now: float) -> list[Effect] | str:
        """Keep the model in host memory only. Copies, then the least recently used Warm instances make room. Or why that cannot be."""
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
        found += self._effects.state_changes(instance, instance.move("Unloading", reason, now), now)
        instance.goes, instance.in_host, instance.ordered = "host", True, None
        return found + self.advance(now)

    def has_room(self, host_mb: float) -> bool:
        """Whether so much is free without dropping anything."""
        return self.used_mb() + host_mb <= self._limit

    def make_room(self, host_mb: float, reason: str, now: float) -> list[Effect] | None:
        """Drop what is least missed until so many MB are free once it is gone: copies, then Warm instances. None if all of that is not enough."""
        everywhere = self._instances.values()
        staying = [i for i in everywhere if i.in_host and (i.state != "Unloading" or i.goes == "host")]
        copies = [i for i in everywhere if i.copied and not i.dropping and i.state != "Unloading"]
        excess = sum(i.host_mb or 0.0 for i in (*staying, *copies)) + host_mb - self._limit
        candidates = sorted(copies, key=lambda each: -each.last_used)  # who was used last leaves the device last
        candidates += sorted(
            (i for i in staying if i.state == "Warm" and not i.wanted), key=lambda each: each.last_used
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
        return [self._effects.order_drop(instance)]

    def copy_is(self, instance: MonitoredInstance, there: bool, now: float) -> list[Effect]:
        """Its executor says whether host memory has a copy of the model of this instance, which serves. A lost order to drop it is repeated."""
        instance.copied = there
        if there:
            return self._drop_copy(instance) if instance.dropping else []
        instance.dropping = False
        return self.advance(now)

    def drop(self, warm: MonitoredInstance, reason: str, now: float) -> list[Effect]:
        """Unload a Warm instance."""
        changes = self._effects.state_changes(warm, warm.move("Unloading", reason, now), now)
        warm.goes = None
        return [*changes, self._effects.order_unload(warm.id, warm.device)]

    def advance(self, now: float) -> list[Effect]:
        """The orders to demote that waited until others had left host memory."""
        waiting = [
            i for i in self._instances.values() if i.state == "Unloading" and i.goes == "host" and i.ordered is None
        ]
        found: list[Effect] = []
        taken = self.used_mb() - sum(i.host_mb or 0.0 for i in waiting)
        for instance in waiting:
            taken += instance.host_mb or 0.0
            if taken > self._limit:
                break
            instance.ordered = now
            found.append(self._effects.order_demote(instance))
        return found
