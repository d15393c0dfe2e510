"""Decides about each request, asks the engine, and shows a part of its answer. Refusals and changes of labels are logged.

The engine is asked over its unix socket: one connection a request, no redirects, limits in bytes and time.
"""

import asyncio
import hmac
import json
import logging
import signal
from collections.abc import Iterable
from typing import Any

from msgspec.structs import replace

from services.core.metric import MetricFamily, counter
from services.core.settings import GatewaySettings, Settings
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
from services.shell.http.handler import HttpHandler
from services.shell.http.messages import JSON, Endpoint, HttpProblem, HttpReply, HttpRequest, JsonReply, TextReply
from services.shell.http.pages import LIMITS, NO_STORE, BadAnswer, HttpAnswer, Pages, ask, serve_pages, state_page
from services.shell.http.server import HttpServer
from services.shell.metrics.counts import process_families
from services.shell.runtime import telemetry

log = logging.getLogger(__name__)

# clients choose the API's version by them
_HEADERS = ("api-version", "builder-version", "docker-experimental", "ostype", "swarm")
_BROWSERS = ("origin", "sec-fetch-site")  # sent for web pages
_STALE = "rpc error: code = Unknown desc = update out of sequence"  # the engine's text, which clients look for
_MESSAGE_LIMIT = 1000  # characters of a message of the engine


class EngineAway(Exception):
    """The engine does not answer, or not as it should. The text says what happened."""


class EngineClient:
    """socket: path of the engine's socket. patience_s: for a whole answer."""

    def __init__(self, socket: str, patience_s: float = 10.0) -> None:
        self._socket = socket
        self._patience = patience_s

    async def ask(self, method: str, target: str, body: bytes = b"") -> HttpAnswer:
        """One request. body: JSON. Raises EngineAway."""
        try:
            async with asyncio.timeout(self._patience):
                return await ask(asyncio.open_unix_connection(self._socket), method, target, "docker", body)
        except TimeoutError as error:
            raise EngineAway(f"the engine did not answer within {self._patience:g} s") from error
        except BadAnswer as error:
            raise EngineAway(f"the engine: {error}") from error
        except OSError as error:
            raise EngineAway(f"the engine cannot be reached at {self._socket}: {error.strerror or error}") from error


class Proxy(HttpHandler):
    """token: what a client must show; empty: nothing. One request a connection: no request can hide behind another."""

    strict = True

    def __init__(self, engine: EngineClient, token: str = "", settings: GatewaySettings = LIMITS) -> None:
        super().__init__(settings)
        self._engine = engine
        self._token = token.encode()
        self.passed = self.refused = self.broken = self.changes = 0

    def check(self, request: HttpRequest) -> None:
        request.stays, request.more = False, NO_STORE
        route = allowed_request(request.method, _target(request))
        self._admit(route, request)
        request.endpoint = Endpoint(lambda request: self._pass(route, request))

    async def _pass(self, route: AllowedRequest, request: HttpRequest) -> HttpReply:
        if not route.node and request.body:
            raise Denied("a request that reads has no body")
        reply = await (self._update(route, request) if route.node else self._read(route))
        self.passed += 1
        return reply

    def failed(self, request: HttpRequest, error: Exception) -> HttpReply:
        """The reply to a request that is not let through, or not answered. It is counted and logged."""
        if isinstance(error, Denied | HttpProblem):
            self.refused += 1
            about = {"client": request.client, "method": request.method[:20], "target": _target(request)[:200]}
            reason = f"engine proxy: {error}" if isinstance(error, HttpProblem) else str(error)  # the server's own
            log.warning("refused", extra={**about, "status": error.status, "reason": reason})
            return problem_reply(error.status, reason)
        self.broken += 1
        expected = isinstance(error, EngineAway | Unexpected)
        log.error("no answer: %s", error, extra={"target": _target(request)}, exc_info=None if expected else error)
        return problem_reply(502, f"engine proxy: {error}" if expected else "engine proxy: its log says what failed")

    async def missing(self) -> str:
        """What the proxy lacks to do its work, in words; empty when it is ready."""
        try:
            answer = await self._engine.ask("GET", "/info")
            swarm = _json(answer).get("Swarm") or {}
        except (EngineAway, Unexpected, AttributeError) as error:
            return f"the engine: {error}"
        return "" if swarm.get("ControlAvailable") else "a manager: this engine manages no swarm"

    def _admit(self, route: AllowedRequest, request: HttpRequest) -> None:
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers.items()}
        if "upgrade" in headers.get("connection", "").lower():
            raise Denied("the engine proxy hands no connection over")
        if any(name in headers for name in _BROWSERS):
            raise Denied("web pages may not ask the engine proxy")
        if self._token and not route.free:
            scheme, _, shown = headers.get("authorization", "").partition(" ")
            if scheme.lower() != "bearer" or not hmac.compare_digest(shown.strip().encode(), self._token):
                raise Denied("this needs the engine proxy's token: Authorization: Bearer TOKEN", 401)
        if route.node and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
            raise Denied("the spec of a node is sent as Content-Type: application/json")
        if headers.get("content-encoding", "identity").lower() != "identity":
            raise Denied("the engine proxy reads no compressed bodies")

    async def _read(self, route: AllowedRequest) -> HttpReply:
        answer = await self._engine.ask(route.method, route.target)
        if answer.status != 200:
            return _error(answer)
        if route.path == "/_ping":
            return HttpReply([b"OK"], b"content-type: text/plain; charset=utf-8\r\n" + _headers(answer))
        return HttpReply([json.dumps(view(route.path)(_json(answer))).encode()], JSON + _headers(answer))

    async def _update(self, route: AllowedRequest, request: HttpRequest) -> HttpReply:
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
        return HttpReply([], JSON + _headers(answer))


