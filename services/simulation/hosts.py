"""Processes on simulated hosts: their connections, the actors in them, and the events that these have not stored yet."""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bus.messages.events import Event
from services.core.actor import Actor, Publish


class Promised:
    """What a command's result will be, at a time that nobody knows yet. The environment sets `then`, the edge calls `keep` once."""

    __slots__ = ("then",)
    then: Callable[[Any], None]

    def keep(self, result: Any) -> None:
        """The result is there now."""
        self.then(result)


# An actor's simulated edge: command -> (seconds that it takes, result or an exception).
SimulatedEdge = Callable[[Any], tuple[float, Any] | Promised]


@dataclass(slots=True, eq=False)
class Link:
    """One direction of a connection. last: when what was sent last arrives. blocked: faults that hold it up; lost: those that lose what it carries.

    held: what waits for its end, in order.
    """

    last: float = 0.0
    blocked: int = 0
    lost: int = 0
    held: list[tuple[Callable[[Any], None], Any]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class Process:
    """One process, also after its restart. stops: how often it has got SIGSTOP without SIGCONT. paused: seconds that it has been stopped in all.

    waiting: what has come meanwhile (whether it is a timer, what to do with it). work: what its devices were computing.
    skew: seconds by which its clock is ahead. late: seconds that its watches are behind; watched: when the last change comes.
    anew: the connection was lost and is there again, and no echo has told it yet. served: when the server next answers its requests to buckets. twice, deaf, unstored: faults by which its events are stored twice, it does not hear that they are, or they are not.
    generation: number of its deaths.
    left: outcomes that it had not stored when it died, in memory that its supervisor has. wills: what its successor says then, by actor and key; last: does say.
    """

    name: str
    out: Link = field(default_factory=Link)
    into: Link = field(default_factory=Link)
    members: dict[str, "RunningActor"] = field(default_factory=dict)
    stops: int = 0
    twice: int = 0
    deaf: int = 0
    unstored: int = 0
    anew: bool = False
    generation: int = 0
    stopped_at: float = 0.0
    paused: float = 0.0
    skew: float = 0.0
    late: float = 0.0
    watched: float = 0.0
    served: float = 0.0
    waiting: list[tuple[bool, Callable[[Any], None], Any]] = field(default_factory=list)
    work: list[tuple["RunningActor", Any, float, float]] = field(default_factory=list)
    left: list[Event] = field(default_factory=list)
    wills: dict[tuple[str, Any], Publish] = field(default_factory=dict)
    last: list[Publish] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class EventBatch:
    """Events that travel together. number: of the last of them; 0: the process before this one recorded them. tries: how often they were sent.
    soon: somebody waits for one of them.
    """

    events: list[Event] = field(default_factory=list)
    identity: str = ""
    number: int = 0
    tries: int = 0
    soon: bool = False


class RunningActor:
    """One running actor, in a process. order: how many entered before it. timers: by key, the number of the event that is due.

    recorded: number of events so far. sealing: number of the first event of the batch on its way to disk; 0: none. full: number of its last.
    soon: somebody waits for one of them. promised: results that its edge still owes.

    Where processes fail: computes: whether its commands are work of a device, which a stopped process does not do. remote: the types of
    those that travel to the server. open: the batch that is being filled. outbox: those that are not acknowledged yet, the first on its way.
    """

    __slots__ = (
        "actor", "alive", "computes", "edge", "full", "handle", "inlets", "name", "open", "order", "outbox", "process", "promised",
        "recorded", "remote", "sealed", "sealing", "soon", "timers", "watches",
    )  # fmt: skip

    def __init__(self, name: str, order: int, actor: Actor, edge: SimulatedEdge | None, process: Process) -> None:
        self.name = name
        self.order = order
        self.actor = actor
        self.handle = actor.handle
        self.edge = edge
        self.inlets = actor.inlets
        self.watches = tuple(watch.bucket for watch in actor.watches)
        self.alive = True
        self.timers: dict[Any, int] = {}
        self.recorded = self.sealing = 0
        self.full, self.soon = 0, False
        self.promised = 0
        self.process = process
        self.computes: bool = getattr(edge, "computes", False)
        self.remote: frozenset[type] = getattr(edge, "remote", frozenset())
        self.open: EventBatch | None = None
        self.outbox: deque[EventBatch] = deque()
        self.sealed = 0
