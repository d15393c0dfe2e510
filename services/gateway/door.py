"""What every protocol goes through to the system: one way in, whatever a client speaks."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from bus.subjects import Subjects
from infaas.answers import Answer
from infaas.client import Client
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout
from services.core.catalog import Catalog
from services.gateway.actor import Gateway
from services.gateway.codes import called
from services.shell.clock import now
from services.shell.sections import GatewaySettings


class Problem(Exception):
    """A request that ends here: status for HTTP, code as in codes.py, and a sentence for whoever sent it."""

    def __init__(
        self,
        status: int | None,
        message: str,
        *,
        code: str = "bad_request",
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.code = code
        self.status = called(code).http if status is None else status
        self.message = message
        self.headers = dict(headers or {})


class Door:
    """The system as protocols see it. `actor`: whose catalogue and heartbeats these are; set by whoever makes it."""

    actor: Gateway

    def __init__(self, settings: GatewaySettings, client: Client) -> None:
        self.settings = settings
        self.client = client
        self.draining = False
        self.asked: Counter[tuple[str, str]] = Counter()  # by protocol, and refusal code or "ok"

    @property
    def subjects(self) -> Subjects:
        return self.client.subjects

    @property
    def catalog(self) -> Catalog:
        """The catalogue as last told; read only."""
        return self.actor.catalog

    @property
    def missing(self) -> str:
        """Why queries cannot be answered now, in words; empty when they can."""
        return "it is being stopped" if self.draining else self.actor.missing(now())

    @property
    def ready(self) -> bool:
        """Whether a query can be answered: a dispatcher is there, the catalogue is known, nobody stops us."""
        return not self.missing

    async def ask(
        self,
        app: str | None,
        inputs: Any,
        needs: Mapping[str, Any],
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        protocol: str,
    ) -> Answer | Refused:
        """One query. inputs: a map of input names to tensors (datatype, shape, data) or nested lists. Raises Problem."""
        missing = self.actor.missing(now())
        if missing:
            raise Problem(None, f"the system cannot answer yet: it lacks {missing}", code="unavailable")
        try:
            end = await self.client.query(
                app, inputs, timeout=timeout, raise_refused=False, traceparent=traceparent, **needs
            )
        except InfaasError as error:
            problem = problem_of(error)
            self.asked[protocol, problem.code] += 1
            raise problem from error
        self.asked[protocol, end.code if isinstance(end, Refused) else "ok"] += 1
        return end

    async def command(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """An operator's verb, as `infaas.admin.<verb>`. Raises Refused, Problem."""
        try:
            return await self.client.admin(verb, **fields)
        except Refused:
            raise
        except InfaasError as error:
            raise problem_of(error) from error


def problem_of(error: InfaasError) -> Problem:
    """What the client library could not do, in words that name no subject or host."""
    if isinstance(error, BadInput):
        return Problem(None, str(error))
    if isinstance(error, Timeout):
        return Problem(None, "the system did not answer in time", code="deadline")
    if isinstance(error, NotConnected):
        return Problem(None, "the system cannot be reached now", code="unavailable")
    return Problem(None, "the system's answer could not be used", code="internal")
