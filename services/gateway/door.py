"""What every protocol goes through to the system: one way in, whatever a client speaks."""

import re
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from bus.messages.catalog import AppRecord
from bus.port import PayloadTooLarge
from bus.subjects import WITHOUT_APP, Subjects
from infaas.answers import Answer
from infaas.client import Client
from infaas.errors import BadInput, InfaasError, NotConnected, Refused, Timeout
from services.core.catalog import Catalog
from services.core.settings import GatewaySettings
from services.core.trace import Span
from services.core.trace import read as read_trace
from services.gateway.actor import Gateway
from services.gateway.codes import called, retry_after
from services.gateway.statistics import Statistics
from services.gateway.traffic import Traffic
from services.shell.clock import now

_SUBJECT = re.compile(r"see infaas\.[\w.]+, or |: see infaas\.[\w.]+\Z")  # as the system's own advice has them
_RIGHT = re.compile(r"our credentials have no right to \S+: ")  # as the client library says it


class Problem(Exception):
    """A request that ends here: status for HTTP, code as in codes.py, a sentence for whoever sent it, and more beside it."""

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
        self.status = called(code).http if status is None else status
        self.message = message
        self.headers = dict(headers or {})


class Door:
    """The system as protocols see it. `actor`: whose catalogue and heartbeats these are; set by whoever makes it."""

    actor: Gateway

    def __init__(self, settings: GatewaySettings, client: Client) -> None:
        self.settings = settings
        self.client = client
        self.listening = False
        self.draining = False
        self.statistics = Statistics()
        self.traffic = Traffic()
        self.span: Callable[[Span], None] = _nobody  # told of what was done for a traced query
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
        if missing := self.actor.missing(now()):
            raise self._ended(app, protocol, 0.0, unavailable(missing))
        if app is not None and len(inputs) == 1 and (record := self.actor.catalog.app(app)) is not None:
            inputs = _alone(inputs, record)
        trace = read_trace({"traceparent": traceparent}) if traceparent is not None else None
        ours = secrets.token_hex(8) if trace is not None else ""
        onward = None if trace is None else trace.headers(ours)["traceparent"]
        began, began_at = time.perf_counter_ns(), now()
        code = "internal"
        try:
            end = await self.client.query(
                app, inputs, timeout=timeout, raise_refused=False, traceparent=onward, **needs
            )
            code = end.code if isinstance(end, Refused) else ""
        except InfaasError as error:
            problem = problem_of(error)
            code = problem.code
            raise self._ended(app, protocol, time.perf_counter_ns() - began, problem) from error
        finally:
            if trace is not None and trace.recorded:
                about = {"infaas.app": app or WITHOUT_APP, "infaas.protocol": protocol}
                name = "infaas gateway"
                self.span(
                    Span(
                        trace=trace,
                        span=ours,
                        name=name,
                        kind="server",
                        start=began_at,
                        end=now(),
                        attributes=about,
                        error=code,
                    )
                )
        spent = time.perf_counter_ns() - began
        if isinstance(end, Refused):
            end = without_subjects(end)
            self._ended(app, protocol, spent, Problem(None, end.message, code=end.code))
        else:
            self.asked[protocol, "ok"] += 1
            self.statistics.answered(app or WITHOUT_APP, end, _items(inputs), spent, now())
        return end

    def _ended(self, app: str | None, protocol: str, ns: float, problem: Problem) -> Problem:
        """A query without an answer."""
        self.asked[protocol, problem.code] += 1
        if app is not None and self.actor.catalog.app(app) is not None:
            self.statistics.refused(app, ns, now())
        return problem

    async def command(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """An operator's verb, as `infaas.admin.<verb>`. Raises Refused, Problem."""
        try:
            return await self.client.admin(verb, **fields)
        except Refused as refused:
            raise without_subjects(refused) from None
        except InfaasError as error:
            raise problem_of(error) from error


def _nobody(span: Span) -> None:
    """Where no spans are wanted."""


def unavailable(missing: str) -> Problem:
    """The system cannot answer now: what it lacks, and when to come back."""
    text = f"the system cannot answer now: it lacks {missing}"
    return Problem(None, text, code="unavailable", headers=retry_after("unavailable", None))


def _alone(inputs: Any, record: AppRecord) -> Any:
    """The only tensor of a model with one input needs no name on the bus, which spares the dispatcher a map."""
    signature = record.signature
    if not isinstance(inputs, Mapping) or signature is None or len(signature.inputs) != 1:
        return inputs
    return inputs.get(signature.inputs[0].name, inputs)


def _items(inputs: Any) -> int:
    """Of a query that was answered: the length of its first axis."""
    while isinstance(inputs, Mapping):
        if isinstance(inputs.get("shape"), list):
            return int(inputs["shape"][0])
        inputs = next(iter(inputs.values()))
    return len(inputs)


def without_subjects(refused: Refused) -> Refused:
    """The refusal in words for those who do not see the bus."""
    text = _RIGHT.sub("the gateway's credentials on the bus do not allow this: ", _SUBJECT.sub("", refused.message))
    if text == refused.message:
        return refused
    return Refused(refused.code, text, closest=refused.closest, retry_after_ms=refused.retry_after_ms, id=refused.id)


def problem_of(error: InfaasError) -> Problem:
    """What the client library could not do, in words that name no subject or host."""
    if isinstance(error, BadInput):
        if isinstance(error.__cause__, PayloadTooLarge):
            return Problem(None, "the query is larger than the system takes", code="too_large")
        return Problem(None, str(error))
    if isinstance(error, Timeout):
        return Problem(None, "the system did not answer in time", code="deadline")
    if isinstance(error, NotConnected):
        return Problem(None, "the system cannot be reached now", code="unavailable")
    return Problem(None, "the system's answer could not be used", code="internal")
