"""Queries that are answered from the answers of several others: of an app's models (Clipper, paper 002, section 5), and of the apps of a
pipeline (InferLine, paper 004). Pure.
"""

from collections.abc import Callable, Iterable, Sequence

from msgspec.structs import replace

from bus.messages.fleet import ExecutorExited
from bus.messages.flow import ContextChanged, DoneBatch
from bus.messages.public import ListRequest
from bus.subjects import Subjects
from services.core.actor import Done, Effect, Envelope, Failed, Handler, Inlet, TimedOut
from services.core.ensemble.policies import make_policy
from services.core.outcomes import PART_GRACE
from services.core.settings import DispatcherSettings, EnsembleSettings, JobsSettings, QualitySettings
from services.dispatcher.answered import AnsweredQueries, score_answered
from services.dispatcher.apps import Apps, forget, members_of
from services.dispatcher.budgets import Budgets
from services.dispatcher.cache import CachedParts
from services.dispatcher.contexts import Contexts, SelectionList, Then
from services.dispatcher.copies import Copied, Copies
from services.dispatcher.demand import ArrivalsCounter, ArrivalsDue
from services.dispatcher.ensembles import Ensembles
from services.dispatcher.feedback import UNKNOWN, Feedbacks
from services.dispatcher.inflight import OutcomeRecorder
from services.dispatcher.join import JOIN, RESULTS, EndsDue, Joins
from services.dispatcher.pipelines import Pipelines
from services.dispatcher.predictions import Predictions
from services.dispatcher.query import Composite, PartReply, Query
from services.dispatcher.references import Probe, References
from services.dispatcher.releases import Mirrored, Releases


