"""How long decisions take, by samples: at most one in 50 ms is timed, so that all others are exactly what they would be without."""

import asyncio
from time import perf_counter

from services.core.ask import Ask, Decision
from services.core.cluster import ClusterView
from services.core.goal import Goal
from services.core.metric import MICROSECONDS, Histogram
from services.core.selection import SelectionPolicy

EVERY = 0.05  # s


class SampledPolicy:
    """A policy that is the given one. `select` is its own method, but for the moments in which one call is timed."""

    def __init__(self, policy: SelectionPolicy, loop: asyncio.AbstractEventLoop) -> None:
        self.name = policy.name
        self.goal: Goal = getattr(policy, "goal", "cost")
        self.seconds = Histogram(MICROSECONDS)
        self._plain = policy.select
        self._loop = loop
        self.select = self._timed

    def _timed(self, ask: Ask, now: float, view: ClusterView) -> Decision:
        self.select = self._plain
        self._loop.call_later(EVERY, self._arm)
        began = perf_counter()
        decision = self._plain(ask, now, view)
        self.seconds.observe(perf_counter() - began)
        return decision

    def _arm(self) -> None:
        self.select = self._timed
