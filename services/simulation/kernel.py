"""The event heap: drives the services' actors on virtual time, in one thread, as fast as they decide.

It does what services/shell/runtime.py does with asyncio and NATS: inlets, queue groups, timers, edges, events, watches. Messages
are handed over as they are, since they are frozen; only where an inlet reads another type than was sent do they pass through
the codec. The same calls in the same order give the same course: there is no clock and no chance in here.
"""

from collections import deque
from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from bus.codec import decode, encode
from bus.messages.events import Event
from bus.patterns import matches
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
    Record,
    Recorded,
    Started,
    Stopping,
    Synced,
    TimedOut,
    Undelivered,
)
from services.simulation.stage import Hands

NETWORK = 0.00025  # s that a message is under way
STORED = 0.2  # s until events are on disk: the outbox sends what it has collected so often
INBOX = "_INBOX."
GRACE = 1.0

Receive = Callable[[Publish], None]
Listen = Callable[[str, Event], None]


class ActorHalted(RuntimeError):
    """An actor gave up (effect Halt), or failed on a message; in production its process would end."""


class Member:
    """One actor on the heap. timers: key to the number of the event that will ring."""

    __slots__ = ("actor", "alive", "handle", "hands", "inlets", "name", "recorded", "sealing", "timers", "watches")

    def __init__(self, name: str, actor: Actor, hands: Hands | None) -> None:
        self.name = name
        self.actor = actor
        self.handle = actor.handle
        self.hands = hands
        self.inlets = actor.inlets
        self.watches = tuple(watch.bucket for watch in actor.watches)
        self.alive = True
        self.timers: dict[Any, int] = {}
        self.recorded = 0
        self.sealing = False


class Route:
    """Who hears a subject: everybody in `all`, and one of each queue group in turn. one: the only one who ever does."""

    __slots__ = ("all", "groups", "one", "turns")

    def __init__(self) -> None:
        self.one: tuple[Member, type] | None = None
        self.all: list[tuple[Member, type]] = []
        self.groups: list[list[tuple[Member, type]]] = []
        self.turns: list[int] = []