class Composites:
    """The parts of a dispatcher that only apps with a selection (paper 002, section 5) and pipelines (paper 004) need.

    joins: queries with parts. contexts: what policies have learnt. predictions: that feedback may come for. decide: dispatches a query.
    policy: name of the one that selects variants.
    """

    def __init__(
        self,
        name: str,
        subjects: Subjects,
        apps: Apps,
        outcomes: OutcomeRecorder,
        decide: Callable[[Query, float], Iterable[Effect]],
        new_uid: Callable[[], bytes],
        dispatcher: DispatcherSettings,
        settings: EnsembleSettings,
        policy: str,
        quality: QualitySettings,
        jobs: JobsSettings,
    ) -> None:
        self.answered = AnsweredQueries()
        self.joins = Joins(name, subjects, dispatcher.max_stored)
        self.predictions = Predictions()
        self.contexts = Contexts(
            subjects, settings.max_contexts, lambda app: members_of(apps.catalog, app), make_policy
        )
        self.cached = CachedParts(apps)
        self.budgets = Budgets(apps)
        self.ensembles = Ensembles(
            name,
            self.joins,
            self.contexts,
            self.predictions,
            apps,
            settings,
            dispatcher,
            outcomes,
            self.cached,
            self.budgets,
            self.answered,
            decide,
        )
        self._decide = decide
        self._apps = apps
        self._arrivals = ArrivalsCounter(name, subjects)
        self.pipelines = Pipelines(
            name,
            self.joins,
            apps,
            dispatcher,
            outcomes,
            self._arrivals,
            policy,
            self.budgets,
            self.predictions,
            self.begin,
            self.answered,
        )
        self.budgets.served = self.pipelines.served
        self.copies = Copies(name, subjects)
        self.releases = outcomes.releases = Releases(name, subjects, apps.view, self.copies)
        known = (self.contexts, self.predictions, outcomes.log, new_uid, self.answered, self.releases, self.copies)
        self.feedback = Feedbacks(name, subjects, apps, *known)
        told = (apps.view, apps.catalog, self.copies, self.feedback.learning)
        self.references = References(*told, quality, jobs)
        self.feedback.evaluate = self.ensembles.evaluate
        self.ensembles.evaluated = self.feedback.evaluated
        # What is kept by app, until that is deleted.
        self.by_app = [
            *self.contexts.by_app,
            *self.ensembles.by_app,
            *self.releases.by_app,
            *self.references.by_app,
            self.pipelines.visits,
            self.feedback.learning.ended,
        ]
        self._list = SelectionList(apps.catalog, self.contexts)
        self.ending = (PartReply, Done, Failed, TimedOut)  # what may end a query
        self.inlets = (Inlet(subject=subjects.part(name), message=PartReply), *self.feedback.inlets)
        self.handlers: dict[type, Handler] = {
            PartReply: self._replied,
            EndsDue: lambda _: self.joins.tell(),
            ArrivalsDue: lambda _: self._arrivals.report(),
            ContextChanged: lambda envelope: self.contexts.changed(envelope.message),
            Done: self._edge_ended,
            Failed: self._edge_ended,
            TimedOut: self._edge_ended,
            **self.feedback.handlers,
        }

    def __contains__(self, uid: bytes) -> bool:
        """Whether this query waits for its parts."""
        return uid in self.joins.open

    def begin(self, query: Query, now: float) -> Iterable[Effect]:
        """A query begins: it is decided on, or asks its parts."""
        if query.pipeline is not None:
            return self.pipelines.start(query, now)
        if query.ensemble is not None:
            return self.ensembles.start(query, now)
        return (*self.ensembles.alone(query), *self._decide(query, now))

    def done(self, batch: DoneBatch, queries: Sequence[Query | None], now: float) -> list[Effect]:
        """A batch is done: what it said may be compared. Before its outcomes count as recorded."""
        if batch.said is not None:
            self.answered.ended(batch, queries)
        copied = [
            effect for one in self.copies.done(batch, self._apps.view.records) for effect in self._copied(one, now)
        ]
        return [*copied, *self.releases.done(batch, queries, now), *self.references.done(batch, queries, now)]

    def exited(self, gone: ExecutorExited, now: float) -> None:
        """An executor has ended, and copies with it: none has been answered."""
        for one in self.copies.exited(gone):
            self._copied(one, now)

    def unreached(self, query: Query, now: float) -> tuple[list[Effect], str | None]:
        """A query is about to be refused, since no variant is able to answer it. Labels may come for it all the same. Returns copies, and a variant
        that is to be loaded for those of others.
        """
        if not self.references.refuses(query):
            return [], None
        self.answered.add(query, [None] * query.ask.items)
        return self.references.refused(query, now)

    def _copied(self, one: Copied, now: float) -> list[Effect]:
        """A copy has ended: labels score what it said, too, whether they come later or have come."""
        self.answered.copied(one.uid, one.record.variant, one.said)
        effects = self._labelled(one, now) if one.labels and one.said is not None else []
        if isinstance(one.about, Probe):
            return effects + (
                self.references.ask(one.about.query, one.said, one.record.variant, now) if one.said else []
            )
        (self.releases if isinstance(one.about, Mirrored) else self.references).copied(one)
        return effects

    def _labelled(self, one: Copied, now: float) -> list[Effect]:
        """Labels of its query came before the copy was answered: they score it now."""
        of = self.answered.find(one.about.app, one.uid, None)
        if of is None:
            return []
        alone, known = replace(of, variant="", copies=((one.record.variant, one.said),)), self._apps.catalog.variant
        found = [score_answered(label, item, alone, known) for item, label in one.labels.items()]
        for scored in found:
            self.releases.labelled(of.app, of.arm, None, scored.copy)
        found = [scored for scored in found if scored.variants]
        return self.feedback.learning.compared(of.app, found, now) if found else []

    def due(self, of: str, now: float) -> Iterable[Effect] | None:
        """A deadline has come. None: it is none of the joins'."""
        if of != JOIN:
            return None
        effects: list[Effect] = []
        for join in self.joins.due(now):
            effects.extend(join.kind.due(join, now))
            if join.query.uid in self.joins.open and now < join.last:
                self.joins.goes_on(join, now)
        effects.extend(self.joins.timer(now))
        return effects

    def changed(self, *, deleted: bool) -> None:
        """The catalogue has changed. deleted: an entry is gone, and what was kept of it goes."""
        self.cached.drop()
        self.pipelines.changed()
        if deleted and self._apps.synced:
            known = {*self._apps.view.apps, UNKNOWN}
            forget(known, *self.by_app)
            self.predictions.forget(known)

    def ask(self, envelope: Envelope, then: Then | None = None) -> Iterable[Effect]:
        """What the members of an app weigh. then: what is replied instead, once the context is in memory."""
        asked: ListRequest = envelope.message
        return self._list.ask(envelope.reply, asked, then) if envelope.reply else ()

    def check(self, now: float) -> Iterable[Effect]:
        """To be called now and then."""
        self.copies.check(now)
        return (
            *self.joins.forget(now),
            *self.contexts.retry(),
            *self.ensembles.overdue(now - PART_GRACE, now),
            *self.references.check(now),
            *self.feedback.publisher.due(now),
        )

    def _replied(self, envelope: Envelope) -> Iterable[Effect]:
        uid = bytes.fromhex(envelope.subject.rpartition(".")[2])
        part = self.joins.parts.get(uid)
        # Of an unknown part, a kept answer may still be waited for.
        kind: Composite = self.ensembles if part is None else part.join.kind
        return kind.replied(uid, envelope.message, envelope.now)

    def _edge_ended(self, envelope: Envelope) -> Iterable[Effect]:
        """The edge has read or written a context, run a user's own policy, or stored outputs; or it could not."""
        done: Done | Failed | TimedOut = envelope.message
        kind = done.id[0]
        if kind == "gather":
            return self.pipelines.gathered(done, envelope.now)
        if kind == "inputs":
            return self.pipelines.stored(done, envelope.now)
        if kind in ("items", "rows"):
            return self.pipelines.fetched(done, envelope.now)
        if kind in (RESULTS, "quality"):
            return ()  # what could not be deleted goes when its time is up
        if kind == "policy":
            return self.ensembles.ran(done, envelope.now)
        if kind == "listed":
            return self._list.ran(done)
        if kind != "context":
            return self.feedback.done(done)
        key = self.contexts.took(done)
        asked = self.ensembles.known(key, envelope.now)
        return (*asked, *self.feedback.read(key), *self._list.read(key))
