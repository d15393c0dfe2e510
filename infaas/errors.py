"""What can go wrong for a caller, one exception each, all below `InfaasError`; texts say what to do."""

from collections.abc import Mapping
from typing import Any


class InfaasError(Exception):
    """Base of everything this package raises on purpose."""


class NotConnected(InfaasError, ConnectionError):
    """No system can be reached, or the connection was closed."""


class Timeout(InfaasError, TimeoutError):
    """No reply came in time, although the request was sent again."""


class BadInput(InfaasError, ValueError):
    """The inputs cannot be sent as they are; nothing was sent."""


class RegistrationFailed(InfaasError):
    """A registration came to nothing; `status` is its last RegistrationStatus, with the reason and what failed."""

    def __init__(self, status: Any) -> None:
        super().__init__(f"registration {status.registration} failed: {status.reason or 'no reason was given'}")
        self.status = status


class Refused(InfaasError):
    """The system's typed refusal.

    code: one of bad_request, unknown_app, unknown_model, unsatisfiable, deadline, overloaded, model_error, too_large,
    forbidden (the list may grow). closest: the variant that comes nearest to what was asked (model, variant, accuracy,
    latency_ms, cost). retry_after_ms: worth trying again after that. id: the caller's own label.
    """

    def __init__(
        self,
        code: str,
        message: str,
        *,
        closest: Mapping[str, Any] | None = None,
        retry_after_ms: float | None = None,
        id: str | None = None,
    ) -> None:
        super().__init__(f"{code}: {message}")
        self.code = code
        self.message = message
        self.closest = None if closest is None else dict(closest)
        self.retry_after_ms = retry_after_ms
        self.id = id

    @classmethod
    def from_map(cls, reply: Mapping[str, Any]) -> "Refused":
        """The exception of a Refusal as it came; missing or foreign fields do not hide the code."""
        error = reply.get("error")
        if not isinstance(error, Mapping):
            return cls("bad_reply", f"the system refused without a reason: {error!r}")
        return cls(
            str(error.get("code", "bad_reply")),
            str(error.get("message", "")),
            closest=error.get("closest"),
            retry_after_ms=error.get("retry_after_ms"),
            id=reply.get("id"),
        )

    def to_map(self) -> dict[str, Any]:
        """The Refusal as the contract spells it."""
        error: dict[str, Any] = {"code": self.code, "message": self.message}
        if self.closest is not None:
            error["closest"] = self.closest
        if self.retry_after_ms is not None:
            error["retry_after_ms"] = self.retry_after_ms
        return {"id": self.id, "error": error}


def denied(subject: str) -> Refused:
    """NATS does not let us publish there."""
    return Refused("forbidden", f"our credentials have no right to {subject}: ask an operator (infaas auth)")
