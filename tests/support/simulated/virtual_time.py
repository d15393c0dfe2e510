"""A small stage for actors: an event heap on virtual time that routes messages by subject, through the codec.

It drives the very actors that production runs. Edges are scripted: each command is answered by a function after a delay.
"""

import heapq
from collections.abc import Callable
from typing import Any

from bus.codec import decode, encode
from bus.subjects import matches
from services.core.actor import (
    Actor,
    After,
    Cancel,
    Do,
    Done,
    Envelope,
    Failed,
    Halt,
    Publish,
    Record,
    Recorded,
    Started,
    Stopping,
    TimedOut,
    Undelivered,
)

EdgeScript = Callable[[Any], tuple[float, Any]]  # command -> (seconds it takes, result or Exception)


class Member:
    """One actor on stage."""

    def __init__(self, actor: Actor, edge: EdgeScript | None) -> None:
        self.actor = actor
        self.edge = edge
        self.alive = True
        self.timers: dict[Any, int] = {}
        self.recorded = 0


class Stage:
    """Everybody's clock, mail and memory. delay: seconds a message is under way."""

    def __init__(self, *, start: float = 1_000_000.0, delay: float = 0.0001) -> None:
        self.now = start
        self.delay = delay
        self.members: dict[str, Member] = {}
        self.heard: list[tuple[float, str, Any]] = []  # what reached the ears: (time, subject, body)
        self.records: list[tuple[str, Any]] = []
        self._ears: list[str] = []
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        self._turn: dict[str, int] = {}

    def enter(self, name: str, actor: Actor, edge: EdgeScript | None = None) -> Member:
        member = self.members[name] = Member(actor, edge)
        self._deliver(member, Envelope(self.now, Started()))
        return member

    def kill(self, name: str) -> None:
        """As kill -9: no goodbye, nothing more is delivered or done."""
        self.members.pop(name).alive = False

    def stop(self, name: str) -> None:
        member = self.members[name]
        self._deliver(member, Envelope(self.now, Stopping(1.0)))
        self.kill(name)

    def listen(self, pattern: str) -> None:
        """Keep what is published on these subjects in `heard`."""
        self._ears.append(pattern)

    def publish(self, subject: str, message: Any, reply: str = "", sender: Member | None = None) -> None:
        body = message if isinstance(message, bytes) else encode(message)
        self._at(self.delay, lambda: self._route(subject, body, reply, sender))

    def send(self, name: str, message: Any) -> None:
        """Hand one actor a message that does not travel on the bus (Changed, Synced, ...)."""
        self._deliver(self.members[name], Envelope(self.now, message))

    def run(self, seconds: float) -> None:
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end

    # -- inside

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay, self._count, action))

    def _route(self, subject: str, body: bytes, reply: str, sender: Member | None) -> None:
        taken = False
        for pattern in self._ears:
            if matches(pattern, subject):
                self.heard.append((self.now, subject, body))
                taken = True
        groups: dict[tuple[str, str], list[tuple[Member, type]]] = {}
        for member in list(self.members.values()):
            for inlet in member.actor.inlets:
                if not matches(inlet.subject, subject):
                    continue
                taken = True
                if inlet.queue:
                    groups.setdefault((inlet.subject, inlet.queue), []).append((member, inlet.message))
                else:
                    self._hand(member, inlet.message, subject, body, reply)
        for (_, queue), candidates in groups.items():
            turn = self._turn[queue] = self._turn.get(queue, 0) + 1
            member, message = candidates[turn % len(candidates)]
            self._hand(member, message, subject, body, reply)
        if not taken and reply and sender is not None and sender.alive:
            self._deliver(sender, Envelope(self.now, Undelivered(reply), reply))

    def _hand(self, member: Member, message: type, subject: str, body: bytes, reply: str) -> None:
        decoded = body if message is bytes else decode(message, body or b"\x80")
        self._deliver(member, Envelope(self.now, decoded, subject, reply, body))

    def _deliver(self, member: Member, envelope: Envelope) -> None:
        if not member.alive:
            return
        for effect in member.actor.handle(envelope):
            self._perform(member, effect)

    def _perform(self, member: Member, effect: Any) -> None:
        match effect:
            case Publish():
                self.publish(effect.subject, effect.message, effect.reply, member)
            case After():
                token = member.timers[effect.key] = self._count = self._count + 1
                self._at(effect.delay, lambda: self._ring(member, effect, token))
            case Cancel():
                member.timers.pop(effect.key, None)
            case Do():
                assert member.edge is not None, effect
                seconds, result = member.edge(effect.command)
                failed = isinstance(result, Exception)
                message: Any = Failed(effect.id, str(result)) if failed else Done(effect.id, result)
                if 0 < effect.timeout < seconds:
                    seconds, message = effect.timeout, TimedOut(effect.id)
                self._at(seconds, lambda: self._deliver(member, Envelope(self.now, message)))
            case Record():
                self.records.append((type(effect.event).kind, effect.event))
                member.recorded += 1
                through = member.recorded
                self._at(0.2, lambda: self._deliver(member, Envelope(self.now, Recorded(through))))
            case Halt():
                raise AssertionError(effect.reason)

    def _ring(self, member: Member, effect: After, token: int) -> None:
        if member.timers.get(effect.key) == token:
            del member.timers[effect.key]
            self._deliver(member, Envelope(self.now, effect.message))
