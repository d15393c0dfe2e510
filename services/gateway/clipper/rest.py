"""The paths of Clipper's dialect."""

from starlette.routing import Route

from services.gateway.clipper.managing import Managing
from services.gateway.clipper.predicting import Predicting
from services.gateway.clipper.problems import error_body
from services.gateway.door import Door
from services.gateway.registering import Registering

__all__ = ("error_body", "routes")

VERBS = (
    "add_app", "delete_app", "add_model_links", "delete_model_links", "add_model", "delete_versioned_model",
    "set_model_version", "get_all_applications", "get_application", "get_linked_models", "get_all_models", "get_model",
    "get_all_containers", "get_container",
)  # fmt: skip


def routes(door: Door, registering: Registering) -> list[Route]:
    """All of its paths. The management's come first: `admin` is no application."""
    predicting, managing = Predicting(door), Managing(door, registering)
    return [
        *(Route(f"/admin/{verb}", getattr(managing, verb), methods=["POST"]) for verb in VERBS),
        Route("/admin/ping", managing.ping, methods=["GET"]),
        Route("/admin/metrics", predicting.metrics, methods=["POST"]),
        Route("/metrics", predicting.metrics, methods=["GET"]),
        Route("/{app}/predict", predicting.predict, methods=["POST"]),
        Route("/{app}/update", predicting.update, methods=["POST"]),
    ]
