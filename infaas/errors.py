"""The exceptions of the client. All are subclasses of `InfaasError`, and their texts say what to do."""

import re
from collections.abc import Mapping
from typing import Any


class InfaasError(Exception):
    """Base of all exceptions of this package."""


class NotConnected(InfaasError, ConnectionError):
    """No system could be reached, or the connection is closed."""


class Timeout(InfaasError, TimeoutError):
    """No reply came in time, even though the request was sent again."""


class BadInput(InfaasError, ValueError):
    """The inputs cannot be sent. Nothing was sent."""


class RegistrationFailed(InfaasError):
    """A registration failed or was cancelled. `status` is its last RegistrationStatus, with `reason` and `failures`."""

    def __init__(self, status: Any) -> None:
        reason = "" if status.state == "cancelled" else f" failed: {status.reason or 'no reason was given'}"
        super().__init__(f"registration {status.registration}{reason or ' was cancelled'}")
        self.status = status


class Refused(InfaasError):
    """The system refused a request.

    code: bad_request, unknown_app, unknown_model, unsatisfiable, deadline, overloaded, model_error, too_large or forbidden; the list
    may grow. closest: the variant that comes closest to the requirements (model, variant, accuracy, latency_ms, cost).
    retry_after_ms: time after which another try may succeed. id: the caller's id of the query. field: of the request, where programs go by it.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        closest: Mapping[str, Any] | None = None,
        retry_after_ms: float | None = None,
        id: str | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(code, message)
        self.code = code
        self.message = message
        self.closest = None if closest is None else dict(closest)
        self.retry_after_ms = retry_after_ms
        self.id = id
        self.field = field

    @property
    def told(self) -> str:
        """As the system said it, in the names of the bus; `str` names the calls of Python instead."""
        return f"{self.code}: {self.message}"

    def __str__(self) -> str:
        return re.sub(r"\binfaas\.(?:list\.([a-z]+)|(admin)\.([a-z-]+))", _call, self.told)

    @classmethod
    def from_map(cls, reply: Mapping[str, Any]) -> "Refused":
        """The exception for a Refusal of the wire. Missing and unknown fields are accepted."""
        error = reply.get("error")
        if not isinstance(error, Mapping):
            return cls("bad_reply", f"the system refused without a reason: {error!r}")
        return cls(
            str(error.get("code", "bad_reply")),
            str(error.get("message", "")),
            closest=error.get("closest"),
            retry_after_ms=error.get("retry_after_ms"),
            id=reply.get("id"),
            field=error.get("field"),
        )

    def to_map(self) -> dict[str, Any]:
        """The Refusal as a map (docs/contract.md, section 2)."""
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.closest is not None:
            error["closest"] = self.closest
        if self.retry_after_ms is not None:
            error["retry_after_ms"] = self.retry_after_ms
        if self.field is not None:
            error["field"] = self.field
        return {"id": self.id, "error": error}


def _call(subject: re.Match[str]) -> str:
    what, admin, verb = subject.groups()
    return f"{admin}({verb!r})" if admin else f"{what}()"


def denied(subject: str) -> Refused:
    """The refusal for a subject that the credentials may not publish to."""
    return Refused("forbidden", f"our credentials have no right to {subject}: ask an operator (infaas auth)")
