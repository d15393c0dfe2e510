"""What selection policies have learnt, by app and context. Pure.

The truth is in the selection bucket, shared by all dispatchers and changed by compare-and-set. A dispatcher holds the contexts that it
used last, and reads others when a query or feedback needs them. A state in memory may be older than the stored one for the time that a
message takes: queries are served by it, but what feedback teaches is always computed on the stored one.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from msgspec.structs import asdict, replace

from bus.codec import decode_kept
from bus.messages.catalog import AppRecord, Ensemble
from bus.messages.flow import ContextChanged
from bus.messages.public import MOST_TEXT, Error, Listing, ListRequest, Refusal
from bus.messages.quality import LiveAccuracy
from bus.subjects import Subjects
from services.core.actor import NOTHING, Do, Done, Effect, Failed, Publish, TimedOut
from services.core.catalog import Catalog, ContextLabels, labels_of, selection_key
from services.core.demand import as_registered
from services.core.ensemble.base import EnsemblePolicy, Learnt, Member
from services.core.quality import Score
from services.core.selection.eligibility import AppView, Ask
from services.dispatcher.answered import ANSWERS, Scored, by_labels, of_several
from services.dispatcher.apps import members_of
from services.dispatcher.commands import ReadContext, RunPolicy, StoredContext
from services.dispatcher.counted import MARK, MOVED, Counted, OlderMarks

READ_S = 2.0  # s for one read; queries wait for it, and are then served by what no feedback has taught
RETRIES = 100  # reads that failed and are tried again, at each check
NO_REVISION = -1  # instead of a revision: the bucket could not be read
# labels of an app, and s, without one for a variant, which is then tried again: the world may have gone back
FORGOTTEN, FORGOTTEN_S = 1000, 600.0
MOST_SCORES = 200  # of an app: those are left out that have had no label for longest
PROMISES = 512  # of labels, of which the mean is the promise; then half of them
OLD_MARKS = 128  # that a value had at most before older ones moved
COUNTS = Ensemble(policy="")  # of an app without a policy: nothing learns, and feedback is counted all the same
_encode = msgspec.msgpack.Encoder().encode


class ContextValue(Struct, frozen=True, array_like=True):
    """The value of a key in the selection bucket. state: dumped by the policy. n: feedbacks that made it. marks: of the last feedbacks, MARK
    bytes each. moved: the revision of the key with older ones (`services.dispatcher.counted`); 0: there are none, -1: not known. full: older
    ones are forgotten. scores: what labels say, by the variants' `twins`, and of the answers (`services.dispatcher.answered`). promised: their sum, and how many.
    told: labels that have scored something.
    """

    policy: str
    state: bytes
    n: int = 0
    marks: bytes = b""
    moved: int = -1
    full: bool = False
    scores: dict[str, Score] = {}
    promised: tuple[float, int] = (0.0, 0)
    told: int = 0

    def known(self) -> set[bytes]:
        """The marks that are here."""
        return {self.marks[at : at + MARK] for at in range(0, len(self.marks), MARK)}

    def after(self, state: bytes, marks: Iterable[bytes]) -> "ContextValue":
        """With one more feedback, which made this state."""
        return replace(self, state=state, n=self.n + 1, marks=self.marks + b"".join(marks))

    def counted(self, marks: Iterable[bytes]) -> "ContextValue":
        """With one more feedback, which taught nothing."""
        return replace(self, marks=self.marks + b"".join(marks))

    def scored(self, scored: Scored, now: float) -> "ContextValue":
        """With what one more label says."""
        told = self.told + 1
        scores = {
            name: one for name, one in self.scores.items() if told - one.last <= FORGOTTEN or now - one.at < FORGOTTEN_S
        }
        aims = {**scored.aims, ANSWERS: scored.promised or 0.0}
        for name, one in {**scored.variants, **({} if scored.answer is None else {ANSWERS: scored.answer})}.items():
            before = scores.get(name, Score())
            scores[name] = replace(before, bins=list(before.bins), aim=aims[name], last=told)
            scores[name].add(one, now)
        for name in sorted(scores, key=lambda name: scores[name].last)[: max(0, len(scores) - MOST_SCORES)]:
            del scores[name]
        total, count = self.promised
        if scored.answer is not None:
            total, count = total + (scored.promised or 0.0), count + 1
        promised = (total / 2, count // 2) if count >= PROMISES else (total, count)
        return replace(self, scores=scores, promised=promised, told=told)

    def judge(self, now: float) -> None:
        """Find changes."""
        for one in self.scores.values():
            one.interval(now)

    def beside(self, older: OlderMarks) -> "ContextValue":
        """As it is with these older marks."""
        full = self.full or older.full or (self.moved < 0 and len(self.marks) >= MARK * OLD_MARKS)
        if full == self.full and self.moved >= 0:
            return self
        return replace(self, moved=older.covers, full=full)

    def without(self, older: OlderMarks) -> "ContextValue":
        """Without its oldest marks, which are among these now."""
        return replace(self, marks=self.marks[MARK * MOVED :], moved=older.covers)

    def encoded(self) -> bytes:
        return _encode(self)


class Held(Struct, eq=False):
    """One context in memory. state: the policy's; of a user's own policy: its dump, b"" before the first feedback. context: None: of the app."""

    key: str
    value: ContextValue | None
    revision: int
    context: str | None = None
    ensemble: Ensemble | None = None  # by which `state` was made from `value`
    state: Any = None
    labels: tuple[AppView | None, ContextLabels | None] = (None, None)  # where they decide, and of which variants

    together: Mapping[str, LiveAccuracy] | None = None

    @property
    def n(self) -> int:
        return 0 if self.value is None else self.value.n

    def of_answers(self, by: str) -> LiveAccuracy | None:
        """What labels of this context say of members that answer together, as `AppQuality` names them. None: nothing, or it is of the app."""
        if self.together is None:
            scores = {} if self.context is None or self.value is None else self.value.scores
            self.together = of_several(scores, 0.0)  # whose changes were found when they were written
        return self.together.get(by)


def context_key(app: str, ensemble: Ensemble, context: str | None) -> str:
    """In the selection bucket: of the app as a whole, or of a context where the policy keeps them apart."""
    return selection_key(app, context if ensemble.contextual else None)


def read_value(data: bytes | None) -> ContextValue | None:
    """None: there is none, or it cannot be read, so that learning begins anew."""
    return decode_kept(ContextValue, data)


class Contexts(Struct, eq=False):
    """At most `most` contexts, of which the least recently used ones go.

    members: the members of an app's selection. make: its policy; None for a user's own class.
    """

    subjects: Subjects
    most: int
    members: Callable[[str], Sequence[Member]]
    make: Callable[[Ensemble], EnsemblePolicy[Any] | None]
    counted: Counted = field(default_factory=Counted)
    _policies: dict[str, tuple[Ensemble, EnsemblePolicy[Any] | None]] = {}
    _held: OrderedDict[str, Held] = field(default_factory=OrderedDict)
    _reading: set[str] = set()
    _unread: dict[str, None] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def by_app(self) -> tuple[Any, ...]:
        return self._policies, self._held, self._unread, self.counted

    def policy(self, app: str, ensemble: Ensemble) -> EnsemblePolicy[Any] | None:
        """The policy of an app; None for a user's own class."""
        known = self._policies.get(app)
        if known is None or (known[0] is not ensemble and known[0] != ensemble):
            known = self._policies[app] = (ensemble, self.make(ensemble))
        return known[1]

    # -- look-ups

    def held(self, app: str, ensemble: Ensemble, context: str | None) -> Held | None:
        """What is known of a context. None: it is not in memory, `read` it. Another policy's state counts as none."""
        key = context_key(app, ensemble, context)
        held = self._held.get(key)
        if held is None:
            return None
        self._held.move_to_end(key)
        if held.ensemble is not ensemble:
            self.load(held, app, ensemble, context)
        return held

    def load(self, held: Held, app: str, ensemble: Ensemble, context: str | None) -> None:
        """Make the policy's state from the stored value: what no feedback has taught where there is none, or another policy's."""
        policy = self.policy(app, ensemble)
        held.ensemble = ensemble
        held.context = context if ensemble.contextual else None
        value = held.value
        if not ensemble.policy:
            held.value = value or ContextValue("", b"", moved=0)
            return
        if value is not None and value.policy == ensemble.policy:
            if policy is None:
                held.state = value.state
                return
            try:
                held.state = policy.load(value.state)
            except (msgspec.MsgspecError, ValueError, TypeError, KeyError):
                pass  # a state of another release: learning begins anew
            else:
                return
        held.state = b"" if policy is None else policy.init(self.members(app))
        dumped = b"" if policy is None else policy.dump(held.state)
        before = value or ContextValue("", b"", moved=0)
        held.value = replace(before, policy=ensemble.policy, state=dumped, n=0)

    def read(self, app: str, ensemble: Ensemble, context: str | None) -> Iterable[Effect]:
        """Read a context that is not in memory. Its result comes to `took`; a second call meanwhile changes nothing."""
        return self._read(context_key(app, ensemble, context))

    def _read(self, key: str) -> Iterable[Effect]:
        if key in self._reading:
            return NOTHING
        self._reading.add(key)
        return (Do(("context", key), ReadContext(key), READ_S),)

    def took(self, done: Done | Failed | TimedOut) -> str:
        """A read has ended: `held` has the context now, as before any feedback if the bucket could not be read. Returns its key."""
        key: str = done.id[1]
        self._reading.discard(key)
        if isinstance(done, Done):
            stored: StoredContext = done.result
            self._put(key, stored.value, stored.revision)
        elif key not in self._held:
            self._put(key, None, NO_REVISION)
            self._unread[key] = None
        return key

    def retry(self) -> list[Effect]:
        """Read again what could not be read. To be called now and then."""
        if not self._unread:
            return []
        keys = [key for key in list(self._unread)[:RETRIES] if key not in self._reading]
        return [effect for key in keys for effect in self._read(key)]

    def in_context(self, ask: Ask, held: Held, view: AppView) -> Ask:
        """These needs, with what labels of their context say of the app's variants."""
        if held.context is None or held.value is None or not held.value.scores:
            return ask
        if held.labels[0] is not view:
            scores = held.value.scores  # whose changes were found when they were written
            say = labels_of(view.records, lambda one: by_labels(as_registered(one), scores, 0.0), view.app.quality_act)
            held.labels = view, say
        return ask if held.labels[1] is None else replace(ask, labels=held.labels[1])

    # -- changes

    def put(self, app: str, key: str, value: ContextValue, revision: int) -> Publish:
        """This dispatcher has stored a value; the others hear of it."""
        data = value.encoded()
        self._put(key, data, revision)
        return Publish(self.subjects.selection("changed"), ContextChanged(app, key, revision, data))

    def stored(self, key: str, stored: StoredContext) -> Held:
        """Another dispatcher's value came back instead of a write."""
        return self._put(key, stored.value, stored.revision)

    def changed(self, change: ContextChanged) -> Iterable[Effect]:
        """A dispatcher has stored a value, or the registrar has deleted some. Contexts that are not in memory are not kept."""
        if change.value is None:
            for key in self._of(change.app) if not change.key else (change.key,):
                self.drop(key)
                self.counted.pop(key)
            return NOTHING
        held = self._held.get(change.key)
        if held is not None and held.revision < change.revision:
            self._put(change.key, change.value, change.revision, used=False)
        return NOTHING

    def drop(self, key: str) -> None:
        """Forget a context, so that it is read again."""
        self._held.pop(key, None)
        self._unread.pop(key, None)

    def _of(self, app: str) -> list[str]:
        return [key for key in {*self._held, *self.counted} if key.partition(".")[0] == app]

    def _put(self, key: str, data: bytes | None, revision: int, *, used: bool = True) -> Held:
        held = Held(key, read_value(data), revision)
        self._unread.pop(key, None)
        self._held[key] = held
        if used:
            self._held.move_to_end(key)
        while len(self._held) > self.most:
            old, _ = self._held.popitem(last=False)
            self._unread.pop(old, None)
        return held


