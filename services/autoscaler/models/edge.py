"""The model-autoscaler's hands: solving takes up to half a second, off the loop, so that nothing waits for it."""

import asyncio
import time
from typing import Any

from services.autoscaler.models.work import Solve, Solved
from services.core.planning.plan import Solver


class SolverEdge:
    """Solves one problem at a time."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver

    async def perform(self, command: Any) -> Solved:
        """See services.core.actor.Edge."""
        if not isinstance(command, Solve):
            raise TypeError(f"unknown command {command!r}")
        started = time.perf_counter()
        plan = await asyncio.to_thread(self._solver.solve, command.problem)
        return Solved(plan, (time.perf_counter() - started) * 1000.0)
