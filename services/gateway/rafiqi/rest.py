"""The paths of Rafiqi's dialect."""

from starlette.routing import Route

from services.gateway.door import Door
from services.gateway.rafiqi.serving import Serving
from services.gateway.registering import Registering


def routes(door: Door, registering: Registering) -> list[Route]:
    """All of its paths."""
    serving = Serving(door, registering)
    return [
        Route("/register", serving.register, methods=["POST"]),
        Route("/classify", serving.classify, methods=["POST"]),
        Route("/list", serving.listed, methods=["GET"]),
    ]
