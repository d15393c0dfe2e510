"""The join: a query that is answered from the answers to its parts. Pure.

The query itself stays here. A part is an ordinary internal query: it is decided on, queued, retried and recorded like any other, but its
answer comes to its dispatcher instead of a client. A part's uid follows from the query's uid and the part's position, so a dispatcher
that starts the query again asks for the same parts, and executors repeat what they have answered.
"""

from collections import deque
from collections.abc import Iterable
from hashlib import blake2b

from msgspec import UNSET, Struct

from bus.messages.flow import HandBack, PartsEnded
from bus.messages.public import Answer, Error, ObjectRef, QueryHead
from bus.subjects import Subjects
from services.core.actor import NOTHING, After, Do, Effect, Publish
from services.core.deadlines import Deadlines
from services.core.outcomes import PART_GRACE
from services.core.selection.eligibility import Ask
from services.dispatcher.commands import DeleteResults
from services.dispatcher.query import Join, PartReply, Query, QueryPart, outermost, start_trace
from services.dispatcher.waiting import take_back

LINGER = 5.0  # s after the end of a query; until then another dispatcher may have started it again, if an executor did not hear of the end
TIMEOUT = 10.0  # s to delete some
RESULTS = "results"  # names the command


class Intermediates:
    """Results that stages hand on by way of the object store: they go when the query ends that a client asked, and have a bound. What nobody hears of,
    since its dispatcher died or its reply came too late, goes when the bucket's time is up. What a client fetches stays until then, too: it is an object
    of its own.

    most_bytes: that there may be, of this dispatcher. bytes: that there are.
    """

    def __init__(self, most_bytes: int) -> None:
        self.bytes = 0
        self._most = most_bytes
        self._held: dict[bytes, dict[str, int]] = {}  # bytes by key, by uid of the outermost query
        self._over: deque[tuple[float, dict[str, int]]] = deque()

    def hold(self, uid: bytes, ref: ObjectRef) -> None:
        """Keep a result until its outermost query, with this uid, ends."""
        for _, found in self._over:  # the same query was asked again
            self.bytes -= found.pop(ref.key, 0)
        ours = self._held.setdefault(uid, {})
        self.bytes += ref.bytes - ours.get(ref.key, 0)
        ours[ref.key] = ref.bytes

    def ended(self, uid: bytes, now: float) -> None:
        """The query has ended; also again, for what came late."""
        found = self._held.pop(uid, None)
        if found is not None:
            self._over.append((now + LINGER, found))

    def refusal(self) -> Error | None:
        """Why a query that has just added to them ends; None: there is room."""
        if self.bytes <= self._most:
            return None
        text = (
            f"results on their way between stages take {self.bytes / 1e6:.3g} MB, at most {self._most / 1e6:.3g} MB are kept"
            " (the setting dispatcher.max_stored): ask fewer at a time, or give smaller outputs"
        )
        return Error(code="overloaded", message=text, retry_after_ms=1000.0 * LINGER)

    def due(self, now: float) -> Iterable[Effect]:
        """Delete those whose time is over."""
        keys: list[str] = []
        while self._over and self._over[0][0] <= now:
            found = self._over.popleft()[1]
            self.bytes -= sum(found.values())
            keys += found
        return (Do((RESULTS, keys[0]), DeleteResults(tuple(keys)), TIMEOUT),) if keys else ()


JOIN = "join"  # names the deadlines of queries with parts
REMEMBER = (
    60.0  # s for which a query that was taken over is remembered after its end: other executors may still hand it on
)


class EndsDue(Struct, frozen=True):
    """Timer: tell executors which queries have ended."""


def part_uid(parent: bytes, index: int, digest: bytes | None = None) -> bytes:
    """16 bytes. index: position among the parts, the same whenever the query is started again.

    digest: of the inputs, where answers are kept by it: executors must not repeat what they have answered to other inputs of one uid.
    """
    return blake2b(parent + index.to_bytes(4, "little") + (digest or b""), digest_size=16).digest()


def chance(uid: bytes) -> float:
    """In [0, 1): the query's own random number, the same for each of its retries."""
    return int.from_bytes(blake2b(uid, digest_size=8, person=b"chance").digest(), "little") / 2.0**64


def is_due(join: Join) -> float:
    return join.last if join.looked_at else join.due


def answer_part(query: Query, answer: Answer, now: float) -> Iterable[Effect]:
    """If the query is itself a part of another one, that one goes on with this answer."""
    part = query.part
    if part is None:
        return NOTHING
    return part.join.kind.replied(part.uid, _reply_of(answer), now)


def refuse_part(query: Query, error: Error, now: float) -> Iterable[Effect]:
    """The same of a refusal."""
    part = query.part
    return NOTHING if part is None else part.join.kind.refused(part, error, now)


_BOTH = [name for name in PartReply.__struct_fields__ if name in Answer.__struct_fields__]


def _reply_of(answer: Answer) -> PartReply:
    said = {name: value for name in _BOTH if (value := getattr(answer, name)) is not UNSET}
    return PartReply(**said)


def _computed(part: QueryPart) -> bool:
    """Whether an executor has answered it, and so knows its query."""
    return part.reply is not None and not part.reply.cached


