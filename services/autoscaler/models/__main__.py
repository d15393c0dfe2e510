"""Wires the model-autoscaler of one worker."""

import asyncio
import time
from typing import Any

from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.models import actor
from services.autoscaler.models.actor import ModelAutoscaler, Solve, Solved, make_model_autoscaler
from services.core.planning.plan import Solver
from services.core.planning.solvers import make_solver
from services.core.settings import Settings
from services.shell.host.machine import worker_name
from services.shell.policies import load_scaling
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """The model-autoscaler of one worker, which runs beside its monitor. Raises SettingsError, which names the setting."""
    subjects = Subjects(settings.prefix)
    worker = worker_name(settings.worker)
    ours = settings.autoscaler
    prices = load_prices(settings.prices)
    solver = make_solver(ours.solver, time_limit_s=ours.time_limit_s, clock=time.monotonic)

    policy = load_scaling(settings)

    def make() -> ModelAutoscaler:
        return make_model_autoscaler(settings, subjects, worker, prices, policy)

    return [Runtime(f"model-autoscaler-{worker}", make, bus, subjects, SolverEdge(solver), insight=actor)]


class SolverEdge:
    """Solves one problem at a time in a thread: it takes up to half a second, and the loop must not wait."""

    def __init__(self, solver: Solver) -> None:
        self._solver = solver

    async def perform(self, command: Any) -> Solved:
        """See `services.core.actor.Edge`."""
        if not isinstance(command, Solve):
            raise TypeError(f"unknown command {command!r}")
        started = time.perf_counter()
        plan = await asyncio.to_thread(self._solver.solve, command.problem)
        return Solved(plan, (time.perf_counter() - started) * 1000.0)
