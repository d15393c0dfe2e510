"""Queries that come again: their client has heard nothing, sends them again, marked, and another process may have them or have ended them. Pure.

This dispatcher asks all others and the executors (`ResentSought`). Who has the query ends it, and who has ended it says the same again. Nobody: it
is taken as a new one. What waited long to be read here counts as one that comes again: its client may have sent it again meanwhile. So does what an
executor hands on of a dispatcher that has died: that may have ended it, unheard by this executor.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from msgspec import Raw
from msgspec.structs import replace

from bus.codec import decode
from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch, Echo, HandBack, ResentKnown, ResentSought, Route
from bus.messages.public import RESENT, Error, QueryHead
from bus.subjects import Subjects
from services.core.actor import NOTHING, Effect, Envelope, Handler, Inlet, Publish, Will
from services.core.outcomes import CANCELLED, GRACE, SILENT, RecentAnswers
from services.dispatcher.composites import Composites
from services.dispatcher.inflight import InFlight
from services.dispatcher.query import Admission
from services.dispatcher.silence import Silence

ALL = "all"  # in place of a dispatcher's name: also one whose link was lost before anybody heard it, which may have the query
SAYS_S = 0.05  # s since the question reached others, in which an executor that knows a query says so, before the next echo is sent
AGAIN_S = 1.0  # s for the same where an executor is known to have replied: it may be busy
SEEK_S = 1.0  # s that a query may have waited here, from which on its client may have sent it again; less than its and others' patience
MOST_S = 10.0  # s after which nobody is waited for any more
TWICE_S = 4.0  # s of silence after which a client has not got that reply: it has asked twice
FORGET_S = 30.0  # s without a heartbeat after which a dispatcher is forgotten
KEPT = 65_536  # queries that executors have ended, at least
PIECES = 8  # they go a piece at a time, so that memory stays as it is once they are so many
LEFT = 64  # dispatchers that have stopped in order, of which is known
LONGEST_S = 600.0  # s that a client may have waited
WAITED = Error(code="deadline", message="its deadline passed before a dispatcher could read it: ask again")


class Sought:
    """A query that was asked for.

    at: when, Unix seconds. asked: the last time; 0: nobody was asked. reached: since when others know that question; 0: not
    yet. first: the same of the first question. age: seconds since its client sent it first, as far as known. silence: those after which the client
    asked again. sent: when it did, Unix seconds. waited: it was not marked, and only waited here. answered: an executor has replied to it. heard: dispatchers that do not have it.
    """

    __slots__ = ("age", "answered", "asked", "at", "envelope", "first", "heard", "reached", "sent", "silence", "waited")

    def __init__(self, envelope: Envelope, at: float, age: float, *, waited: bool, answered: bool) -> None:
        self.envelope = envelope
        self.at = self.asked = at
        self.first = self.reached = 0.0
        self.age = self.silence = age
        self.waited = waited
        self.answered = answered
        self.sent = envelope.now
        self.heard: set[str] = set()


@dataclass(eq=False)
class Resent:
    """The door of all queries. name: of this dispatcher. said: its own last replies. take: begins a query that nobody has, of this age; whether others that may have
    it were silent. adopt: the same of one with parts that was handed on. A dispatcher that is silent for longer than `silence.patience` is not waited for.
    """

    name: str
    subjects: Subjects
    silence: Silence
    admission: Admission
    said: RecentAnswers
    in_flight: InFlight
    composites: Composites
    take: Callable[..., Iterable[Effect]]
    adopt: Callable[[Envelope, float], Iterable[Effect]]

    def __post_init__(self) -> None:
        self.inlets = (
            Inlet(subject=self.subjects.dispatcher_heartbeat(), message=DispatcherHeartbeat),
            Inlet(subject=self.subjects.resent(), message=ResentSought),
            Inlet(subject=self.subjects.resent(self.name), message=ResentKnown),
            Inlet(subject=self.subjects.resent(ALL), message=ResentKnown),
        )
        self.handlers: dict[type, Handler] = {
            QueryHead: self._query,
            Echo: lambda envelope: (*self.silence.echoed(envelope), *self._echoed(envelope)),
            DispatcherHeartbeat: self._heartbeat,
            ResentSought: self._sought,
            ResentKnown: self._known,
        }
        self.ends: Counter[str] = Counter()  # how those that came again went on
        self.cancelled: dict[bytes, None] = {}  # the last ones that their clients have taken back
        self._prefix = len(self.subjects.query(""))
        self._line = self.silence.line
        self.known_as = self.admission.known_as
        self._own = self.subjects.resubmit(self.name)
        self._left: deque[str] = deque(maxlen=LEFT)
        self._patience = self.silence.patience
        self._asked: dict[bytes, Sought] = {}
        # that executors had as another dispatcher took them from here, and which one did
        self._lost: dict[bytes, str] = {}
        # begun here although others were silent, which know it unless their link was lost
        self._told: dict[bytes, set[str]] = {}
        self._others: dict[str, float] = {}  # dispatchers, and when each was last heard
        self._least: dict[str, float] = {}  # seconds by which their heartbeats are late at least
        self._at: dict[str, float] = {}  # when each had last heard itself, by its own clock
        self._ended: deque[set[bytes]] = deque([set()], PIECES + 1)  # by executors

    def has(self, uid: bytes) -> bool:
        """Whether this query is under way here."""
        flight = self.in_flight
        return (
            uid in flight.dispatched
            or uid in flight.waiting
            or uid in flight.retries
            or uid in self.composites.joins.open
        )

    def forget(self, uid: bytes, now: float, taker: str = "") -> Iterable[Effect]:
        """Another process ends this query. taker: a dispatcher, which does not know the executor that has it from here."""
        query = self.in_flight.forget(uid)
        if taker and query is not None and query.sent is not None:
            if len(self._lost) >= KEPT:
                del self._lost[next(iter(self._lost))]
            self._lost[uid] = taker
        if (sought := self._asked.get(uid)) is not None and type(sought.envelope.message) is HandBack:
            del self._asked[uid]  # its dispatcher was only silent, and has answered it
        return self.composites.joins.taken(uid, now)

    def ended(self, batch: DoneBatch) -> list[Effect]:
        """Executors have replied to these. Who has taken one from here hears of it: else it would refuse what is answered."""
        self._ended[-1].update(batch.uids)
        if len(self._ended[-1]) >= KEPT // PIECES:
            self._ended.append(set())
        effects: list[Effect] = []
        if batch.codes is not None and CANCELLED.code in batch.codes:
            for uid, code in zip(batch.uids, batch.codes, strict=True):
                if code == CANCELLED.code:
                    self.note_cancelled(uid)
        for i, uid in enumerate(batch.uids) if self._lost else ():
            if (taker := self._lost.pop(uid, None)) is not None:
                codes, items = batch.codes and [batch.codes[i]], batch.items and [batch.items[i]]
                told = replace(batch, seq=0, uids=[uid], codes=codes, items=items, storing=None)
                effects.append(Publish(self.subjects.done(taker), told))
        return effects

    @property
    def known(self) -> bool:
        """Whether there were other dispatchers lately: whoever was clogged has not heard them."""
        return bool(self._others)

    def others(self, now: float) -> set[str]:
        """The other dispatchers that live."""
        return {name for name, seen in self._others.items() if seen + self._patience >= now}

    def sought(self, uid: bytes) -> bool:
        """Whether others are asked for it."""
        return uid in self._asked

    def note_cancelled(self, uid: bytes) -> None:
        """Its client has taken it back: whoever asks for it again hears so."""
        if len(self.cancelled) >= KEPT:
            del self.cancelled[next(iter(self.cancelled))]
        self.cancelled[uid] = None

    def has_ended(self, uid: bytes) -> bool:
        """Whether it has ended here."""
        return any(uid in piece for piece in self._ended) or self.said.get((uid, 0)) is not None

    def _query(self, envelope: Envelope) -> Iterable[Effect]:
        """A query arrives."""
        if not envelope.reply:
            return NOTHING  # nobody waits for an answer
        now, headers = envelope.now, envelope.headers
        if now <= self._line.fresh_until and self._line.caught_up and (headers is None or RESENT not in headers):
            since = self._line.waited_since(now)  # the dispatcher may have more to read than it can
            return self.take(envelope if since == now else replace(envelope, now=since), now, 0.0)
        uid = self.known_as(envelope.subject[self._prefix :], envelope.message, envelope.reply)
        if uid is not None:
            return self._comes(uid, envelope)
        return self.take(replace(envelope, now=self._line.reached(now)), now, 0.0)

    def _comes(self, uid: bytes, envelope: Envelope, handed: HandBack | None = None) -> Iterable[Effect]:
        """A query with a retry key comes that is marked, or may have waited. handed: on, by a dispatcher that was killed."""
        now, age = envelope.now, _age(envelope.headers)
        reached = self._line.reached(now)
        if self.has(uid) or uid in self._asked:
            return NOTHING
        known = self.said.get((uid, 0))
        if known is not None:
            self.ends["said"] += 1
            repeats = handed is not None and self.said.repeats(uid, handed.route.deadline)
            return NOTHING if repeats else (Publish(envelope.reply, known.body),)
        answered, waited = self.has_ended(uid) or (handed is not None and handed.text == "answered"), age is None
        alone = not self._others and self._line.came_once
        if waited and not answered and (alone or now < reached + SEEK_S):
            envelope = replace(envelope, now=reached)
            waits = () if self._line.caught_up else self.waits(uid, envelope, now)
            return waits or self.take(envelope, now, 0.0)
        if reached < now:
            envelope = replace(envelope, now=reached)
        sought = self._asked[uid] = Sought(envelope, now, age or 0.0, waited=waited, answered=answered)
        if handed is not None:
            sought.sent, sought.silence = handed.route.deadline, handed.route.deadline - handed.route.arrived
        return (self._ask(uid, sought), Will(uid, self._asks_again(uid, sought)))

    def waits(self, uid: bytes, envelope: Envelope, now: float) -> tuple[Effect, ...]:
        """The time of a query was over before it was read here, or others have not waited for this dispatcher. Its client may have sent it again,
        and another one may have told that it has begun it: that is read before an echo of later. Empty: it is refused or begun now.
        """
        if envelope.message.retry_key is None or not self._others or now >= envelope.now + SEEK_S:
            return ()
        if self._line.caught_up and now <= self._line.fresh_until:
            return ()
        sought = self._asked[uid] = Sought(envelope, now, 0.0, waited=True, answered=False)
        sought.heard.update(self._others)
        sought.asked, sought.first, sought.reached = 0.0, now, now
        return (Will(uid, self._asks_again(uid, sought)),)

    def _asks_again(self, uid: bytes, sought: Sought) -> Publish:
        """What to say of a query if this dispatcher is killed before others have answered: another one asks in its stead."""
        one = sought.envelope
        app, at = one.subject[self._prefix :], one.now - sought.age
        route = Route(uid, 0, 0, one.reply, sought.sent, at, self.name, "", app, 1, one.message.id)
        back = HandBack(route, "sought", Raw(one.body), "answered" if sought.answered else "")
        return Publish(self.subjects.resubmit(), back, "", one.headers)

    def _asked_again(self, back: HandBack, headers: Mapping[str, str] | None, now: float) -> Iterable[Effect]:
        """A dispatcher was killed while it asked for a query: it comes again, to this one."""
        route, body = back.route, bytes(back.body)
        head, subject = decode(QueryHead, body), self.subjects.query(route.app)
        age = str(max(0, round(1000.0 * (now - route.arrived))))
        again = Envelope(now, head, subject, route.reply_to, body, {**(headers or {}), RESENT: age})
        return self._comes(route.uid, again, back)

    def handed_on(self, envelope: Envelope) -> Iterable[Effect]:
        """A query with parts whose dispatcher is gone, or one that this had asked others for. What it has left or willed itself, nobody else has. An executor
        may not know that it has ended.
        """
        back: HandBack = envelope.message
        uid, now = back.route.uid, envelope.now
        if back.reason == "sought":
            return self._asked_again(back, envelope.headers, now)
        if self.has(uid) or uid in self._asked or self.said.get((uid, 0)) is not None:
            return NOTHING
        if self._at.get(back.route.dispatcher, 0.0) > back.route.deadline + GRACE + SILENT:
            return NOTHING  # it has ended it, which this executor did not hear
        if envelope.subject != self._own or back.route.dispatcher in self._left:
            return self.adopt(envelope, now)
        sought = self._asked[uid] = Sought(envelope, now, 0.0, waited=False, answered=False)
        sought.heard.add(back.route.dispatcher)  # nothing more is heard of it
        return (self._ask(uid, sought),)

    def _ask(self, uid: bytes, sought: Sought, *, again: bool = False) -> Publish:
        handed = type(sought.envelope.message) is HandBack  # with an address for who handed it on
        reply = "" if handed else sought.envelope.reply
        return Publish(self.subjects.resent(), ResentSought(self.name, uid, reply, again, sent=sought.sent))

    def _echoed(self, envelope: Envelope) -> list[Effect]:
        """All that was said when this echo was sent is here: begin what nobody has."""
        echo: Echo = envelope.message
        effects: list[Effect] = []
        for uid, sought in list(self._asked.items()):
            if not sought.reached and echo.at >= sought.asked:  # it was clogged until now, perhaps
                sought.reached = envelope.now
                sought.first = sought.first or envelope.now
            if sought.first and self._nobody_has(sought, echo.at):
                effects += (*self._found(uid), *self._begin(uid, sought, envelope.now))
            elif sought.reached and any(
                s > sought.reached for name, s in self._others.items() if name not in sought.heard
            ):
                # It goes on and has not answered: its connection, or it, may have begun anew, or it is busy.
                sought.asked, sought.reached = envelope.now, 0.0
                effects.append(self._ask(uid, sought, again=True))
        return effects

    def _nobody_has(self, sought: Sought, at: float) -> bool:
        if at < sought.first + (AGAIN_S if sought.answered else SAYS_S):
            return False
        return at >= sought.at + MOST_S or all(
            name in sought.heard or seen + self._patience < at or seen < sought.at - FORGET_S
            for name, seen in self._others.items()
        )

    def _found(self, uid: bytes) -> tuple[Effect, ...]:
        """Nobody is asked for it any more."""
        sought = self._asked.pop(uid, None)
        return () if sought is None or type(sought.envelope.message) is HandBack else (Will(uid, None),)

    def _begin(self, uid: bytes, sought: Sought, now: float) -> list[Effect]:
        if self.has(uid) or (sought.answered and sought.silence < TWICE_S):
            return []  # an executor has handed it on, or has replied and stands still
        silent = [name for name in self._others if name not in sought.heard]
        told = self._taken(uid, ALL)
        if silent:
            self._told_of(uid, silent)
        envelope = sought.envelope
        if type(envelope.message) is HandBack:
            return [told, *self.adopt(envelope, now)]
        self.ends["taken"] += 1
        age = sought.age
        if not sought.waited and envelope.now == sought.at:
            envelope, age = replace(envelope, now=now), age + now - sought.at
        return [told, *self.take(envelope, now, age, owed=bool(silent) and not sought.answered)]

    def _taken(self, uid: bytes, name: str) -> Publish:
        return Publish(self.subjects.resent(name), ResentKnown(self.name, uid, "taken"))

    def _told_of(self, uid: bytes, silent: Iterable[str]) -> None:
        """It is begun here, and those that were silent are told."""
        if len(self._told) >= KEPT:
            self._told = {each: names for each, names in self._told.items() if self.has(each)}
        self._told[uid] = {*silent}

    # -- what dispatchers tell each other

    def _heartbeat(self, envelope: Envelope) -> Iterable[Effect]:
        heartbeat: DispatcherHeartbeat = envelope.message
        if heartbeat.dispatcher == self.name or not heartbeat.adopts:
            return NOTHING  # runners of offline jobs have heartbeats, too
        if heartbeat.leaving:
            self._others.pop(heartbeat.dispatcher, None)
            self._left.append(heartbeat.dispatcher)
            return NOTHING
        now, name = envelope.now, heartbeat.dispatcher
        back = now - self._others.get(name, now) > self._patience
        self._others[name] = self._when(heartbeat, now)
        self._at[name] = heartbeat.at
        if any(now - seen > FORGET_S for seen in self._others.values()):
            self._others = {name: seen for name, seen in self._others.items() if now - seen <= FORGET_S}
            self._least = {name: least for name, least in self._least.items() if name in self._others}
            self._at = {name: at for name, at in self._at.items() if name in self._others}
        if not back:
            return NOTHING
        # its link may have been lost, and with it what it was told
        again = [uid for uid, silent in self._told.items() if name in silent]
        for uid in again:
            self._told[uid].discard(name)
        return [self._taken(uid, name) for uid in again]

    def _when(self, heartbeat: DispatcherHeartbeat, now: float) -> float:
        """When that dispatcher lived and heard: its heartbeat may have been held up, here or there, and it may have died since. How late its heartbeats are at
        least is how far its clock is off.
        """
        name, late = heartbeat.dispatcher, now - heartbeat.at
        if now > self._line.fresh_until:
            return max(self._line.reached(now), now - late + min(late, self._least.get(name, 0.0)))
        least = self._least[name] = min(late, self._least.get(name, late))
        return now - late + least

    def _sought(self, envelope: Envelope) -> Iterable[Effect]:
        asked: ResentSought = envelope.message
        uid = asked.uid
        if asked.dispatcher == self.name:
            return NOTHING
        effects: list[Effect] = []
        what = "no"
        sought = self._asked.get(uid)
        if self.has(uid) or (sought is not None and (self.name < asked.dispatcher or not sought.asked)):
            what = "has"  # of two that ask, one goes on
        elif (known := self.said.get((uid, 0))) is not None:
            what = "has"
            # who asked a silent dispatcher has begun it, and speaks
            fresh = envelope.now - self._line.reached(envelope.now) <= self._patience
            if asked.reply and fresh and not self.said.repeats(uid, asked.sent):
                effects.append(Publish(asked.reply, known.body))
        elif self.has_ended(uid):
            what = "answered"
        effects.append(Publish(self.subjects.resent(asked.dispatcher), ResentKnown(self.name, uid, what)))
        return effects

    def _known(self, envelope: Envelope) -> Iterable[Effect]:
        known: ResentKnown = envelope.message
        if known.dispatcher == self.name:
            return NOTHING
        sought = self._asked.get(known.uid)
        if known.what == "taken":
            if sought is not None or (known.uid in self._told and self.name < known.dispatcher):
                # Of two that have begun it at the same time, as neither heard the other, one goes on.
                return self._found(known.uid)
            if not self.has(known.uid) and self.has_ended(known.uid):
                return (Publish(self.subjects.resent(known.dispatcher), ResentKnown(self.name, known.uid, "answered")),)
            return self.forget(known.uid, envelope.now, known.dispatcher)
        if sought is None:
            query = self.in_flight.find(known.uid) if known.what == "answered" and known.uid in self._told else None
            return self.silence.called_off(query) if query is not None and query.moved else NOTHING
        if known.what == "has":
            self.ends["had"] += 1
            return self._found(known.uid)
        sought.answered |= known.what == "answered"
        sought.heard.add(known.dispatcher)
        if sought.waited and not sought.answered and sought.heard >= self._others.keys():
            return (*self._found(known.uid), *self._begin(known.uid, sought, envelope.now))
        return NOTHING


def _age(headers: Mapping[str, str] | None) -> float | None:
    """Seconds since a client sent a query first. None: it has not sent it again."""
    text = None if headers is None else headers.get(RESENT)
    if text is None:
        return None
    return min(int(text) / 1000.0, LONGEST_S) if text.isascii() and text.isdigit() and len(text) < 10 else 0.0