# -- what people see

Then = Callable[[Held | None], Listing | Refusal]


class SelectionList(Struct, eq=False):
    """Answers `infaas.list.selection`. A context that is not in memory is read first."""

    catalog: Catalog
    contexts: Contexts
    _waiting: dict[str, list[tuple[str, ListRequest, Then | None]]] = {}  # by the key that is being read
    _asked: int = 0
    # Who waits for a user's own policy to say what it has learnt: of which app and context.
    _run: dict[int, tuple[str, AppRecord, ContextValue | None]] = {}

    def ask(self, reply: str, asked: ListRequest, then: Then | None = None) -> list[Effect]:
        """The weights of an app's members, or of one of its contexts. then: what is replied instead, once the context is in memory."""
        app = None if asked.app is None else self.catalog.app(asked.app)
        if asked.app is None:
            text = "field `app` is missing: the weights of which app's members are asked for"
            return [Publish(reply, Refusal(error=Error(code="bad_request", message=text)))]
        if asked.context is not None and len(asked.context) > MOST_TEXT:
            text = f"context must be at most {MOST_TEXT} characters long, as those of queries"
            return [Publish(reply, Refusal(error=Error(code="bad_request", message=text)))]
        if app is None:
            unknown = Error(code="unknown_app", message=self.catalog.no_app(asked.app))
            return [Publish(reply, Refusal(error=unknown))]
        ensemble = app.selection
        if ensemble is None or ensemble.policy is None:
            return [Publish(reply, Listing(items=[]) if then is None else then(None))]
        held = self.contexts.held(app.app, ensemble, asked.context)
        if held is None:
            waiting = self._waiting.setdefault(context_key(app.app, ensemble, asked.context), [])
            waiting.append((reply, asked, then))
            return list(self.contexts.read(app.app, ensemble, asked.context))
        if then is not None:
            return [Publish(reply, then(held))]
        members = members_of(self.catalog, app.app)
        policy = self.contexts.policy(app.app, ensemble)
        if policy is not None:
            return [Publish(reply, self._listing(app, held.value, policy.learnt(held.state, members)))]
        self._asked += 1
        self._run[self._asked] = reply, app, held.value
        return [Do(("listed", self._asked), RunPolicy(ensemble.policy, "learnt", (held.state, members)))]

    def read(self, key: str) -> list[Effect]:
        """A context has been read."""
        waiting = self._waiting.pop(key, None)
        return [] if waiting is None else [effect for each in waiting for effect in self.ask(*each)]

    def ran(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """A user's own policy has said what it has learnt."""
        reply, app, value = self._run.pop(done.id[1])
        if isinstance(done, Done):
            return [Publish(reply, self._listing(app, value, done.result))]
        text = done.error if isinstance(done, Failed) else "the app's policy took too long"
        return [Publish(reply, Refusal(error=Error(code="model_error", message=text)))]

    def _listing(self, app: AppRecord, value: ContextValue | None, learnt: Iterable[Learnt]) -> Listing:
        return Listing(
            items=[
                {
                    "member": r.member, "weight": r.weight, "probability": r.probability, "n": r.n,
                    "live": self._live(app, value, r.member),
                }
                for r in learnt
            ]
        )  # fmt: skip

    def _live(self, app: AppRecord, value: ContextValue | None, model: str) -> dict[str, Any]:
        """By variant of a member, what the labels of this context say."""
        records = () if value is None or model not in app.links else self.catalog.variants_at(model, app.links[model])
        scores = {} if value is None else value.scores  # whose changes were found when they were written
        found = ((one, by_labels(one, scores, 0.0)) for one in records)
        return {one.variant: {"registered": one.measured, **asdict(live)} for one, live in found if live is not None}
