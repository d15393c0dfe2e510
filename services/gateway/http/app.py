"""All dialects behind one router: their routes, and errors in each dialect's own form."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from infaas.errors import InfaasError, Refused
from services.core.settings import GatewaySettings
from services.gateway.clipper import rest as clipper
from services.gateway.codes import called, retry_after
from services.gateway.door import Door, Problem, problem_of
from services.gateway.http.access import Doorkeeper
from services.gateway.http.entry import check, enter, right_of
from services.gateway.http.metered import PROTOCOL, Metered
from services.gateway.http.parts import ASKING, LEFT
from services.gateway.http.reply import Json
from services.gateway.oip import rest
from services.gateway.openapi import document as openapi
from services.gateway.rafiqi import rest as rafiqi
from services.gateway.registering import Registering

log = logging.getLogger(__name__)

QUERIES = ("/infer", "/predict", "/classify")  # ends of paths of what changes nothing: it may be given up at any moment
ErrorBody = Callable[[Problem], Any]  # what a dialect writes of a problem
Dialect = tuple[list[Route], ErrorBody]


def plain(problem: Problem) -> dict[str, Any]:
    """The Open Inference Protocol's and Rafiqi's form."""
    return {"error": problem.message, **problem.more}


def dialects(door: Door) -> list[Dialect]:
    """Every dialect's routes, with the form of its errors. Paths of different dialects do not overlap. Raises BadHosts."""
    registering = Registering(door)
    return [
        (rest.routes(door), plain),
        (openapi.routes(), plain),
        (rafiqi.routes(door, registering), plain),
        (clipper.routes(door, registering), clipper.error_body),
    ]


def build(door: Door, keeper: Doorkeeper | None = None) -> ASGIApp:
    """The whole application. keeper: says who may what; made from the door's settings where there is none. Raises BadTokens, BadHosts."""
    app = assemble(dialects(door), door.settings, keeper or Doorkeeper(door.settings))
    return Metered(app, door.traffic)


def assemble(found: list[Dialect], settings: GatewaySettings, keeper: Doorkeeper) -> ASGIApp:
    """Dialects behind what holds for every request."""
    return enter(
        Router([(route, _Guarded(route, body, keeper)) for routes, body in found for route in routes]), settings
    )


class Router:
    """The first route that fits, by path and method. (Starlette's own, less what a dozen layers of it do for each request.)"""

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
            problem = Problem(405, f"this takes {names}, not {scope['method']}", headers={"Allow": names})
        else:
            problem = Problem(404, "there is nothing at this path", code="unknown")
        await error_reply(problem, plain)(scope, receive, send)


class _Guarded:
    """One endpoint, whose errors become replies."""

    def __init__(self, route: Route, body: ErrorBody, keeper: Doorkeeper) -> None:
        self._endpoint = route.endpoint
        self._body = body
        self._keeper = keeper
        self._protocol = protocol_of(route)
        self._rights = {method: right_of(route.path, method) for method in route.methods or ()}
        self._query = route.path.endswith(QUERIES)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[PROTOCOL] = self._protocol
        if self._query:
            scope[ASKING] = asyncio.current_task()
        try:
            check(scope, self._rights[scope["method"]], self._keeper)
            reply = await self._endpoint(Request(scope, receive, send))
        except Problem as problem:
            reply = error_reply(problem, self._body)
        except Refused as refused:
            reply = error_reply(of_refusal(refused), self._body)
        except InfaasError as error:
            reply = error_reply(problem_of(error), self._body)
        except ClientDisconnect:
            return
        except asyncio.CancelledError:
            if LEFT not in scope:
                raise
            scope[ASKING].uncancel()
            return
        except Exception:
            number = secrets.token_hex(6)
            log.exception("a request failed", extra={"request": number, "path": scope["path"]})
            message = f"the gateway failed on this request; it was logged as {number}"
            reply = error_reply(Problem(500, message, code="internal"), self._body)
        finally:
            scope.pop(ASKING, None)
        await reply(scope, receive, send)


def protocol_of(route: Route) -> str:
    """The protocol as metrics name it: its package here; the Open Inference Protocol over HTTP is `rest`."""
    package = route.endpoint.__module__.removeprefix("services.gateway.").partition(".")[0]
    return "rest" if package == "oip" else package


def of_refusal(refused: Refused) -> Problem:
    """A refusal of the system's in HTTP's terms."""
    headers = retry_after(refused.code, refused.retry_after_ms)
    more = {"code": refused.code, "closest": refused.closest, "retry_after_ms": refused.retry_after_ms}
    told = {name: value for name, value in more.items() if value is not None}
    return Problem(called(refused.code).http, refused.message, code=refused.code, headers=headers, more=told)


def error_reply(problem: Problem, body: ErrorBody) -> Json:
    """The reply that tells of a problem."""
    return Json(body(problem), problem.status, problem.headers)
