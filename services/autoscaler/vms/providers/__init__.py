"""Providers start and stop machines. A new provider is one file here and one line in `PROVIDERS`."""

from collections.abc import Callable, Mapping

from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.vms.providers.base import Local, Provider, Simulated
from services.autoscaler.vms.providers.command import Command
from services.autoscaler.vms.providers.swarm import Swarm
from services.core.settings import MachineSettings

Make = Callable[[Bus, Subjects, MachineSettings], Provider]

PROVIDERS: Mapping[str, Make] = {
    "local": Local,
    "simulated": Simulated,
    "swarm": lambda _bus, _subjects, settings: Swarm(settings.swarm),
    "command": lambda _bus, _subjects, settings: Command(settings.command),
}
