"""The way into the application: what holds for every request, before any dialect sees it."""

from socket import gethostname

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.core.settings import GatewaySettings, listed
from services.gateway.door import Problem
from services.gateway.http.access import Doorkeeper, Right, is_loopback
from services.gateway.http.guard import READING, host_allowed, origin_allowed, path_fault
from services.gateway.http.limits import Allowance, Limits
from services.gateway.http.reply import Json

METHODS = ("GET", "POST", "PUT", "DELETE")
HEADERS = ("Authorization", "Content-Type", "Content-Encoding", "Inference-Header-Content-Length", "Traceparent")
_ASKING = ("/classify", "/list", "/metrics", "/openapi.json", "/v2/repository/index")
_FOREIGN = "infaas.foreign"  # in a request's scope: a page of another origin has sent it


def enter(app: ASGIApp, settings: GatewaySettings) -> ASGIApp:
    """`app` behind all that is checked and limited."""
    allowance = Allowance(
        settings.max_body, settings.body_timeout_s, settings.in_flight, max(4 * settings.max_body, 256 * 2**20)
    )
    origins = listed(settings.cors_origins)
    hosts = {name.lower() for name in (settings.address, *listed(settings.hosts))}
    if not is_loopback(settings.address):
        hosts.add(gethostname().lower())
    whole: ASGIApp = Entry(Limits(app, allowance), hosts, frozenset(origins))
    if origins:
        exposed = ("Inference-Header-Content-Length", "Retry-After", "Traceparent")
        whole = CORSMiddleware(
            whole, allow_origins=origins, allow_methods=METHODS, allow_headers=HEADERS, expose_headers=exposed
        )
    return whole


class Entry:
    """ASGI middleware: paths, hosts, origins. hosts: names in lower case. origins: as browsers write them."""

    def __init__(self, app: ASGIApp, hosts: set[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins
        self._known: set[str] = set()  # hosts that were found right

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        problem = self._problem(scope)
        if problem is not None:
            await Json({"error": problem.message}, problem.status, problem.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _problem(self, scope: Scope) -> Problem | None:
        fault = path_fault(scope["raw_path"])
        if fault is not None:
            return Problem(400, fault)
        host = origin = site = ""
        for name, value in scope["headers"]:
            if name == b"host":
                host = value.decode("latin-1")
            elif name == b"origin":
                origin = value.decode("latin-1")
            elif name == b"sec-fetch-site":
                site = value.decode("latin-1")
        if host not in self._known and (host or scope["http_version"] != "1.0"):
            if not host_allowed(host, self._hosts):
                return Problem(421, "no such host is served here: the gateway's setting `hosts` names those that are")
            if len(self._known) < 1000:
                self._known.add(host)
        if (origin or site) and not origin_allowed(origin, host, site, ()):
            scope[_FOREIGN] = True
            if scope["method"] not in READING and not origin_allowed(origin, host, site, self._origins):
                return Problem(
                    403, "pages of other origins may not ask: the gateway's setting `cors_origins` names those that may"
                )
        return None


def right_of(path: str, method: str) -> Right:
    """What a route needs, by its template; whatever is not known to be harmless is for operators."""
    if path.startswith("/v2/health/"):
        return Right.NONE
    steps = path.split("/")
    if steps[1] == "admin":
        return Right.OPERATE
    if path in _ASKING or (method in READING and steps[1] == "v2"):
        return Right.ASK
    if method == "POST":
        if path.startswith("/v2/models/") and steps[-1] in ("infer", "generate", "generate_stream"):
            return Right.ASK
        if len(steps) == 3 and steps[-1] in ("predict", "update"):
            return Right.ASK
    return Right.OPERATE


def check(scope: Scope, right: Right, keeper: Doorkeeper) -> None:
    """Whether whoever sends this request may. Raises Problem."""
    if right is Right.NONE or (right is Right.ASK and keeper.open):
        return
    credential = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None)
    verdict = keeper.verdict(right, credential)
    if verdict.status == 401:
        raise Problem(
            401, verdict.message, code="unauthenticated", headers={"WWW-Authenticate": 'Bearer realm="infaas"'}
        )
    if verdict.status:
        raise Problem(verdict.status, verdict.message, code="forbidden")
    if right is Right.OPERATE and scope.get(_FOREIGN) and not keeper.operators:
        raise Problem(403, "pages of other origins manage nothing without an operator's token", code="forbidden")
