"""Queries under way: dispatched and not yet done, waiting for somebody to serve them, or to be retried one by one."""

from collections import deque

from services.core.cluster import Instance
from services.dispatcher.query import Query


class Flights:
    """The in-flight table. Each query is in exactly one of `flying`, `waiting`, `retries`."""

    def __init__(self) -> None:
        self.flying: dict[bytes, Query] = {}
        self.waiting: dict[bytes, Query] = {}
        self.retries: deque[Query] = deque()
        self.retrying: bytes | None = None
        self.tried: dict[bytes, int] = {}  # suspects that an executor has begun alone, and their attempt

    def __contains__(self, uid: bytes) -> bool:
        if uid in self.flying or uid in self.waiting:
            return True
        return bool(self.retries) and any(q.uid == uid for q in self.retries)

    def __len__(self) -> int:
        return len(self.flying) + len(self.waiting) + len(self.retries)

    def depart(self, query: Query, instance: Instance) -> None:
        query.instance = instance
        query.attempt += 1
        instance.take(query.items)
        self.flying[query.uid] = query

    def land(self, uid: bytes) -> Query | None:
        """Take a query out of the air; None when it is not (or no longer) ours."""
        query = self.flying.pop(uid, None)
        if query is not None and query.instance is not None:
            query.instance.own -= query.items
            query.instance = None
        if uid == self.retrying:
            self.retrying = None
        return query

    def returned(self, reply_subject: str) -> Query | None:
        """What flies and was sent with this reply subject (its last token: uid and attempt); None when it is elsewhere by now."""
        token = reply_subject.rpartition(".")[2]
        try:
            query = self.flying.get(bytes.fromhex(token[:32]))
            return query if query is not None and query.attempt == int(token[33:]) else None
        except ValueError:
            return None

    def aboard(self, lost: list[Instance], worker: str = "", device: str = "") -> list[Query]:
        """Take out, in order of arrival, what was dispatched to these instances, or to a device that is gone as a whole.

        Instances count by name: the view may have dropped one and met it again since.
        """
        gone = {instance.id for instance in lost}
        found = [
            query
            for query in self.flying.values()
            if (on := query.instance) is not None
            and (on.id in gone or (on.worker.name == worker and on.device == device))
        ]
        for query in found:
            self.land(query.uid)
        return found

    def guilty(self, query: Query) -> bool:
        """Whether the death of the executor that it was aboard counts against it.

        The first one does, whoever was in the batch. Then it travels alone, and only a death while it ran does.
        """
        return self.tried.pop(query.uid, None) == query.attempt or not query.crashes

    def expired(self, now: float, grace: float) -> list[Query]:
        """Take out what waits beyond its deadline, and what should have landed `grace` seconds after it."""
        late = [q for q in self.waiting.values() if q.ask.deadline <= now]
        for query in late:
            del self.waiting[query.uid]
        kept = [q for q in self.retries if q.ask.deadline > now]
        if len(kept) < len(self.retries):
            late += [q for q in self.retries if q.ask.deadline <= now]
            self.retries = deque(kept)
        if self.tried:
            self.tried = {uid: attempt for uid, attempt in self.tried.items() if uid in self.flying}
        lost = [q for q in self.flying.values() if q.ask.deadline + grace <= now]
        for query in lost:
            self.land(query.uid)
        return late + lost
