"""Which variants of an app may serve one set of needs, in order: made as far as a query looks, and no further.

The order is the app's (`AppView.in_order`): cheapest first, or most accurate first where that is the goal.
Most queries end at the first few Active variants. So only those are looked at at once, in arrays that hold the Active
variants alone, in that order; what is loading, troubled or could be loaded is worked out when somebody asks for it.
"""

from typing import TYPE_CHECKING, Literal

import numpy as np
from numpy.typing import NDArray

from bus.messages.catalog import VariantRecord
from services.core.ask import INFINITE, Ask
from services.core.cost import LatencyTable, load_seconds
from services.core.crowd import Crowd

if TYPE_CHECKING:
    from services.core.appview import AppView
    from services.core.cluster import Instance

Kind = Literal["active", "loading", "troubled"]
RESOLUTION = 0.05  # s
LOADABLE = 4  # alternatives kept, should a worker refuse the best
FIRST = 8  # Active variants looked at before all of them are


class Group:
    """One variant of the app, with its instances by what they are good for. crowds: the same lists, for when they are long."""

    __slots__ = ("active", "crowds", "loading", "record", "seconds_to_load", "table", "troubled", "where")

    def __init__(self, record: VariantRecord) -> None:
        self.record = record
        self.table = LatencyTable(record)
        self.seconds_to_load = load_seconds(record)
        self.active: list[Instance] = []
        self.loading: list[Instance] = []
        self.troubled: list[Instance] = []
        self.where: dict[Instance, list[Instance]] = {}
        self.crowds: dict[Kind, Crowd] = {
            "active": Crowd(self.active), "loading": Crowd(self.loading), "troubled": Crowd(self.troubled)
        }  # fmt: skip

    @property
    def serving(self) -> "tuple[tuple[Kind, list[Instance]], ...]":
        return ("active", self.active), ("troubled", self.troubled)

    def put(self, instance: "Instance", where: "list[Instance] | None") -> None:
        """Into one of the lists, or out of all; where it is already, there it stays."""
        before = self.where.get(instance)
        if before is where:
            return
        if before is not None:
            before.remove(instance)
            del self.where[instance]
        if where is not None:
            where.append(instance)
            self.where[instance] = where


class Ranked:
    """The variants of an app that have an instance in one state, in order, with their static facts in the same order."""

    def __init__(self, app: "AppView", mask: NDArray[np.bool_]) -> None:
        found = app.in_order(np.flatnonzero(mask))
        self.groups = [app.groups[i] for i in found.tolist()]
        self._app = app
        self._found = found
        self._accuracy = app.accuracy[found]
        self._cost = app.cost[found]
        self._current = app.current[found]
        self._latency: dict[tuple[int, int | None], NDArray[np.float64]] = {}

    def eligible(self, ask: Ask) -> NDArray[np.intp]:
        """Places in `groups` of those that meet accuracy, latency (inference alone), cost and what was pinned."""
        if ask.variant is not None or ask.model is not None or ask.version is not None:
            mask = self._app.pinned(ask)[self._found]
        else:
            mask = self._current
        if ask.accuracy > 0.0:
            mask = mask & (self._accuracy >= ask.accuracy)
        if ask.latency_s < INFINITE:
            key = (ask.items, ask.length)
            latency = self._latency.get(key)
            if latency is None:
                latency = self._latency[key] = self._app.latency(*key)[self._found]
            mask = mask & (latency <= ask.latency_s)
        if ask.cost < INFINITE:
            mask = mask & (self._cost <= ask.cost)
        return np.flatnonzero(mask)


class Plan:
    """For one set of needs. first: the first few Active variants; the lists below: all of each kind, in order."""

    __slots__ = ("_active", "_app", "_ask", "_loadable", "_loading", "_places", "_troubled", "first")

    def __init__(self, app: "AppView", ask: Ask) -> None:
        self._app = app
        self._ask = ask
        ranked = app.ranked("active")
        self._places = ranked.eligible(ask)
        self.first = [ranked.groups[i] for i in self._places[:FIRST].tolist()]
        self._active = self.first if len(self.first) == self._places.size else None
        self._loading: list[Group] | None = None
        self._troubled: list[Group] | None = None
        self._loadable: list[Group] | None = None

    @property
    def any(self) -> bool:
        """Whether any variant at all, running or not, meets the needs."""
        return bool(self.first) or bool(self._app.eligible(self._ask).any())

    @property
    def active(self) -> list[Group]:
        """With an Active instance."""
        if self._active is None:
            groups = self._app.ranked("active").groups
            self._active = [groups[i] for i in self._places.tolist()]
        return self._active

    @property
    def loading(self) -> list[Group]:
        """With an instance that is being loaded."""
        if self._loading is None:
            self._loading = self._in("loading")
        return self._loading

    @property
    def troubled(self) -> list[Group]:
        """With an Overloaded or Interfered instance."""
        if self._troubled is None:
            self._troubled = self._in("troubled")
        return self._troubled

    @property
    def loadable(self) -> list[Group]:
        """Without an instance, soonest ready first: the best few."""
        if self._loadable is None:
            self._loadable = self._soonest()
        return self._loadable

    def _in(self, kind: Kind) -> list[Group]:
        groups = self._app.ranked(kind).groups
        return [groups[i] for i in self._app.ranked(kind).eligible(self._ask).tolist()] if groups else []

    def _soonest(self) -> list[Group]:
        app = self._app
        idle = np.flatnonzero(app.eligible(self._ask) & ~(app.has_active | app.has_loading | app.has_troubled))
        if not idle.size:
            return []
        # Load times are measured to some hundredths of a second: what is closer than that is as soon, and the cheaper
        # one, then the one with more throughput, is meant.
        ready = np.round((app.load_s[idle] + app.latency(self._ask.items, self._ask.length)[idle]) / RESOLUTION)
        best = np.lexsort((-app.saturation[idle], app.cost[idle], ready))[:LOADABLE]
        return [app.groups[i] for i in idle[best].tolist()]