class Joins:
    """Queries with parts. open: those that have not ended, by uid. parts: those under way, by uid. results: of parts, in the object store."""

    def __init__(self, name: str, subjects: Subjects, max_stored: int) -> None:
        self.open: dict[bytes, Join] = {}
        self.parts: dict[bytes, QueryPart] = {}
        self.results = Intermediates(max_stored)
        self._name = name
        self._subjects = subjects
        self._replies = subjects.part(name, "")
        self._deadlines: Deadlines[bytes, Join] = Deadlines(is_due, JOIN)
        self._ended: list[bytes] = []
        self._adopted: dict[bytes, float] = {}  # queries of dead dispatchers, and until when they are remembered
        self._late: deque[tuple[float, Join]] = deque()

    def begin(self, join: Join, now: float) -> Iterable[Effect]:
        """A query is to be answered from parts."""
        self.open[join.query.uid] = join
        return self.watch(join, now)

    def part(
        self, join: Join, index: int, stage: str, app: str, head: QueryHead, ask: Ask, body: bytes, arrived: float
    ) -> Query:
        """A further part of a query. index: its position among all that there may be. arrived: when it began, Unix seconds."""
        parent = join.query
        uid = part_uid(parent.uid, index, join.digest)
        part = QueryPart(join, uid, stage, join.origin)
        join.parts.append(part)
        self.parts[uid] = part
        query = Query(uid, app, head, ask, f"{self._replies}{uid.hex()}", body, arrived)
        query.part = part
        paying = parent.payer or parent.app
        query.payer = None if paying == app else paying
        if parent.headers is not None:
            start_trace(query, parent.headers)
        return query

    def replied(self, uid: bytes, reply: PartReply, now: float) -> QueryPart | None:
        """A part has ended. None if it has ended before, or is not ours."""
        part = self.parts.pop(uid, None)
        if part is None:
            return None
        if reply.error is not None:
            part.error = reply.error
        else:
            part.reply = reply
            if reply.outputs_ref is not None:
                self.hold(part.join, reply.outputs_ref, now)
        return part

    def hold(self, join: Join, ref: ObjectRef, now: float) -> None:
        """A part has put this into the object store, and no client gets it: it goes with the outermost query."""
        outer = outermost(join)
        self.results.hold(outer.query.uid, ref)
        if outer.ended:
            self.results.ended(outer.query.uid, now)

    def refused(self, part: QueryPart, error: Error) -> None:
        """A part has ended without an answer."""
        self._drop(part)
        part.error = error

    def _drop(self, part: QueryPart) -> None:
        """Nobody waits for it any more. Its query may have been asked again meanwhile: that one's part has the same uid."""
        if self.parts.get(part.uid) is part:
            del self.parts[part.uid]

    def end(self, join: Join, now: float, *, taken: bool = False) -> Iterable[Effect]:
        """Its client gets the answer, and executors need not keep it any more. taken: another dispatcher answers it; they keep it."""
        uid = join.query.uid
        self.open.pop(uid, None)
        join.ended = True
        if uid in self._adopted:
            self._adopted[uid] = now + REMEMBER
        if any(part.uid in self.parts for part in join.parts):
            self._late.append((join.query.ask.deadline + PART_GRACE, join))
        if join.query.part is not None:
            return NOTHING  # executors keep the outermost query only
        self.results.ended(uid, now)
        effects = take_back(join) if join.willed else []
        if taken:
            return effects
        self._ended.append(uid)
        # At once, for a crash before executors know would answer it twice; and together with those that end in this turn of the loop.
        return (*effects, After("ends", 0.0, EndsDue())) if len(self._ended) == 1 else effects

    def tell(self) -> tuple[Effect, ...]:
        """Tell executors which queries have ended since the last time."""
        ended, self._ended = self._ended, []
        return (Publish(self._subjects.ended(self._name), PartsEnded(ended)),) if ended else NOTHING

    def adopt(self, uid: bytes, now: float) -> bool:
        """Whether to start this query of a dead dispatcher again: not if that was done already, by the word of another executor."""
        if uid in self._adopted:
            return False
        self._adopted[uid] = now + REMEMBER
        return True

    def taken(self, uid: bytes, now: float) -> Iterable[Effect]:
        """Another dispatcher answers this query, if it is here."""
        join = self.open.get(uid)
        return NOTHING if join is None else self.end(join, now, taken=True)

    def due(self, now: float) -> list[Join]:
        """The queries whose time has come. They stay open; the caller ends them. One that it does not end is due again at its last."""
        return self._deadlines.due(now, self.open)

    def goes_on(self, join: Join, now: float) -> None:
        """It stays open beyond its time, until the next one."""
        join.looked_at = join.due <= now
        self.watch(join, now)

    def watch(self, join: Join, now: float) -> Iterable[Effect]:
        """Its time has changed."""
        return self._deadlines.watch(join.query.uid, join, now, self.open)

    def timer(self, now: float) -> Iterable[Effect]:
        """For the next of them."""
        return self._deadlines.timer(now)

    def forget(self, now: float) -> Iterable[Effect]:
        """Drop what nobody waits for any more."""
        while self._late and self._late[0][0] <= now:
            for part in self._late.popleft()[1].parts:
                self._drop(part)
        if self._adopted:
            self._adopted = {uid: at for uid, at in self._adopted.items() if at > now or uid in self.open}
        return self.results.due(now)

    def leave(self, dispatched: Iterable[Query]) -> Iterable[Effect]:
        """This dispatcher stops. Executors hand on the queries of which they have parts; the others are handed on here."""
        there = {outermost(query.part.join) for query in dispatched if query.part is not None}
        there |= {outermost(join) for join in self.open.values() if any(_computed(part) for part in join.parts)}
        left = [join for join in self.open.values() if join not in there and join.query.part is None]
        subject = self._subjects.resubmit()
        backs = [
            Publish(subject, HandBack(join.origin.route, "orphaned", join.query.raw), "", join.query.headers)
            for join in left
            if join.origin is not None
        ]
        return (*backs, *self.tell())
