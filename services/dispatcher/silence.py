"""Executors that say nothing: when their dispatcher speaks for them. Pure.

It hears itself first (services/core/line.py). Then it has heard all that an executor had said, however late that came here. Where the bus has several
servers, an echo through our own one shows only how old messages here are: what came to another one may still be on its way. So before it speaks, it
waits for the same echo behind all that any of them had got.
"""

from collections import Counter
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from msgspec.structs import replace

from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.messages.flow import DoneBatch, Echo, HandBack, Route, Withdraw
from bus.messages.public import Error
from bus.port import ECHO
from bus.subjects import Subjects
from services.core.actor import After, Effect, Envelope, Handler, Inlet, Publish, PublishBehind
from services.core.line import ECHO_S, EchoDue, Hold, Line
from services.core.outcomes import CANCELLED
from services.core.selection.cluster import ClusterView
from services.core.selection.eligibility import Ask
from services.core.selection.instances import Instance, SharedCores
from services.core.selection.policy import Decision
from services.dispatcher.apps import forget
from services.dispatcher.default_output import expiry_error
from services.dispatcher.inflight import InFlight, Retries, urgency
from services.dispatcher.query import Query

KEPT = 8192  # of the queries that this dispatcher spoke for
QUIET = (
    3  # echoes in a row before which an executor has said nothing although it has queries; then others may take them
)
HURRY = 2.0  # times `patience`; a query with more time left stays with a quiet executor
STALE = 0.4  # s since the last echo that came back was sent, from which on a query counts as one that waited


