"""Wires one registrar: `infaas run registrar`."""

import secrets
from functools import partial

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import Settings
from services.registrar import actor
from services.registrar.actor import make_registrar
from services.registrar.edge import RegistrarEdge
from services.shell.runtime.runtime import Runtime


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One registrar with a name of its own; several share the registrations by queue group."""
    subjects = Subjects(settings.prefix)
    # One name for the life of the process: a restarted actor goes on with its registrations.
    name = f"registrar-{secrets.token_hex(4)}"
    make = partial(make_registrar, settings, subjects, name, lambda: f"r-{secrets.token_hex(8)}")
    edge = await RegistrarEdge.open(bus, subjects, settings.quality)
    return [Runtime("registrar", make, bus, subjects, edge, insight=actor)]
