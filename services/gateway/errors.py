"""Failed requests: their codes, HTTP's and gRPC's status for each code, and the texts that clients get. Pure."""

import re
from collections.abc import Mapping
from math import ceil
from typing import Any, NamedTuple

from bus.port import PayloadTooLarge
from bus.tensors import BadTensor
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, RegistrationFailed, Timeout


class StatusCodes(NamedTuple):
    """http: HTTP's status. grpc: the name of gRPC's status."""

    http: int
    grpc: str


CODES = {
    "bad_request": StatusCodes(400, "INVALID_ARGUMENT"),
    "unknown_app": StatusCodes(404, "NOT_FOUND"),
    "unknown_model": StatusCodes(404, "NOT_FOUND"),
    "unsatisfiable": StatusCodes(422, "FAILED_PRECONDITION"),
    "deadline": StatusCodes(504, "DEADLINE_EXCEEDED"),
    "overloaded": StatusCodes(503, "RESOURCE_EXHAUSTED"),
    "model_error": StatusCodes(500, "INTERNAL"),
    "too_large": StatusCodes(413, "RESOURCE_EXHAUSTED"),
    "forbidden": StatusCodes(403, "PERMISSION_DENIED"),
    "internal": StatusCodes(500, "INTERNAL"),
    "cancelled": StatusCodes(499, "CANCELLED"),
    # The gateway's own: the request has not reached the system.
    "unavailable": StatusCodes(503, "UNAVAILABLE"),
    "unauthenticated": StatusCodes(401, "UNAUTHENTICATED"),
    "unknown": StatusCodes(404, "NOT_FOUND"),
}
_DEFAULT = CODES["internal"]  # of a code that a newer system may send


def statuses_of(code: str) -> StatusCodes:
    """The statuses of a failure with this code."""
    return CODES.get(code, _DEFAULT)


def retry_after(code: str, retry_after_ms: float | None) -> dict[str, str]:
    """The header Retry-After, in whole seconds, where a later try may succeed; else no header."""
    if retry_after_ms is None and statuses_of(code).http != 503:
        return {}
    return {"Retry-After": str(max(1, ceil((retry_after_ms or 1000.0) / 1000.0)))}


_LIST = re.compile(r"infaas\.list\.\w+")  # in the system's refusals
_RIGHT = re.compile(r"our credentials have no right to \S+: ")  # in the client library's errors


class RequestFailed(Exception):
    """A request that gets an error instead of its answer.

    status: HTTP's; None: that of the code. message: a sentence for the client. code: one of CODES. headers: of HTTP's reply.
    more: fields of the reply beside the message. passed_on: whether a dispatcher refused the query, and so has counted it.
    """

    passed_on = False

    def __init__(
        self,
        status: int | None,
        message: str,
        *,
        code: str = "bad_request",
        headers: Mapping[str, str] | None = None,
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.more = dict(more or {})
        self.code = code
        self.status = statuses_of(code).http if status is None else status
        self.message = message
        self.headers = dict(headers or {})


class BadRequest(RequestFailed):
    """The body, or a field or parameter of it, is wrong; the text names it and says what would be right."""

    def __init__(self, message: str) -> None:
        super().__init__(None, message)


def unavailable(missing: str) -> RequestFailed:
    """The failure of a query that the system cannot answer now. missing: what it lacks."""
    text = f"the system cannot answer now: it lacks {missing}"
    return RequestFailed(None, text, code="unavailable", headers=retry_after("unavailable", None))


def let_go(*errors: BaseException) -> None:
    """Their frames keep the request, and may keep the errors themselves: without this, only a garbage collection would free them."""
    for error in errors:
        error.__traceback__ = error.__context__ = error.__cause__ = None


def failure_of(error: BaseException) -> RequestFailed | None:
    """The failure for an error that was to be expected, whose text names no subject or host; None for any other: a fault of ours."""
    match error:
        case RequestFailed():
            return error
        case Refused():
            return _of_refusal(error)
        case RegistrationFailed():
            return RequestFailed(422, str(error), code="unsatisfiable")
        case BadInput() if isinstance(error.__cause__, PayloadTooLarge):
            return RequestFailed(None, "the query is larger than the system takes", code="too_large")
        case BadInput() | BadTensor():
            return BadRequest(str(error))
        case Timeout():
            return RequestFailed(None, "the system did not answer in time", code="deadline")
        case NotConnected():
            return RequestFailed(None, "the system cannot be reached now", code="unavailable")
        case InfaasError():
            return RequestFailed(None, "the system's answer could not be used", code="internal")
    return None


def _of_refusal(refused: Refused) -> RequestFailed:
    more = {"code": refused.code, "closest": refused.closest, "retry_after_ms": refused.retry_after_ms}
    failure = RequestFailed(
        None,
        _RIGHT.sub(
            "the gateway's credentials on the bus do not allow this: ", _LIST.sub("/v2/models", refused.message)
        ),
        code=refused.code,
        headers=retry_after(refused.code, refused.retry_after_ms),
        more={name: value for name, value in more.items() if value is not None},
    )
    failure.passed_on = True
    return failure
