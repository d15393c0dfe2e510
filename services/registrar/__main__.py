"""Wires one registrar."""

import secrets

from bus.port import Bus
from bus.subjects import Subjects
from services.core.settings import RegistrarSettings, Settings
from services.registrar import actor
from services.registrar.actor import Registrar
from services.registrar.edge import RegistrarEdge
from services.registrar.policy import Rules
from services.shell.runtime.runtime import Runtime
from services.shell.settings import load


def rules_of(settings: RegistrarSettings) -> Rules:
    """What the settings say, in the registrar's words."""
    return Rules(
        allow_torchscript=settings.allow_torchscript,
        agreement=settings.agreement,
        threads=settings.threads,
        max_batches=settings.max_batches,
    )


async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
    """One registrar actor with a name of its own; several share the registrations by queue group."""
    subjects = Subjects(settings.prefix)
    rules = rules_of(settings.registrar)
    name = (
        f"registrar-{secrets.token_hex(4)}"  # one for the life of the process: a restarted actor goes on with its work
    )

    def make() -> Registrar:
        return Registrar(name, subjects, rules, lambda: f"r-{secrets.token_hex(8)}")

    edge = await RegistrarEdge.open(bus, subjects)
    return [Runtime("registrar", make, bus, subjects, edge, insight=actor)]


if __name__ == "__main__":
    import sys

    from services.shell.runtime.serve import serve

    sys.exit(serve("registrar", load(), wire))