@dataclass(slots=True, eq=False)
class Silence:
    """patience: seconds without a heartbeat after which a worker is lost. refuse: ends a query that its executor is silent about. select,
    dispatch: find another one for it. handle: of the actor. alive: its heartbeat, which it sends at once after its connection was broken: what others have asked
    meanwhile they ask again then.

    line: how old a message may be that is read now. hold: what waits while this is not known.
    """

    name: str
    subjects: Subjects
    in_flight: InFlight
    view: ClusterView
    retries: Retries
    patience: float
    refuse: Callable[[Query, Error, float], list[Effect]]
    select: Callable[[Ask, float], Decision]
    dispatch: Callable[[Query, Instance, float], Effect]
    handle: Callable[[Envelope], Iterable[Effect]]
    alive: Callable[[float], Publish]
    start: After = field(default_factory=lambda: After("echo", 0.0, EchoDue()))
    # By app: executors that ended a query after this dispatcher had spoken for them.
    crossings: Counter[str] = field(default_factory=Counter)
    moved: dict[bytes, Query] = field(default_factory=dict)  # queries that two executors may have
    # Executors that have ended: when that was said here, what ran, and what they had, by uid and attempt.
    _ended: list[tuple[float, frozenset[bytes] | None, dict[bytes, int]]] = field(default_factory=list)
    _early: float = 0.0  # the last echo that came through our own server alone
    _whole: float = 0.0  # when the last regular one left that comes behind what any server had got
    _counted: float = 0.0  # the last echo by which executors were found to be quiet
    _spoken: dict[bytes, str] = field(default_factory=dict)  # the last queries of silent executors, and their apps
    line: Line = field(init=False)
    hold: Hold = field(init=False)
    inlets: tuple[Inlet, ...] = field(init=False)
    handlers: dict[type, Handler] = field(init=False)

    def __post_init__(self) -> None:
        self.line = Line(self.subjects.echo(self.name), STALE, PublishBehind)
        self.hold = Hold(self.line, self.handle, _at_once)
        self.inlets = (Inlet(subject=self.subjects.echo(self.name), message=Echo),)
        self.handlers = {EchoDue: self._due}

    def _due(self, envelope: Envelope) -> tuple[Effect, ...]:
        now, echo = envelope.now, self.line.echo(envelope.now)
        if now < self._whole + 0.9 * ECHO_S:  # it says how old messages are here: no other server is asked for that
            echo = Publish(echo.subject, echo.message, headers={ECHO: "early"})
        else:
            self._whole = now
        return (*self.hold.release(now), echo, self.line.next_due(now))

    def expired(self, now: float) -> Iterable[Effect]:
        """A deadline has come: refuse what waits beyond its own, and ask for an echo for what executors have."""
        expired, silent = self.in_flight.remove_expired(now)
        effects = self._speak(expired, now)
        return [*effects, self.line.echo(now)] if silent else effects

    def lost(self, now: float) -> list[Effect]:
        """What silent workers have is dispatched again."""
        flight = self.in_flight.dispatched
        self.moved = {uid: query for uid, query in self.moved.items() if flight.get(uid) is query}
        untold = self._lent(self.in_flight.not_told(now))
        effects = [*self.retries.lost(untold, now), *self.let_go(untold)]
        for worker in [w for w in self.view.workers.values() if now - w.seen > self.patience]:
            effects.extend(self.gone(self.view.lose_worker(worker.name), now))
        return effects

    def gone(self, instances: list[Instance], now: float) -> list[Effect]:
        """These are taken for dead, though only their supervisor may be silent, or have been stopped: what they had is dispatched again, and withdrawn
        once nobody waits for them to end it after all.
        """
        lost = self._lent(self.in_flight.dispatched_to(instances))
        return [*self.retries.lost(lost, now, _suspects(lost)), *self.let_go(lost)]

    def _lent(self, queries: list[Query]) -> list[Query]:
        """These are taken from executors that may end them all the same."""
        for query in queries:
            on = query.instance
            self.in_flight.remove(query.uid)
            if on is not None:
                query.lent = on, query.attempt
        return queries

    def exited(self, gone: ExecutorExited, instances: list[Instance], now: float) -> tuple[Effect, ...]:
        """A supervisor says that an executor has ended. What that had said before may be read later, as it came on another connection: what it had is
        dispatched again behind an echo.
        """
        had = {query.uid: query.attempt for query in self.in_flight.dispatched_to(instances, gone.worker, gone.device)}
        if not had:
            return ()
        self._ended.append((now, None if gone.running is None else frozenset(gone.running), had))
        return (self.line.echo(now),)

    def _dispatch_again(self, echoed: float, now: float) -> list[Effect]:
        effects: list[Effect] = []
        while self._ended and self._ended[0][0] <= echoed:
            _, running, had = self._ended.pop(0)
            flight = self.in_flight
            lost = [
                query
                for uid, attempt in had.items()
                if (query := flight.dispatched.get(uid)) and query.attempt == attempt
            ]
            for query in lost:
                flight.remove(query.uid)
                flight.waiting.back(query.part)
            effects += self.retries.lost(lost, now, running)
        return effects

    def waiting_changed(self, policy: str) -> list[Effect]:
        """Queries wait that did not, or wait no longer. policy: name of the one that selects variants."""
        waiting = self.in_flight.waiting
        gone, waiting.gone = waiting.gone, []
        return [*self.let_go(gone), *waiting.wills(self.name, policy, self.subjects.resubmit())]

    def let_go(self, queries: Iterable[Query]) -> list[Effect]:
        """Of these queries, withdraw from executors that were taken for dead what others have now, or what has ended here. What waits, also as a retry
        for its turn, nobody else has yet: it stays with them.
        """
        effects: list[Effect] = []
        waiting, retries = self.in_flight.waiting, self.in_flight.retries
        for query in queries:
            if query.lent is None or query.uid in waiting or query.uid in retries:
                continue
            (old, attempt), query.lent = query.lent, None
            effects.append(self._withdraw(old.worker.name, old.device, old.id, [query.uid], attempt))
            self.moved[query.uid], query.moved = query, True
        return effects

    def echoed(self, envelope: Envelope) -> Iterable[Effect]:
        """All that executors had said when this echo was sent is here, unless it is an early one: speak for those that have said nothing."""
        echo: Echo = envelope.message
        now, how = envelope.now, (envelope.headers or {}).get(ECHO)
        lost = how == "lost"
        if how == "early":
            self._early = echo.at
        if echo.at > self._early or how == "early":
            lost |= self.line.came(echo, now)
        again = [*self._say_again(now), self.alive(now)] if lost else ()
        silent = self.in_flight.remove_silent(echo.at) if how is None and not self.line.waits(now) else ()
        for query in silent:
            if len(self._spoken) >= KEPT:
                del self._spoken[next(iter(self._spoken))]
            self._spoken[query.uid] = query.app
        released = self.hold.release(now)
        lost_ones = self._dispatch_again(echo.at, now) if how != "early" else []
        return [*again, *released, *self._speak(silent, now), *lost_ones, *self._others(echo.at, now)]

    def _say_again(self, now: float) -> list[Effect]:
        """What executors have said may be lost: ask those that have queries, before this dispatcher speaks for them."""
        had = self.in_flight.ask_again(now)
        return [
            Publish(self.subjects.executor(*of, "withdraw"), Withdraw(self.name, on, [], 0, True))
            for of, on in had.items()
        ]

    # -- before the deadline: another executor may take what a quiet one has

    def _others(self, echoed: float, now: float) -> list[Effect]:
        """Ask executors that have queries and have said nothing whether they turn. What those have that do not say so, another one gets."""
        if echoed < self._counted + 0.9 * ECHO_S or now > self.line.fresh_until:
            return []
        self._counted = echoed
        most = QUIET + int(2.0 * self.line.usual / ECHO_S)  # the question travels, and the answer
        effects: list[Effect] = []
        quiet: list[SharedCores] = []
        for worker in self.view.workers.values():
            for device, cores in worker.cores.items():
                asked = next((instance for instance in cores.instances if instance.own), None)
                if asked is None:
                    cores.quiet = 0
                    continue
                cores.quiet += 1
                if cores.quiet == 1:
                    effects.append(self._withdraw(worker.name, device, asked.id, []))
                elif cores.quiet >= most:
                    quiet.append(cores)
        if quiet:
            effects.extend(self._move(quiet, now))
        return effects

    def _move(self, quiet: list[SharedCores], now: float) -> list[Effect]:
        """Dispatch what these executors have to others that are likely to be in time. What they may compute stays: if it is what stops them, it
        must not stop others.
        """
        instances = [instance for cores in quiet for instance in cores.instances]
        had: dict[str, list[Query]] = {instance.id: [] for instance in instances}
        for query in self.in_flight.dispatched.values():
            if query.instance is not None and query.instance.id in had:
                had[query.instance.id].append(query)
        effects: list[Effect] = []
        left: list[Instance] = []
        for instance in instances:
            instance.shut()
        for old in instances:
            uids: list[bytes] = []
            for query in sorted(had[old.id], key=urgency)[max(1, old.running) :]:
                if query.attempt or query.crashes or query.planned is not None or query.why is CANCELLED:
                    continue
                if query.ask.deadline > now + HURRY * self.patience:
                    continue  # it can wait until that executor goes on, or is taken for dead
                found = self.select(query.ask, now).instance
                other = None if found is None else self.view.instances.get(found)
                if other is None:
                    break  # nor for those that have more time, or give way
                self.in_flight.remove(query.uid)
                old.shut()
                effects.append(self.dispatch(query, other, now))
                uids.append(query.uid)
                self.moved[query.uid], query.moved = query, True
            if uids:
                effects.append(self._withdraw(old.worker.name, old.device, old.id, uids))
                left.append(old)
        for instance in instances:
            instance.reopen()
        for old in left:  # the next ones go to the others at once, if those are in time
            old.free_at = max(old.free_at, now + QUIET * ECHO_S)
        return effects

    def settled(self, batch: DoneBatch, ended: Iterable[Query | None]) -> list[Effect]:
        """Queries have ended at this instance. Another one to which they were given need not answer them any more."""
        if not batch.seq:  # of an executor that had them from another dispatcher, which these were taken from
            self.moved.update((query.uid, query) for query in ended if query is not None)
        effects: list[Effect] = []
        for uid in batch.uids if self.moved else ():
            query = self.moved.pop(uid, None)
            if query is None or query.sent is None or query.sent.instance == batch.instance:
                continue
            other = self.view.instances.get(query.sent.instance)
            if other is not None:
                order = self._withdraw(other.worker.name, other.device, other.id, [uid], query.sent.attempt)
                effects.append(order)
        return effects

    def called_off(self, query: Query) -> list[Effect]:
        """Another dispatcher, which was silent, has had this query answered meanwhile. It ends here, and at its executor."""
        held = query.instance
        self.in_flight.forget(query.uid)
        return (
            [] if held is None else [self._withdraw(held.worker.name, held.device, held.id, [query.uid], query.attempt)]
        )

    def cancelled(self, query: Query, reply: str) -> Publish:
        """Its client has taken it back: its executor ends it if it has not begun, and says which at this reply subject."""
        on = query.instance
        assert on is not None, "it is dispatched"
        subject = self.subjects.executor(on.worker.name, on.device, "withdraw")
        return Publish(subject, Withdraw(self.name, on.id, [query.uid], query.attempt, cancelled=True, reply=reply))

    def _withdraw(self, worker: str, device: str, instance: str, uids: list[bytes], attempt: int = 0) -> Publish:
        subject = self.subjects.executor(worker, device, "withdraw")
        return Publish(subject, Withdraw(self.name, instance, uids, attempt))

    def crossed(self, uid: bytes) -> None:
        """An executor has ended a query that is not in flight. Its outcome stays what this dispatcher said, if it spoke for that executor."""
        app = self._spoken.pop(uid, None)
        if app is not None:
            self.crossings[app] += 1

    def _speak(self, queries: Iterable[Query], now: float) -> list[Any]:
        return [effect for query in queries for effect in self.refuse(query, expiry_error(query), now)]


