"""What feedback teaches: states of contexts, changed by compare-and-set and each by one write at a time. Pure.

Feedback that comes while a context is being written waits, and is written with the next. If another dispatcher has written in between,
its value comes back, and all is computed again on that. The marks of the last feedbacks are part of the value, so that nothing counts
twice, whatever is sent again to whichever dispatcher. A feedback is accepted once the value is stored and its events are on disk.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from bus.messages.catalog import ModelSelection
from bus.messages.events import FeedbackEvent, SelectionEvent
from bus.messages.public import Accepted, Code, Error, Refusal
from services.core.actor import Do, Done, Effect, Failed, Publish, TimedOut
from services.core.ensemble.base import EnsemblePolicy, Learnt
from services.core.ensemble.outputs import BadLabel, BadOutputs, losses
from services.core.outcomes import OutcomeLog
from services.dispatcher.commands import ContextWritten, RunPolicy, StoredContext, WriteContext
from services.dispatcher.contexts import UNREAD, Contexts, ContextValue, Held, context_key
from services.dispatcher.predictions import Prediction

WRITE_S = 5.0  # s for one write; the sender of a feedback may then ask again
TOGETHER = 32  # feedbacks in one write; half of those whose marks a value keeps, so that none is forgotten before it is accepted
APPLIED = 20_000  # feedbacks that are remembered, each 100 bytes, so that one that comes again is accepted when the first one is


class Sender:
    """One sender of a feedback. reply: "" if nobody waits. app: that the feedback is to."""

    __slots__ = ("app", "id", "reply")

    def __init__(self, app: str, reply: str, id: str | None) -> None:
        self.app = app
        self.reply = reply
        self.id = id


class Lesson:
    """A feedback with the prediction that it is for. marks: by which it is known again, MARK bytes each. label: as it came."""

    __slots__ = ("event", "item", "label", "losses", "marks", "prediction", "reevaluated", "rows", "sender")

    def __init__(
        self,
        prediction: Prediction,
        item: int,
        label: Any,
        marks: Sequence[bytes],
        event: FeedbackEvent,
        sender: Sender,
        *,
        reevaluated: bool = False,
    ) -> None:
        self.prediction = prediction
        self.item = item
        self.label = label
        self.marks = marks
        self.event = event
        self.sender = sender
        self.reevaluated = reevaluated
        self.losses: dict[str, float] = {}
        self.rows: list[Learnt] = []


class Course:
    """The lessons about one context. batch: those of the write under way; todo: of them, those that are still to be computed.

    value, revision, state: what they are computed on. selection: of the batch; wanted: of the next one.
    """

    __slots__ = (
        "app", "batch", "busy", "context", "key", "revision", "selection", "state", "taught", "todo", "value", "waiting", "wanted",
    )  # fmt: skip

    def __init__(self, key: str, app: str, selection: ModelSelection, context: str | None) -> None:
        self.key = key
        self.app = app
        self.selection = self.wanted = selection
        self.context = context
        self.waiting: deque[Lesson] = deque()
        self.batch: list[Lesson] = []
        self.todo: deque[Lesson] = deque()
        self.taught: list[Lesson] = []
        self.busy = False
        self.value: ContextValue | None = None
        self.revision = 0
        self.state: Any = None


class Learning:
    """log: counts the dispatcher's events. ended: feedbacks by app and how they ended, `accepted` or the code of the refusal."""

    def __init__(self, contexts: Contexts, log: OutcomeLog) -> None:
        self.ended: Counter[tuple[str, str]] = Counter()
        self.open = 0  # lessons that are not stored yet
        self.repeated: list[Lesson] = []  # applied before, by whom is not known here; the owner takes them
        self._contexts = contexts
        self._log = log
        self._courses: dict[str, Course] = {}
        self._unsaid: deque[tuple[int, Sender]] = (
            deque()
        )  # who is told `Accepted` when events up to this number are on disk
        self._applied: OrderedDict[bytes, int] = OrderedDict()

    # -- a lesson comes

    def teach(self, lesson: Lesson, selection: ModelSelection) -> list[Effect]:
        """Apply a feedback once. Its sender hears of it when it is durable, or why it is refused."""
        prediction = lesson.prediction
        key = context_key(prediction.app, selection, prediction.context)
        course = self._courses.get(key)
        if course is None:
            context = prediction.context if selection.contextual else None
            course = self._courses[key] = Course(key, prediction.app, selection, context)
        course.wanted = selection
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
        course.selection = course.wanted
        if not course.waiting:
            self._courses.pop(course.key, None)
            return []
        held = self._contexts.held(course.app, course.selection, course.context)
        if held is None or (held.revision == UNREAD and not read):
            return list(self._contexts.read(course.app, course.selection, course.context))
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
        course.value, course.revision, course.state = value, held.revision, held.state
        again = [lesson for lesson in course.batch if value.has(lesson.marks)]
        course.batch = [lesson for lesson in course.batch if not value.has(lesson.marks)]
        course.todo, course.taught = deque(course.batch), []
        effects: list[Effect] = []
        for lesson in again:
            if not value.has(lesson.marks[:1]):  # another word about the same item: it is kept, and teaches nothing
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
        policy = self._contexts.policy(course.app, course.selection)
        assert course.value is not None
        while course.todo:
            lesson = course.todo.popleft()
            if course.value.has(lesson.marks):
                continue  # twice in this batch: accepted with the other
            prediction = lesson.prediction
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
        if policy is None and not course.taught[-1].rows:
            return [*effects, self._run(course, "learnt", (course.state, course.taught[-1].prediction.members))]
        return [
            *effects,
            Do(("write", course.key), WriteContext(course.key, course.value.encoded(), course.revision), WRITE_S),
        ]

    def _taught(self, course: Course, lesson: Lesson, state: Any, policy: EnsemblePolicy[Any] | None) -> None:
        assert course.value is not None
        course.state = state
        course.value = course.value.after(state if policy is None else policy.dump(state), lesson.marks)
        lesson.rows = [] if policy is None else policy.learnt(state, lesson.prediction.members)
        course.taught.append(lesson)

    def _run(self, course: Course, method: Literal["observe", "learnt"], args: tuple[Any, ...]) -> Do:
        """A user's own policy runs in the edge. Its state stays bytes here."""
        assert course.selection.policy is not None
        return Do((method, course.key), RunPolicy(course.selection.policy, method, args))

    # -- results of the edge

    def ran(self, done: Done | Failed | TimedOut) -> list[Effect]:
        """A user's own policy has observed, or said what it has learnt."""
        method, key = done.id
        course = self._courses.get(key)
        if course is None or not course.busy:
            return []
        if method == "learnt":
            lesson = course.taught[-1]
            lesson.rows = (
                done.result
                if isinstance(done, Done)
                else [
                    Learnt(member.model, 0.0, lesson.prediction.p.get(member.model, 0.0), 0)
                    for member in lesson.prediction.members
                ]
            )
            for other in course.taught[:-1]:
                other.rows = lesson.rows
            return self._step(course)
        lesson = course.todo.popleft()
        if isinstance(done, Done):
            self._taught(course, lesson, done.result, None)
            return self._step(course)
        text = done.error if isinstance(done, Failed) else f"the policy {course.selection.policy} took too long"
        return [*self._refuse(course, lesson, "model_error", text), *self._step(course)]

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
            held = self._contexts.held(course.app, course.selection, course.context)
            assert held is not None, "it has just been put there"
            return self._compute(course, held)
        assert course.value is not None
        effects: list[Effect] = [self._contexts.put(course.app, course.key, course.value, result.revision)]
        for lesson in course.taught:
            effects.append(self._log.record(lesson.event))
            effects.extend(self._log.record(event) for event in _events(lesson, course))
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
