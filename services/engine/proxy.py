"""Decides about each request, asks the engine, and shows a part of its answer. Refusals and changes of labels are logged.

The engine is asked over its unix socket: one connection a request, no redirects, limits in bytes and time.
"""

import asyncio
import hmac
import json
import logging
import signal
from collections.abc import Iterable
from typing import Any, NamedTuple

import h11

from services.core.metric import MetricFamily, counter
from services.core.settings import Settings
from services.engine.allow import (
    AllowedRequest,
    Denied,
    NotStrict,
    Unexpected,
    allowed_request,
    label_change,
    strict_json,
    view,
)
from services.shell.http import HttpListener, HttpProblem, Pages, Reply, Request, plain, serve_pages, state_page
from services.shell.metrics.counts import process_families
from services.shell.runtime import telemetry

log = logging.getLogger(__name__)

# clients choose the API's version by them
_HEADERS = ("api-version", "builder-version", "docker-experimental", "ostype", "swarm")
_BROWSERS = ("origin", "sec-fetch-site")  # sent for web pages
_STALE = "rpc error: code = Unknown desc = update out of sequence"  # the engine's text, which clients look for
_MESSAGE_LIMIT = 1000  # characters of a message of the engine


_PIECE = 64 * 2**10
MOST = 64 * 2**20  # bytes of an answer


class EngineAway(Exception):
    """The engine does not answer, or not as it should. The text says what happened."""


class EngineReply(NamedTuple):
    """An answer of the engine. headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


class EngineClient:
    """socket: path of the engine's socket. patience_s: for a whole answer."""

    def __init__(self, socket: str, patience_s: float = 10.0) -> None:
        self._socket = socket
        self._patience = patience_s

    async def ask(self, method: str, target: str, body: bytes = b"") -> EngineReply:
        """One request. body: JSON. Raises EngineAway."""
        try:
            async with asyncio.timeout(self._patience):
                return await self._ask(method, target, body)
        except TimeoutError as error:
            raise EngineAway(f"the engine did not answer within {self._patience:g} s") from error
        except h11.RemoteProtocolError as error:
            raise EngineAway(f"the engine's answer cannot be read: {error}") from error
        except OSError as error:
            raise EngineAway(f"the engine cannot be reached at {self._socket}: {error.strerror or error}") from error

    async def _ask(self, method: str, target: str, body: bytes) -> EngineReply:
        reader, writer = await asyncio.open_unix_connection(self._socket)
        try:
            http = h11.Connection(h11.CLIENT)
            headers = [("Host", "docker"), ("User-Agent", "infaas-engine-proxy"), ("Connection", "close")]
            if body:
                headers += [("Content-Type", "application/json"), ("Content-Length", str(len(body)))]
            writer.write(http.send(h11.Request(method=method, target=target, headers=headers)) or b"")
            if body:
                writer.write(http.send(h11.Data(data=body)) or b"")
            writer.write(http.send(h11.EndOfMessage()) or b"")
            await writer.drain()
            return await _read(http, reader)
        finally:
            writer.close()


async def _read(http: h11.Connection, reader: asyncio.StreamReader) -> EngineReply:
    status, headers, body = 0, {}, bytearray()
    while True:
        event = http.next_event()
        if event is h11.NEED_DATA:
            http.receive_data(await reader.read(_PIECE))
        elif isinstance(event, h11.Response):
            status = event.status_code
            headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        elif isinstance(event, h11.Data):
            body += event.data
            if len(body) > MOST:
                raise EngineAway(f"the engine's answer has more than {MOST} bytes")
        elif isinstance(event, h11.EndOfMessage):
            return EngineReply(status, headers, bytes(body))
        elif not isinstance(event, h11.InformationalResponse):
            raise EngineAway("the engine closed the connection without an answer")


