"""What a runner tells: heartbeats to executors, outcomes to history, and to coordinators why it takes nothing. Pure."""

from collections.abc import Iterator

from bus.messages.catalog import VariantRecord
from bus.messages.fleet import EnsureLoaded, LoadReply, Release, WorkerHeartbeat
from bus.messages.jobs import RunnerNote
from bus.subjects import Subjects
from services.core.actor import Effect, Publish
from services.core.outcomes import OutcomeLog

BEAT_S = 0.4
AFTER_S = 5.0  # that it goes on beating when there is nothing to do any more
NOTE_S = 2.0


class RunnerReports:
    """To executors a runner is a dispatcher: it says that it lives while it has something with them, and what is on disk."""

    def __init__(self, name: str, worker: str, subjects: Subjects) -> None:
        self._name = name
        self._worker = worker
        self._subject = subjects.dispatcher_heartbeat(name)
        self._notes = subjects.offline("note")
        self.history = OutcomeLog()
        self._beaten = self._active = float("-inf")
        self._noted = float("-inf")
        self._why: str | None = None

    def active(self, now: float) -> None:
        """There is something under way."""
        self._active = now

    def beat(self, now: float, least: float = 0.0) -> Iterator[Effect]:
        """A heartbeat, when one is due; with `least`, also when the last one is only so old but work begins."""
        if least:
            self._active = now
        if now - self._active <= AFTER_S and now - self._beaten >= BEAT_S:
            self._beaten = now
            yield self._beat(now)

    def goodbye(self, now: float) -> Iterator[Effect]:
        if self._active > float("-inf"):
            yield self._beat(now, leaving=True)

    def _beat(self, now: float, *, leaving: bool = False) -> Publish:
        beat = self.history.heartbeat(self._name, now, leaving=leaving)
        return Publish(self._subject, beat)

    def note(self, why: str, now: float) -> Iterator[Effect]:
        """Why nothing is taken now, empty when something is: told at a change, and now and then."""
        if (bool(why) != bool(self._why)) or self._why is None or now - self._noted >= NOTE_S:
            self._noted, self._why = now, why
            yield Publish(self._notes, RunnerNote(worker=self._worker, why=why))


# -- variants that offline work had loaded

AGAIN_S = 5.0  # before an order that nothing came of is repeated
REFUSED_S = 10.0  # before a variant that found no room is tried again
IDLE_S = 10.0  # that a variant of ours stays when no job wants it any more


class LoadRequests:
    """One worker's. An instance that online queries use is not ours any more, and stays."""

    def __init__(self, name: str, worker: str, subjects: Subjects) -> None:
        self._name = name
        self._load = subjects.worker(worker, "load")
        self._release = subjects.worker(worker, "release")
        self._replies = subjects.loads(name)
        self._ordered: dict[str, float] = {}
        self._refused: dict[str, float] = {}
        self._ours: dict[str, float] = {}  # variant -> when it was used last

    def is_refused(self, variant: str, now: float) -> bool:
        return self._refused.get(variant, float("-inf")) > now

    def used(self, variant: str, now: float) -> None:
        if variant in self._ours:
            self._ours[variant] = now

    def order(self, record: VariantRecord, app: str, now: float) -> Iterator[Effect]:
        """Have one instance loaded, unless that was asked for a moment ago."""
        if now - self._ordered.get(record.variant, float("-inf")) < AGAIN_S:
            return
        self._ordered[record.variant] = self._ours[record.variant] = now
        order = EnsureLoaded(variant=record, at_least=1, app=app, orderer=self._name, reason="an offline job needs it")
        yield Publish(self._load, order, self._replies)

    def replied(self, reply: LoadReply, now: float) -> None:
        if reply.reason:
            self._refused[reply.variant] = now + REFUSED_S
            self._ours.pop(reply.variant, None)
            self._ordered.pop(reply.variant, None)

    def seen(self, beat: WorkerHeartbeat) -> None:
        """What serves online queries (offline work does not count as load) is not ours to let go."""
        for instance in beat.instances:
            if instance.load > 0:
                self._ours.pop(instance.variant, None)

    def release(self, wanted: set[str], now: float) -> Iterator[Effect]:
        """Let go what no job wants any more."""
        for variant, used in list(self._ours.items()):
            if variant in wanted:
                self._ours[variant] = now
            elif now - used >= IDLE_S:
                del self._ours[variant]
                self._ordered.pop(variant, None)
                yield Publish(
                    self._release,
                    Release(variant=variant, keep=0, orderer=self._name, reason="no offline job needs it any more"),
                )
