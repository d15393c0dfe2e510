"""The queries that an executor has taken and not ended, and when each of them ends without an answer. Pure."""

from bus.messages.flow import Route
from services.core.deadlines import EarliestDeadline
from services.core.outcomes import GRACE, PART_GRACE, default_at
from services.executor.instances import Loaded
from services.executor.queue import QueuedQuery

Key = tuple[bytes, int]  # uid, part


def ends(route: Route, *, default: bool = True) -> float:
    """When a query ends that has no answer, in Unix seconds. default: a dispatcher gives the default output of its app, if there is one."""
    if route.fallback and default:
        return default_at(route.arrived, route.deadline)
    return route.deadline + (GRACE if route.parent is None else PART_GRACE)


class PendingQueries(dict[Key, QueuedQuery]):
    """By uid and part. earliest: when the first of them ends. fetching: those whose inputs are on their way, by uid."""

    def __init__(self) -> None:
        self.earliest = EarliestDeadline()
        self.fetching: dict[bytes, tuple[Loaded, QueuedQuery]] = {}

    def take(self, query: QueuedQuery) -> None:
        """It has come, or its inputs have."""
        route = query.route
        self[route.uid, route.part] = query
        if route.deadline < self.earliest.at or route.fallback:  # else it ends later
            self.earliest.at = min(self.earliest.at, ends(route))

    def fetch(self, loaded: Loaded, query: QueuedQuery) -> None:
        """It has come without its inputs."""
        self.fetching[query.route.uid] = (loaded, query)
        self.take(query)

    def arrived(self, uid: bytes) -> tuple[Loaded, QueuedQuery] | None:
        """What the inputs are for, which is not pending until it is taken again. None: it has ended meanwhile."""
        found = self.fetching.pop(uid, None)
        if found is None or found[1].abandoned:
            return None
        del self[uid, found[1].route.part]
        return found

    def due(self, now: float, *, default: bool) -> list[QueuedQuery]:
        """Those whose time is up. They stay; the caller ends them. default: as of `ends`."""
        found, earliest = [], float("inf")
        for query in self.values():
            due = ends(query.route, default=default)
            if due <= now:
                found.append(query)
            elif due < earliest:
                earliest = due
        self.earliest.looked(earliest, len(self), now)
        return found
