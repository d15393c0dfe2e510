"""A gateway's outside: queries and commands to the system for every protocol, and the servers that open and close with the actor."""

import asyncio
import logging
import secrets
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import cached_property
from importlib import metadata as packages
from typing import Any, NamedTuple, Protocol

from msgspec import to_builtins

from bus.messages.catalog import AppRecord
from bus.messages.events import CLIENT_ERRORS, ClientError, Event, OutcomeEvent
from bus.messages.verbs import AdminVerb
from bus.subjects import WITHOUT_APP, Subjects
from infaas.answers import Answer
from infaas.client import Client
from infaas.errors import InfaasError
from infaas.queries import reply_within
from services.core.catalog import Catalog
from services.core.metric import MetricFamily
from services.core.settings import GatewaySettings
from services.core.trace import Span
from services.core.trace import read as read_trace
from services.gateway.actor import AwaitClientErrors, Close, Gateway, RequestCounts, Serve
from services.gateway.errors import RequestFailed, failure_of, retry_after, unavailable
from services.gateway.statistics import Statistics
from services.shell.metrics.system import SystemPage
from services.shell.runtime.runtime import unix_now

log = logging.getLogger(__name__)

CATALOG_WAIT_S = 2.0  # longest wait for a change to reach this gateway's catalogue; the change itself is made
CATALOG_POLL_S = 0.005
CATCH_UP_S = 30.0  # longest wait of a successor for what it needs to answer
CLOSE_S = 1.0  # of its grace, for a gateway with a successor to close what clients have left open
UNNOTICED_S = 0.01  # s that a request may wait in this process
GATHER_S = 1.0  # in which client errors are put together before they are recorded
MOST_NAMES = 1000  # different client errors that are held
NAME_LENGTH = 64  # characters of an app's name

BEHIND = RequestFailed(
    None,
    "the gateway is behind with its requests, and could not pass this one on in time: ask again later",
    code="overloaded",
    headers=retry_after("overloaded", 1000.0),
    more={"code": "overloaded", "retry_after_ms": 1000.0},
)


class SystemReadiness(NamedTuple):
    """ready: queries can be answered. missing: what the system lacks, in words, also what queries do not need."""

    ready: bool
    missing: str