class Proxy:
    """token: what a client must show; empty: nothing."""

    def __init__(self, engine: EngineClient, token: str = "") -> None:
        self._engine = engine
        self._token = token.encode()
        self.passed = self.refused = self.failed = self.changes = 0

    async def answer(self, request: Request) -> Reply:
        """The reply to one request."""
        try:
            route = allowed_request(request.method, request.target)
            self._admit(route, request)
            reply = await (self._update(route, request) if route.node else self._read(route))
        except Denied as denied:
            return self.refuse(denied, request)
        except EngineAway as error:
            self.failed += 1
            log.error("the engine does not answer: %s", error)
            return problem_reply(502, f"engine proxy: {error}")
        except Unexpected as error:
            self.failed += 1
            log.error("the engine answers something else than expected: %s", error, extra={"path": route.path})
            return problem_reply(502, f"engine proxy: the engine answered something else than expected: {error}")
        self.passed += 1
        return reply

    def refuse(self, denied: Denied | HttpProblem, request: Request) -> Reply:
        """The reply to a request that is not let through. It is counted and logged."""
        self.refused += 1
        about = {"client": request.client, "method": request.method[:20], "target": request.target[:200]}
        log.warning("refused", extra={**about, "status": denied.status, "reason": str(denied)})
        return problem_reply(denied.status, str(denied))

    async def missing(self) -> str:
        """What the proxy lacks to do its work, in words; empty when it is ready."""
        try:
            answer = await self._engine.ask("GET", "/info")
            swarm = _json(answer).get("Swarm") or {}
        except (EngineAway, Unexpected, AttributeError) as error:
            return f"the engine: {error}"
        return "" if swarm.get("ControlAvailable") else "a manager: this engine manages no swarm"

    def _admit(self, route: AllowedRequest, request: Request) -> None:
        headers = request.headers
        if "upgrade" in headers or "upgrade" in headers.get("connection", "").lower():
            raise Denied("the engine proxy hands no connection over")
        if any(name in headers for name in _BROWSERS):
            raise Denied("web pages may not ask the engine proxy")
        if self._token and not route.free:
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self._token):
                raise Denied("this needs the engine proxy's token: Authorization: Bearer TOKEN", 401)
        if not route.node and request.body:
            raise Denied("a request that reads has no body")
        if route.node and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Denied("the spec of a node is sent as Content-Type: application/json")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Denied("the engine proxy reads no compressed bodies")

    async def _read(self, route: AllowedRequest) -> Reply:
        answer = await self._engine.ask(route.method, route.target)
        if answer.status != 200:
            return _error(answer)
        if route.path == "/_ping":
            return Reply(200, b"OK" if route.method == "GET" else b"", _headers(answer), "text/plain; charset=utf-8")
        return Reply(200, json.dumps(view(route.path)(_json(answer))).encode() + b"\n", _headers(answer))

    async def _update(self, route: AllowedRequest, request: Request) -> Reply:
        try:
            asked = strict_json(request.body)
        except NotStrict as error:
            raise Denied(f"the spec of a node: {error}") from error
        answer = await self._engine.ask("GET", f"{route.prefix}/nodes/{route.node}")
        if answer.status != 200:
            return _error(answer)
        node = _json(answer)
        try:
            id_, index, spec, name = node["ID"], node["Version"]["Index"], node["Spec"], node["Description"]["Hostname"]
        except (KeyError, TypeError) as error:
            raise Unexpected("a node was expected") from error
        if index != route.revision:
            return problem_reply(500, _STALE)
        wanted = label_change(spec, asked)
        # The engine takes it only at this version, so what was compared is what is replaced.
        target = f"{route.prefix}/nodes/{id_}/update?version={index}"
        answer = await self._engine.ask("POST", target, json.dumps(wanted.spec).encode())
        if answer.status != 200:
            return _error(answer)
        self.changes += 1
        about = {"client": request.client, "node": id_, "hostname": name, "version": index}
        log.info("labels of a node were changed", extra={**about, "set": wanted.set, "removed": wanted.removed})
        return Reply(200, b"", _headers(answer))


def _json(answer: EngineReply) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Unexpected("JSON was expected") from error


