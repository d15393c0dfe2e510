"""Baselines that serve: `replicate` (one variant an app, more or fewer of it) and `static` (chosen once, never changed). Pure.

INFaaS compares itself with both (Romero et al., Table 5: SM+ and Clipper+): the developer picks a variant, the system serves it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil

from msgspec import Struct

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.models.policy import InstanceChange
from services.autoscaler.models.problem import Situation
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED


class FixedVariant(Struct, frozen=True):
    """What serves an app: a variant, and how many instances in the whole cluster (static only)."""

    variant: str
    instances: int = 1


class Choices:
    """The developer's choice for each app: by settings, else made from the first load that is seen, and kept."""

    def __init__(self, given: Mapping[str, FixedVariant]) -> None:
        self._of = dict(given)
        self._given = dict(sorted(given.items()))

    def turns(self, catalog: Catalog) -> dict[str, int]:
        """For each app of the settings how many instances the apps before it have on its kind of device."""
        dealt: dict[tuple[str, bool], int] = {}
        found = {}
        for app, chosen in self._given.items():
            record = catalog.variant(chosen.variant)
            if record is not None:
                kind = (record.hardware, record.simulated)
                found[app] = dealt.get(kind, 0)
                dealt[kind] = found[app] + chosen.instances
        return found

    def open(
        self,
        mine: WorkerHeartbeat,
        loaded: Iterable[str],
        roster: Mapping[tuple[str, bool], list[str]],
        catalog: Catalog,
    ) -> bool:
        """Whether a worker has to look at all, under "static": load of an app without a choice, or instances that it has not yet.

        loaded: apps that have had load.
        """
        if any(app not in self._of for app in loaded):
            return True
        turns = self.turns(catalog)
        running = Counter(one.variant for one in mine.instances if one.state in COUNTED)
        for app, chosen in self._of.items():
            record = catalog.variant(chosen.variant)
            if record is None:
                continue
            if running[chosen.variant] < _dealt(mine.worker, roster, record, chosen.instances, turns.get(app, 0)):
                return True
        return False

    @property
    def variants(self) -> dict[str, str]:
        return {app: chosen.variant for app, chosen in self._of.items()}

    def of(self, app: str) -> FixedVariant | None:
        return self._of.get(app)

    def learn(self, seen: Situation) -> None:
        """Choose for apps that have load and no choice: what carries the load now, within all its classes, at least cost."""
        problem = seen.problem
        for app in sorted(set(seen.apps) - self._of.keys()):
            demands = [d for d, name in zip(problem.demands, seen.apps, strict=True) if name == app and d.load > 0]
            if not demands:
                continue
            load = problem.slack * sum(d.load for d in demands)
            able = [one for one in problem.candidates if all(d.accepts(one) for d in demands)]
            if able:
                best = min(able, key=lambda one: (ceil(load / one.saturation_qps) * one.cost_per_s, one.name))
                self._of[app] = FixedVariant(best.name, ceil(load / best.saturation_qps))


def static_changes(
    worker: str, roster: Mapping[tuple[str, bool], list[str]], seen: Situation, choices: Choices, catalog: Catalog
) -> list[InstanceChange]:
    """This worker's part of what was chosen: instances are dealt out in turn, by the names of the workers with such a device.

    What the settings chose is dealt out app after app, so that the first worker does not get all; what was chosen when its load
    was first seen, each app for itself: workers may have seen it in different orders.
    roster: names of workers by kind of device. seen: with the load of the whole cluster, so that every worker comes to the same.
    """
    changes = []
    turns = choices.turns(catalog)
    running = {one.name: one.running for one in seen.problem.candidates}
    for app in sorted(set(seen.apps)):
        chosen = choices.of(app)
        if chosen is None or chosen.variant not in seen.here:
            continue
        count = _dealt(worker, roster, seen.records[chosen.variant], chosen.instances, turns.get(app, 0))
        if running.get(chosen.variant, 0) < count:
            changes.append(
                InstanceChange(chosen.variant, count, "load", f"chosen for {app}: {chosen.instances} in all")
            )
    return changes


def _dealt(
    worker: str, roster: Mapping[tuple[str, bool], list[str]], record: VariantRecord, instances: int, turn: int
) -> int:
    """How many of so many instances are this worker's, when the one whose turn it is begins."""
    able = roster.get((record.hardware, record.simulated), [])
    if worker not in able:
        return 0  # it has only just come, or has no such device
    return len(range((able.index(worker) - turn) % len(able), instances, len(able)))
