"""What a gateway shows. Pure."""

from collections.abc import Iterable

from services.core.metric import Family
from services.gateway.actor import Gateway
from services.gateway.door import Door


class GatewayInsight:
    """door: where the counts are."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def families(self, actor: Gateway) -> Iterable[Family]:
        del actor
        return ()

    def missing(self, actor: Gateway, now: float) -> str:
        return "it is being stopped" if self._door.draining else actor.missing(now)
