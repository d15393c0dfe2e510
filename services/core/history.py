"""Events that a dispatcher (of queries, or of offline work) records, counted.

So executors learn which of their done batches are safely on disk.
"""

from collections import deque

from bus.messages.events import Event
from bus.messages.fleet import DispatcherHeartbeat
from bus.messages.flow import DoneBatch
from services.core.actor import Record


class History:
    """stored: number of events on disk. flushed: per executor queue, the highest done `seq` whose outcomes are."""

    def __init__(self) -> None:
        self.flushed: dict[str, int] = {}
        self._recorded = 0
        self._stored = 0
        self._open: deque[tuple[int, str, int]] = deque()

    def record(self, event: Event) -> Record:
        self._recorded += 1
        return Record(event)

    @property
    def recorded(self) -> int:
        """How many events so far; `on_disk` says of such a number whether they all are kept."""
        return self._recorded

    def on_disk(self, number: int) -> bool:
        return number <= self._stored

    def covers(self, batch: DoneBatch) -> None:
        """All outcomes of this batch have been recorded."""
        if self._recorded <= self._stored:
            self.flushed[batch.queue] = batch.seq
        else:
            self._open.append((self._recorded, batch.queue, batch.seq))

    def stored(self, through: int) -> None:
        self._stored = through
        while self._open and self._open[0][0] <= through:
            _, queue, seq = self._open.popleft()
            self.flushed[queue] = seq

    def heartbeat(self, dispatcher: str, now: float, *, leaving: bool) -> DispatcherHeartbeat:
        return DispatcherHeartbeat(
            dispatcher=dispatcher, incarnation=0, at=now, flushed=dict(self.flushed), leaving=leaving
        )