class Kernel:
    """start: the clock's first reading, seconds. received: gets what is sent to clients' inboxes, told: gets every event recorded."""

    received: Receive

    def __init__(self, start: float, told: Listen, *, delay: float = NETWORK) -> None:
        self.now = start
        self.events = 0  # calls of `handle`
        self.delay = delay
        self.members: dict[str, Member] = {}
        self._told = told
        self._heap: list[tuple[float, int, Callable[[Any], None], Any]] = []
        self._mail: deque[tuple[float, int, Callable[[Any], None], Any]] = deque()
        self._soon: deque[tuple[Callable[[Any], None], Any]] = deque()
        self._number = 0
        self._last_mail = start
        self._routes: dict[str, Route] = {}
        self._exact: dict[str, dict[tuple[str, int], tuple[Member, Inlet]]] = {}
        self._wild: dict[str, dict[tuple[str, int], tuple[Member, Inlet]]] = {}
        self._buckets: dict[str, dict[str, bytes]] = {}
        self._watchers: dict[str, dict[str, Member]] = {}
        self._perform: dict[type, Callable[[Member, Any], None]] = {
            Publish: self._publish,
            After: self._after,
            Cancel: self._cancel,
            Do: self._do,
            Record: self._record,
            Halt: self._halt,
        }

    # -- the stage

    def enter(self, name: str, actor: Actor, hands: Hands | None = None) -> None:
        """See services.simulation.stage.Stage."""
        member = self.members[name] = Member(name, actor, hands)
        for number, inlet in enumerate(member.inlets):
            index = self._wild if "*" in inlet.subject or ">" in inlet.subject else self._exact
            index.setdefault(inlet.subject, {})[name, number] = (member, inlet)
        self._routes.clear()
        self._deliver(member, Envelope(self.now, Started()))
        for bucket in member.watches:
            self._watchers.setdefault(bucket, {})[name] = member
            for key, value in self._buckets.get(bucket, {}).items():
                self._deliver(member, Envelope(self.now, Changed(bucket, key, value)))
            self._deliver(member, Envelope(self.now, Synced(bucket)))

    def leave(self, name: str, *, goodbye: bool) -> None:
        member = self.members.get(name)
        if member is None:
            return
        if goodbye:
            self._deliver(member, Envelope(self.now, Stopping(GRACE)))
        del self.members[name]
        member.alive = False
        for number, inlet in enumerate(member.inlets):
            for index in (self._exact, self._wild):
                index.get(inlet.subject, {}).pop((name, number), None)
        for watchers in self._watchers.values():
            watchers.pop(name, None)
        self._routes.clear()

    def at(self, delay: float, action: Callable[[Any], None], argument: Any = None) -> None:
        self._number += 1
        heappush(self._heap, (self.now + delay, self._number, action, argument))

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        stored = self._buckets.setdefault(bucket, {})
        if value is None:
            stored.pop(key, None)
        else:
            stored[key] = value
        self._post(self._change, (bucket, key, value))

    def get(self, bucket: str, key: str) -> bytes | None:
        return self._buckets.get(bucket, {}).get(key)

    def publish(self, subject: str, message: Any, reply: str = "", body: bytes = b"") -> None:
        self._post(self._route, (subject, message, reply, None, body))

    def run(self, until: float) -> None:
        """Let everything happen that is due up to this moment."""
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
        """Hand over after the network's delay; who sends later never arrives earlier."""
        self._number += 1
        due = self.now + self.delay
        if due < self._last_mail:
            due = self._last_mail
        self._last_mail = due
        self._mail.append((due, self._number, action, argument))

    def _publish(self, member: Member, effect: Publish) -> None:
        subject = effect.subject
        number = self._number = self._number + 1
        due = self.now + self.delay
        if due < self._last_mail:
            due = self._last_mail
        self._last_mail = due
        if subject[:7] == INBOX:
            self._mail.append((due, number, self.received, effect))
        else:
            self._mail.append((due, number, self._route, (subject, effect.message, effect.reply, member, b"")))

    def _route(self, mail: tuple[str, Any, str, Member | None, bytes]) -> None:
        subject, message, reply, sender, body = mail
        route = self._routes.get(subject)
        if route is not None and (one := route.one) is not None and type(message) is one[1]:
            member = one[0]  # nearly all messages: without any further call
            self.events += 1
            effects = member.handle(Envelope(self.now, message, subject, reply, body))
            if effects:
                perform = self._perform
                for effect in effects:
                    perform[type(effect)](member, effect)
            return
        if route is None:
            if subject.startswith(INBOX):
                self.received(Publish(subject, message))
                return
            route = self._routes[subject] = self._resolve(subject)
        if route.all:
            for member, wanted in route.all:
                self._hand(member, wanted, mail)
        elif not route.groups:
            if reply and sender is not None:
                self._deliver(sender, Envelope(self.now, Undelivered(reply), reply))
            return
        for number, group in enumerate(route.groups):
            turn = route.turns[number] = (route.turns[number] + 1) % len(group)
            member, wanted = group[turn]
            self._hand(member, wanted, mail)

    def _hand(self, member: Member, wanted: type, mail: tuple[str, Any, str, Member | None, bytes]) -> None:
        subject, message, reply, _, body = mail
        if type(message) is not wanted:
            body = body or (message if type(message) is bytes else encode(message))
            message = body if wanted is bytes else decode(wanted, body or b"\x80")
        self._deliver(member, Envelope(self.now, message, subject, reply, body))

    def _resolve(self, subject: str) -> Route:
        """Members in the order of their coming, so that nothing depends on how dictionaries were filled."""
        found = list(self._exact.get(subject, {}).values())
        for pattern, heard in self._wild.items():
            if heard and matches(pattern, subject):
                found.extend(heard.values())
        route = Route()
        groups: dict[str, list[tuple[Member, type]]] = {}
        for member, inlet in found:
            (groups.setdefault(inlet.queue, []) if inlet.queue else route.all).append((member, inlet.message))
        route.groups = list(groups.values())
        route.turns = [-1] * len(route.groups)
        if len(found) == 1:
            route.one = (found[0][0], found[0][1].message)
        return route

    def _change(self, change: tuple[str, str, bytes | None]) -> None:
        for member in list(self._watchers.get(change[0], {}).values()):
            self._deliver(member, Envelope(self.now, Changed(*change)))

    def _deliver(self, member: Member, envelope: Envelope) -> None:
        if not member.alive:
            return
        self.events += 1
        effects = member.handle(envelope)
        if effects:
            perform = self._perform
            for effect in effects:
                perform[type(effect)](member, effect)

    # -- effects

    def _after(self, member: Member, effect: After) -> None:
        number = self._number = self._number + 1
        member.timers[effect.key] = number
        if effect.delay <= 0:
            self._soon.append((self._ring, (member, effect, number)))
        else:
            heappush(self._heap, (self.now + effect.delay, number, self._ring, (member, effect, number)))

    def _ring(self, timer: tuple[Member, After, int]) -> None:
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

    def _cancel(self, member: Member, effect: Cancel) -> None:
        member.timers.pop(effect.key, None)

    def _do(self, member: Member, effect: Do) -> None:
        if member.hands is None:
            raise ActorHalted(f"{member.name} has no edge for {type(effect.command).__name__}")
        seconds, result = member.hands(effect.command)
        message: Done | Failed | TimedOut
        if isinstance(result, Exception):
            message = Failed(effect.id, str(result) or repr(result))
        else:
            message = Done(effect.id, result)
        if 0 < effect.timeout < seconds:
            seconds, message = effect.timeout, TimedOut(effect.id)
        self._number += 1
        heappush(self._heap, (self.now + seconds, self._number, self._did, (member, message)))

    def _did(self, done: tuple[Member, Any]) -> None:
        self._deliver(done[0], Envelope(self.now, done[1]))

    def _record(self, member: Member, effect: Record) -> None:
        member.recorded += 1
        self._told(member.name, effect.event)
        if not member.sealing:
            member.sealing = True
            self._number += 1
            heappush(self._heap, (self.now + STORED, self._number, self._stored, member))

    def _stored(self, member: Member) -> None:
        member.sealing = False
        self._deliver(member, Envelope(self.now, Recorded(member.recorded)))

    def _halt(self, member: Member, effect: Halt) -> None:
        raise ActorHalted(f"{member.name}: {effect.reason}")
