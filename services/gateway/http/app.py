"""The HTTP application: the routes of all dialects, who may use them, errors in each dialect's form, and the counts for metrics.

A query that the gateway itself cannot get through in time is refused before a task is made for it. A request costs the gateway half a
millisecond, and its refusal by what is behind no less. So beyond saturation the loop's turns grow, and what waits in sockets is older than its
objective before it is read. A refusal here costs a tenth of that. What is in the way is measured (`Turns`): how long a query may have waited in
its socket, and what those take that were read before it, there and back. Nothing is refused here while the turns are short, nor a query
without an objective, or of an app with a default output.
"""

import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

import msgspec

from services.core.settings import GatewaySettings
from services.gateway import rafiqi
from services.gateway.actor import RequestCounts
from services.gateway.clipper import rest as clipper
from services.gateway.edge import BEHIND, GatewayService, failure_from
from services.gateway.errors import RequestFailed, let_go
from services.gateway.http.access import AccessControl
from services.gateway.http.checks import HeadChecks, app_of, check, right_of
from services.gateway.http.pages import Pages
from services.gateway.oip import rest
from services.gateway.registration import ModelRegistration
from services.shell.http.handler import SHORT_S, HttpHandler, Turns
from services.shell.http.messages import HttpProblem, HttpReply, HttpRequest, HttpRoute, JsonReply
from services.shell.runtime.runtime import unix_now

NO_DIALECT = "http"  # the protocol, in metrics, of requests that no dialect takes, and of those under way
QUERIES = ("/infer", "/predict", "/classify")  # ends of paths that change nothing
KNOWN_PATHS, LONG_PATH = 1000, 300  # whose routes are remembered: so many, below so many characters
SHARE = 0.8  # of a query's objective that its way may take: the rest is for the system behind
_LESS = "send less at a time (files by their URL), or have the operator raise gateway.max_body"
_TIMES = re.compile(rb'"(latency_ms|timeout)"\s*:\s*"?(\d+\.?\d*(?:[eE][-+]?\d+)?)')
_UNREAD = frozenset({b"content-encoding", b"origin", b"sec-fetch-site"})  # it must be inflated; a page of others asks
DOCUMENT = Path(__file__).parents[1] / "openapi.json"  # written by tools/openapi


class Dialect(NamedTuple):
    """One protocol over HTTP. name: in metrics. failed: the form of its errors."""

    name: str
    routes: list[HttpRoute]
    failed: Callable[[RequestFailed], JsonReply]


def plain(failure: RequestFailed) -> JsonReply:
    """The Open Inference Protocol's and Rafiqi's form."""
    return JsonReply({"error": failure.message, **failure.more}, failure.status, failure.headers)


def dialects(service: GatewayService) -> list[Dialect]:
    """All dialects. Their paths do not overlap. Raises BadAllowedHosts."""
    registration = ModelRegistration(service)
    clipping = clipper.routes(service, registration)
    counts = next(route.endpoint for route in clipping if route.path == clipper.COUNTS)
    document = JsonReply(msgspec.json.decode(DOCUMENT.read_bytes()))

    async def describe(_request: HttpRequest) -> HttpReply:
        return document

    return [
        Dialect("rest", rest.routes(service), plain),
        Dialect("openapi", [HttpRoute("/openapi.json", describe)], plain),
        Dialect("pages", Pages(service, counts).routes(), plain),
        Dialect("rafiqi", rafiqi.routes(service, registration), plain),
        Dialect("clipper", clipping, clipper.clipper_error),
    ]


class _Endpoint:
    """One route of a dialect."""

    def __init__(self, route: HttpRoute, dialect: Dialect) -> None:
        self.call = route.endpoint
        self.failed = dialect.failed
        self.protocol = dialect.name
        self.methods = {*route.methods, *(("HEAD",) if "GET" in route.methods else ())}
        self.rights = {method: right_of(route.path, method) for method in self.methods}
        self.query = route.path.endswith(QUERIES)
        steps = re.split(r"{(\w+)}", route.path)
        self.pattern = re.compile(
            "".join(f"(?P<{step}>[^/]+)" if at % 2 else re.escape(step) for at, step in enumerate(steps))
        )


def objective_of(body: bytes, of_app: float | None) -> float | None:
    """The most ms that a query may take: what its parameters say, else its app's objective, and no more than its timeout. None: there is no limit."""
    own = {name: float(value) for name, value in _TIMES.findall(body)}
    timeout = own.get(b"timeout", 0.0) / 1000.0
    return min(filter(None, (own.get(b"latency_ms", of_app), timeout)), default=None)


