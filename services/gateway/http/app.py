"""The HTTP application: the routes of all dialects, who may use them, errors in each dialect's form, and the counts for metrics."""

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
from services.gateway.http.checks import HeadChecks, check, right_of
from services.gateway.http.limits import RequestLimits, Shedding, coding_of
from services.gateway.http.messages import HttpReply, HttpRequest, HttpRoute, JsonReply, app_of
from services.gateway.http.pages import Pages
from services.gateway.oip import rest
from services.gateway.registration import ModelRegistration
from services.shell.runtime.runtime import unix_now

NO_DIALECT = "http"  # the protocol, in metrics, of requests that no dialect takes, and of those under way
QUERIES = ("/infer", "/predict", "/classify")  # ends of paths that change nothing
KNOWN_PATHS, LONG_PATH = 1000, 300  # whose routes are remembered: so many, below so many characters
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


class HttpApplication:
    """These dialects behind the checks and limits of every request.

    service: counts the queries that were wrong themselves. counts: of requests, for metrics. shedding: refuses what could not be passed on in time;
    None: nothing is.
    """

    def __init__(
        self,
        found: Iterable[Dialect],
        settings: GatewaySettings,
        access: AccessControl,
        service: GatewayService | None = None,
    ) -> None:
        self.settings = settings
        self.limits = RequestLimits(settings)
        self.counts = RequestCounts() if service is None else service.counts
        self.shedding = None if service is None else Shedding(service)
        self._access = access
        self._service = service
        self._checks = HeadChecks(settings)
        self._endpoints = [_Endpoint(route, dialect) for dialect in found for route in dialect.routes]
        self._known: dict[str, list[tuple[_Endpoint, Mapping[str, str]]]] = {}

    # -- a request, from its head to its reply

    def begin(self, request: HttpRequest) -> HttpReply | None:
        """Look at a head. The refusal, if the request gets one whatever its body is."""
        try:
            self._checks.check(request)
            if (reply := self._checks.preflight(request)) is not None:
                return reply
            self._find(request)
            check(request, request.endpoint.rights[request.method], self._access)
            self.limits.check(request)
        except Exception as error:
            return self.failed(request, error)
        return None

    def receive(self, request: HttpRequest, piece: bytes) -> HttpReply | None:
        """The next bytes of a body. The refusal, if they are too many."""
        try:
            self.limits.receive(request, piece)
        except RequestFailed as error:
            return self.failed(request, error)
        return None

    def refusal(self, request: HttpRequest, *, fresh: bool) -> HttpReply | None:
        """Of a request that has come whole; None: it got a place. fresh: it was read in this turn, and nothing of its connection is before it."""
        endpoint = request.endpoint
        if fresh and endpoint.query and self.shedding is not None and self.shedding.refuses(request, endpoint.protocol):
            return self._form(request)(BEHIND)
        try:
            self.limits.admit(request)
        except RequestFailed as error:
            return self.failed(request, error)
        self.counts.running[NO_DIALECT] += 1
        return None

    async def answer(self, request: HttpRequest) -> HttpReply:
        """The reply to a request that has a place."""
        try:
            if b"content-encoding" in request.headers and coding_of(request):
                await self.limits.inflate(request)
            reply: HttpReply = await request.endpoint.call(request)
            return await reply.packed() if reply.coding else reply
        except Exception as error:
            return self.failed(request, error)

    def ended(self, request: HttpRequest, reply: HttpReply | None) -> None:
        """A request has its reply, or its client has left before (None)."""
        if request.placed:
            self.counts.running[NO_DIALECT] -= 1
        self.limits.release(request)
        protocol = NO_DIALECT if request.endpoint is None else request.endpoint.protocol
        status, sent = ("499", 0) if reply is None else (str(reply.status), reply.size)
        self.counts.ended(protocol, status, time.perf_counter() - request.began, request.size, sent)

    # -- parts

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
