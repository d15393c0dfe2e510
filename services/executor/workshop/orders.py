"""An order on its way: from the executor's process to the helper that it starts, on standard input, with everything that the helper needs."""

from msgspec import Struct

from bus.login import Login
from bus.messages.work import BuildVariants, InspectModel
from services.core.settings import RegistrarSettings


class WorkshopOrder(Struct, frozen=True, kw_only=True):
    """One order for one worker. Exactly one of inspect and build is set.

    devices: where variants of a kind other than the CPU are measured, by kind ("gpu": "cuda:0").
    """

    worker: str
    devices: dict[str, str] = {}
    inspect: InspectModel | None = None
    build: BuildVariants | None = None

    @property
    def registration(self) -> str:
        order = self.inspect or self.build
        return order.registration if order is not None else ""

    @property
    def kind(self) -> str:
        return "inspect" if self.inspect is not None else "build"


# -- Everything the helper process is told, on its standard input: credentials pass through no environment.


class HelperInput(Struct, frozen=True, kw_only=True):
    """One order, the bus to publish on, the limits for sandboxes, and an empty directory that its owner removes."""

    order: WorkshopOrder
    url: str
    login: Login = Login()
    prefix: str
    limits: RegistrarSettings
    directory: str
