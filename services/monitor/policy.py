"""What a worker's monitor decides: which instances make room for a new one, and which go when some must.

When an instance counts as troubled is decided in `services.core.lifecycle`, which names its sources; where an interfered one
goes in mitigation.py; when a failed load may be tried again in failures.py.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec import Struct

from services.core.lifecycle import BY_HARDWARE, COUNTED, Thresholds
from services.core.placement import NOTHING, OVERCOMMIT, Amount, short_of
from services.monitor.instances import MonitoredInstance


class Knobs(Struct, frozen=True, kw_only=True):
    """The monitor's settings (services/core/settings, MonitorSettings), as a policy may see them.

    idle_s: an instance that served nothing for so long may make room for another. load_timeout_s: an executor that has
    not answered a load order for this, plus ten times the profiled load latency, is not waited for any longer.
    acquaint_s: a monitor that starts says nothing for so long, or until all its executors have told what they have loaded.
    mitigate_after_s: an instance that has been Interfered for so long is moved; mitigate_again_s: not twice within this long.
    """

    heartbeat_s: float = 0.5
    sample_s: float = 2.0
    cost_s: float = 10.0
    memory_share: float = 0.8
    failure_timeout_s: float = 2.0
    idle_s: float = 1.0
    load_timeout_s: float = 30.0
    acquaint_s: float = 0.0
    cores_overcommit: float = OVERCOMMIT
    mitigate_after_s: float = 2.0
    mitigate_again_s: float = 20.0
    quarantine_after: int = 3
    thresholds: Thresholds = BY_HARDWARE


def make_room(
    instances: Iterable[MonitoredInstance],
    need: Amount,
    apps_of: Callable[[MonitoredInstance], Iterable[str]],
    least: Callable[[str], int],
    now: float,
    idle_s: float,
) -> list[MonitoredInstance] | None:
    """The instances to unload so that so much becomes free, least recently used first; None when it cannot be.

    Only idle ones go, and none that an app in use still needs: `least(app)` instances stay with each app that `apps_of`
    names. instances: those that are loaded or loading on the device; what is unloading already is counted by the caller.
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
    """Which of one variant's instances go so that `keep` stay: not yet loaded ones first, then the least busy, oldest use."""
    present = [instance for instance in instances if instance.state in COUNTED]
    present.sort(key=lambda instance: (instance.state != "Loading", instance.queued, instance.last_used))
    return present[: max(0, len(present) - max(0, keep))]


def scaler(orderer: str) -> str:
    """Who scales, as events name it: "model" and "vm" for the two autoscalers, "dispatcher" for everybody else."""
    return next((name for name in ("model", "vm") if orderer.startswith(name)), "dispatcher")


# -- Loads that failed: a pause that doubles with each failure in a row, and quarantine for what fails again and
# again. Pure.

RETRY_FIRST = 1.0  # s until a variant whose load failed may be tried again; doubles
RETRY_LAST = 60.0


class LoadFailures:
    """By variant, on one worker. quarantine_after: failures in a row; 0: never.

    quarantined: variant -> reason; such a variant is not tried again until an operator releases it.
    """

    def __init__(self, quarantine_after: int = 0) -> None:
        self.quarantined: dict[str, str] = {}
        self._after = quarantine_after
        self._of: dict[str, tuple[int, float, str]] = {}

    def failed(self, variant: str, reason: str, now: float) -> bool:
        """One more failure; True when this one puts the variant into quarantine.

        Nothing begins during the pause, so what fails then began with the one that failed before, and counts as one with it.
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
        """It may be tried again, at once; False when it was not in quarantine."""
        self._of.pop(variant, None)
        return self.quarantined.pop(variant, None) is not None

    def obstacle(self, variant: str, now: float) -> str:
        """Why it may not be tried now; empty when it may."""
        why = self.quarantined.get(variant)
        if why is not None:
            return f"{variant} is quarantined here until infaas.admin.release-variant names it: {why}"
        count, until, reason = self._of.get(variant, (0, 0.0, ""))
        if now >= until:
            return ""
        times = "the last load" if count == 1 else f"the last {count} loads"
        return f"{times} failed ({reason}); it is tried again in {until - now:.0f} s at the earliest"
