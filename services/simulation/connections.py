"""The kernel on which processes and their connections may fail, as NATS and Linux allow it. Runs whose scenario has no such fault do without.

Each process has one connection. What it publishes reaches the server in its order; what it gets comes in its order; what travels on other
connections may overtake it. Who listens is decided at the server. Requests to buckets and streams travel on the connection, too.
Delays are drawn from a seed, so the same calls in the same order have the same effects.
"""

from collections.abc import Callable
from functools import partial
from math import inf, log
from random import Random
from typing import Any

from msgspec.structs import replace

from bus.messages.events import Event, OutcomeEvent
from bus.port import ECHO
from bus.subjects import matches
from services.core.actor import (
    Actor,
    After,
    Changed,
    Do,
    Done,
    Envelope,
    Failed,
    Publish,
    PublishBehind,
    Record,
    Recorded,
    Synced,
    TimedOut,
    Undelivered,
    Will,
)
from services.shell.runtime.outbox import LATEST, ROWS, SOON
from services.simulation.hosts import EventBatch, Link, Process, Promised, RunningActor, SimulatedEdge
from services.simulation.kernel import (
    INBOX,
    NETWORK,
    ActorHalted,
    Headers,
    Kernel,
    Listen,
    Mail,
    as_read,
    result_of,
)

CLIENTS = "clients"  # the process of all clients; each of its connections has a process of its own here
CONNECTIONS = 4  # of clients
ANSWERED = (
    5.0  # s within which the server answers a request; then it counts as failed, and a batch of events is sent again
)
# Gets a batch of events when the stream has it: whose, its id and its events. A batch that is sent again has the same id.
Stored = Callable[[str, str, list[Event]], None]


