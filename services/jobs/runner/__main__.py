"""Wires the runner of one worker: `infaas run offline`, beside its monitor."""

import secrets

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import Settings
from services.jobs.runner import actor
from services.jobs.runner.actor import Runner, make_runner
from services.jobs.runner.edge import RunnerEdge
from services.shell.host.machine import worker_name
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One runner for this worker."""
    subjects = Subjects(settings.prefix)
    worker, prices = worker_name(settings.worker), load_prices(settings.prices)

    def make() -> Runner:
        return make_runner(settings, subjects, f"offline-{worker}-{secrets.token_hex(4)}", worker, prices)

    return [Runtime(f"offline-{worker}", make, bus, subjects, RunnerEdge(bus, subjects), insight=actor)]
