"""What a worker's monitor decides: which instances it evicts or releases, and when a failed load may be tried again. Pure.

When an instance is Overloaded or Interfered is decided in `services.core.lifecycle`; where an Interfered one goes, in mitigation.py.
"""

from collections.abc import Callable, Iterable, Sequence

from services.core.lifecycle import COUNTED, Thresholds
from services.core.placement import NOTHING, Amount, short_of
from services.core.settings import MonitorSettings
from services.monitor.instances import MonitoredInstance

RETRY_FIRST = 1.0  # s until a variant whose load failed may be tried again; doubles with each failure in a row
RETRY_LAST = 60.0  # s, at most


def thresholds_of(settings: MonitorSettings) -> Thresholds:
    """The thresholds of an instance's states. 0: by hardware (`services.core.lifecycle.thresholds_for`)."""
    return Thresholds(
        overloaded_backlog_s=settings.overloaded_backlog_s,
        overloaded_slo_share=settings.overloaded_slo_share,
        interfered_ratio=settings.interfered_ratio,
        interfered_least_s=settings.interfered_least_ms / 1000.0,
        interfered_load_share=settings.interfered_load_share,
        clear_ratio=settings.clear_ratio,
        least_items=settings.least_items,
    )


def make_room(
    instances: Iterable[MonitoredInstance],
    need: Amount,
    apps_of: Callable[[MonitoredInstance], Iterable[str]],
    least: Callable[[str], int],
    now: float,
    idle_s: float,
) -> list[MonitoredInstance] | None:
    """The instances to unload so that so much becomes free, least recently used first. None if they do not suffice.

    Only idle instances are evicted, and each app that `apps_of` names keeps `least(app)` instances. instances: those on the
    device; the caller counts the room of those that are being unloaded. idle_s: unused for so long is idle.
    """
    present = [instance for instance in instances if instance.state in COUNTED]
    serving: dict[str, int] = {}
    for instance in present:
        for app in apps_of(instance):
            serving[app] = serving.get(app, 0) + 1
    victims: list[MonitoredInstance] = []
    freed = NOTHING
    for instance in sorted(present, key=lambda instance: instance.last_used):
        if short_of(need, freed).none:
            break
        idle = instance.state == "Active" and instance.queued == 0 and now - instance.last_used >= idle_s
        apps = list(apps_of(instance))
        if not idle or any(serving[app] <= least(app) for app in apps):
            continue
        for app in apps:
            serving[app] -= 1
        victims.append(instance)
        freed += instance.takes
    return victims if short_of(need, freed).none else None


def to_release(instances: Sequence[MonitoredInstance], keep: int) -> list[MonitoredInstance]:
    """Which of one variant's instances to unload so that `keep` are left: first those that are loading, then the least busy ones."""
    present = [instance for instance in instances if instance.state in COUNTED]
    present.sort(key=lambda instance: (instance.state != "Loading", instance.queued, instance.last_used))
    return present[: max(0, len(present) - max(0, keep))]


def scaler(orderer: str) -> str:
    """The scaler of a scaling event: "model" or "vm" for orders of the two autoscalers, else "dispatcher"."""
    return next((name for name in ("model", "vm") if orderer.startswith(name)), "dispatcher")


class LoadFailures:
    """Loads that failed on one worker, by variant.

    quarantine_after: failures in a row until a variant is quarantined; 0: never. quarantined: variant to reason. A quarantined
    variant is not tried again until an operator releases it.
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
        if not self._after or count < self._after or variant in self.quarantined:
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
            return f"{variant} is quarantined here until infaas.admin.release-variant names it: {why}"
        count, until, reason = self._of.get(variant, (0, 0.0, ""))
        if now >= until:
            return ""
        times = "the last load" if count == 1 else f"the last {count} loads"
        return f"{times} failed ({reason}); it is tried again in {until - now:.0f} s at the earliest"