class Connections(Kernel):
    """See Kernel. seed: of the delays. process_of: the name of an actor's process."""

    def __init__(
        self,
        start: float,
        recorded: Listen,
        *,
        delay: float = NETWORK,
        seed: int = 0,
        process_of: Callable[[str], str] = str,
    ) -> None:
        super().__init__(start, recorded, delay=delay)
        self.stored: Stored = lambda *_: None
        self.unread: Callable[[Envelope], None] = lambda _: None  # gets what was lost before a process read it
        self.processes: dict[str, Process] = {}
        self._process_of = process_of
        self._least = delay
        self._random = Random(seed)  # noqa: S311  (a simulation)
        self._draw = self._random.random
        self._perform[Will] = self._will
        self._perform[PublishBehind] = self._publish_behind

    # -- faults: each call is undone by its counterpart

    def process(self, name: str) -> Process:
        """The process of this name, also before it starts."""
        found = self.processes.get(name)
        if found is None:
            found = self.processes[name] = Process(name)
        return found

    def connected(self, name: str) -> list[Process]:
        """The process of this name; of "clients", one for each connection."""
        if name == CLIENTS:
            return [self.process(f"{CLIENTS}-{number}") for number in range(CONNECTIONS)]
        return [self.process(name)]

    def stop(self, name: str) -> None:
        """SIGSTOP."""
        process = self.process(name)
        if not process.stops:
            process.stopped_at = self.now
        process.stops += 1

    def go_on(self, name: str) -> None:
        """SIGCONT. What has come meanwhile is handled at once: messages first, timers first, or as they came."""
        process = self.process(name)
        if not process.stops:
            return  # it died meanwhile
        process.stops -= 1
        if process.stops:
            return
        process.paused += self.now - process.stopped_at
        waiting, process.waiting = process.waiting, []
        turn = self._random.randrange(3)
        if turn:
            waiting.sort(key=lambda one: one[0] is (turn == 1))
        self._soon.extend((action, argument) for _, action, argument in waiting)
        work, process.work = process.work, []
        for member, message, due, paused in work:
            self._push(due + process.paused - paused, self._did, (member, message, due, process.paused))

    def die(self, name: str) -> None:
        """Kill -9: the end of all actors in the process. What it has sent is on its way. Its successor sends the outcomes that are not stored
        (services/shell/host/running.py).
        """
        process = self.process(name)
        for member in list(process.members.values()):
            batches = [*member.outbox, *([member.open] if member.open is not None else ())]
            process.left += [one for batch in batches for one in batch.events if isinstance(one, OutcomeEvent)]
            self.leave(member.name, goodbye=False)
        process.last += process.wills.values()
        process.wills.clear()
        process.generation += 1
        process.stops = 0
        waiting, process.waiting, process.work = process.waiting, [], []
        for _, action, what in waiting:
            if action == self._take:
                self.unread(what[1])

    def block(self, name: str, *, into: bool, lost: bool) -> None:
        """Hold up what the process gets (into) or sends. lost: what it would get is lost, and it is not subscribed."""
        for process in self.connected(name):
            link = process.into if into else process.out
            link.blocked += 1
            if lost and into:
                link.lost += 1
                for member in process.members.values():
                    self._unsubscribe(member)

    def unblock(self, name: str, *, into: bool, lost: bool) -> None:
        for process in self.connected(name):
            link = process.into if into else process.out
            link.blocked -= 1
            if lost and into:
                link.lost -= 1
                process.anew = True
                for member in process.members.values():
                    self._subscribe(member)
            if not link.blocked:
                held, link.held = link.held, []
                link.last = max(link.last, self.now)
                for action, argument in held:
                    self._push(link.last, action, argument)

    # -- the environment

    def _member(self, name: str, actor: Actor, edge: SimulatedEdge | None) -> RunningActor:
        process = self.process(self._process_of(name))
        member = process.members[name] = RunningActor(name, self._entered, actor, edge, process)
        if process.left:
            member.open = EventBatch()
            member.open.events, process.left = process.left, []
            self._seal((member, member.open))
        last, process.last = process.last, []
        self._soon.extend((self._speak, (member, will)) for will in last)
        return member

    def _subscribe(self, member: RunningActor) -> None:
        if not member.process.into.lost:
            super()._subscribe(member)

    def leave(self, name: str, *, goodbye: bool) -> None:
        member = self.members.get(name)
        super().leave(name, goodbye=goodbye)
        if member is not None:
            del member.process.members[name]
            if not goodbye:  # else they are written within LATEST seconds
                member.open = None
                member.outbox.clear()
            else:
                process = member.process
                process.wills = {key: will for key, will in process.wills.items() if key[0] != name}

    def _farewell(self, member: RunningActor) -> None:
        """It handles what is on its way, as a subscription that is drained."""
        self._send(member.process.into, self._leaves, member)

    def _leaves(self, member: RunningActor) -> None:
        if member.process.stops and member.alive:
            member.process.waiting.append((False, self._leaves, member))
        else:
            super()._farewell(member)

    def put(self, bucket: str, key: str, value: bytes | None) -> None:
        stored = self._buckets.setdefault(bucket, {})
        stored.pop(key, None)
        stored[key] = value
        for member in tuple(self._watchers.get(bucket, {}).values()):
            self._tell(member, Changed(bucket, key, value))

    def publish(
        self, subject: str, message: Any, reply: str = "", body: bytes = b"", by: str = "", headers: Headers = None
    ) -> None:
        process = self.process(by) if by else self._client(reply)
        self._send(process.out, self._route, (subject, message, reply, None, body, headers))

    def _client(self, inbox: str) -> Process:
        """Whose inbox this is."""
        number = inbox.rpartition(".")[2]
        return self.process(f"{CLIENTS}-{int(number) % CONNECTIONS if number.isdecimal() else 0}")

    # -- messages

    def _send(self, link: Link, action: Callable[[Any], None], argument: Any) -> None:
        """Over a link: half of the way. On average it takes half the network's delay."""
        if link.blocked:
            if not link.lost or action not in (self._take, self._replied, self._answered, self._acknowledged):
                link.held.append((action, argument))
            elif action == self._replied:
                self.unread(Envelope(self.now, argument.message, reply=argument.subject))
            elif action == self._take:
                self.unread(argument[1])
            return
        due = self.now + 0.5 * (self.delay - self._least * (1.0 + log(1.0 - self._draw())))
        if due < link.last:
            due = link.last
        link.last = due
        self._push(due, action, argument)

    def _publish(self, member: RunningActor, effect: Publish) -> None:
        self._send(member.process.out, self._route, (effect.subject, effect.message, effect.reply, member, b"", None))

    def _publish_behind(self, member: RunningActor, effect: Publish) -> None:
        """There is one server."""
        self._send(
            member.process.out, self._route_behind, (effect.subject, effect.message, effect.reply, member, b"", None)
        )

    def _route_behind(self, mail: Mail) -> None:
        """The first one on a connection that was made anew says that what came on the one before is lost."""
        assert mail[3] is not None
        process = mail[3].process
        if process.anew and not process.into.lost:
            process.anew = False
            mail = (*mail[:5], {ECHO: "lost"})
        self._route(mail)

    def _route(self, mail: Mail) -> None:
        """At the server."""
        subject = mail[0]
        if subject.startswith(INBOX):
            self._send(self._client(subject).into, self._replied, as_read(Publish(subject, mail[1])))
            return
        self._spread(mail, self._subscribers(subject))

    def _replied(self, reply: Publish) -> None:
        self.received(reply)

    def _send_to(self, member: RunningActor, envelope: Envelope) -> None:
        self._send(member.process.into, self._take, (member, envelope))

    def _unheard(self, reply: str, sender: RunningActor | None) -> None:
        if not reply:
            return
        if sender is None:
            if reply.startswith(INBOX):
                self._send(self._client(reply).into, self._replied, Publish(reply, Undelivered(reply)))
        elif sender.alive and any(matches(inlet.subject, reply) for inlet in sender.inlets):
            self._send_to(sender, Envelope(self.now, Undelivered(reply), reply))

    def _take(self, mail: tuple[RunningActor, Envelope]) -> None:
        self._deliver(*mail)

    def _tell(self, member: RunningActor, change: Changed | Synced) -> None:
        """A bucket's change, or that all have come, is on its way to a process that watches it."""
        process = member.process
        due = max(process.watched, self.now + process.late, process.served)
        if due > self.now:
            process.watched = due
            self._push(due, self._watched, (member, change, process.late > 0 and type(change) is Changed))
        else:
            self._send(process.into, self._watch, (member, change))

    def _watched(self, late: tuple[RunningActor, Changed | Synced, bool]) -> None:
        member, change, twice = late
        for _ in range(1 + twice):
            self._send(member.process.into, self._watch, (member, change))

    def _watch(self, what: tuple[RunningActor, Changed | Synced]) -> None:
        self._deliver(what[0], Envelope(self.now, what[1]))

    def _deliver(self, member: RunningActor, envelope: Envelope) -> None:
        if not member.alive:
            self.unread(envelope)
            return
        process = member.process
        if process.stops:
            process.waiting.append((False, self._take, (member, envelope)))
            return
        now = self.now + process.skew
        if envelope.now != now:
            envelope = replace(envelope, now=now)
        self.events += 1
        effects = member.handle(envelope)
        if effects:
            perform = self._perform
            for effect in effects:
                perform[type(effect)](member, effect)

    # -- effects

    def _will(self, member: RunningActor, effect: Will) -> None:
        key = member.name, effect.key
        if effect.publish is None:
            member.process.wills.pop(key, None)
        else:
            member.process.wills[key] = effect.publish

    def _speak(self, what: tuple[RunningActor, Publish]) -> None:
        self._publish(*what)

    def _ring(self, timer: tuple[RunningActor, After, int]) -> None:
        member, effect, number = timer
        if member.timers.get(effect.key) != number or not member.alive:
            return
        if member.process.stops:
            member.process.waiting.append((True, self._ring, timer))
            return
        del member.timers[effect.key]
        self._deliver(member, Envelope(self.now, effect.message))

    def _do(self, member: RunningActor, effect: Do) -> None:
        if member.edge is None:
            raise ActorHalted(f"{member.name} has no edge for {type(effect.command).__name__}")
        if type(effect.command) in member.remote:
            member.promised += 1
            request = (member, effect, [True])
            self._send(member.process.out, self._serve, request)
            self._push(self.now + (effect.timeout or ANSWERED), self._unanswered, request)
            return
        paused = member.process.paused
        outcome = member.edge(effect.command)
        if isinstance(outcome, Promised):
            member.promised += 1
            outcome.then = partial(self._fulfilled, member, effect.id, paused)
            return
        seconds, message = result_of(effect, *outcome)
        if seconds < inf:
            self._push(self.now + seconds, self._did, (member, message, self.now + seconds, paused))

    def _fulfilled(self, member: RunningActor, number: Any, paused: float, result: Any) -> None:
        member.promised -= 1
        self._did((member, Done(number, result), self.now, paused))

    def _did(self, done: tuple[RunningActor, Any, float, float]) -> None:  # type: ignore[override]
        """A command's time is over; not yet, if its process was stopped meanwhile and its device with it."""
        member, message, due, paused = done
        process = member.process
        if member.computes and member.alive:
            if process.stops:
                process.work.append((member, message, due, paused))
                return
            if process.paused > paused:
                due = self.now + process.paused - paused
                self._push(due, self._did, (member, message, due, process.paused))
                return
        self._deliver(member, Envelope(self.now, message))

    # requests to buckets and streams

    def _serve(self, request: tuple[RunningActor, Do, list[bool]]) -> None:
        """At the server. It does what was asked also if the process has died, or waits no longer."""
        member, effect, _ = request
        if member.process.served > self.now:
            self._push(member.process.served, self._serve, request)
            return
        assert member.edge is not None
        outcome = member.edge(effect.command)
        assert not isinstance(outcome, Promised), "buckets answer at once"
        seconds, message = result_of(effect, *outcome)
        self._push(self.now + seconds, self._serves, (request, message))

    def _serves(self, answer: tuple[tuple[RunningActor, Do, list[bool]], Any]) -> None:
        self._send(answer[0][0].process.into, self._answered, answer)

    def _answered(self, answer: tuple[tuple[RunningActor, Do, list[bool]], Any]) -> None:
        (member, _, waits), message = answer
        if waits[0]:
            waits[0] = False
            member.promised -= 1
            self._deliver(member, Envelope(self.now, message))

    def _unanswered(self, request: tuple[RunningActor, Do, list[bool]]) -> None:
        member, effect, waits = request
        if waits[0]:
            waits[0] = False
            member.promised -= 1
            message = TimedOut(effect.id) if effect.timeout else Failed(effect.id, "the server does not answer")
            self._deliver(member, Envelope(self.now, message))

    # events

    def _record(self, member: RunningActor, effect: Record) -> None:
        member.recorded += 1
        self._recorded(member.name, effect.event)
        batch, awaited = member.open, effect.event.awaited
        if batch is None or (awaited and not batch.soon):
            batch = member.open = batch or EventBatch()
            batch.soon = awaited
            self._push(self.now + (SOON if awaited and not member.outbox else LATEST), self._seal, (member, batch))
        batch.events.append(effect.event)
        if len(batch.events) == ROWS:
            self._soon.append((self._seal, (member, batch)))

    def _seal(self, what: tuple[RunningActor, EventBatch | None]) -> None:
        member, batch = what
        if batch is None or member.open is not batch:
            return
        if member.process.stops:
            member.process.waiting.append((True, self._seal, what))
            return
        member.open = None
        member.sealed += 1
        batch.identity = f"{member.name}-{member.order}-{member.sealed}"
        batch.number = member.recorded
        member.outbox.append(batch)
        if len(member.outbox) == 1:
            self._write(member)

    def _write(self, member: RunningActor) -> None:
        batch = member.outbox[0]
        batch.tries += 1
        self._send(member.process.out, self._store, (member, batch))
        self._push(self.now + ANSWERED, self._again, (member, batch, batch.tries))

    def _again(self, what: tuple[RunningActor, EventBatch, int]) -> None:
        """A batch that nobody has acknowledged is sent again."""
        member, batch, tries = what
        if not member.alive or not member.outbox or member.outbox[0] is not batch or batch.tries != tries:
            return
        if member.process.stops:
            member.process.waiting.append((True, self._again, what))
        else:
            self._write(member)

    def _store(self, what: tuple[RunningActor, EventBatch]) -> None:
        """At the server."""
        member, batch = what
        if member.process.unstored:
            return
        for _ in range(1 + (member.process.twice > 0)):
            self.stored(member.name, batch.identity, batch.events)
        if not member.process.deaf:
            self._send(member.process.into, self._acknowledged, what)

    def _acknowledged(self, what: tuple[RunningActor, EventBatch]) -> None:
        member, batch = what
        if not member.outbox or member.outbox[0] is not batch:
            return
        if member.process.stops:
            member.process.waiting.append((False, self._acknowledged, what))
            return
        member.outbox.popleft()
        if batch.number:
            self._deliver(member, Envelope(self.now, Recorded(batch.number)))
        if member.outbox:
            self._write(member)
        elif member.open is not None and member.open.soon:
            self._seal((member, member.open))