def _target(request: HttpRequest) -> str:
    return request.target.decode("latin-1")


def _json(answer: HttpAnswer) -> Any:
    try:
        return json.loads(answer.body)
    except (ValueError, RecursionError) as error:
        raise Unexpected("JSON was expected") from error


def _headers(answer: HttpAnswer) -> bytes:
    return "".join(f"{name}: {answer.headers[name]}\r\n" for name in _HEADERS if name in answer.headers).encode(
        "latin-1"
    )


def _error(answer: HttpAnswer) -> HttpReply:
    """The engine's refusal. Raises Unexpected for a status below 400: redirects are not passed on."""
    if answer.status < 400:
        raise Unexpected(f"it answered with status {answer.status}")
    try:
        message = str(json.loads(answer.body)["message"])
    except (ValueError, KeyError, TypeError, RecursionError):
        message = "the engine did not say why"
    reply = problem_reply(answer.status, message[:_MESSAGE_LIMIT])
    reply.lines += _headers(answer)
    return reply


def problem_reply(status: int, message: str) -> HttpReply:
    """A reply that says what is wrong, as the engine does: its clients show `message`."""
    return JsonReply({"message": message}, status)


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
    listener = HttpServer(proxy, replace(LIMITS, address=asked.address, port=asked.port), of="engine")
    try:
        await listener.open()
    except OSError as error:
        raise SystemExit(f"cannot listen on {error}") from error
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


async def _pages(settings: Settings, proxy: Proxy) -> HttpServer | None:
    """Serve /healthz, /readyz, /startz and /metrics at `metrics.port`, as every service does."""
    up = False

    async def health(_: str) -> HttpReply:
        return TextReply("ok\n")

    async def ready(_: str) -> HttpReply:
        nonlocal up
        missing = await proxy.missing()
        up = up or not missing
        return state_page("ready", [missing] if missing else [])

    async def startup(accept: str) -> HttpReply:
        """200 from the first readiness on: an update of a proxy that cannot reach the socket must not count as done."""
        return TextReply("up\n") if up else await ready(accept)

    async def metrics(accept: str) -> HttpReply:
        from services.shell.metrics.exposition import page  # noqa: PLC0415  (prometheus_client: only where somebody asks)

        return page([*process_families(), *families(proxy)], settings.metrics.series, accept)

    pages: Pages = {"/healthz": health, "/readyz": ready, "/startz": startup, "/metrics": metrics}
    asked = settings.metrics
    if not asked.enabled or not asked.port:
        return None
    try:
        return await serve_pages(asked.host, asked.port, pages)
    except OSError as error:
        raise SystemExit(f"cannot listen on {error}") from error


def families(proxy: Proxy) -> Iterable[MetricFamily]:
    """The proxy's own metrics."""
    ended = {"passed": proxy.passed, "refused": proxy.refused, "failed": proxy.broken}
    return (
        counter("infaas_engine_requests_total", "Requests to the engine proxy, by what became of them.").add_all(
            ended, "outcome"
        ),
        counter("infaas_engine_label_changes_total", "Nodes whose labels were changed.").add(proxy.changes),
    )
