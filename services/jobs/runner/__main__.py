"""Wires the runner of one worker: `infaas run offline`, beside its monitor."""

import secrets

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import JobsSettings, Settings
from services.jobs.runner import actor
from services.jobs.runner.actor import Runner
from services.jobs.runner.edge import RunnerEdge
from services.jobs.runner.policy import Knobs
from services.shell.host.machine import worker_name
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import load


def knobs_of(settings: JobsSettings) -> Knobs:
    """The settings as the policy reads them, in seconds."""
    return Knobs(
        utilisation_below=settings.utilisation_below,
        latency_ratio=settings.latency_ratio,
        latency_least_s=settings.latency_least_ms / 1000.0,
        in_flight=settings.in_flight,
    )


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One runner for this worker."""
    subjects = Subjects(settings.prefix)
    worker, prices, knobs = worker_name(settings.worker), load_prices(settings.prices), knobs_of(settings.jobs)

    def make() -> Runner:
        return Runner(f"offline-{worker}-{secrets.token_hex(4)}", worker, subjects, prices, knobs)

    return [Runtime(f"offline-{worker}", make, bus, subjects, RunnerEdge(bus, subjects), insight=actor)]


if __name__ == "__main__":
    import sys

    from services.shell.runtime.serve import serve

    sys.exit(serve("offline", load(), wire))