def _suspects(lost: Iterable[Query]) -> set[bytes]:
    """Which of these queries may have run when their executors were lost, of which nobody says what they ran: those that have run alone, and of each
    instance as many as its batches may hold twice, the most urgent first. A flood that waited behind them is not to be tried one by one.
    """
    found: set[bytes] = set()
    room: dict[str, int] = {}
    for query in sorted(lost, key=urgency):
        on = query.lent[0] if query.lent is not None else None
        if on is None or query.crashes:
            found.add(query.uid)
        elif (left := room.get(on.id, 2 * on.most * on.contexts)) > 0:
            room[on.id] = left - query.ask.items
            found.add(query.uid)
    return found


def _at_once(message: Any) -> bool:
    """Whether it does not wait: another process ends a query, so what waited may not; or one has lost its dispatcher, which is asked for first, and whose
    later heartbeats would be taken for a sign that it has ended it.
    """
    return type(message) is HandBack and message.reason in ("taken", "orphaned")


# -- workers whose clocks are off: what is sent to them says their own time, and what they say is read as ours. A query's deadline is a time, and
# executors keep it. Heartbeats show how far a clock is behind. What delays them only adds to that, so the least of the last seconds counts.

MUCH_S = 0.25  # of a clock that is off, from which on times are corrected
WINDOW_S = 5.0  # of heartbeats; a clock that falls behind while its worker goes on is noticed after two


