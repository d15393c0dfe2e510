"""The model selection layer (paper 002, section 5): what lets several models of an app answer together, and learn from feedback. Pure."""

from collections.abc import Callable, Iterable

from bus.messages.flow import SelectionChanged
from bus.messages.public import Error, ListRequest
from bus.subjects import Subjects
from services.core.actor import Done, Effect, Envelope, Failed, Handler, Inlet, TimedOut
from services.core.ensemble.policies import make_policy
from services.core.settings import DispatcherSettings, SelectionSettings
from services.dispatcher.apps import Apps, members_of
from services.dispatcher.cache import CachedParts
from services.dispatcher.contexts import Contexts, SelectionList
from services.dispatcher.ensembles import Ensembles
from services.dispatcher.feedback import Feedbacks
from services.dispatcher.inflight import OutcomeRecorder
from services.dispatcher.join import JOIN, LATE, EndsDue, Joins
from services.dispatcher.predictions import Predictions
from services.dispatcher.query import PartReply, Query, QueryPart


class SelectionLayer:
    """The parts of a dispatcher that only apps with a selection need.

    joins: queries with parts. contexts: what policies have learnt. predictions: that feedback may come for. decide: dispatches a query.
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
        settings: SelectionSettings,
    ) -> None:
        self.joins = Joins(name, subjects)
        self.predictions = Predictions()
        self.contexts = Contexts(
            subjects, settings.max_contexts, lambda app: members_of(apps.catalog, app), make_policy
        )
        self.cached = CachedParts(apps)
        self.ensembles = Ensembles(
            name, self.joins, self.contexts, self.predictions, apps, settings, dispatcher, outcomes, self.cached, decide
        )
        self.feedback = Feedbacks(name, subjects, apps, self.contexts, self.predictions, outcomes.log, new_uid)
        self.feedback.evaluate = self.ensembles.evaluate
        self.ensembles.evaluated = self.feedback.evaluated
        self._list = SelectionList(apps.catalog, self.contexts)
        self.inlets = (Inlet(subject=subjects.part(name), message=PartReply), *self.feedback.inlets)
        self.handlers: dict[type, Handler] = {
            PartReply: self._replied,
            EndsDue: lambda _: self.joins.tell(),
            SelectionChanged: lambda envelope: self.contexts.changed(envelope.message),
            Done: self._edge_ended,
            Failed: self._edge_ended,
            TimedOut: self._edge_ended,
            **self.feedback.handlers,
        }

    def __contains__(self, uid: bytes) -> bool:
        """Whether this query waits for its parts."""
        return uid in self.joins.open

    def start(self, query: Query, now: float) -> Iterable[Effect]:
        """A query of an app with a selection begins."""
        return self.ensembles.start(query, now)

    def refused(self, part: QueryPart, error: Error, now: float) -> Iterable[Effect]:
        """A part was refused by its own dispatcher."""
        return self.ensembles.refused(part, error, now)

    def due(self, of: str, now: float) -> Iterable[Effect] | None:
        """A deadline has come. None: it is none of the joins'."""
        return self.ensembles.due(now) if of == JOIN else None

    def stored(self) -> Iterable[Effect]:
        """More of the dispatcher's events are on disk."""
        return self.feedback.stored()

    def ask(self, envelope: Envelope) -> Iterable[Effect]:
        """What the members of an app weigh."""
        asked: ListRequest = envelope.message
        return self._list.ask(envelope.reply, asked) if envelope.reply else ()

    def check(self, now: float) -> Iterable[Effect]:
        """To be called now and then."""
        self.joins.forget(now)
        return (*self.contexts.retry(), *self.ensembles.overdue(now - LATE, now))

    def _replied(self, envelope: Envelope) -> Iterable[Effect]:
        uid = bytes.fromhex(envelope.subject.rpartition(".")[2])
        return self.ensembles.replied(uid, envelope.message, envelope.now)

    def _edge_ended(self, envelope: Envelope) -> Iterable[Effect]:
        """The edge has read or written a context, or run a user's own policy, or could not."""
        done: Done | Failed | TimedOut = envelope.message
        kind = done.id[0]
        if kind == "policy":
            return self.ensembles.ran(done, envelope.now)
        if kind == "listed":
            return self._list.ran(done)
        if kind != "context":
            return self.feedback.done(done)
        key = self.contexts.took(done)
        asked = self.ensembles.known(key, envelope.now)
        return (*asked, *self.feedback.read(key), *self._list.read(key))