class GatewayService:
    """The system as every protocol sees it.

    actor: holds the catalogue; set by whoever makes it. counts, statistics: of requests and queries, for metrics and Triton's
    statistics. client_errors: what clients did wrong and no dispatcher has seen. span: takes the spans of traced queries. record: takes events for the history. families: all metrics of this process. dashboard: its URL; empty: there is none.
    page: of the system that the gateway is a part of, if one supervisor runs it.
    """

    actor: Gateway

    def __init__(self, settings: GatewaySettings, client: Client) -> None:
        self.settings = settings
        self.client = client
        self.listening = False
        self.draining = False
        self.statistics = Statistics(lambda app: app == WITHOUT_APP or self.actor.catalog.app(app) is not None)
        self.counts = RequestCounts()
        self.client_errors = ClientErrorLog()
        self.span: Callable[[Span], None] = _discard
        self.record: Callable[[Event], None] = _discard
        self.families: Callable[[], Iterable[MetricFamily]] = tuple
        self.dashboard = ""
        self.page: SystemPage | None = None

    @cached_property
    def version(self) -> str:
        """Of this package."""
        try:
            return packages.version("infaas")
        except packages.PackageNotFoundError:
            return "0"

    @property
    def subjects(self) -> Subjects:
        return self.client.subjects

    @property
    def catalog(self) -> Catalog:
        """The catalogue's present state; read only."""
        return self.actor.catalog

    def not_ready(self, now: float) -> str:
        """Why this process is not ready, in words; empty when it is."""
        if self.draining:
            return "it is being stopped"
        return self.actor.not_ready(now) if self.listening else "servers that listen"

    async def readiness(self) -> SystemReadiness:
        """What every door says of the system: what its supervisor's page says (`services/shell/host/watch.py`), where it has one, and what this process lacks.

        What it lacks may only follow from what the page names: without a monitor no executor is known to live.
        """
        found = (await self.page.missing() if self.page is not None else None) or []
        ours = self.not_ready(unix_now())
        words = ([ours] if ours else []) + [one.what for one in found]
        return SystemReadiness(not ours and not any(one.serves for one in found), "; ".join(words))

    async def query(
        self,
        app: str | None,
        inputs: Any,
        requirements: Mapping[str, Any],
        *,
        timeout: float | None = None,
        traceparent: str | None = None,
        protocol: str,
        complete: float | None = None,
    ) -> Answer:
        """The answer to one query.

        app: None where the requirements name a model. inputs: input names to tensors (datatype, shape, data) or nested lists.
        requirements: as the client library takes them. timeout: seconds. protocol: its name in metrics. complete: when the request had been read, in Unix
        seconds: where this process is behind, its objective counts from then. Raises RequestFailed, also of refusals.
        """
        if missing := self.actor.missing(unix_now()):
            raise self._ended(app, protocol, 0.0, unavailable(missing))
        if app is not None and len(inputs) == 1 and (record := self.actor.catalog.app(app)) is not None:
            inputs = _unnamed(inputs, record)
        trace = read_trace({"traceparent": traceparent}) if traceparent is not None else None
        ours = secrets.token_hex(8) if trace is not None else ""
        onward = None if trace is None else trace.headers(ours)["traceparent"]
        began, began_at = time.perf_counter_ns(), unix_now()
        code = "internal"
        if complete is not None and began_at > complete + UNNOTICED_S:
            timeout = reply_within(requirements.get("deadline")) if timeout is None else timeout
            requirements = self._since(complete, app, requirements)
        try:
            answer: Answer = await self.client.query(app, inputs, timeout=timeout, traceparent=onward, **requirements)
            code = ""
        except InfaasError as error:
            failure = failure_from(error)
            code = failure.code
            raise self._ended(app, protocol, time.perf_counter_ns() - began, failure) from None
        except asyncio.CancelledError:
            code = "cancelled"
            self.counts.queries[protocol, code] += 1  # the client has left, and the query is taken back
            raise
        finally:
            if trace is not None and trace.recorded:
                self.span(
                    Span(
                        trace=trace,
                        span=ours,
                        name="infaas gateway",
                        kind="server",
                        start=began_at,
                        end=unix_now(),
                        attributes={"infaas.app": app or WITHOUT_APP, "infaas.protocol": protocol},
                        error=code,
                    )
                )
        spent = time.perf_counter_ns() - began
        self.counts.queries[protocol, "ok"] += 1
        self.statistics.answered(app or WITHOUT_APP, answer, _items(inputs), spent, unix_now())
        return answer

    def _since(self, complete: float, app: str | None, requirements: Mapping[str, Any]) -> Mapping[str, Any]:
        """The requirements with the deadline that the objective means for one who had asked by then."""
        record = None if app is None else self.actor.catalog.app(app)
        objective = requirements.get("latency_ms", None if record is None else record.latency_ms)
        if not isinstance(objective, int | float):
            return requirements
        due = complete + objective / 1000.0
        return {**requirements, "deadline": min(due, requirements.get("deadline", due))}

    def _ended(self, app: str | None, protocol: str, ns: float, failure: RequestFailed) -> RequestFailed:
        """Count a query without an answer."""
        self.counts.queries[protocol, failure.code] += 1
        if app is not None:
            self.statistics.refused(app, ns, unix_now())
        return failure

    def shed(self, app: str, protocol: str, objective_ms: float) -> None:
        """Count and record a query that gets `BEHIND` as its reply: no dispatcher sees it."""
        self._ended(app, protocol, 0.0, BEHIND)
        uid = secrets.token_bytes(16)
        self.record(
            OutcomeEvent(unix_now(), uid, None, app, "refused", code=BEHIND.code, latency_ms=0.0, slo_ms=objective_ms)
        )

    async def command(self, change: AdminVerb) -> dict[str, Any]:
        """Carry out an operator's verb, as `infaas.admin.<verb>` does. Raises InfaasError."""
        return await self.client.admin(**to_builtins(change))


