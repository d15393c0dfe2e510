"""Memory tiers of a worker: which instances leave a device, and which stay in host memory (Rafiqi, section 3.4). Pure.

A device is a cache of models. Under `cache = "lru"` the least recently used instance that is idle makes room. It is demoted: its model stays
in host memory, and the instance is Warm. Host memory is a cache, too: its least recently used instance is unloaded. What it takes is counted
from the order on, so that orders at once never take the same memory twice.
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
    """Whether it neither runs a batch nor has anything waiting, nor will have in a moment."""
    awaited = not instance.used and now - instance.since < ARRIVES_S
    return instance.state in SERVING and instance.queued == 0 and not awaited


class HostTier:
    """The host memory of one worker for Warm instances. instances: all of the worker, by name. limit_mb: for Warm ones; 0: there is none."""

    def __init__(self, instances: Mapping[str, MonitoredInstance], effects: MonitorEffects, limit_mb: float) -> None:
        self._instances = instances
        self._effects = effects
        self._limit = limit_mb

    def used_mb(self, device: str | None = None) -> float:
        """MB that are taken or promised, by instances of this device or of all."""
        return sum(i.host_mb or 0.0 for i in self._instances.values() if i.in_host and device in (None, i.device))

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
        """Keep the model in host memory only. The least recently used Warm instances make room. Or why that cannot be."""
        obstacle = self.obstacle(instance)
        dropped = [] if obstacle else self._to_drop(instance.host_mb or 0.0)
        if obstacle or dropped is None:
            return obstacle or "host memory is full of models that are on their way to a device"
        found: list[Effect] = []
        for warm in dropped:
            found += self.drop(warm, f"makes room in host memory for {instance.record.variant}", now)
        found += self._effects.state_changes(instance, instance.move("Unloading", reason, now), now)
        instance.goes, instance.in_host, instance.ordered = "host", True, None
        return found + self.advance(now)

    def has_room(self, host_mb: float) -> bool:
        """Whether so much is free without dropping anything."""
        return self.used_mb() + host_mb <= self._limit

    def _to_drop(self, host_mb: float) -> list[MonitoredInstance] | None:
        """The Warm instances that make room for so many MB. None if all of them are not enough."""
        staying = [i for i in self._instances.values() if i.in_host and (i.state != "Unloading" or i.goes == "host")]
        excess = sum(i.host_mb or 0.0 for i in staying) + host_mb - self._limit
        dropped: list[MonitoredInstance] = []
        for warm in sorted((i for i in staying if i.state == "Warm" and not i.wanted), key=lambda each: each.last_used):
            if excess <= 0:
                break
            dropped.append(warm)
            excess -= warm.host_mb or 0.0
        return dropped if excess <= 0 else None

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

    def excess(self) -> list[MonitoredInstance]:
        """The Warm instances to drop because some take more than their profile says."""
        return self._to_drop(0.0) or []
