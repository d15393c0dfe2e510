"""Events on their way to the stream: batched, numbered, kept until they are acknowledged.

JetStream syncs each message to disk, so rows travel in batches. A failed publish is repeated with the same id until it
succeeds; the stream drops repeats. While the stream does not answer, rows wait here, up to a bound far above normal traffic.

Outcomes are kept in memory that outlives the process as well: its successor sends those that a killed one has left. Some of them may be
in the stream already. Of each query the recorder keeps one.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec import Raw

from bus.codec import decode, encode, one_array
from bus.messages.events import Event, OutcomeEvent
from bus.port import Bus, BusError
from bus.subjects import Subjects
from services.shell.host.running import Kept

log = logging.getLogger(__name__)

ROWS = 1024  # a batch is sent when it is this long; keeps one encode well below a millisecond
LATEST = 0.2  # s; or when its first row is this old
SOON = 0.0005  # s; or so soon, if somebody waits for one of its rows and no batch is on its way
LONGEST_PAUSE = 2.0  # s between two tries to publish
HELD = 2_000_000  # rows; beyond this the oldest batches are dropped, which is logged as an error


@dataclass(slots=True, eq=False)
class Outbox:
    """Collects one actor's events. source must be unique per incarnation: it makes the batch ids unique.

    recorded(through) is called whenever all rows up to number `through` (from 1) are acknowledged, sealed(kind, rows)
    with each batch when it is encoded. kept: outlives this process; None: it has no supervisor here.
    """

    bus: Bus
    subjects: Subjects
    source: str
    recorded: Callable[[int], None]
    sealed: Callable[[str, Sequence[Any]], None] | None = None
    kept: Kept | None = None
    unkept: list[Event] = field(default_factory=list)  # outcomes of this turn: `keep` them at its end
    _encoded: list[bytes] = field(default_factory=list)  # the outcomes of `_rows`, by turn, where they are kept
    _keeps: deque[tuple[int, int]] = field(default_factory=deque)  # numbers of rows, and of what is kept of them
    _full: bool = False
    lost: int = 0
    _rows: dict[str, list[Event]] = field(default_factory=dict)
    _open: int = 0
    _added: int = 0
    _batches: int = 0
    _ready: deque[tuple[str, str, bytes, int, int]] = field(default_factory=deque)
    _held: int = 0
    _timer: asyncio.TimerHandle | None = None
    _soon: bool = False  # somebody waits for one of `_rows`
    _wake: asyncio.Event = field(default_factory=asyncio.Event)
    _idle: asyncio.Event = field(default_factory=asyncio.Event)
    _task: asyncio.Task[None] | None = None

    def __post_init__(self) -> None:
        self._idle.set()

    @property
    def held(self) -> int:
        """Rows that are not acknowledged yet."""
        return self._held + self._open

    def start(self) -> None:
        # What a process that was killed has left goes first. These rows have no number of ours.
        self._send_again([] if self.kept is None else [*self.kept.left().items()])
        self._task = asyncio.get_running_loop().create_task(self._send())

    def add(self, event: Event) -> None:
        """Take one row; never blocks."""
        rows = self._rows.get(event.kind)
        if rows is None:
            rows = self._rows[event.kind] = []
        rows.append(event)
        self._added += 1
        self._open += 1
        if self.kept is not None and type(event) is OutcomeEvent:
            self.unkept.append(event)
        if self._open >= ROWS:
            self._seal()
        elif self._timer is None or (event.awaited and not self._soon):
            self._seal_later(event.awaited)

    def _seal_later(self, soon: bool) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._soon = soon
        # Behind a batch that is on its way the next one leaves as soon as that is stored.
        wait = SOON if soon and not self._ready else LATEST
        self._timer = asyncio.get_running_loop().call_later(wait, self._seal)

    def keep(self) -> None:
        """Keep what a turn of the actor has added. This is what is sent as well: no row is encoded twice."""
        assert self.kept is not None, "nothing is to be kept without it"
        rows = encode(self.unkept)
        self._encoded.append(rows)
        self.unkept = []
        number = self.kept.put(rows)
        if number:
            self._keeps.append((self._added, number))
        elif not self._full:
            self._full = True
            log.warning("the stream is so far behind that some rows would be lost if this process was killed")

    def inherit(self, kept: Kept) -> None:
        """Send what the process before this one has left in memory of its own. It has ended."""
        left = kept.left()
        self._seal()
        self._send_again([(self.kept.put(body) if self.kept is not None else 0, body) for body in left.values()])
        for number in left:
            kept.drop(number)

    def _send_again(self, left: list[tuple[int, bytes]]) -> None:
        """left: what turns have kept, each by the number under which this process keeps it; 0: it does not."""
        every = [(number, row) for number, body in left for row in decode(list[Raw], body)]
        for begin in range(0, len(every), ROWS):
            rows = every[begin : begin + ROWS]
            self._batches += 1
            identity = f"{self.source}-{self._batches}"
            body = encode({"id": identity, "rows": [row for _, row in rows]})
            self._ready.append((OutcomeEvent.kind, identity, body, len(rows), 0))
            self._held += len(rows)
            through = self._added + 1 if self._added else 0  # at the start nothing is sent before these
            self._keeps.extend((through, number) for number, _ in rows)
        if left:
            log.warning(
                "the process before this one may not have sent some rows: they are sent again",
                extra={"rows": len(every)},
            )
            self._idle.clear()
            self._wake.set()

    def _seal(self) -> None:
        """Encode what has been collected and queue it for sending."""
        if self.unkept:
            self.keep()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._soon = False
        last = len(self._rows) - 1
        for i, (kind, rows) in enumerate(self._rows.items()):
            self._batches += 1
            identity = f"{self.source}-{self._batches}"
            kept = self._encoded if kind == OutcomeEvent.kind else None
            body = encode({"id": identity, "rows": Raw(one_array(kept)) if kept else rows})
            # Numbers run over all kinds, so only the last batch of a seal may move the mark.
            through = self._added if i == last else 0
            self._ready.append((kind, identity, body, len(rows), through))
            self._held += len(rows)
            if self.sealed is not None:
                self.sealed(kind, rows)
        self._rows = {}
        self._encoded = []
        self._open = 0
        while self._held > HELD:
            _, identity, _, count, _ = self._ready.popleft()
            self._held -= count
            self.lost += count
            log.error("outbox is full: the oldest batch is lost", extra={"batch": identity, "rows": count})
        self._idle.clear()
        self._wake.set()

    async def _send(self) -> None:
        pause = 0.1
        while True:
            while not self._ready:  # what woke it may have had nothing to send
                self._idle.set()
                self._wake.clear()
                await self._wake.wait()
            kind, identity, body, count, through = self._ready[0]
            try:
                await self.bus.publish_durable(self.subjects.event(kind), body, identity)
            except BusError as error:
                # At first a system without its streams is one that starts.
                level = logging.INFO if pause < LONGEST_PAUSE else logging.WARNING
                log.log(level, "events are held: %s", error, extra={"held_rows": self._held})
                await asyncio.sleep(pause)
                pause = min(pause * 2, LONGEST_PAUSE)
                continue
            pause = 0.1
            if self._ready and self._ready[0][1] == identity:
                self._ready.popleft()
                self._held -= count
                if self._soon and not self._ready:
                    self._seal()
            if through:
                self._forget(through)
                self.recorded(through)

    def _forget(self, through: int) -> None:
        """These rows are in the stream."""
        keeps = self._keeps
        while self.kept is not None and keeps and keeps[0][0] <= through:
            self.kept.drop(keeps.popleft()[1])

    async def close(self, grace: float) -> None:
        """Send what is left, for at most `grace` seconds."""
        self._seal()
        if not self._ready:
            self._idle.set()
        try:
            async with asyncio.timeout(grace):
                await self._idle.wait()
        except TimeoutError:
            log.error("stopped with events unsent", extra={"rows": self._held})
        if self._task is not None:
            self._task.cancel()
        if self.kept is not None and not self._ready:  # all of them are in the stream
            for _, number in self._keeps:
                self.kept.drop(number)
        elif self.kept is not None:
            self.kept.leave(number for _, number in self._keeps)
