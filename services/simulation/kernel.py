"""The event heap. It drives the services' actors on virtual time, in one thread, as fast as they decide.

It does what services/shell/runtime/runtime.py does with asyncio and NATS: inlets, queue groups, timers, edges, events, watches. Messages
are frozen, so it hands them over as they are. Only if an inlet reads another type than was sent do they pass through the codec.
It has no clock and no randomness: the same calls in the same order have the same effects.
"""

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from heapq import heappop, heappush
from typing import Any, Protocol

from bus.codec import decode, encode
from bus.messages.events import Event
from bus.messages.public import Answer, Refusal
from bus.subjects import matches
from services.core.actor import (
    Actor,
    After,
    Cancel,
    Changed,
    Do,
    Done,
    Envelope,
    Failed,
    Halt,
    Inlet,
    Publish,
    PublishBehind,
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Undelivered,
    Will,
)
from services.shell.runtime.outbox import LATEST, ROWS, SOON
from services.simulation.hosts import Process, Promised, RunningActor, SimulatedEdge

Headers = Mapping[str, str] | None


class Environment(Protocol):
    """What a simulated system runs on: a clock, actors that enter and leave, key-value buckets. now: seconds, never decreasing.

    The kernel is one environment. The asyncio runtime on a clock that jumps is another (tests/support/simulated); both give the
    same results.
    """

    @property
    def now(self) -> float: ...
    def enter(self, name: str, actor: Actor, edge: SimulatedEdge | None = None) -> None:
        """Start an actor. It gets Started, then the contents of the buckets that it watches."""

    def leave(self, name: str, *, goodbye: bool) -> None:
        """End an actor. goodbye: it gets Stopping and may still publish; otherwise it ends as by kill -9. Unknown names are ignored."""

    def at(self, delay: float, action: Callable[[Any], None], argument: Any = None) -> None:
        """Call action(argument) after `delay` seconds."""

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        """Set a key (None: delete it) and inform the actors that watch the bucket."""

    def get(self, bucket: str, key: str) -> bytes | None: ...
    def publish(
        self, subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Headers = None
    ) -> None:
        """Publish a message from outside. body: its encoding, for actors that read it (queries). by: the process that does; "": a client."""


NETWORK = 0.00025  # s from publishing to delivery
INBOX = "_INBOX."
ROUTES = 20_000  # most subjects whose subscribers are cached; many subjects of replies are used only once
GRACE = 5.0  # s for work under way when its actor is asked to stop, as services/shell/runtime/serve.py gives

Receive = Callable[[Publish], None]
Listen = Callable[[str, Event], None]


class ActorHalted(RuntimeError):
    """An actor halted (effect Halt) or failed on a message. In production its process would end."""


@dataclass(slots=True, eq=False)
class Subscribers:
    """The subscribers of a subject: all members in `all`, and one member of each queue group in turn. one: the only subscriber.

    turns: number of messages of each group so far, on all subjects that match its pattern.
    """

    one: tuple[RunningActor, type] | None = None
    all: list[tuple[RunningActor, type]] = field(default_factory=list)
    groups: list[list[tuple[RunningActor, type]]] = field(default_factory=list)
    turns: list[list[int]] = field(default_factory=list)


# subject, message, reply, sender (None: from outside), body, headers
Mail = tuple[str, Any, str, RunningActor | None, bytes, Headers]
Subscriptions = dict[tuple[str, int], tuple[RunningActor, Inlet]]  # by the member's name and the number of its inlet