class Clocks(Struct, eq=False):
    """line, workers: of the dispatcher. off: by worker, seconds that its clock is behind, if that is much; negative: it is ahead."""

    line: Line
    workers: Container[str]
    off: dict[str, float] = {}
    _least: dict[str, tuple[int, float, float, float]] = {}  # incarnation, since when; least before, and since

    def heard(self, heartbeat: WorkerHeartbeat, now: float) -> None:
        """A heartbeat has come."""
        worker, late = heartbeat.worker, now - heartbeat.at
        if worker not in self._least:
            forget(self.workers, self.off, self._least)
        incarnation, since, before, least = self._least.get(worker, (0, 0.0, late, late))
        anew = incarnation != heartbeat.incarnation  # its clock may have been set meanwhile
        if now > self.line.fresh_until and not anew:
            return  # it may have waited here. Of a worker that begins anew that is better than nothing: the next one says less
        if anew:
            since, before, least = now, late, late
        elif now > since + WINDOW_S:
            since, before, least = now, least, late
        self._least[worker] = heartbeat.incarnation, since, before, min(least, late)
        behind = min(before, least, late)
        if abs(behind) >= MUCH_S:
            self.off[worker] = behind
        else:
            self.off.pop(worker, None)

    def sent(self, route: Route, worker: str) -> Route:
        """The route as this worker must read it."""
        off = self.off.get(worker)
        return route if off is None else _moved(route, -off)

    def done(self, batch: DoneBatch) -> DoneBatch:
        """What a worker says."""
        off = self.off.get(batch.worker)
        return batch if off is None else replace(batch, started=batch.started + off, finished=batch.finished + off)

    def back(self, back: HandBack) -> HandBack:
        """What a worker hands back. A query as a whole was never sent to it, and nor were those that come without an instance."""
        if not self.off or back.reason == "orphaned":
            return back
        behind = (off for worker, off in self.off.items() if f".{worker}-" in back.route.instance)
        return replace(back, route=_moved(back.route, next(behind, 0.0)))


def _moved(route: Route, by: float) -> Route:
    return replace(route, deadline=route.deadline + by, arrived=route.arrived + by) if by else route
