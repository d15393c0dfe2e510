"""Where the dashboard finds its system: told by whoever serves it, else as the commands find one."""

from infaas.locate import Endpoints, locate

_told: list[Endpoints] = []


def tell(endpoints: Endpoints | None) -> None:
    """Say where the system is, for the whole process; None: look for it again at every question."""
    _told[:] = [] if endpoints is None else [endpoints]


def endpoints() -> Endpoints:
    """Where the system is; raises NotConnected when a data directory is named and nothing runs there."""
    return _told[0] if _told else locate()
