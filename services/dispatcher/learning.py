"""What feedback teaches: states of contexts, changed by compare-and-set and each by one write at a time. Pure.

Feedback that comes while a context is being written waits, and is written with the next. If another dispatcher has written in between,
its value comes back, and all is computed again on that. The marks of the last feedbacks are part of the value, and those of older ones have a
key beside it, so that nothing counts twice, whatever is sent again to whichever dispatcher, also to an app without a policy. A feedback is
accepted once the value is stored and its events are on disk.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from msgspec import Struct

from bus.messages.catalog import Ensemble
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.public import Accepted, Code, Error, Refusal
from services.core.actor import Do, Done, Effect, Failed, Publish, TimedOut
from services.core.catalog import counted_key
from services.core.ensemble.base import EnsemblePolicy, Learnt
from services.core.ensemble.outputs import BadLabel, BadOutputs, losses
from services.core.outcomes import OutcomeLog
from services.dispatcher.commands import ContextWritten, ReadContext, RunPolicy, StoredContext, WriteContext
from services.dispatcher.contexts import READ_S, UNREAD, Contexts, ContextValue, Held, context_key
from services.dispatcher.counted import MARK, MOVED, NONE, OlderMarks
from services.dispatcher.predictions import Prediction

WRITE_S = 5.0  # s for one write; the sender of a feedback may then ask again
TOGETHER = 32  # feedbacks in one write
APPLIED = 20_000  # feedbacks that are remembered, each 100 bytes, so that one that comes again is accepted when the first one is


class Sender(Struct, eq=False):
    """One sender of a feedback. reply: "" if nobody waits. app: that the feedback is to."""

    app: str
    reply: str
    id: str | None


class Lesson(Struct, eq=False):
    """A feedback with the prediction that it is for; None: it teaches nothing, and counts all the same.

    marks: by which it is known again, MARK bytes each. more: marks of other names of its prediction. label: as it came. seeks: whoever wants
    to know whether it has counted; then it does not count now.
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
    losses: dict[str, float] = {}
    rows: list[Learnt] = []


class Course:
    """The lessons about one context. batch: those of the write under way; todo: of them, those that are still to be computed.

    value, revision, state: what they are computed on. known, older: the marks of what has counted. moving: the older marks that are being
    written. ensemble: of the batch; wanted: of the next one.
    """

    __slots__ = (
        "app", "batch", "busy", "context", "ensemble", "key", "known", "moving", "older", "revision", "state", "taught", "todo",
        "value", "waiting", "wanted",
    )  # fmt: skip

    def __init__(self, key: str, app: str, ensemble: Ensemble, context: str | None) -> None:
        self.key = key
        self.app = app
        self.ensemble = self.wanted = ensemble
        self.context = context
        self.waiting: deque[Lesson] = deque()
        self.batch: list[Lesson] = []
        self.todo: deque[Lesson] = deque()
        self.taught: list[Lesson] = []
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


