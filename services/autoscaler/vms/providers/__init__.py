"""Who starts and stops machines. A new provider is one file here and one line in `PROVIDERS`."""

from collections.abc import Callable, Mapping

from bus.port import Bus
from bus.subjects import Subjects
from services.autoscaler.vms.providers.base import Provider
from services.autoscaler.vms.providers.local import Local
from services.autoscaler.vms.providers.simulated import Simulated

PROVIDERS: Mapping[str, Callable[[Bus, Subjects], Provider]] = {"local": Local, "simulated": Simulated}
