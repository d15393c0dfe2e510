"""What holds of every query: what its client gets, what is recorded, what it costs, and when."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from bus.codec import encode
from bus.messages.events import CLIENT_ERRORS, OutcomeEvent
from bus.messages.flow import Route
from bus.messages.public import Answer, QueryCancelled, Refusal
from services.core.line import ECHO_S
from services.core.outcomes import CANCELLED
from services.dispatcher.actor import HEARTBEAT
from services.dispatcher.silence import STALE
from services.simulation.clients import QueryTemplate
from services.simulation.fuzz.violations import LINKS, RETURNS_S, HeldUp, Violations, end_of
from services.simulation.scenario.model import Scenario

WAY_S = 0.1  # after its deadline, until which a query may be refused (services/core/outcomes.py)
KNOWS_S = 0.005  # from one process saying something to another one knowing of it, two hops away
_SAME = 1e-9  # of US$ and s


@dataclass(slots=True, eq=False)
class AskedQuery:
    """A client's query. last, times: when it was last sent, and how often. replies: what its client got. row: the first of its uid that was stored. unheard: once nobody
    listened. left: when its client took it back; cancelled: what it was told of that. said: when each reply was sent, with its meaning. held: by dispatcher, when it, or each part of it, was last given to which executor.
    """

    number: str
    kind: QueryTemplate
    sent: float
    last: float
    times: int = 1
    replies: list[tuple[float, Any]] = field(default_factory=list)
    row: OutcomeEvent | None = None
    unheard: bool = False
    left: float | None = None
    cancelled: bool | None = None
    said: list[tuple[float, tuple[Any, ...]]] = field(default_factory=list)
    held: dict[str, dict[bytes, tuple[float, str]]] = field(default_factory=dict)

    @property
    def crossed(self) -> bool:
        """Whether something else was said before what came first overtook it: a link held it up, and nobody could know."""
        first = _meaning(self.first)
        at = next((at for at, one in self.said if one == first), 0.0)
        return any(earlier < at and one != first for earlier, one in self.said)

    @property
    def overtaken(self) -> bool:
        """Whether a link held up what was said first until after another process had spoken, which could not know."""
        if len(self.said) < 2:
            return False
        (first, _), (second, _) = self.said[:2]
        return first + KNOWS_S < second <= self.replies[0][0]

    def at_once(self, knows_s: Callable[[float], float]) -> bool:
        """Whether two executors answered it at the same time: one had taken over from the other, which was silent, and they could not know. knows_s:
        seconds until they do, from a time on.
        """
        answers = [at for at, one in self.said if one[0] == "answer" and not one[2]]
        return any(later - at <= knows_s(at) for at, later in pairwise(answers))

    @property
    def first(self) -> Any:
        return self.replies[0][1]


class QueryChecks:
    """The queries of one run, by their number."""

    def __init__(self, scenario: Scenario, violations: Violations, begins: float) -> None:
        self.asked: dict[str, AskedQuery] = {}
        self._violations = violations
        self._several = {app.app for app in scenario.apps if app.selection is not None or app.pipeline is not None}
        self._held = HeldUp(scenario.faults, begins)
        self._on_links = HeldUp(scenario.faults, begins, kinds=LINKS)
        self._lost = HeldUp(scenario.faults, begins, kinds=("link-lost",))
        self._stopped = HeldUp(scenario.faults, begins, kinds=("process-stopped",))
        self._begins = begins
        halts = (one for one in scenario.faults if one.kind == "process-stopped")
        self._halts = [(one.process, begins + one.at_s, begins + end_of(one)) for one in halts]
        self._delays = [fault for fault in scenario.faults if fault.kind == "messages-delayed"]
        self._killed: dict[str, list[float]] = {}
        cut = (one for one in scenario.faults if one.kind in ("link-clogged", "link-lost") and one.direction != "in")
        self._cut = [(one.process, begins + one.at_s) for one in cut]
        self._usual = scenario.policies[0].settings.dispatcher.default_deadline_s

    def sent(self, number: str, kind: QueryTemplate, now: float) -> None:
        """A client sent a query, perhaps again."""
        if number in self.asked:
            query = self.asked[number]
            query.times, query.last = query.times + 1, now
        else:
            self.asked[number] = AskedQuery(number, kind, now, now)

    def left(self, number: str, said: object, now: float) -> None:
        """A client takes its query back (None), or hears what became of that: perhaps that nobody listens."""
        if number in self.asked:
            query = self.asked[number]
            query.left = now if query.left is None else query.left
            query.cancelled = said.cancelled if isinstance(said, QueryCancelled) else None

    def unheard(self, number: str) -> None:
        """Nobody listened: the client knows at once that its query was not taken."""
        if number in self.asked:
            self.asked[number].unheard = True

    def dispatched(self, number: str, route: Route, executor: str, now: float) -> None:
        """A dispatcher gave this query, or a part of it, to an executor."""
        if number in self.asked:
            self.asked[number].held.setdefault(route.dispatcher, {})[route.uid] = now, executor

    def killed(self, name: str, now: float) -> None:
        """A process died."""
        self._killed.setdefault(name, []).append(now)

    def _left_alone(self, query: AskedQuery) -> bool:
        """Whether all processes that had it, a dispatcher and the executors, died before others could take it over."""
        for dispatcher, parts in query.held.items():
            died = [at for at in self._killed.get(_place(dispatcher), ()) if at >= min(parts.values())[0]]
            if died and all(
                any(at >= since and abs(at - died[0]) <= RETURNS_S for at in self._killed.get(executor, ()))
                for since, executor in parts.values()
            ):
                return True
        return False

    def _untold(self, query: AskedQuery, now: float) -> bool:
        """Whether an executor spoke and died before it could tell that again, as a link was lost, or who had heard it stood still when the query came again."""
        since, places = query.said[0][0], {_place(one) for one in query.held}
        held = (executor for parts in query.held.values() for _, executor in parts.values())
        died = any(since <= at <= now for one in held for at in self._killed.get(one, ()))
        still = any(one in places and at <= now and until >= query.last for one, at, until in self._halts)
        return died and (still or self._lost.seconds(since, now) > 0.0)

    def _fell_silent(self, query: AskedQuery) -> bool:
        """Whether a dispatcher that had just ended it died, or was cut off, before its next heartbeat could tell that: it may have stood still in between."""
        since, places = query.said[0][0], {_place(one) for one in query.held}
        died = [at for place in places for at in self._killed.get(place, ())]
        fell = died + [at for process, at in self._cut if process in places]
        return any(since <= at <= since + HEARTBEAT + self._stopped.seconds(since, at) for at in fell)

    def said(self, number: str, reply: Any, now: float) -> None:
        """A process sends a reply to a client."""
        query = self.asked.get(number)
        if query is not None and isinstance(reply, Answer | Refusal):
            query.said.append((now, _meaning(reply)))

    def replied(self, number: str, reply: Answer | Refusal, now: float) -> None:
        """A client got a reply."""
        query = self.asked[number]
        query.replies.append((now, reply))
        if len(query.replies) > 1:
            self._again(query, reply, now)
            return
        if isinstance(reply, Refusal) or reply.default is True:
            self._not_answered(query, reply, now)
        if _meaning(reply) == ("refusal", CANCELLED.code) and query.left is None:
            self._violations.add("cancelled", now, "nobody has taken it back", query.number)
        if isinstance(reply, Answer):
            self._answered(query, reply, now)
        if query.row is not None:
            self._compare(query, query.row, now)

    def recorded(self, row: OutcomeEvent, now: float) -> None:
        """A row was recorded of a client's query."""
        query = self.asked.get(row.id or "")
        if query is None or row.parent is not None:
            return
        if query.row is None:
            query.row = row
            if query.replies:
                self._compare(query, row, now)
        elif _said(query.row) != _said(row) and not (
            query.replies
            and (query.crossed or query.overtaken or query.at_once(self._knows_s) or self._untold(query, now))
        ):
            words = f"one row says {_said(query.row)}, a later one {_said(row)}"
            self._violations.add("one-row", now, words, query.number)

    def ended(self, now: float) -> None:
        """The run has ended: every query has a reply and a row."""
        for query in self.asked.values():
            if not query.replies and query.unheard:
                continue
            if query.cancelled and query.row is not None and query.row.outcome != CANCELLED.code:
                words = f"{query.kind.app}: its client was told that it is cancelled, the row says {_said(query.row)}"
                self._violations.add("cancelled", now, words, query.number)
            if (not query.replies or query.row is None) and self._left_alone(query):
                continue
            if not query.replies:
                words = f"{query.kind.app}: no reply in {now - query.sent:.1f} s"
                self._violations.add("nothing-open", now, words, query.number)
            elif query.row is None and not (
                isinstance(query.first, Refusal) and query.first.error.code in CLIENT_ERRORS
            ):
                self._violations.add(
                    "lost-row", now, f"{query.kind.app}: {_told(query.first)}, and no row", query.number
                )

    def _knows_s(self, at: float) -> float:
        """From one process saying something then to another one knowing of it, which hears it from a third."""
        since = at - self._begins
        return KNOWS_S + 2.0 * sum(one.delay_s for one in self._delays if one.at_s <= since <= end_of(one))

    # -- replies

    def _again(self, query: AskedQuery, reply: Any, now: float) -> None:
        first, at_once = query.first, query.at_once(self._knows_s)
        if _meaning(first) != _meaning(reply):
            if query.crossed or at_once or self._untold(query, now):
                return
            words = f"first {_told(first)}, then {_told(reply)} {1000 * (now - query.replies[0][0]):.1f} ms later"
            self._violations.add("one-meaning", now, words, query.number)
            return
        unknown = query.crossed or query.overtaken or self._fell_silent(query) or self._untold(query, now)
        if len(query.replies) > query.times + unknown + at_once:
            words = f"{len(query.replies)} replies, {_told(reply)}, to a query that was sent {query.times} times"
            self._violations.add("one-reply", now, words, query.number)

    def _not_answered(self, query: AskedQuery, reply: Answer | Refusal, now: float) -> None:
        late = now - self._due(query) - WAY_S
        held = self._held.seconds(query.sent, now)
        if held > 0.0:  # it may have waited for long, as far as its dispatcher knows, which then asks all others first
            held += 2.0 * ECHO_S
        if late > 0.0 and late > held + _SAME:
            why = reply.error.message if isinstance(reply, Refusal) else reply.reason
            words = f"{query.kind.app}: {_told(reply)} {1000 * (late + WAY_S):.0f} ms after the deadline: {why}"
            self._violations.add("in-time", now, words, query.number)

    def _due(self, query: AskedQuery) -> float:
        """Its deadline, as whoever got it last must see it."""
        return (query.last if query.kind.within is None else query.sent) + (
            self._usual if query.kind.needs.latency_ms is None else query.kind.needs.latency_ms / 1000.0
        )

    def _answered(self, query: AskedQuery, answer: Answer, now: float) -> None:
        needs, missed = query.kind.needs, answer.missed
        broken = []
        if needs.accuracy and "accuracy" not in missed and (answer.accuracy or 0.0) < needs.accuracy - _SAME:
            broken.append(f"accuracy {answer.accuracy} of at least {needs.accuracy}")
        if needs.cost is not None and "cost" not in missed and 1000.0 * answer.cost > needs.cost + _SAME:
            broken.append(f"cost {1000.0 * answer.cost:.3g} of at most {needs.cost:g} US$ per 1,000")
        if needs.latency_ms is not None and "latency" not in missed and answer.latency_ms > needs.latency_ms + 1e-3:
            broken.append(f"latency {answer.latency_ms:.1f} of at most {needs.latency_ms:g} ms")
        for name in ("model", "version", "variant"):
            wanted = getattr(needs, name)
            if wanted is not None and getattr(answer, name) != wanted and answer.default is not True:
                broken.append(f"{name} {getattr(answer, name)!r} and not {wanted}")
        if broken:
            words = f"{query.kind.app}: {', '.join(broken)}, and missed is {missed}"
            self._violations.add("needs", now, words, query.number)

    # -- rows

    def _compare(self, query: AskedQuery, row: OutcomeEvent, now: float) -> None:
        """The row says what the client got first, also when, and what it costs."""
        at, reply = query.replies[0]
        same = _says(row, _meaning(reply))
        if not same and not (query.overtaken and _says(row, query.said[0][1])) and not self._untold(query, now):
            words = f"{query.kind.app}: the client got {_told(reply)}, the row says {_said(row)}"
            self._violations.add("row-as-told", now, words, query.number)
        if not same:
            return
        # What parts of a query have cost is paid for also if it is not answered.
        unanswered = isinstance(reply, Refusal) or reply.default is True
        cost = reply.cost if not unanswered else row.cost if query.kind.app in self._several else 0.0
        if abs(cost - row.cost) > _SAME:
            words = f"{query.kind.app}: {_told(reply)} costs {cost:.3g} US$, the row says {row.cost:.3g}"
            self._violations.add("charged-once", now, words, query.number)
        late = at - self._due(query) - WAY_S
        # a stop that is no longer than what a busy machine does
        unnoticed = min(STALE, self._stopped.seconds(query.sent, at))
        if row.outcome == "ok" and late > 0.0 and late > self._on_links.seconds(query.sent, at) + unnoticed + _SAME:
            words = (
                f"{query.kind.app}: the answer came {1000 * (late + WAY_S):.0f} ms after the deadline, the row says ok"
            )
            self._violations.add("late-as-late", now, words, query.number)


