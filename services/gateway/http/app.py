"""The HTTP application: the routes of all dialects, who may use them, errors in each dialect's form, and the counts for metrics."""

import asyncio
import time
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from services.core.settings import GatewaySettings
from services.gateway.actor import RequestCounts
from services.gateway.clipper import rest as clipper
from services.gateway.edge import GatewayService, failure_from
from services.gateway.errors import RequestFailed, let_go
from services.gateway.http.access import AccessControl
from services.gateway.http.bodies import JsonReply
from services.gateway.http.checks import check, enter, right_of
from services.gateway.http.pages import Pages
from services.gateway.http.protocol import CLIENT_LEFT, QUERY_TASK
from services.gateway.http.shedding import QUERIES, ErrorReply, QueryRoute, Shedding, app_of
from services.gateway.oip import rest
from services.gateway.rafiqi import rest as rafiqi
from services.gateway.registration import ModelRegistration
from services.shell.runtime.runtime import unix_now

PROTOCOL = "infaas.protocol"  # in a request's scope: the dialect whose route has been found, as metrics name it
NO_DIALECT = "http"  # the protocol, in metrics, of requests that no dialect takes, and of those under way
DOCUMENT = Path(__file__).parents[1] / "openapi.json"  # written by tools/openapi


class Dialect(NamedTuple):
    """One protocol over HTTP. name: in metrics. failed: the form of its errors."""

    name: str
    routes: list[Route]
    failed: ErrorReply


def plain(failure: RequestFailed) -> JsonReply:
    """The Open Inference Protocol's and Rafiqi's form."""
    return JsonReply({"error": failure.message, **failure.more}, failure.status, failure.headers)


def dialects(service: GatewayService) -> list[Dialect]:
    """All dialects. Their paths do not overlap. Raises BadAllowedHosts."""
    registration = ModelRegistration(service)
    clipping = clipper.routes(service, registration)
    counts = next(route.endpoint for route in clipping if route.path == clipper.COUNTS)
    document = JsonReply(msgspec.json.decode(DOCUMENT.read_bytes()))

    async def describe(request: Request) -> JsonReply:
        del request
        return document

    return [
        Dialect("rest", rest.routes(service), plain),
        Dialect("openapi", [Route("/openapi.json", describe)], plain),
        Dialect("pages", Pages(service, counts).routes(), plain),
        Dialect("rafiqi", rafiqi.routes(service, registration), plain),
        Dialect("clipper", clipping, clipper.clipper_error),
    ]


def build(service: GatewayService, access: AccessControl) -> tuple[ASGIApp, Shedding]:
    """The whole application, and what refuses queries before they get to it. access: who may do what. Raises BadAllowedHosts."""
    found = dialects(service)
    asking = [
        QueryRoute(route, one.name, one.failed) for one in found for route in one.routes if route.path.endswith(QUERIES)
    ]
    app = assemble(found, service.settings, access, service)
    return MeterMiddleware(app, service.counts), Shedding(asking, service, access)


def assemble(
    found: list[Dialect], settings: GatewaySettings, access: AccessControl, service: GatewayService | None = None
) -> ASGIApp:
    """These dialects behind the checks and limits of every request. service: counts the queries that were wrong themselves."""
    endpoints = [(route, _Endpoint(route, dialect, access, service)) for dialect in found for route in dialect.routes]
    return enter(Router(endpoints), settings)


class Router:
    """Calls the first route that fits path and method. Starlette's own router takes a dozen more calls for each request."""

    def __init__(self, routes: Iterable[tuple[Route, ASGIApp]]) -> None:
        self._routes = list(routes)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        allowed: set[str] = set()
        for route, app in self._routes:
            match, child = route.matches(scope)
            if match is Match.FULL:
                scope.update(child)
                await app(scope, receive, send)
                return
            if match is Match.PARTIAL:
                allowed |= route.methods or set()
        if allowed:
            names = ", ".join(sorted(allowed))
            failure = RequestFailed(405, f"this takes {names}, not {scope['method']}", headers={"Allow": names})
        else:
            failure = RequestFailed(404, "there is nothing at this path: /docs lists what there is", code="unknown")
        await plain(failure)(scope, receive, send)


class _Endpoint:
    """One endpoint: checks the right to use it, and turns its errors into replies."""

    def __init__(self, route: Route, dialect: Dialect, access: AccessControl, service: GatewayService | None) -> None:
        self._endpoint = route.endpoint
        self._failed = dialect.failed
        self._access = access
        self._protocol = dialect.name
        self._rights = {method: right_of(route.path, method) for method in route.methods or ()}
        self._query = route.path.endswith(QUERIES)
        self._service = service

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PROTOCOL] = self._protocol
        if self._query:
            scope[QUERY_TASK] = asyncio.current_task()
        try:
            check(scope, self._rights[scope["method"]], self._access)
            reply = await self._endpoint(Request(scope, receive, send))
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if CLIENT_LEFT not in scope:
                raise
            scope[QUERY_TASK].uncancel()
            return
        except Exception as error:
            failure = failure_from(error, path=scope["path"])
            if self._query and self._service is not None:
                self._service.client_errors.add(app_of(scope), failure, unix_now())
            reply = self._failed(failure)
            let_go(failure, error)
        finally:
            scope.pop(QUERY_TASK, None)
        await reply(scope, receive, send)


class MeterMiddleware:
    """ASGI middleware: counts requests, their bytes and their time."""

    def __init__(self, app: ASGIApp, counts: RequestCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        began = time.perf_counter()
        status = received = sent = 0

        async def counting_receive() -> Message:
            nonlocal received
            message = await receive()
            received += len(message.get("body", b""))
            return message

        async def counting_send(message: Message) -> None:
            nonlocal status, sent
            if message["type"] == "http.response.start":
                status = message["status"]
            else:
                sent += len(message.get("body", b""))
            await send(message)

        counts = self._counts
        counts.running[NO_DIALECT] += 1
        try:
            await self._app(scope, counting_receive, counting_send)
        finally:
            counts.running[NO_DIALECT] -= 1
            # Without a status, the client has left before its reply began.
            protocol = scope.get(PROTOCOL, NO_DIALECT)
            counts.ended(protocol, str(status or 499), time.perf_counter() - began, received, sent)
