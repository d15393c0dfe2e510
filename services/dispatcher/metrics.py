"""What a dispatcher shows: queries under way, its view of the fleet, how long decisions take. Pure."""

from collections.abc import Iterable

from services.core.metric import Family, Histogram
from services.dispatcher.actor import Dispatcher


class DispatcherInsight:
    """decisions: seconds, where they are timed."""

    def __init__(self, decisions: Histogram | None = None) -> None:
        self._decisions = decisions

    def families(self, actor: Dispatcher) -> Iterable[Family]:
        under_way = Family("infaas_dispatcher_queries", "gauge", "Queries taken and not yet ended, by where they are.")
        under_way.add(len(actor.flights.flying), place="executor")
        under_way.add(len(actor.flights.waiting), place="waiting")
        under_way.add(len(actor.flights.retries), place="retrying")
        yield under_way
        workers = Family("infaas_dispatcher_workers", "gauge", "Workers that this dispatcher hears.")
        workers.add(len(actor.view.workers))
        yield workers
        instances = Family("infaas_dispatcher_instances", "gauge", "Instances that this dispatcher knows of.")
        instances.add(len(actor.view.instances))
        yield instances
        if self._decisions is not None:
            seconds = Family(
                "infaas_decision_seconds", "histogram", "Selection of one query; at most 20 a second are timed."
            )
            seconds.add(self._decisions)
            yield seconds

    def missing(self, actor: Dispatcher, now: float) -> str:
        del now
        if not actor.apps.synced:
            return "the catalogue"
        return "" if actor.view.workers else "a worker that is heard"
