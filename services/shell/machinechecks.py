"""What settings of machines must hold beside each other. Pure; checks.py has the rules of single ones."""

import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from services.shell.sections import listed

if TYPE_CHECKING:
    from services.shell.machinesections import CommandSettings, MachineSettings, SwarmSettings

ELSEWHERE = ("swarm", "command")  # providers whose machines are others than this one


def faults_of(machines: "MachineSettings") -> Iterator[tuple[str, str]]:
    """Key and reason of everything that does not go together."""
    for name, kind in machines.kinds.items():
        where = f"machines.kinds.{name}"
        if kind.minimum > kind.maximum:
            yield f"{where}.minimum", f"must be at most {where}.maximum ({kind.maximum}), not {kind.minimum}"
        if machines.provider in ELSEWHERE:
            for key in ("cores", "memory_mb"):
                if getattr(kind, key) == 0:
                    reason = f"must be said with machines.provider {machines.provider}: prices and room go by it"
                    yield f"{where}.{key}", f"{reason}, and its machines are others than this one"
        elif kind.accelerators:
            reason = (
                f"is for machines of the providers {' and '.join(ELSEWHERE)}; local ones have what their drivers show"
            )
            yield f"{where}.accelerators", f"{reason}, and what `simulate` says"
    yield from _commands("machines.swarm", machines.swarm)
    yield from _commands("machines.command", machines.command)
    if machines.provider == "swarm" and not listed(machines.swarm.hosts):
        yield (
            "machines.swarm.hosts",
            "must name the Docker API of at least one manager, as tcp://engine-proxy:2375, for machines.provider swarm",
        )
    if machines.provider == "command" and not (machines.command.add or machines.command.remove):
        yield "machines.command.add", "must be the command that starts a machine, for machines.provider command"


def words(command: tuple[str, ...] | str) -> tuple[str, ...]:
    """A command's words; where it is one text, as in a variable, split as a shell would. Raises ValueError."""
    return tuple(shlex.split(command)) if isinstance(command, str) else command


def _commands(section: str, found: "SwarmSettings | CommandSettings") -> Iterator[tuple[str, str]]:
    for key, other in (("add", "remove"), ("remove", "add")):
        try:
            ours = words(getattr(found, key))
        except ValueError as error:
            yield f"{section}.{key}", f"cannot be split into words as a shell would: {str(error).lower()}"
            continue
        if not ours and getattr(found, other):
            why = "what is bought must be given back" if key == "remove" else "there would be nothing to remove"
            yield f"{section}.{key}", f"must be a command, too, where {section}.{other} is one: {why}"
