"""After a change: until this gateway knows of it, so that whoever made it finds it here with the next request."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from bus.messages.catalog import AppRecord
from bus.subjects import WITHOUT_APP, Subjects
from infaas.answers import Answer
from infaas.client import Client
from infaas.errors import InfaasError, Refused
from services.core.catalog import Catalog
from services.core.settings import GatewaySettings
from services.core.trace import Span
from services.core.trace import read as read_trace
from services.gateway.actor import Close, Gateway, Serve
from services.gateway.errors import RequestFailed, failure_of, unavailable, without_subjects
from services.gateway.metrics import RequestCounts
from services.gateway.statistics import Statistics
from services.shell.clock import now

PATIENCE = 2.0  # s; the change is made, whatever is known here by then
STEP = 0.005


async def wait_until(known: Callable[[], bool]) -> None:
    """Return once `known()`, or when it takes too long."""
    ends = time.monotonic() + PATIENCE
    while not known() and time.monotonic() < ends:  # noqa: ASYNC110  (the catalogue is not asyncio's)
        await asyncio.sleep(STEP)


# -- What every protocol goes through to the system: one way in, whatever a client speaks.


class GatewayService:
    """The system as protocols see it. `actor`: whose catalogue and heartbeats these are; set by whoever makes it."""

    actor: Gateway

    def __init__(self, settings: GatewaySettings, client: Client) -> None:
        self.settings = settings
        self.client = client
        self.listening = False
        self.draining = False
        self.statistics = Statistics()
        self.traffic = RequestCounts()
        self.span: Callable[[Span], None] = _nobody  # told of what was done for a traced query

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

    def not_ready(self, now: float) -> str:
        """Why a probe of readiness fails, in words; empty when it passes."""
        if self.draining:
            return "it is being stopped"
        return self.actor.missing(now) if self.listening else "its servers, which do not listen yet"

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
        """One query. inputs: a map of input names to tensors (datatype, shape, data) or nested lists. Raises RequestFailed."""
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
            problem = failure_of(error)
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
            self._ended(app, protocol, spent, RequestFailed(None, end.message, code=end.code))
        else:
            self.traffic.queries[protocol, "ok"] += 1
            self.statistics.answered(app or WITHOUT_APP, end, _items(inputs), spent, now())
        return end

    def _ended(self, app: str | None, protocol: str, ns: float, problem: RequestFailed) -> RequestFailed:
        """A query without an answer."""
        self.traffic.queries[protocol, problem.code] += 1
        if app is not None and self.actor.catalog.app(app) is not None:
            self.statistics.refused(app, ns, now())
        return problem

    async def command(self, verb: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        """An operator's verb, as `infaas.admin.<verb>`. Raises Refused, RequestFailed."""
        try:
            return await self.client.admin(verb, **fields)
        except Refused as refused:
            raise without_subjects(refused) from None
        except InfaasError as error:
            raise failure_of(error) from error


def _nobody(span: Span) -> None:
    """Where no spans are wanted."""


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


# -- A gateway's hands: opens and closes its servers with the actor's life.


class Server(Protocol):
    """One protocol's server."""

    async def open(self) -> None:
        """Listen. Raises OSError."""

    async def close(self, grace: float) -> None:
        """Take nothing new, finish what is under way within so many seconds, close."""


class GatewayEdge:
    """servers: opened in this order, closed side by side."""

    def __init__(self, door: GatewayService, servers: list[Server]) -> None:
        self._door = door
        self._closed = list(servers)
        self._open: list[Server] = []

    async def perform(self, command: Any) -> Any:
        match command:
            case Serve():
                await self._serve()
            case Close(grace):
                await self._close(grace)
            case _:
                raise TypeError(f"a gateway has no {type(command).__name__}")

    async def _serve(self) -> None:
        while self._closed:  # none where the actor was started again: its servers never stopped
            await self._closed[0].open()
            self._open.append(self._closed.pop(0))
        self._door.listening = True

    async def _close(self, grace: float) -> None:
        self._door.draining = True
        notice = min(self._door.settings.drain_s, grace)
        if self._open:
            await asyncio.sleep(notice)  # whoever deals requests out sees that it is not ready, and goes elsewhere
        await asyncio.gather(*(server.close(grace - notice) for server in self._open))
        self._open.clear()
        await self._door.client.close()
