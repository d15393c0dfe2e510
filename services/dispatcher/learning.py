"""What feedback teaches: states of contexts, changed by compare-and-set and each by one write at a time. Pure.

Feedback that comes while a context is being written waits, and is written with the next. If another dispatcher has written in between,
its value comes back, and all is computed again on that. The marks of the last feedbacks are part of the value, and those of older ones have a
key beside it, so that nothing counts twice, whatever is sent again to whichever dispatcher, also to an app without a policy. A feedback is
accepted once the value is stored and its events are on disk.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct, field
from msgspec.structs import replace

from bus.messages.catalog import Ensemble
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.public import Accepted, Code, Error, Refusal
from services.core.actor import Do, Done, Effect, Failed, Publish, TimedOut
from services.core.catalog import counted_key
from services.core.ensemble.base import EnsemblePolicy, Learnt
from services.core.ensemble.outputs import BadLabel, BadOutputs, losses
from services.core.outcomes import OutcomeLog
from services.core.release import Arm
from services.dispatcher.answered import Publisher, Scored
from services.dispatcher.commands import ContextWritten, ReadContext, RunPolicy, StoredContext, WriteContext
from services.dispatcher.contexts import COUNTS, NO_REVISION, READ_S, Contexts, ContextValue, Held, context_key
from services.dispatcher.counted import MARK, MOVED, NONE, OlderMarks, mark_of_bytes
from services.dispatcher.predictions import Prediction
from services.dispatcher.releases import Releases

WRITE_S = 5.0  # s for one write; the sender of a feedback may then ask again
TOGETHER = 32  # feedbacks in one write
APPLIED = 20_000  # feedbacks that are remembered, each 100 bytes, so that one that comes again is accepted when the first one is


class Sender(Struct, eq=False):
    """One sender of a feedback. reply: "" if nobody waits. app: that the feedback is to."""

    app: str
    reply: str
    id: str | None


class FeedbackUpdate(Struct, eq=False):
    """A feedback with the prediction that it is for; None: it teaches nothing, and counts all the same.

    marks: by which it is known again, MARK bytes each. more: marks of other names of its prediction. label: as it came. seeks: whoever wants
    to know whether it has counted; then it does not count now. scored: what it says of variants. silent: another one, of which this is a part, has
    been recorded. arm, right: the version that a release gave the query, and what the label says of it.
    """

    prediction: Prediction | None
    item: int
    label: Any
    marks: Sequence[bytes]
    event: FeedbackEvent
    sender: Sender
    more: Sequence[bytes] = ()
    seeks: Any = None
    reevaluated: bool = False
    scored: Scored = Scored()
    silent: bool = False
    arm: Arm | None = None
    right: float | None = None
    losses: dict[str, float] = {}
    rows: list[Learnt] = []


class ContextWrites:
    """The feedback about one context, which one write after the other stores. batch: those of the write under way; todo: of them, those that are still to be computed.

    value, revision, state: what they are computed on. known, older: the marks of what has counted. moving: the older marks that are being
    written. ensemble: of the batch; wanted: of the next one.
    """

    __slots__ = (
        "app", "applied", "batch", "busy", "context", "ensemble", "key", "known", "moving", "older", "revision", "state", "todo",
        "value", "waiting", "wanted",
    )  # fmt: skip

    def __init__(self, key: str, app: str, ensemble: Ensemble, context: str | None) -> None:
        self.key = key
        self.app = app
        self.ensemble = self.wanted = ensemble
        self.context = context
        self.waiting: deque[FeedbackUpdate] = deque()
        self.batch: list[FeedbackUpdate] = []
        self.todo: deque[FeedbackUpdate] = deque()
        self.applied: list[FeedbackUpdate] = []
        self.busy = False
        self.value: ContextValue | None = None
        self.revision = 0
        self.state: Any = None
        self.known: set[bytes] = set()
        self.older: OlderMarks = NONE
        self.moving = b""

    def has(self, marks: Iterable[bytes]) -> bool:
        """Whether a feedback with one of these marks has counted."""
        return any(mark in self.known or self.older.has(mark) for mark in marks)


class Learning(Struct, eq=False):
    """log: counts the dispatcher's events. ended: feedbacks by app and how they ended, `accepted` or the code of the refusal."""

    contexts: Contexts
    log: OutcomeLog
    publisher: Publisher
    releases: Releases
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)
    open: int = 0  # updates that are not stored yet
    repeated: list[FeedbackUpdate] = []  # applied before, by whom is not known here; the owner takes them
    sought: list[tuple[FeedbackUpdate, bool]] = []  # what has not counted, as far as is known; whether all is known
    _writes: dict[str, ContextWrites] = {}
    _unsaid: deque[tuple[int, Sender]] = field(
        default_factory=deque
    )  # who is told `Accepted` when events up to this number are on disk
    _applied: OrderedDict[bytes, int] = field(default_factory=OrderedDict)

    # -- an update comes

    def apply(self, update: FeedbackUpdate, ensemble: Ensemble, more: Sequence[FeedbackUpdate] = ()) -> list[Effect]:
        """Apply a feedback once, and more to the same context. Its sender hears of it when it is durable, or why it is refused."""
        of: Prediction | FeedbackEvent = update.prediction or update.event
        key = context_key(of.app, ensemble, of.context)
        writes = self._writes.get(key)
        if writes is None:
            context = of.context if ensemble.contextual else None
            writes = self._writes[key] = ContextWrites(key, of.app, ensemble, context)
        if ensemble.policy:  # what counts alone waits beside what teaches
            writes.wanted = ensemble
        writes.waiting.extend((update, *more))
        self.open += 1 + len(more)
        return self._next(writes)

    def known(self, marks: Iterable[bytes], sender: Sender) -> list[Effect] | None:
        """What to do for a feedback with these marks if this dispatcher has applied it: its sender is told, at once or later."""
        number = max((self._applied.get(mark, 0) for mark in marks), default=0)
        return self._accept(number, sender) if number else None

    def record(self, event: FeedbackEvent, marks: Sequence[bytes], sender: Sender) -> list[Effect]:
        """Keep a feedback that teaches nothing, or has taught already; its sender is told when it is on disk."""
        effects: list[Effect] = [self.log.record(event)]
        self._remember(marks)
        return [*effects, *self._accept(self.log.recorded, sender)]

    def stored(self) -> list[Effect]:
        """More of the log's events are on disk."""
        effects: list[Effect] = []
        while self._unsaid and self.log.on_disk(self._unsaid[0][0]):
            effects.extend(self.tell(self._unsaid.popleft()[1], Accepted()))
        return effects

    def compared(self, app: str, found: Iterable[Scored], now: float) -> list[Effect]:
        """Count what references say, at least one. Nobody waits for it, and none comes twice."""
        event = FeedbackEvent(time=now, app=app, id=None, context=None, label="", input_digest=None)
        nobody = Sender(app, "", None)
        first, *more = (
            FeedbackUpdate(None, 0, None, (), event, nobody, scored=scored, silent=True) for scored in found
        )
        return self.apply(first, COUNTS, more)

    # -- one write after the other

    def read(self, key: str) -> list[Effect]:
        """A context has been read."""
        writes = self._writes.get(key)
        return [] if writes is None else self._next(writes, read=True)

    def _next(self, writes: ContextWrites, *, read: bool = False) -> list[Effect]:
        """Begin with the updates that wait. read: the context has just been read, if it can be."""
        if writes.busy:
            return []
        writes.ensemble = writes.wanted
        if not writes.waiting:
            self._writes.pop(writes.key, None)
            return []
        held = self.contexts.held(writes.app, writes.ensemble, writes.context)
        if held is None or (held.revision == NO_REVISION and not read):
            return list(self.contexts.read(writes.app, writes.ensemble, writes.context))
        if held.revision == NO_REVISION:
            del self._writes[writes.key]
            return self._turn_away(writes, writes.waiting)
        writes.busy = True
        writes.batch = [writes.waiting.popleft() for _ in range(min(TOGETHER, len(writes.waiting)))]
        return self._compute(writes, held)

    def _compute(self, writes: ContextWrites, held: Held) -> list[Effect]:
        """What the batch makes of this value."""
        value = held.value
        assert value is not None, "a context that was loaded has a value"
        older = self.contexts.counted.get(writes.key, value.moved)
        if older is None:
            return [Do(("counted", writes.key), ReadContext(counted_key(writes.key)), READ_S)]
        value = value.beside(older)
        if len(value.marks) >= MARK * MOVED:
            moving = value.marks[: MARK * MOVED]
            if not older.has(moving):
                writes.moving = older.plus(moving)
                command = WriteContext(counted_key(writes.key), writes.moving, older.revision)
                return [Do(("move", writes.key), command, WRITE_S)]
            value = value.without(older)
        writes.value, writes.revision, writes.state = value, held.revision, held.state
        writes.known, writes.older = value.known(), older
        again: list[FeedbackUpdate] = []
        new: list[FeedbackUpdate] = []
        for update in writes.batch:
            counted = update.prediction is not None and update.item in update.prediction.counted
            if counted or writes.has(update.marks):
                again.append(update)
            elif update.seeks is not None:
                self.open -= 1
                self.sought.append((update, not value.full))
            else:
                new.append(update)
        writes.batch = new
        writes.todo, writes.applied = deque(new), []
        effects: list[Effect] = []
        for update in again:
            if update.prediction is not None:
                update.prediction.counted.add(update.item)
            if update.silent:
                pass
            elif not writes.has(update.marks[:1]):  # another word about the same item: it is kept, and teaches nothing
                event = replace(update.event, score=None)
                effects.extend(self.record(event, update.marks[:1], update.sender))
            elif (known := self.known(update.marks[:1], update.sender)) is not None:
                effects.extend(known)
            else:
                self.repeated.append(update)
        self.open -= len(again)
        return [*effects, *self._step(writes)]

    def _step(self, writes: ContextWrites) -> list[Effect]:
        """Compute what is left of the batch, then write it."""
        effects: list[Effect] = []
        policy = self.contexts.policy(writes.app, writes.ensemble) if writes.ensemble.policy else None
        assert writes.value is not None
        while writes.todo:
            update = writes.todo.popleft()
            if not writes.known.isdisjoint(update.marks):  # twice in this batch: accepted with the other
                if update.marks[0] not in writes.known:
                    update.event = replace(update.event, score=None)  # another word about the same item teaches nothing
                continue
            prediction = update.prediction
            if prediction is None or not writes.ensemble.policy:
                writes.value = writes.value.counted((*update.marks, *update.more))
                self._counts(writes, update)
                continue
            outputs = prediction.of_item(update.item)
            try:
                update.losses = losses(update.label, prediction.members, outputs)
                if policy is None:
                    args = (writes.state, prediction.members, update.label, outputs, prediction.p)
                    writes.todo.appendleft(update)
                    return [*effects, self._run(writes, "observe", args)]
                state = policy.observe(writes.state, prediction.members, update.label, outputs, prediction.p)
            except BadLabel as error:
                effects.extend(self._refuse(writes, update, "bad_request", str(error)))
                continue
            except BadOutputs as error:
                effects.extend(self._refuse(writes, update, "model_error", str(error)))
                continue
            self._observed(writes, update, state, policy)
        if not writes.applied:
            writes.busy = False
            return [*effects, *self._next(writes)]
        last = self._last(writes)
        if policy is None and last is not None and last.prediction is not None and not last.rows:
            return [*effects, self._run(writes, "learnt", (writes.state, last.prediction.members))]
        writes.value.judge(writes.applied[-1].event.time)
        return [
            *effects,
            Do(("write", writes.key), WriteContext(writes.key, writes.value.encoded(), writes.revision), WRITE_S),
        ]

    def _observed(
        self, writes: ContextWrites, update: FeedbackUpdate, state: Any, policy: EnsemblePolicy[Any] | None
    ) -> None:
        assert writes.value is not None
        assert update.prediction is not None
        writes.state = state
        dumped = state if policy is None else policy.dump(state)
        writes.value = writes.value.after(dumped, (*update.marks, *update.more))
        update.rows = [] if policy is None else policy.learnt(state, update.prediction.members)
        self._counts(writes, update)

    def _counts(self, writes: ContextWrites, update: FeedbackUpdate) -> None:
        writes.known.update(update.marks)
        writes.applied.append(update)
        if update.scored.variants and writes.value is not None:
            writes.value = writes.value.scored(update.scored, update.event.time)

    def _last(self, writes: ContextWrites) -> FeedbackUpdate | None:
        """The last update of the batch that a policy has observed."""
        if not writes.ensemble.policy:
            return None
        return next((update for update in reversed(writes.applied) if update.prediction is not None), None)

    def _run(self, writes: ContextWrites, method: Literal["observe", "learnt"], args: tuple[Any, ...]) -> Do:
        """A user's own policy runs in the edge. Its state stays bytes here."""
        assert writes.ensemble.policy is not None
        return Do((method, writes.key), RunPolicy(writes.ensemble.policy, method, args))

    # -- results of the edge

    def ran(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """A user's own policy has observed, or said what it has learnt."""
        method, key = done.id
        writes = self._writes.get(key)
        if writes is None or not writes.busy:
            return []
        if method == "learnt":
            last = self._last(writes)
            assert last is not None
            assert last.prediction is not None
            p = last.prediction.p
            rows = (
                done.result
                if isinstance(done, Done)
                else [Learnt(one.model, 0.0, p.get(one.model, 0.0), 0) for one in last.prediction.members]
            )
            for update in writes.applied:
                update.rows = rows
            return self._step(writes)
        update = writes.todo.popleft()
        if isinstance(done, Done):
            self._observed(writes, update, done.result, None)
            return self._step(writes)
        text = done.error if isinstance(done, Failed) else f"the policy {writes.ensemble.policy} took too long"
        return [*self._refuse(writes, update, "model_error", text), *self._step(writes)]

    def moved(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """The older marks of a context have been read or written, or could not be."""
        key = done.id[1]
        writes = self._writes[key]
        if not isinstance(done, Done):
            self.contexts.counted.pop(key)
            writes.busy = False
            return [*self._turn_away(writes, writes.batch), *self._next(writes)]
        result: ContextWritten | StoredContext = done.result
        held = self.contexts.held(writes.app, writes.ensemble, writes.context)
        value = None if held is None else held.value
        moved = 0 if value is None else value.moved
        if isinstance(result, ContextWritten):
            self.contexts.counted.put(key, writes.moving, result.revision, moved)
        else:  # they have been read, or another dispatcher has moved some
            self.contexts.counted.put(key, result.value or b"", result.revision, moved)
        if held is None or held.revision == NO_REVISION:  # forgotten meanwhile
            writes.waiting.extendleft(reversed(writes.batch))
            writes.batch, writes.busy = [], False
            return self._next(writes)
        return self._compute(writes, held)

    def wrote(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """A write has ended."""
        writes = self._writes[done.id[1]]
        if not isinstance(done, Done):
            self.contexts.drop(
                writes.key
            )  # it may have been stored all the same: its marks say so when it is read again
            writes.busy = False
            return [*self._turn_away(writes, writes.batch), *self._next(writes)]
        result: ContextWritten | StoredContext = done.result
        if isinstance(result, StoredContext):
            self.contexts.stored(writes.key, result)
            held = self.contexts.held(writes.app, writes.ensemble, writes.context)
            assert held is not None, "it has just been put there"
            return self._compute(writes, held)
        assert writes.value is not None
        effects: list[Effect] = [self.contexts.put(writes.app, writes.key, writes.value, result.revision)]
        total, count = writes.value.promised
        loud = [update for update in writes.applied if not update.silent]
        if writes.context is None:
            self.publisher.changed(writes.app, result.revision, writes.value.scores, total / max(count, 1))
        else:  # what it says of variants counts for the app as a whole, too
            for update in loud:
                effects.extend(self.counted(writes.app, update.event, b"scored" + update.marks[0], update.scored))
        for update in loud:
            self.releases.labelled(writes.app, update.arm, update.right, update.scored.copy)
            effects.append(self.log.record(update.event))
            effects.extend(self.log.record(event) for event in _events(update, writes))
            if update.prediction is not None:
                update.prediction.counted.add(update.item)
            self._remember(update.marks[:1])
        for update in [one for one in writes.batch if not one.silent]:
            known = self.known(update.marks[:1], update.sender)
            effects.extend(self.record(update.event, update.marks[:1], update.sender) if known is None else known)
        self.open -= len(writes.batch)
        writes.busy = False
        return [*effects, *self._next(writes)]

    def counted(self, app: str, event: FeedbackEvent, mark: bytes, scored: Scored) -> list[Effect]:
        """Count in an app, once, what a feedback says that counts in a context, or for a stage."""
        if not scored.variants:
            return []
        event = replace(event, app=app)
        marks, nobody = (mark_of_bytes(app, mark),), Sender(app, "", None)
        return self.apply(FeedbackUpdate(None, 0, None, marks, event, nobody, scored=scored, silent=True), COUNTS)

    # -- how each ends

    def _refuse(self, writes: ContextWrites, update: FeedbackUpdate, code: Code, text: str) -> list[Effect]:
        writes.batch.remove(update)
        self.open -= 1
        return self.tell(update.sender, Refusal(id=update.sender.id, error=Error(code=code, message=text)))

    def _turn_away(self, writes: ContextWrites, updates: Iterable[FeedbackUpdate]) -> list[Effect]:
        text = f"what {writes.app} has learnt cannot be stored now: send the feedback again with the same retry_key"
        error = Error(code="overloaded", message=text, retry_after_ms=1000.0)
        effects: list[Effect] = []
        for update in updates:
            self.open -= 1
            if not update.silent:
                effects.extend(self.tell(update.sender, Refusal(id=update.sender.id, error=error)))
        return effects

    def _remember(self, marks: Sequence[bytes]) -> None:
        for mark in marks:
            self._applied.setdefault(mark, self.log.recorded)
        while len(self._applied) > APPLIED:
            self._applied.popitem(last=False)

    def tell(self, sender: Sender, message: Accepted | Refusal) -> list[Effect]:
        """The end of a feedback."""
        self.ended[sender.app, "accepted" if isinstance(message, Accepted) else message.error.code] += 1
        return [Publish(sender.reply, message)] if sender.reply else []

    def _accept(self, number: int, sender: Sender) -> list[Effect]:
        if self.log.on_disk(number):
            return self.tell(sender, Accepted())
        self._unsaid.append((self.log.recorded, sender))
        return []


def _events(update: FeedbackUpdate, writes: ContextWrites) -> Iterable[SelectionEvent]:
    """A row for each member whose output is known."""
    prediction, weights = update.prediction, {row.member: row.weight for row in update.rows}
    if prediction is None:
        return ()
    return (
        SelectionEvent(
            time=update.event.time,
            app=prediction.app,
            context=writes.context,
            query=prediction.uid,
            member=model,
            probability=prediction.p.get(model, 0.0),
            loss=loss,
            weight=weights.get(model, 0.0),
            reevaluated=update.reevaluated,
        )
        for model, loss in update.losses.items()
    )