class Kernel:
    """An Environment. start: the clock's first reading, seconds. received is called with messages to clients' inboxes, recorded with every event."""

    received: Receive

    def __init__(self, start: float, recorded: Listen, *, delay: float = NETWORK) -> None:
        self.now = start
        self.events = 0  # calls of `handle`
        self.delay = delay
        self.members: dict[str, RunningActor] = {}
        self._recorded = recorded
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._mail: deque[tuple[float, int, Callable[[Any], None], Any]] = deque()
        self._soon: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._number = 0
        self._last_mail = start
        self._routes: dict[str, Subscribers] = {}
        self._exact: dict[str, Subscriptions] = {}
        self._wild: dict[str, dict[str, Subscriptions]] = {}  # by what precedes the first wildcard
        self._turns: dict[tuple[str, str], list[int]] = {}
        self._entered = 0
        self._buckets: dict[str, dict[str, bytes | None]] = {}
        self._watchers: dict[str, dict[str, RunningActor]] = {}
        self._perform: dict[type, Callable[[RunningActor, Any], object]] = {
            Publish: self._publish,
            PublishBehind: self._publish,  # there is one server
            After: self._after,
            Cancel: lambda member, effect: member.timers.pop(effect.key, None),
            Do: self._do,
            Record: self._record,
            Will: lambda *_: None,
            Halt: self._halt,
        }

    # -- the environment

    def enter(self, name: str, actor: Actor, edge: SimulatedEdge | None = None) -> None:
        self._entered += 1
        member = self.members[name] = self._member(name, actor, edge)
        self._subscribe(member)
        self._deliver(member, Envelope(self.now, Started()))
        for bucket in member.watches:
            self._watchers.setdefault(bucket, {})[name] = member
            for key, value in self._buckets.get(bucket, {}).items():
                self._tell(member, Changed(bucket, key, value))
            self._tell(member, Synced(bucket))

    def _member(self, name: str, actor: Actor, edge: SimulatedEdge | None) -> RunningActor:
        return RunningActor(name, self._entered, actor, edge, Process(name))

    def _subscribe(self, member: RunningActor) -> None:
        for number, inlet in enumerate(member.inlets):
            self._hearers(inlet.subject)[member.name, number] = (member, inlet)

    def _tell(self, member: RunningActor, change: Changed | Synced) -> None:
        self._deliver(member, Envelope(self.now, change))

    def leave(self, name: str, *, goodbye: bool) -> None:
        member = self.members.pop(name, None)
        if member is None:
            return
        self._unsubscribe(member)
        for watchers in self._watchers.values():
            watchers.pop(name, None)
        if goodbye:
            self._farewell(member)
        else:
            member.alive = False

    def _farewell(self, member: RunningActor) -> None:
        """It gets Stopping; work under way may end."""
        self._deliver(member, Envelope(self.now, Stopping(GRACE)))
        work = [due for due, _, action, what in self._heap if action == self._did and what[0] is member]
        if member.promised:
            work.append(self.now + GRACE)
        if work:
            self._push(min(max(work), self.now + GRACE), self._gone, member)
            return
        member.alive = False

    def _unsubscribe(self, member: RunningActor) -> None:
        for number, inlet in enumerate(member.inlets):
            self._hearers(inlet.subject).pop((member.name, number), None)

    @staticmethod
    def _gone(member: RunningActor) -> None:
        member.alive = False

    def at(self, delay: float, action: Callable[[Any], None], argument: Any = None) -> None:
        self._push(self.now + delay, action, argument)

    def _push(self, due: float, action: Callable[[Any], None], argument: Any) -> None:
        number = self._number = self._number + 1
        heappush(self._heap, (due, number, action, argument))

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        stored = self._buckets.setdefault(bucket, {})
        stored.pop(key, None)  # later watchers get the keys in the order of their last change
        stored[key] = value
        watchers = self._watchers.get(bucket)
        if watchers:
            self._post(self._change, (tuple(watchers.values()), Changed(bucket, key, value)))

    def entries(self, bucket: str) -> dict[str, bytes]:
        """All keys that have a value."""
        return {key: value for key, value in self._buckets.get(bucket, {}).items() if value is not None}

    def get(self, bucket: str, key: str) -> bytes | None:
        return self._buckets.get(bucket, {}).get(key)

    def publish(
        self, subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Headers = None
    ) -> None:
        del by
        self._post(self._route, (subject, message, reply, None, body, headers))

    def run(self, until: float) -> None:
        """Process everything that is due up to this time. Raises ActorHalted."""
        try:
            self._run(until)
        except ActorHalted:
            raise
        except Exception as error:
            raise ActorHalted(f"{_whose(error)} failed: {error!r}") from error

    def _run(self, until: float) -> None:
        heap, mail, soon = self._heap, self._mail, self._soon
        while True:
            if soon:
                action, argument = soon.popleft()
                action(argument)
                continue
            if mail and (not heap or mail[0] < heap[0]):
                if mail[0][0] > until:
                    break
                self.now, _, action, argument = mail.popleft()
            elif heap:
                if heap[0][0] > until:
                    break
                self.now, _, action, argument = heappop(heap)
            else:
                break
            action(argument)
        self.now = until

    # -- messages

    def _post(self, action: Callable[[Any], None], argument: Any) -> None:
        """Deliver after the network's delay. Messages arrive in the order in which they were sent."""
        self._number += 1
        due = self._last_mail = max(self.now + self.delay, self._last_mail)
        self._mail.append((due, self._number, action, argument))

    def _publish(self, member: RunningActor, effect: Publish) -> None:
        subject = effect.subject
        number = self._number = self._number + 1
        due = self.now + self.delay
        if due < self._last_mail:
            due = self._last_mail
        self._last_mail = due
        if subject[:7] == INBOX:
            self._mail.append((due, number, self.received, as_read(effect)))
        else:
            self._mail.append((due, number, self._route, (subject, effect.message, effect.reply, member, b"", None)))

    def _route(self, mail: Mail) -> None:
        subject, message, reply, _, body, headers = mail
        route = self._routes.get(subject)
        if route is not None and (one := route.one) is not None and type(message) is one[1]:
            member = one[0]  # nearly all messages take this path, without further calls
            self.events += 1
            effects = member.handle(Envelope(self.now, message, subject, reply, body, headers))
            if effects:
                perform = self._perform
                for effect in effects:
                    perform[type(effect)](member, effect)
            return
        if route is None:
            if subject.startswith(INBOX):
                self.received(Publish(subject, message))
                return
            route = self._subscribers(subject)
        self._spread(mail, route)

    def _spread(self, mail: Mail, route: Subscribers) -> None:
        """Hand a message to its subscribers."""
        if route.all:
            for member, wanted in route.all:
                self._hand(member, wanted, mail)
        elif not route.groups:
            self._unheard(mail[2], mail[3])
            return
        for group, turns in zip(route.groups, route.turns, strict=True):
            member, wanted = group[turns[0] % len(group)]
            turns[0] += 1
            self._hand(member, wanted, mail)

    def _hand(self, member: RunningActor, wanted: type, mail: Mail) -> None:
        subject, message, reply, _, body, headers = mail
        if type(message) is not wanted:
            body = body or (message if type(message) is bytes else encode(message))
            message = body if wanted is bytes else decode(wanted, body or b"\x80")
        self._send_to(member, Envelope(self.now, message, subject, reply, body, headers))

    def _send_to(self, member: RunningActor, envelope: Envelope) -> None:
        self._deliver(member, envelope)

    def _unheard(self, reply: str, sender: RunningActor | None) -> None:
        """Nobody listens. The bus informs the sender where it subscribes to the reply's subject."""
        if reply and sender is not None and any(matches(inlet.subject, reply) for inlet in sender.inlets):
            self._send_to(sender, Envelope(self.now, Undelivered(reply), reply))

    def _subscribers(self, subject: str) -> Subscribers:
        route = self._routes.get(subject)
        if route is None:
            if len(self._routes) >= ROUTES:
                self._routes.clear()
            route = self._routes[subject] = self._resolve(subject)
        return route

    def _hearers(self, pattern: str) -> Subscriptions:
        """The subscriptions to a pattern, for the caller to change. Cached subscribers of matching subjects are dropped."""
        head = pattern.partition("*")[0].partition(">")[0].rstrip(".")  # the tokens before the first wildcard
        if head == pattern:
            self._routes.pop(pattern, None)
            return self._exact.setdefault(pattern, {})
        for subject in [subject for subject in self._routes if subject.startswith(head) and matches(pattern, subject)]:
            del self._routes[subject]
        return self._wild.setdefault(head, {}).setdefault(pattern, {})

    def _resolve(self, subject: str) -> Subscribers:
        """The subscribers in the order in which they entered, so that the order of dictionaries has no effect."""
        found = list(self._exact.get(subject, {}).items())
        tokens = subject.split(".")
        for length in range(len(tokens)):
            for pattern, heard in self._wild.get(".".join(tokens[:length]), {}).items():
                if heard and matches(pattern, subject):
                    found.extend(heard.items())
        found.sort(key=lambda each: (each[1][0].order, each[0][1]))
        route = Subscribers()
        groups: dict[tuple[str, str], list[tuple[RunningActor, type]]] = {}
        for _, (member, inlet) in found:
            group = groups.setdefault((inlet.subject, inlet.queue), []) if inlet.queue else route.all
            group.append((member, inlet.message))
        route.groups = list(groups.values())
        route.turns = [self._turns.setdefault(group, [0]) for group in groups]
        if len(found) == 1:
            route.one = (found[0][1][0], found[0][1][1].message)
        return route

    def _change(self, change: tuple[tuple[RunningActor, ...], Changed]) -> None:
        for member in change[0]:
            self._deliver(member, Envelope(self.now, change[1]))

    def _deliver(self, member: RunningActor, envelope: Envelope) -> None:
        if not member.alive:
            return
        self.events += 1
        effects = member.handle(envelope)
        if effects:
            perform = self._perform
            for effect in effects:
                perform[type(effect)](member, effect)

    # -- effects

    def _after(self, member: RunningActor, effect: After) -> None:
        number = self._number = self._number + 1
        member.timers[effect.key] = number
        if effect.delay <= 0:
            self._soon.append((self._ring, (member, effect, number)))
        else:
            heappush(self._heap, (self.now + effect.delay, number, self._ring, (member, effect, number)))

    def _ring(self, timer: tuple[RunningActor, After, int]) -> None:
        member, effect, number = timer
        timers = member.timers
        if timers.get(effect.key) == number and member.alive:
            del timers[effect.key]
            self.events += 1
            effects = member.handle(Envelope(self.now, effect.message))
            if effects:
                perform = self._perform
                for each in effects:
                    perform[type(each)](member, each)

    def _do(self, member: RunningActor, effect: Do) -> None:
        if member.edge is None:
            raise ActorHalted(f"{member.name} has no edge for {type(effect.command).__name__}")
        outcome = member.edge(effect.command)
        if isinstance(outcome, Promised):
            member.promised += 1
            outcome.then = partial(self._kept, member, effect.id)
            return
        seconds, message = result_of(effect, *outcome)
        self._push(self.now + seconds, self._did, (member, message))

    def _kept(self, member: RunningActor, number: Any, result: Any) -> None:
        member.promised -= 1
        self._deliver(member, Envelope(self.now, Done(number, result)))

    def _did(self, done: tuple[RunningActor, Any]) -> None:
        self._deliver(done[0], Envelope(self.now, done[1]))

    def _record(self, member: RunningActor, effect: Record) -> None:
        number = member.recorded = member.recorded + 1
        awaited = effect.event.awaited
        self._recorded(member.name, effect.event)
        if not member.sealing or (awaited and not member.soon):
            member.full = member.full if member.sealing else number + ROWS - 1
            member.sealing, member.soon = number, awaited
            self.at(SOON if awaited else LATEST, self._stored, (member, number))
        elif number == member.full:
            member.sealing, member.soon = 0, False
            self._soon.append((self._did, (member, Recorded(number))))

    def _stored(self, batch: tuple[RunningActor, int]) -> None:
        """The outbox writes events after LATEST seconds, SOON if somebody waits for one, or once there are ROWS of them."""
        member, first = batch
        if member.sealing == first:
            member.sealing, member.soon = 0, False
            self._deliver(member, Envelope(self.now, Recorded(member.recorded)))

    def _halt(self, member: RunningActor, effect: Halt) -> None:
        raise ActorHalted(f"{member.name}: {effect.reason}")


def as_read(reply: Publish) -> Publish:
    """What a client makes of a reply. Executors publish answers that they may have to repeat as bytes."""
    body = reply.message
    if type(body) is not bytes:
        return reply
    return Publish(reply.subject, decode(Refusal if "error" in decode(dict[str, Any], body) else Answer, body))


def result_of(effect: Do, seconds: float, result: Any) -> tuple[float, Done | Failed | TimedOut]:
    """When a command's result is there, and what it is. result: or an exception."""
    if 0 < effect.timeout < seconds:
        return effect.timeout, TimedOut(effect.id)
    if isinstance(result, Exception):
        return seconds, Failed(effect.id, str(result) or repr(result))
    return seconds, Done(effect.id, result)


def _whose(error: Exception) -> str:
    """The member whose message raised this. The traceback says so, which costs nothing while all is well."""
    name, trace = "the simulator", error.__traceback__
    while trace is not None:
        member = trace.tb_frame.f_locals.get("member")
        if isinstance(member, RunningActor):
            name = member.name
        trace = trace.tb_next
    return name
