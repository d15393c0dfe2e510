"""What a runner tells: heartbeats to executors, outcomes to history, and to coordinators why it takes nothing. Pure."""

from collections.abc import Iterator

from bus.messages.jobs import RunnerNote
from bus.subjects import Subjects
from services.core.actor import Effect, Publish
from services.core.history import History

BEAT_S = 0.4
AFTER_S = 5.0  # that it goes on beating when there is nothing to do any more
NOTE_S = 2.0


class Told:
    """To executors a runner is a dispatcher: it says that it lives while it has something with them, and what is on disk."""

    def __init__(self, name: str, worker: str, subjects: Subjects) -> None:
        self._name = name
        self._worker = worker
        self._subject = subjects.dispatcher_heartbeat(name)
        self._notes = subjects.offline("note")
        self.history = History()
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
