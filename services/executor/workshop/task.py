"""Everything the helper process is told, on its standard input: credentials pass through no environment."""

from msgspec import Struct

from bus.login import Login
from services.core.settings import RegistrarSettings
from services.executor.workshop.errand import Errand


class Task(Struct, frozen=True, kw_only=True):
    """One errand, the bus to publish on, the limits for sandboxes, and an empty directory that its owner removes."""

    errand: Errand
    url: str
    login: Login = Login()
    prefix: str
    limits: RegistrarSettings
    directory: str