class Learning:
    """log: counts the dispatcher's events. ended: feedbacks by app and how they ended, `accepted` or the code of the refusal."""

    def __init__(self, contexts: Contexts, log: OutcomeLog) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.open = 0  # lessons that are not stored yet
        self.repeated: list[Lesson] = []  # applied before, by whom is not known here; the owner takes them
        self.sought: list[tuple[Lesson, bool]] = []  # what has not counted, as far as is known; whether all is known
        self._contexts = contexts
        self._log = log
        self._courses: dict[str, Course] = {}
        self._unsaid: deque[tuple[int, Sender]] = (
            deque()
        )  # who is told `Accepted` when events up to this number are on disk
        self._applied: OrderedDict[bytes, int] = OrderedDict()

    # -- a lesson comes

    def teach(self, lesson: Lesson, ensemble: Ensemble) -> list[Effect]:
        """Apply a feedback once. Its sender hears of it when it is durable, or why it is refused."""
        of: Prediction | FeedbackEvent = lesson.prediction or lesson.event
        key = context_key(of.app, ensemble, of.context)
        course = self._courses.get(key)
        if course is None:
            context = of.context if ensemble.contextual else None
            course = self._courses[key] = Course(key, of.app, ensemble, context)
        course.wanted = ensemble
        course.waiting.append(lesson)
        self.open += 1
        return self._next(course)

    def known(self, marks: Iterable[bytes], sender: Sender) -> list[Effect] | None:
        """What to do for a feedback with these marks if this dispatcher has applied it: its sender is told, at once or later."""
        number = max((self._applied.get(mark, 0) for mark in marks), default=0)
        return self._accept(number, sender) if number else None

    def record(self, event: FeedbackEvent, marks: Sequence[bytes], sender: Sender) -> list[Effect]:
        """Keep a feedback that teaches nothing, or has taught already; its sender is told when it is on disk."""
        effects: list[Effect] = [self._log.record(event)]
        self._remember(marks)
        return [*effects, *self._accept(self._log.recorded, sender)]

    def stored(self) -> list[Effect]:
        """More of the log's events are on disk."""
        effects: list[Effect] = []
        while self._unsaid and self._log.on_disk(self._unsaid[0][0]):
            effects.extend(self.tell(self._unsaid.popleft()[1], Accepted()))
        return effects

    # -- one write after the other

    def read(self, key: str) -> list[Effect]:
        """A context has been read."""
        course = self._courses.get(key)
        return [] if course is None else self._next(course, read=True)

    def _next(self, course: Course, *, read: bool = False) -> list[Effect]:
        """Begin with the lessons that wait. read: the context has just been read, if it can be."""
        if course.busy:
            return []
        course.ensemble = course.wanted
        if not course.waiting:
            self._courses.pop(course.key, None)
            return []
        held = self._contexts.held(course.app, course.ensemble, course.context)
        if held is None or (held.revision == UNREAD and not read):
            return list(self._contexts.read(course.app, course.ensemble, course.context))
        if held.revision == UNREAD:
            del self._courses[course.key]
            return self._turn_away(course, course.waiting)
        course.busy = True
        course.batch = [course.waiting.popleft() for _ in range(min(TOGETHER, len(course.waiting)))]
        return self._compute(course, held)

    def _compute(self, course: Course, held: Held) -> list[Effect]:
        """What the batch makes of this value."""
        value = held.value
        assert value is not None, "a context that was loaded has a value"
        older = self._contexts.counted.get(course.key, value.moved)
        if older is None:
            return [Do(("counted", course.key), ReadContext(counted_key(course.key)), READ_S)]
        value = value.beside(older)
        if len(value.marks) >= MARK * MOVED:
            moving = value.marks[: MARK * MOVED]
            if not older.has(moving):
                course.moving = older.plus(moving)
                command = WriteContext(counted_key(course.key), course.moving, older.revision)
                return [Do(("move", course.key), command, WRITE_S)]
            value = value.without(older)
        course.value, course.revision, course.state = value, held.revision, held.state
        course.known, course.older = value.known(), older
        again: list[Lesson] = []
        new: list[Lesson] = []
        for lesson in course.batch:
            counted = lesson.prediction is not None and lesson.item in lesson.prediction.counted
            if counted or course.has(lesson.marks):
                again.append(lesson)
            elif lesson.seeks is not None:
                self.open -= 1
                self.sought.append((lesson, not value.full))
            else:
                new.append(lesson)
        course.batch = new
        course.todo, course.taught = deque(new), []
        effects: list[Effect] = []
        for lesson in again:
            if lesson.prediction is not None:
                lesson.prediction.counted.add(lesson.item)
            if not course.has(lesson.marks[:1]):  # another word about the same item: it is kept, and teaches nothing
                effects.extend(self.record(lesson.event, lesson.marks[:1], lesson.sender))
            elif (known := self.known(lesson.marks[:1], lesson.sender)) is not None:
                effects.extend(known)
            else:
                self.repeated.append(lesson)
        self.open -= len(again)
        return [*effects, *self._step(course)]

    def _step(self, course: Course) -> list[Effect]:
        """Compute what is left of the batch, then write it."""
        effects: list[Effect] = []
        policy = self._contexts.policy(course.app, course.ensemble) if course.ensemble.policy else None
        assert course.value is not None
        while course.todo:
            lesson = course.todo.popleft()
            if not course.known.isdisjoint(lesson.marks):
                continue  # twice in this batch: accepted with the other
            prediction = lesson.prediction
            if prediction is None or not course.ensemble.policy:
                course.value = course.value.counted((*lesson.marks, *lesson.more))
                self._counts(course, lesson)
                continue
            outputs = prediction.of_item(lesson.item)
            try:
                lesson.losses = losses(lesson.label, prediction.members, outputs)
                if policy is None:
                    args = (course.state, prediction.members, lesson.label, outputs, prediction.p)
                    course.todo.appendleft(lesson)
                    return [*effects, self._run(course, "observe", args)]
                state = policy.observe(course.state, prediction.members, lesson.label, outputs, prediction.p)
            except BadLabel as error:
                effects.extend(self._refuse(course, lesson, "bad_request", str(error)))
                continue
            except BadOutputs as error:
                effects.extend(self._refuse(course, lesson, "model_error", str(error)))
                continue
            self._taught(course, lesson, state, policy)
        if not course.taught:
            course.busy = False
            return [*effects, *self._next(course)]
        last = self._last(course)
        if policy is None and last is not None and last.prediction is not None and not last.rows:
            return [*effects, self._run(course, "learnt", (course.state, last.prediction.members))]
        return [
            *effects,
            Do(("write", course.key), WriteContext(course.key, course.value.encoded(), course.revision), WRITE_S),
        ]

    def _taught(self, course: Course, lesson: Lesson, state: Any, policy: EnsemblePolicy[Any] | None) -> None:
        assert course.value is not None
        assert lesson.prediction is not None
        course.state = state
        dumped = state if policy is None else policy.dump(state)
        course.value = course.value.after(dumped, (*lesson.marks, *lesson.more))
        lesson.rows = [] if policy is None else policy.learnt(state, lesson.prediction.members)
        self._counts(course, lesson)

    def _counts(self, course: Course, lesson: Lesson) -> None:
        course.known.update(lesson.marks)
        course.taught.append(lesson)

    def _last(self, course: Course) -> Lesson | None:
        """The last lesson of the batch that a policy has observed."""
        if not course.ensemble.policy:
            return None
        return next((lesson for lesson in reversed(course.taught) if lesson.prediction is not None), None)

    def _run(self, course: Course, method: Literal["observe", "learnt"], args: tuple[Any, ...]) -> Do:
        """A user's own policy runs in the edge. Its state stays bytes here."""
        assert course.ensemble.policy is not None
        return Do((method, course.key), RunPolicy(course.ensemble.policy, method, args))

    # -- results of the edge

    def ran(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """A user's own policy has observed, or said what it has learnt."""
        method, key = done.id
        course = self._courses.get(key)
        if course is None or not course.busy:
            return []
        if method == "learnt":
            last = self._last(course)
            assert last is not None
            assert last.prediction is not None
            p = last.prediction.p
            rows = (
                done.result
                if isinstance(done, Done)
                else [Learnt(one.model, 0.0, p.get(one.model, 0.0), 0) for one in last.prediction.members]
            )
            for lesson in course.taught:
                lesson.rows = rows
            return self._step(course)
        lesson = course.todo.popleft()
        if isinstance(done, Done):
            self._taught(course, lesson, done.result, None)
            return self._step(course)
        text = done.error if isinstance(done, Failed) else f"the policy {course.ensemble.policy} took too long"
        return [*self._refuse(course, lesson, "model_error", text), *self._step(course)]

    def moved(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """The older marks of a context have been read or written, or could not be."""
        key = done.id[1]
        course = self._courses[key]
        if not isinstance(done, Done):
            self._contexts.counted.drop(key)
            course.busy = False
            return [*self._turn_away(course, course.batch), *self._next(course)]
        result: ContextWritten | StoredContext = done.result
        held = self._contexts.held(course.app, course.ensemble, course.context)
        value = None if held is None else held.value
        moved = 0 if value is None else value.moved
        if isinstance(result, ContextWritten):
            self._contexts.counted.put(key, course.moving, result.revision, moved)
        else:  # they have been read, or another dispatcher has moved some
            self._contexts.counted.put(key, result.value or b"", result.revision, moved)
        if held is None or held.revision == UNREAD:  # forgotten meanwhile
            course.waiting.extendleft(reversed(course.batch))
            course.batch, course.busy = [], False
            return self._next(course)
        return self._compute(course, held)

    def wrote(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """A write has ended."""
        course = self._courses[done.id[1]]
        if not isinstance(done, Done):
            self._contexts.drop(
                course.key
            )  # it may have been stored all the same: its marks say so when it is read again
            course.busy = False
            return [*self._turn_away(course, course.batch), *self._next(course)]
        result: ContextWritten | StoredContext = done.result
        if isinstance(result, StoredContext):
            self._contexts.stored(course.key, result)
            held = self._contexts.held(course.app, course.ensemble, course.context)
            assert held is not None, "it has just been put there"
            return self._compute(course, held)
        assert course.value is not None
        effects: list[Effect] = [self._contexts.put(course.app, course.key, course.value, result.revision)]
        for lesson in course.taught:
            effects.append(self._log.record(lesson.event))
            effects.extend(self._log.record(event) for event in _events(lesson, course))
            if lesson.prediction is not None:
                lesson.prediction.counted.add(lesson.item)
            self._remember(lesson.marks[:1])
        for lesson in course.batch:
            known = self.known(lesson.marks[:1], lesson.sender)
            effects.extend(self.record(lesson.event, lesson.marks[:1], lesson.sender) if known is None else known)
        self.open -= len(course.batch)
        course.busy = False
        return [*effects, *self._next(course)]

    # -- how each ends

    def _refuse(self, course: Course, lesson: Lesson, code: Code, text: str) -> list[Effect]:
        course.batch.remove(lesson)
        self.open -= 1
        return self.tell(lesson.sender, Refusal(id=lesson.sender.id, error=Error(code=code, message=text)))

    def _turn_away(self, course: Course, lessons: Iterable[Lesson]) -> list[Effect]:
        text = f"what {course.app} has learnt cannot be stored now: send the feedback again with the same retry_key"
        error = Error(code="overloaded", message=text, retry_after_ms=1000.0)
        effects: list[Effect] = []
        for lesson in lessons:
            self.open -= 1
            effects.extend(self.tell(lesson.sender, Refusal(id=lesson.sender.id, error=error)))
        return effects

    def _remember(self, marks: Sequence[bytes]) -> None:
        for mark in marks:
            self._applied.setdefault(mark, self._log.recorded)
        while len(self._applied) > APPLIED:
            self._applied.popitem(last=False)

    def tell(self, sender: Sender, message: Accepted | Refusal) -> list[Effect]:
        """The end of a feedback."""
        self.ended[sender.app, "accepted" if isinstance(message, Accepted) else message.error.code] += 1
        return [Publish(sender.reply, message)] if sender.reply else []

    def _accept(self, number: int, sender: Sender) -> list[Effect]:
        if self._log.on_disk(number):
            return self.tell(sender, Accepted())
        self._unsaid.append((self._log.recorded, sender))
        return []


def _events(lesson: Lesson, course: Course) -> Iterable[SelectionEvent]:
    """A row for each member whose output is known."""
    prediction, weights = lesson.prediction, {row.member: row.weight for row in lesson.rows}
    if prediction is None:
        return ()
    return (
        SelectionEvent(
            time=lesson.event.time,
            app=prediction.app,
            context=course.context,
            query=prediction.uid,
            member=model,
            probability=prediction.p.get(model, 0.0),
            loss=loss,
            weight=weights.get(model, 0.0),
            reevaluated=lesson.reevaluated,
        )
        for model, loss in lesson.losses.items()
    )
