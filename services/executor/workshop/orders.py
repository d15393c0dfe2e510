"""What the executor's process gives the helper that it starts, on standard input: no credentials are in the environment."""

from msgspec import Struct

from bus.login import Login
from bus.messages.work import BuildVariants, InspectModel
from services.core.settings import RegistrarSettings


class WorkshopOrder(Struct, frozen=True, kw_only=True):
    """One order for one worker. Exactly one of inspect and build is set.

    devices: addresses of the accelerators that variants are measured on, by kind ("gpu": "cuda:0").
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


class StopOrder(Struct, frozen=True):
    """Stop the order of this registration that is being carried out; comes back as None once its processes are gone."""

    registration: str


class HelperInput(Struct, frozen=True, kw_only=True):
    """One order, the bus to publish on, the limits of sandboxes, and an empty directory that the executor's process removes."""

    order: WorkshopOrder
    url: str
    login: Login = Login()
    prefix: str
    limits: RegistrarSettings
    directory: str
