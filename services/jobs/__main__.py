"""Wires one coordinator of offline jobs: `infaas run jobs`."""

import os
import secrets
from functools import partial
from pathlib import Path

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import Settings
from services.jobs import actor
from services.jobs.actor import make_coordinator
from services.jobs.edge import JobsEdge
from services.jobs.files import Files, JobFiles
from services.shell.prices import load_prices
from services.shell.runtime.runtime import Runtime


def files_of(settings: Settings) -> JobFiles:
    """The files that jobs may use. file:// may name the data directory's `jobs`, which is made, and the directories of the settings."""
    given = settings.jobs.roots
    more = [one for one in given.split(os.pathsep) if one] if isinstance(given, str) else list(given)
    data = Path(settings.data_dir).absolute()
    own = data / "jobs"
    own.mkdir(parents=True, exist_ok=True)
    return JobFiles(Files([own, *(Path(one).expanduser().absolute() for one in more)]), data / "spool" / "jobs")


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One coordinator with a name of its own; several share the jobs by queue group and take over from each other."""
    subjects = Subjects(settings.prefix)
    # One name for the life of the process: a restarted actor goes on with its jobs.
    name = f"jobs-{secrets.token_hex(4)}"
    make = partial(
        make_coordinator, settings, subjects, name, load_prices(settings.prices), lambda: f"j-{secrets.token_hex(8)}"
    )
    edge = await JobsEdge.open(bus, subjects, files_of(settings), settings.jobs.chunk_kb * 1024)
    return [Runtime("jobs", make, bus, subjects, edge, insight=actor)]
