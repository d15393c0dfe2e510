"""Apps with a default output: what such a query waits for, when the default is given, and with which reason. Pure.

Clipper's rule (section 5.2.2): at the deadline the application gets its default, and is told that it is one.
"""

import heapq

from msgspec import Struct

from bus.messages.flow import HandBack
from bus.messages.public import Answer, Error
from services.core.actor import After, Effect
from services.core.ask import INFINITE
from services.core.fallback import default_at
from services.dispatcher.defaults import default_outputs
from services.dispatcher.flights import Flights
from services.dispatcher.query import Query

WORTH_WAITING = frozenset({"deadline", "overloaded", "unsatisfiable"})  # something better may come before the deadline
FEW = 1024  # deadlines that are kept whatever became of their queries
REPLACED = WORTH_WAITING | {"model_error", "internal", "unknown_model"}
OF_THE_QUERY = frozenset({"unsatisfiable", "unknown_model"})  # its own fault where it demands something itself


class Due(Struct, frozen=True):
    """Timer: the first of the queries that wait for their app's default has come to its deadline."""


def falls_back(query: Query, error: Error) -> bool:
    """Whether its app's default is answered instead of this refusal."""
    if query.fallback is None or error.code not in REPLACED:
        return False
    head = query.head
    demands = (head.latency_ms, head.accuracy, head.cost, head.model, head.version, head.variant)
    return error.code not in OF_THE_QUERY or all(demand is None for demand in demands)


def default_answer(query: Query, error: Error, now: float) -> Answer | None:
    """The app's default for all items of the query, with the reason why it is nothing better; None where no message can hold it."""
    app, ask, head = query.fallback, query.ask, query.head
    assert app is not None, "it falls back"
    outputs = default_outputs(app.default_output, app.signature, query.items)
    if outputs is None:
        return None
    seconds = now - query.arrived
    missed = ["latency"] if ask.latency_s < INFINITE and seconds > ask.latency_s else []
    if head.accuracy:
        missed.append("accuracy")
    return Answer(
        id=head.id,
        outputs=outputs,
        model="",
        version="",
        variant="",
        hardware="",
        worker="",
        accuracy=None,
        latency_ms=seconds * 1000.0,
        queue_ms=seconds * 1000.0,
        compute_ms=0.0,
        batch=0,
        cached=False,
        simulated=False,
        cost=0.0,
        missed=missed,
        default=True,
        reason="unknown_model: the app serves no model now"
        if error.code == "unknown_model"
        else f"{error.code}: {error.message}",
    )


def ended(back: HandBack) -> Error | None:
    """How an executor ended a query that has a default, instead of telling its client; None: it did not."""
    if back.reason == "late":
        return Error(code="deadline", message="the model had not answered when the time was up")
    if back.reason == "failed":
        return Error(code="model_error", message=back.text)
    return None


def expired(query: Query) -> Error:
    """Why it was not answered before its deadline."""
    text = "no worker could answer this query before its deadline"
    return query.why or Error(code="deadline", message=text, retry_after_ms=1000.0)


class Fallbacks:
    """Queries that wait until their deadline for something better than the default, the first due first."""

    def __init__(self) -> None:
        self._due: list[tuple[float, bytes]] = []
        self._known: set[bytes] = set()

    def holds(self, query: Query, error: Error, now: float) -> bool:
        """Whether it waits instead of ending with this; the last reason is kept."""
        held = error.code in WORTH_WAITING and now < _due_at(query) and falls_back(query, error)
        query.why = error if held else None
        return held

    def __len__(self) -> int:
        return len(self._due)

    def hold(self, query: Query, now: float, waiting: dict[bytes, Query]) -> tuple[Effect, ...]:
        """It waits from now on: wake up at its deadline. waiting: all that do."""
        if query.fallback is None or query.uid in self._known:
            return ()
        if len(self._due) > FEW + 2 * len(waiting):  # mostly of queries that were served long before a late deadline
            self._due = [entry for entry in self._due if entry[1] in waiting]
            self._known = {uid for _, uid in self._due}
            heapq.heapify(self._due)
        entry = (_due_at(query), query.uid)
        self._known.add(query.uid)
        heapq.heappush(self._due, entry)
        return self._wake(now) if self._due[0] == entry else ()

    def due(self, now: float, flights: Flights) -> tuple[list[Query], tuple[Effect, ...]]:
        """Take out what waits and has come to its deadline."""
        found = []
        while self._due and self._due[0][0] <= now:
            uid = heapq.heappop(self._due)[1]
            self._known.discard(uid)
            query = flights.waiting.get(uid)
            if query is None:
                continue  # it was served, or is on its way
            if _due_at(query) <= now:
                found.append(flights.waiting.pop(uid))
            else:  # the same came again, with more time
                self.hold(query, now, flights.waiting)
        return found, self._wake(now)

    def _wake(self, now: float) -> tuple[Effect, ...]:
        return (After("default", max(0.0, self._due[0][0] - now), Due()),) if self._due else ()


def _due_at(query: Query) -> float:
    return default_at(query.arrived, query.ask.deadline)
