"""Processes on simulated hosts: their connections, the actors in them, and the events that these have not stored yet."""

from collections import deque
from collections.abc import Callable
from typing import Any

from bus.messages.events import Event
from services.core.actor import Actor, Publish
from services.simulation.kernel import RunningActor, SimulatedEdge


class Link:
    """One direction of a connection. last: when what was sent last arrives. blocked: faults that hold it up; lost: those that lose what it carries.

    held: what waits for its end, in order.
    """

    __slots__ = ("blocked", "held", "last", "lost")

    def __init__(self) -> None:
        self.last = 0.0
        self.blocked = 0
        self.lost = 0
        self.held: list[tuple[Callable[[Any], None], Any]] = []


class Process:
    """One process, also after its restart. stops: how often it has got SIGSTOP without SIGCONT. paused: seconds that it has been stopped in all.

    waiting: what has come meanwhile (whether it is a timer, what to do with it). work: what its devices were computing.
    skew: seconds by which its clock is ahead. late: seconds that its watches are behind; watched: when the last change comes.
    served: when the server next answers its requests to buckets. twice, deaf, unstored: faults by which its events are stored twice, it does not hear that they are, or they are not.
    generation: number of its deaths.
    left: outcomes that it had not stored when it died, in memory that its supervisor has. wills: what its successor says then, by actor and key; last: does say.
    """

    __slots__ = (
        *(
            "deaf",
            "generation",
            "into",
            "last",
            "late",
            "left",
            "members",
            "name",
            "out",
            "paused",
            "served",
            "skew",
            "stopped_at",
            "stops",
        ),
        *("twice", "unstored", "waiting", "watched", "wills", "work"),
    )

    def __init__(self, name: str) -> None:
        self.name = name
        self.out, self.into = Link(), Link()
        self.members: dict[str, Occupant] = {}
        self.stops = self.twice = self.deaf = self.unstored = self.generation = 0
        self.stopped_at = self.paused = self.skew = self.late = self.watched = self.served = 0.0
        self.waiting: list[tuple[bool, Callable[[Any], None], Any]] = []
        self.work: list[tuple[Occupant, Any, float, float]] = []
        self.left: list[Event] = []
        self.wills: dict[tuple[str, Any], Publish] = {}
        self.last: list[Publish] = []


class EventBatch:
    """Events that travel together. number: of the last of them; 0: the process before this one recorded them. tries: how often they were sent."""

    __slots__ = ("events", "identity", "number", "tries")

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.identity = ""
        self.number = 0
        self.tries = 0


class Occupant(RunningActor):
    """An actor in a process. computes: whether its commands are work of a device, which a stopped process does not do. remote: the types of
    those that travel to the server. open: the batch that is being filled. outbox: those that are not acknowledged yet, the first on its way.
    """

    __slots__ = ("computes", "open", "outbox", "process", "remote", "sealed")

    def __init__(self, name: str, order: int, actor: Actor, edge: SimulatedEdge | None, process: Process) -> None:
        super().__init__(name, order, actor, edge)
        self.process = process
        self.computes: bool = getattr(edge, "computes", False)
        self.remote: frozenset[type] = getattr(edge, "remote", frozenset())
        self.open: EventBatch | None = None
        self.outbox: deque[EventBatch] = deque()
        self.sealed = 0