class ClientErrorLog:
    """Requests that were wrong themselves, by second, app and code, until they are taken."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str | None, str]] = Counter()
        self._some = asyncio.Event()
        self._closed = asyncio.Event()

    def add(self, app: str | None, failure: RequestFailed, now: float) -> None:
        """Count a query without an answer, if it was wrong and did not reach a dispatcher. app: what was asked for. now: Unix seconds."""
        if failure.passed_on or failure.code not in CLIENT_ERRORS:
            return
        key = (int(now), app[:NAME_LENGTH] if app else None, failure.code)
        if key not in self._counts and len(self._counts) >= MOST_NAMES:
            key = (key[0], None, failure.code)
        self._counts[key] += 1
        self._some.set()

    async def take(self) -> list[ClientError]:
        """Wait for some, and then a second for more of them; empty once it is closed."""
        await self._some.wait()
        with suppress(TimeoutError):
            await asyncio.wait_for(self._closed.wait(), GATHER_S)
        counts, self._counts = self._counts, Counter()
        if not self._closed.is_set():
            self._some.clear()
        return [ClientError(time=second, app=app, code=code, count=n) for (second, app, code), n in counts.items()]

    def close(self) -> None:
        """Let whoever waits have what is left."""
        self._closed.set()
        self._some.set()


async def wait_until(known: Callable[[], bool]) -> None:
    """After a change: wait until this gateway's catalogue has it, so that the client's next request finds it; 2 s at most."""
    ends = time.monotonic() + CATALOG_WAIT_S
    while not known() and time.monotonic() < ends:  # noqa: ASYNC110  (the catalogue is not asyncio's)
        await asyncio.sleep(CATALOG_POLL_S)


def failure_from(error: BaseException, **about: Any) -> RequestFailed:
    """The failure for any error. The client gets no details of one that was not expected, only the number under which it is logged."""
    failure = failure_of(error)
    if failure is None:
        number = secrets.token_hex(6)
        log.error("a request failed", exc_info=error, extra={"request": number, **about})
        text = f"the gateway failed on this request; it was logged as {number}"
        failure = RequestFailed(None, text, code="internal")
    return failure


def _discard(_: Span | Event) -> None:
    """Where nothing is recorded."""


def _unnamed(inputs: Any, record: AppRecord) -> Any:
    """The tensor alone where the app has one input: the dispatcher then reads no map of names."""
    signature = record.signature
    if not isinstance(inputs, Mapping) or signature is None or len(signature.inputs) != 1:
        return inputs
    return inputs.get(signature.inputs[0].name, inputs)


def _items(inputs: Any) -> int:
    """How many items an answered query had: the length of its inputs' first axis."""
    while isinstance(inputs, Mapping):
        if isinstance(inputs.get("shape"), list):
            return int(inputs["shape"][0])
        inputs = next(iter(inputs.values()))
    return len(inputs)


class Server(Protocol):
    """One protocol's server."""

    async def open(self) -> None:
        """Listen. Raises OSError."""

    async def close(self, grace: float) -> None:
        """Refuse new requests, finish those under way within `grace` seconds, close."""

    async def retire(self, grace: float) -> None:
        """Before `close`: a successor has the address, so nothing is refused. Let clients go there, and finish, within `grace` seconds."""


class GatewayEdge:
    """Opens the servers in this order, and closes them together. succeeds: another gateway serves until this one can."""

    def __init__(self, service: GatewayService, servers: list[Server], *, succeeds: bool = False) -> None:
        self._service = service
        self._succeeds = succeeds
        self._closed = list(servers)
        self._open: list[Server] = []

    async def perform(self, command: Any) -> Any:
        match command:
            case Serve():
                await self._serve()
            case AwaitClientErrors():
                return await self._service.client_errors.take()
            case Close(grace, succeeded):
                if succeeded:
                    await asyncio.gather(*(server.retire(grace - 2 * CLOSE_S) for server in self._open))
                await self._close(CLOSE_S if succeeded else grace, notice=not succeeded)
            case _:
                raise TypeError(f"a gateway has no {type(command).__name__}")
        return None

    async def _serve(self) -> None:
        end = time.monotonic() + CATCH_UP_S
        while self._succeeds and self._service.actor.missing(unix_now()) and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(CATALOG_POLL_S)
        while self._closed:  # empty where the actor was started again: its servers never stopped
            await self._closed[0].open()
            self._open.append(self._closed.pop(0))
        self._service.listening = True

    async def _close(self, grace: float, *, notice: bool) -> None:
        self._service.draining = True
        told = min(self._service.settings.drain_s, grace) if notice else 0.0
        if self._open:
            await asyncio.sleep(told)  # a load balancer sees that it is not ready and sends requests elsewhere
        await asyncio.gather(*(server.close(grace - told) for server in self._open))
        self._open.clear()
        self._service.client_errors.close()
        await self._service.client.close()
