"""Wires one coordinator of offline jobs: `infaas run jobs`."""

import os
import secrets
from pathlib import Path

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import JobsSettings, Settings
from services.jobs import actor
from services.jobs.actor import Coordinator
from services.jobs.edge import JobsEdge, spool_of
from services.jobs.files import Files, JobFiles
from services.jobs.policy import Limits
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime
from services.shell.settings import load


def roots_of(settings: Settings) -> list[Path]:
    """The directories that file:// may name: the data directory's `jobs`, which is made, and those of the settings."""
    given = settings.jobs.roots
    more = [one for one in given.split(os.pathsep) if one] if isinstance(given, str) else list(given)
    own = Path(settings.data_dir).absolute() / "jobs"
    own.mkdir(parents=True, exist_ok=True)
    return [own, *(Path(one).expanduser().absolute() for one in more)]


def limits_of(settings: JobsSettings) -> Limits:
    """What the settings say, in the coordinator's words."""
    return Limits(
        chunk_items=settings.chunk_items,
        batch_s=settings.batch_ms / 1000.0,
        window=settings.window,
        keep=settings.keep,
    )


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One coordinator with a name of its own; several share the jobs by queue group and take over from each other."""
    subjects = Subjects(settings.prefix)
    limits, prices = limits_of(settings.jobs), load_prices(settings.prices)
    name = f"jobs-{secrets.token_hex(4)}"  # one for the life of the process: a restarted actor goes on with its jobs
    desk = JobFiles(Files(roots_of(settings)), spool_of(settings.data_dir))

    def make() -> Coordinator:
        return Coordinator(name, subjects, limits, prices, lambda: f"j-{secrets.token_hex(8)}")

    edge = await JobsEdge.open(bus, subjects, desk, settings.jobs.chunk_kb * 1024)
    return [Runtime("jobs", make, bus, subjects, edge, insight=actor)]


if __name__ == "__main__":
    import sys

    from services.shell.runtime.serve import serve

    sys.exit(serve("jobs", load(), wire))