def _says(row: OutcomeEvent, meaning: tuple[Any, ...]) -> bool:
    """Whether a row says what a reply of this meaning does."""
    if meaning[0] == "refusal":
        return row.outcome in ("refused", "error", CANCELLED.code) and row.code == meaning[1]
    return (
        row.outcome == "default" if meaning[2] else row.outcome in ("ok", "late") and (row.variant or "") == meaning[1]
    )


def _place(dispatcher: str) -> str:
    """The name that a dispatcher has in all of its lives."""
    return "-".join(dispatcher.split("-")[:2])


def _meaning(reply: Any) -> tuple[Any, ...]:
    """What must not change from one reply to the next."""
    if isinstance(reply, Refusal):
        return "refusal", reply.error.code
    return "answer", reply.variant, reply.default is True, encode(reply.outputs)


def _told(reply: Any) -> str:
    if isinstance(reply, Refusal):
        return f"a refusal ({reply.error.code})"
    return f"an answer ({reply.variant or 'of several models'})" if reply.default is not True else "the default output"


def _said(row: OutcomeEvent) -> str:
    return f"{row.outcome} ({row.code or row.variant or 'several models'})"


def by_app(asked: Mapping[str, AskedQuery]) -> dict[str, list[AskedQuery]]:
    """The queries of each app, in their order."""
    found: dict[str, list[AskedQuery]] = {}
    for query in asked.values():
        found.setdefault(query.kind.app, []).append(query)
    return found
