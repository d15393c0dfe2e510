"""What a refusal's code is called in HTTP and in gRPC: one table for every dialect. Pure."""

from math import ceil
from typing import NamedTuple


class Called(NamedTuple):
    """http: status. grpc: the name of a status code."""

    http: int
    grpc: str


CODES = {
    "bad_request": Called(400, "INVALID_ARGUMENT"),
    "unknown_app": Called(404, "NOT_FOUND"),
    "unknown_model": Called(404, "NOT_FOUND"),
    "unsatisfiable": Called(422, "FAILED_PRECONDITION"),
    "deadline": Called(504, "DEADLINE_EXCEEDED"),
    "overloaded": Called(503, "RESOURCE_EXHAUSTED"),
    "model_error": Called(500, "INTERNAL"),
    "too_large": Called(413, "RESOURCE_EXHAUSTED"),
    "forbidden": Called(403, "PERMISSION_DENIED"),
    "internal": Called(500, "INTERNAL"),
    # The gateway's own, before a query has reached the system.
    "unavailable": Called(503, "UNAVAILABLE"),
    "unauthenticated": Called(401, "UNAUTHENTICATED"),
    "unknown": Called(404, "NOT_FOUND"),
}
UNFORESEEN = CODES["internal"]  # the list of codes may grow


def called(code: str) -> Called:
    """HTTP status and gRPC code of a refusal's code."""
    return CODES.get(code, UNFORESEEN)


def retry_after(code: str, retry_after_ms: float | None) -> dict[str, str]:
    """The header that says when to come back, in whole seconds; only where coming back may help."""
    if retry_after_ms is None and called(code).http != 503:
        return {}
    return {"Retry-After": str(max(1, ceil((retry_after_ms or 1000.0) / 1000.0)))}
