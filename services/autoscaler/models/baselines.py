"""Baselines that serve: `replicate` (one variant an app, more or fewer of it) and `static` (chosen once, never changed). Pure.

INFaaS compares itself with both (Romero et al., Table 5: SM+ and Clipper+): the developer picks a variant, the system serves it.
"""

from collections.abc import Mapping
from math import ceil

from msgspec import Struct

from services.autoscaler.models.policy import Change
from services.autoscaler.models.situation import Situation


class Chosen(Struct, frozen=True):
    """What serves an app: a variant, and how many instances in the whole cluster (static only)."""

    variant: str
    instances: int = 1


class Choices:
    """The developer's choice for each app: by settings, else made from the first load that is seen, and kept."""

    def __init__(self, given: Mapping[str, Chosen]) -> None:
        self._of = dict(given)

    @property
    def variants(self) -> dict[str, str]:
        return {app: chosen.variant for app, chosen in self._of.items()}

    def of(self, app: str) -> Chosen | None:
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
                self._of[app] = Chosen(best.name, ceil(load / best.saturation_qps))


def static_changes(
    worker: str, roster: Mapping[tuple[str, bool], list[str]], seen: Situation, choices: Choices
) -> list[Change]:
    """This worker's part of what was chosen: instances are dealt out in turn, by the names of the workers with such a device.

    roster: names of workers by kind of device. seen: with the load of the whole cluster, so that every worker comes to the same.
    """
    changes = []
    running = {one.name: one.running for one in seen.problem.candidates}
    for app in sorted(set(seen.apps)):
        chosen = choices.of(app)
        if chosen is None or chosen.variant not in seen.here:
            continue
        record = seen.records[chosen.variant]
        able = roster.get((record.hardware, record.simulated), [])
        if worker not in able:
            continue  # it has only just come
        count = len(range(able.index(worker), chosen.instances, len(able)))
        if running.get(chosen.variant, 0) < count:
            changes.append(Change(chosen.variant, count, "load", f"chosen for {app}: {chosen.instances} in all"))
    return changes
