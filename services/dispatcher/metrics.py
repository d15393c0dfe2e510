"""A dispatcher's metrics: queries in flight, its view of the fleet, how long decisions take. Pure."""

from collections.abc import Callable, Iterable

from services.core.metric import Histogram, MetricFamily
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import Decision, SelectionPolicy, goal_of
from services.dispatcher.actor import Dispatcher

EVERY = 0.05  # s


class SampledPolicy:
    """A selection policy with some decisions timed, at most one in 50 ms. The decisions are the policy's own.

    clock: seconds. observe: called with the seconds that a timed decision took.
    """

    def __init__(self, policy: SelectionPolicy, clock: Callable[[], float], observe: Callable[[float], None]) -> None:
        self.name = policy.name
        self.goal = goal_of(policy)
        self._select = policy.select
        self._clock = clock
        self._observe = observe
        self._next = float("-inf")  # Unix seconds

    def select(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        """The policy's own decision."""
        if now < self._next:
            return self._select(ask, now, view)
        self._next = now + EVERY
        began = self._clock()
        decision = self._select(ask, now, view)
        self._observe(self._clock() - began)
        return decision


class DispatcherMetrics:
    """decisions: seconds, where they are timed."""

    def __init__(self, decisions: Histogram | None = None) -> None:
        self._decisions = decisions

    def families(self, actor: Dispatcher) -> Iterable[MetricFamily]:
        in_flight = MetricFamily(
            "infaas_dispatcher_queries", "gauge", "Queries taken and not yet ended, by where they are."
        )
        in_flight.add(len(actor.in_flight.dispatched), place="executor")
        in_flight.add(len(actor.in_flight.waiting), place="waiting")
        in_flight.add(len(actor.in_flight.retries), place="retrying")
        workers = MetricFamily("infaas_dispatcher_workers", "gauge", "Workers that this dispatcher hears.")
        workers.add(len(actor.view.workers))
        instances = MetricFamily("infaas_dispatcher_instances", "gauge", "Instances that this dispatcher knows of.")
        instances.add(len(actor.view.instances))
        if self._decisions is None:
            return in_flight, workers, instances
        seconds = MetricFamily(
            "infaas_decision_seconds", "histogram", "Selection of one query; at most 20 a second are timed."
        )
        seconds.add(self._decisions)
        return in_flight, workers, instances, seconds

    def missing(self, actor: Dispatcher, now: float) -> str:
        del now
        if not actor.apps.synced:
            return "the catalogue"
        return "" if actor.view.workers else "a worker's heartbeat"