class HttpApplication(HttpHandler):
    """These dialects behind the checks and limits of every request.

    service: counts the queries that were wrong themselves; without one nothing is refused for being late. counts: of requests, for metrics.
    """

    def __init__(
        self,
        found: Iterable[Dialect],
        settings: GatewaySettings,
        access: AccessControl,
        service: GatewayService | None = None,
    ) -> None:
        super().__init__(settings, _LESS)
        self.counts = RequestCounts() if service is None else service.counts
        self.turns = None if service is None else Turns()
        self._access = access
        self._service = service
        self._checks = HeadChecks(settings)
        self._endpoints = [_Endpoint(route, dialect) for dialect in found for route in dialect.routes]
        self._known: dict[str, list[tuple[_Endpoint, Mapping[str, str]]]] = {}

    # -- a request, from its head to its reply

    def check(self, request: HttpRequest) -> HttpReply | None:
        self._checks.check(request)
        if (reply := self._checks.preflight(request)) is not None:
            return reply
        self._find(request)
        check(request, request.endpoint.rights[request.method], self._access)
        return None

    def refusal(self, request: HttpRequest, *, fresh: bool) -> HttpReply | None:
        endpoint = request.endpoint
        if fresh and endpoint.query and self._sheds(request):
            return self._form(request)(BEHIND)
        if (reply := super().refusal(request, fresh=fresh)) is None:
            self.counts.running[NO_DIALECT] += 1
        return reply

    def ended(self, request: HttpRequest, reply: HttpReply | None) -> None:
        if request.placed:
            self.counts.running[NO_DIALECT] -= 1
        super().ended(request, reply)
        protocol = NO_DIALECT if request.endpoint is None else request.endpoint.protocol
        status, sent = ("499", 0) if reply is None else (str(reply.status), reply.size)
        self.counts.ended(protocol, status, time.perf_counter() - request.began, request.size, sent)

    # -- parts

    def _sheds(self, request: HttpRequest) -> bool:
        """Whether a query that has come whole is not to be started: `BEHIND` is its reply. The checks before have let it pass."""
        if self.turns is None or self._service is None:
            return False
        way = self.turns.way()
        if way < SHORT_S or not _UNREAD.isdisjoint(request.headers):
            return False
        record = self._service.catalog.app(app_of(request) or "")
        if record is None or record.default_output is not None:
            return False
        objective_ms = objective_of(request.body, record.latency_ms)
        if objective_ms is None or 1000.0 * way <= SHARE * objective_ms:
            return False
        self.turns.refused += 1
        self._service.shed(record.app, request.endpoint.protocol, objective_ms)
        return True

    def _find(self, request: HttpRequest) -> None:
        """Set the request's endpoint. Raises RequestFailed."""
        path, method = request.path, request.method
        found = self._known.get(path)
        if found is None:
            matches = ((one, one.pattern.fullmatch(path)) for one in self._endpoints)
            found = [(one, match.groupdict()) for one, match in matches if match is not None]
            if found and len(path) < LONG_PATH:
                if len(self._known) >= KNOWN_PATHS:
                    self._known.clear()
                self._known[path] = found
        for endpoint, params in found:
            if method in endpoint.methods:
                request.endpoint, request.params = endpoint, params
                return
        if not found:
            raise RequestFailed(404, "there is nothing at this path: /docs lists what there is", code="unknown")
        names = ", ".join(sorted({name for endpoint, _ in found for name in endpoint.methods}))
        raise RequestFailed(405, f"this takes {names}, not {method}", headers={"Allow": names})

    def failed(self, request: HttpRequest, error: Exception) -> HttpReply:
        """The reply to a request that ends with this error."""
        if isinstance(error, HttpProblem):  # the server's own
            failure = RequestFailed(error.status, error.message, code=error.code, headers=error.headers)
        else:
            failure = failure_from(error, path=request.path)
        if self._service is not None and request.endpoint is not None and request.endpoint.query:
            self._service.client_errors.add(app_of(request), failure, unix_now())
        reply = self._form(request)(failure)
        let_go(failure, error)
        return reply

    def _form(self, request: HttpRequest) -> Callable[[RequestFailed], JsonReply]:
        return plain if request.endpoint is None else request.endpoint.failed


def build(service: GatewayService, access: AccessControl) -> HttpApplication:
    """The whole application. access: who may do what. Raises BadAllowedHosts."""
    return HttpApplication(dialects(service), service.settings, access, service)
