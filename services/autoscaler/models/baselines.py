"""Policies to compare with: `replicate` (one variant for each app, in any number) and `static` (chosen once, never changed). Pure.

They are SM+ and Clipper+ of INFaaS (Romero et al., Table 5): the developer chooses a variant, and the system serves it.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from math import ceil

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import WorkerHeartbeat
from services.autoscaler.models.policy import InstanceChange
from services.autoscaler.models.problem import Situation
from services.core.catalog import Catalog
from services.core.lifecycle import COUNTED
from services.core.settings import StaticVariant


class Choices:
    """The developer's choice for each app: from the settings, else made from the first load and kept."""

    def __init__(self, given: Mapping[str, StaticVariant]) -> None:
        self._of = dict(given)
        self._given = dict(sorted(given.items()))

    def offsets(self, catalog: Catalog) -> dict[str, int]:
        """For each app of the settings: how many instances the apps before it have on its kind of device."""
        placed: dict[tuple[str, bool], int] = {}
        found = {}
        for app, chosen in self._given.items():
            record = catalog.variant(chosen.variant)
            if record is not None:
                kind = (record.hardware, record.simulated)
                found[app] = placed.get(kind, 0)
                placed[kind] = found[app] + chosen.instances
        return found

    def incomplete(
        self,
        mine: WorkerHeartbeat,
        with_load: Iterable[str],
        roster: Mapping[tuple[str, bool], list[str]],
        catalog: Catalog,
    ) -> bool:
        """Whether a static system still has anything to do: an app has load and no choice, or instances of this worker are missing.

        with_load: apps that have had load.
        """
        if any(app not in self._of for app in with_load):
            return True
        offsets = self.offsets(catalog)
        running = Counter(one.variant for one in mine.instances if one.state in COUNTED)
        for app, chosen in self._of.items():
            record = catalog.variant(chosen.variant)
            if record is None:
                continue
            if running[chosen.variant] < _part_of(mine.worker, roster, record, chosen.instances, offsets.get(app, 0)):
                return True
        return False

    @property
    def variants(self) -> dict[str, str]:
        return {app: chosen.variant for app, chosen in self._of.items()}

    def of(self, app: str) -> StaticVariant | None:
        return self._of.get(app)

    def learn(self, seen: Situation) -> None:
        """Choose for apps with load and without a choice: the variant that meets all its classes and carries the load at least cost."""
        problem = seen.problem
        for app in sorted(set(seen.apps) - self._of.keys()):
            demands = [d for d, name in zip(problem.demands, seen.apps, strict=True) if name == app and d.load > 0]
            if not demands:
                continue
            load = problem.slack * sum(d.load for d in demands)
            able = [one for one in problem.candidates if all(d.accepts(one) for d in demands)]
            if able:
                best = min(able, key=lambda one: (ceil(load / one.saturation_qps) * one.cost_per_s, one.name))
                self._of[app] = StaticVariant(variant=best.name, instances=ceil(load / best.saturation_qps))


def static_changes(
    worker: str, roster: Mapping[tuple[str, bool], list[str]], seen: Situation, choices: Choices, catalog: Catalog
) -> list[InstanceChange]:
    """This worker's part of the chosen instances, which go in turn to the workers with such a device, in the order of their names.

    Choices of the settings go round app after app, so that the first worker does not get all. A choice that was made from load
    begins with the first worker, since workers may see the apps' first loads in different orders. roster: names of workers by kind
    of device. seen: with the load of the whole cluster, so that all workers come to the same result.
    """
    changes = []
    offsets = choices.offsets(catalog)
    running = {one.name: one.running for one in seen.problem.candidates}
    for app in sorted(set(seen.apps)):
        chosen = choices.of(app)
        if chosen is None or chosen.variant not in seen.here:
            continue
        count = _part_of(worker, roster, seen.records[chosen.variant], chosen.instances, offsets.get(app, 0))
        if running.get(chosen.variant, 0) < count:
            changes.append(
                InstanceChange(chosen.variant, count, "load", f"chosen for {app}: {chosen.instances} in all")
            )
    return changes


def _part_of(
    worker: str, roster: Mapping[tuple[str, bool], list[str]], record: VariantRecord, instances: int, offset: int
) -> int:
    """How many of so many instances are this worker's, if the first one goes to the worker at this offset."""
    able = roster.get((record.hardware, record.simulated), [])
    if worker not in able:
        return 0  # it has just come, or has no such device
    return len(range((able.index(worker) - offset) % len(able), instances, len(able)))
