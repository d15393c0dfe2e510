"""A dispatcher's metrics: queries in flight, its view of the fleet, how long decisions take. Pure."""

from collections import Counter
from collections.abc import Callable, Iterable

from msgspec import Struct

from services.core.metric import Histogram, MetricFamily, counter, gauge, histogram
from services.core.policy import policy_failures
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.policy import Decision, SelectionPolicy
from services.dispatcher.actor import Dispatcher
from services.dispatcher.stages import unserved

EVERY = 0.05  # s


class SampledPolicy(SelectionPolicy):
    """A selection policy with some decisions timed, at most one in 50 ms. The decisions are the policy's own.

    clock: seconds. observe: called with the seconds that a timed decision took.
    """

    def __init__(self, policy: SelectionPolicy, clock: Callable[[], float], observe: Callable[[float], None]) -> None:
        self.name = policy.name
        self.goal = policy.goal
        self.observe = policy.observe
        self.failures = policy.failures
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


class DispatcherMetrics(Struct, eq=False):
    """decisions: seconds, where they are timed."""

    decisions: Histogram | None = None

    def families(self, actor: Dispatcher) -> Iterable[MetricFamily]:
        open_ = actor.composites.joins.open.values()
        joining = sum(join.query.part is None for join in open_)
        whole, parts = {"joining": joining}, {"joining": len(open_) - joining}
        for place, queries in (
            ("executor", actor.in_flight.dispatched.values()),
            ("waiting", actor.in_flight.waiting.values()),
            ("retrying", actor.in_flight.retries.values()),
        ):
            parts[place] = sum(query.part is not None for query in queries) if actor.composites.joins.parts else 0
            whole[place] = len(queries) - parts[place]
        apps = [app for app in actor.view.apps if not app.startswith("_")]
        ensembles = actor.composites.ensembles
        families = (
            gauge(
                "infaas_dispatcher_queries",
                "Queries taken and not yet ended: with an executor, waiting, retrying alone, or joining parts.",
            ).add_all(whole, "place"),
            gauge(
                "infaas_dispatcher_parts",
                "Parts of queries under way, by where they are; not in infaas_dispatcher_queries.",
            ).add_all(parts, "place"),
            counter("infaas_members_asked_total", "Times that a member was asked.").add_all(
                ensembles.asked, "app", "member"
            ),
            counter("infaas_members_missing_total", "Answers without the member's output.").add_all(
                ensembles.missing, "app", "member"
            ),
            counter("infaas_members_late_total", "Outputs of the member that came after their answer.").add_all(
                ensembles.late, "app", "member"
            ),
            counter("infaas_feedback_total", "Feedbacks of all apps: accepted, or the refusal's code.").add_all(
                actor.composites.feedback.learning.ended, "app", "outcome"
            ),
            gauge("infaas_dispatcher_workers", "Workers that this dispatcher hears.").add(len(actor.view.workers)),
            gauge("infaas_dispatcher_instances", "Instances that this dispatcher knows of.").add(
                len(actor.view.instances)
            ),
            counter(
                "infaas_crossed_replies_total",
                "Replies of executors after the refusal of their dispatcher, which is recorded.",
            ).add_all(actor.silence.crossings, "app"),
            counter(
                "infaas_resent_queries_total",
                "Queries that came again: said (the same reply), had (by another process) or taken (nobody had it).",
            ).add_all(actor.resent.ends, "how"),
            gauge(
                "infaas_app_unserved",
                "1 while no query of the app can be answered, whatever it asks for; `infaas status` says why.",
            ).add_all({app: int(bool(unserved(app, actor.apps))) for app in apps}, "app"),
            *_accuracy(actor),
            policy_failures(actor.policy_failures),
            *_kept(actor),
            *_pipelines(actor),
        )
        if self.decisions is None:
            return families
        seconds = histogram("infaas_decision_seconds", "Selection of one query; at most 20 a second are timed.")
        return (*families, seconds.add(self.decisions))

    def missing(self, actor: Dispatcher, _now: float) -> str:
        return actor.view.missing if actor.apps.synced else "the catalogue"

    def under_way(self, actor: Dispatcher) -> bool:
        """Whether queries that it took have not ended."""
        return len(actor.in_flight) > 0 or bool(actor.composites.joins.open)


def _accuracy(actor: Dispatcher) -> Iterable[MetricFamily]:
    """Of the apps of whose answers labels came."""
    promised = gauge("infaas_accuracy_promised", "Accuracy that the app's labelled answers should reach.")
    found = gauge("infaas_accuracy_found", "Share of them that are right.")
    high = gauge("infaas_accuracy_found_high", "The upper end of its 95 % interval.")
    labels = gauge("infaas_accuracy_labels", "Labels that it rests on.")
    for app in actor.apps.catalog.apps:
        known = actor.apps.catalog.quality(app.app)
        if known is not None and known.answers is not None:
            promised.add(known.promised, app=app.app)
            found.add(known.answers.accuracy, app=app.app)
            high.add(known.answers.high, app=app.app)
            labels.add(known.answers.labels, app=app.app)
    return promised, found, high, labels


def _kept(actor: Dispatcher) -> Iterable[MetricFamily]:
    """The caches of the apps that have one."""
    lookups = counter(
        "infaas_cache_lookups_total",
        "Parts of queries of apps with a cache: hit, coalesced (an equal one was under way) or miss.",
    )
    size = gauge("infaas_cache_bytes", "Memory of kept answers, of one dispatcher.")
    evictions = counter("infaas_cache_evictions_total", "Answers that went since there was no room.")
    for app, cache in actor.composites.cached.caches.items():
        waited = actor.composites.cached.equal.waited[app]
        lookups.add(cache.hits, app=app, result="hit")
        lookups.add(waited, app=app, result="coalesced")
        lookups.add(cache.misses - waited, app=app, result="miss")
        size.add(cache.size, app=app)
        evictions.add(cache.evictions, app=app)
    return lookups, size, evictions


def _pipelines(actor: Dispatcher) -> Iterable[MetricFamily]:
    pipelines = actor.composites.pipelines
    open_ = dict.fromkeys((name for name, _ in pipelines.visits), 0)
    open_ |= Counter(join.query.app for join in actor.composites.joins.open.values() if join.query.pipeline is not None)
    return (
        counter("infaas_pipeline_visits_total", "Times that a vertex of a pipeline was asked.").add_all(
            pipelines.visits, "pipeline", "vertex"
        ),
        gauge("infaas_pipeline_queries", "Queries of pipelines taken and not yet ended.").add_all(open_, "pipeline"),
        gauge("infaas_pipeline_queue_items", "Items in the queue for the instances of a planned variant.").add_all(
            actor.central.depths(), "variant"
        ),
    )