def _headers(answer: EngineReply) -> tuple[tuple[str, str], ...]:
    return tuple((name.title(), answer.headers[name]) for name in _HEADERS if name in answer.headers)


def _error(answer: EngineReply) -> Reply:
    """The engine's refusal. Raises Unexpected for a status below 400: redirects are not passed on."""
    if answer.status < 400:
        raise Unexpected(f"it answered with status {answer.status}")
    try:
        message = str(json.loads(answer.body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = "the engine did not say why"
    return problem_reply(answer.status, message[:_MESSAGE_LIMIT])._replace(headers=_headers(answer))


def problem_reply(status: int, message: str) -> Reply:
    """A reply that says what is wrong, as the engine does: its clients show `message`."""
    return Reply(status, json.dumps({"message": message}).encode() + b"\n")


# -- the process: `infaas run engine-proxy`

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_GRACE_S = 5.0


def serve(settings: Settings) -> int:
    """Serve until SIGTERM or Ctrl-C; returns the exit code. Raises SystemExit with the reason if it cannot listen."""
    telemetry.set_up(settings.log_level, "engine-proxy")
    return asyncio.run(_main(settings))


async def _main(settings: Settings) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    asked = settings.engine
    proxy = Proxy(EngineClient(asked.socket), asked.token)
    listener = HttpListener(proxy.answer, proxy.refuse)
    try:
        await listener.open(asked.address, asked.port)
    except OSError as error:
        reason = error.strerror or error
        raise SystemExit(
            f"cannot listen on {asked.address}:{asked.port}: {reason}; set engine.address or engine.port"
        ) from error
    metrics = await _pages(settings, proxy)
    log.info("the engine proxy runs", extra={"address": asked.address, "port": listener.port, "socket": asked.socket})
    if not asked.token and asked.address not in _LOOPBACK:
        log.warning(
            "anybody who reaches this address may read the swarm and set labels infaas.*: engine.token is not set"
        )
    if missing := await proxy.missing():
        log.warning("not ready: it lacks %s", missing)
    await stop.wait()
    await listener.close(_GRACE_S)
    if metrics is not None:
        await metrics.close(0.0)
    log.info("the engine proxy stopped")
    return 0


async def _pages(settings: Settings, proxy: Proxy) -> HttpListener | None:
    """Serve /healthz, /readyz, /startz and /metrics at `metrics.port`, as every service does."""
    up = False

    async def health(_: str) -> Reply:
        return plain(200, "ok\n")

    async def ready(_: str) -> Reply:
        nonlocal up
        missing = await proxy.missing()
        up = up or not missing
        return state_page("ready", [missing] if missing else [])

    async def startup(accept: str) -> Reply:
        """200 from the first readiness on: an update of a proxy that cannot reach the socket must not count as done."""
        return plain(200, "up\n") if up else await ready(accept)

    async def metrics(accept: str) -> Reply:
        from services.shell.metrics.exposition import page  # noqa: PLC0415  (prometheus_client: only where somebody asks)

        return page([*process_families(), *families(proxy)], settings.metrics.series, accept)

    pages: Pages = {"/healthz": health, "/readyz": ready, "/startz": startup, "/metrics": metrics}
    asked = settings.metrics
    if not asked.enabled or not asked.port:
        return None
    try:
        return await serve_pages(asked.host, asked.port, pages)
    except OSError as error:
        raise SystemExit(f"cannot listen on {asked.host}:{asked.port} (metrics.port): {error.strerror}") from error


def families(proxy: Proxy) -> Iterable[MetricFamily]:
    """The proxy's own metrics."""
    ended = {"passed": proxy.passed, "refused": proxy.refused, "failed": proxy.failed}
    return (
        counter("infaas_engine_requests_total", "Requests to the engine proxy, by what became of them.").add_all(
            ended, "outcome"
        ),
        counter("infaas_engine_label_changes_total", "Nodes whose labels were changed.").add(proxy.changes),
    )
