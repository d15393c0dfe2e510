"""The checks of every request before a dialect sees it: its path, its host, the page that sent it, and its right.

Host and origin are checked because of browsers. A page from anywhere can make its visitor's browser send requests to this machine.
If its owner points the page's own name to this machine (DNS rebinding), the browser takes them for the page's own. So a request must
name a known host (421), and requests that change or compute something must not come from a page of another origin (403).
"""

from collections.abc import Collection
from ipaddress import ip_address
from socket import gethostname
from urllib.parse import unquote_to_bytes

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from services.core.settings import GatewaySettings, listed
from services.gateway.errors import RequestFailed
from services.gateway.http.access import AccessControl, Right, is_loopback
from services.gateway.http.bodies import JsonReply
from services.gateway.http.limits import LimitMiddleware

READING = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS = ("GET", "POST", "PUT", "DELETE")
HEADERS = ("Authorization", "Content-Type", "Content-Encoding", "Inference-Header-Content-Length", "Traceparent")
_OPEN_PATHS = ("/", "/docs")  # they show what anybody may know
_QUERY_PATHS = ("/classify", "/clipper/metrics", "/list", "/metrics", "/openapi.json", "/v2/repository/index")
_FOREIGN = "infaas.foreign"  # in a request's scope: a page of another origin sent it


def path_fault(raw: bytes) -> str | None:
    """What is wrong with a raw path: no name of an app or model needs such characters. None: nothing."""
    if b"%" not in raw and b"/." not in raw and b"\\" not in raw and b"//" not in raw:
        return None
    path = unquote_to_bytes(raw)
    try:
        text = path.decode()
    except UnicodeDecodeError:
        return "the path is not UTF-8"
    if not text.isprintable():
        return "the path has control characters"
    if "\\" in text or b"%2f" in raw.lower() or "//" in text:
        return "the path has empty steps, or slashes inside a name"
    if any(step in (".", "..") for step in text.split("/")):
        return "the path has steps that are . or .."
    return None


def bare_host(value: str) -> str | None:
    """The host of a header Host or :authority, without port, in lower case; None where it is malformed."""
    value = value.strip().lower()
    if value.startswith("["):
        host, bracket, port = value[1:].partition("]")
        port = port.removeprefix(":") if not port or port.startswith(":") else "?"
        fine = bool(bracket) and _address(host)
    else:
        host, _, port = value.partition(":")
        host = host.removesuffix(".")
        fine = bool(host) and all(letter.isalnum() or letter in "-._" for letter in host) and host.isascii()
    return host if fine and (not port or (port.isascii() and port.isdigit())) else None


def host_allowed(value: str, hosts: Collection[str]) -> bool:
    """Whether a request may name this host. hosts: names, `*.name`, or `*`.

    Addresses are always allowed: unlike a name, they cannot be pointed to another machine.
    """
    host = bare_host(value)
    if host is None:
        return False
    if host == "localhost" or host.endswith(".localhost") or host in hosts or "*" in hosts or _address(host):
        return True
    return any(name.startswith("*.") and host.endswith(name[1:]) for name in hosts)


def origin_allowed(origin: str, host: str, site: str, origins: Collection[str]) -> bool:
    """Whether a page of this origin may do more than read. host: the request's header Host. site: its header Sec-Fetch-Site.

    Browsers always send an origin where it matters; other programs send none.
    """
    if "*" in origins or origin in origins:
        return True
    if not origin:
        return site in ("", "same-origin", "none")
    _, scheme, rest = origin.partition("://")
    return bool(scheme) and rest.lower() == host.strip().lower()


def _address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def enter(app: ASGIApp, settings: GatewaySettings) -> ASGIApp:
    """`app` behind these checks, the limits, and CORS where the settings name origins."""
    origins = listed(settings.cors_origins)
    hosts = {name.lower() for name in (settings.address, *listed(settings.hosts))}
    if not is_loopback(settings.address):
        hosts.add(gethostname().lower())
    whole: ASGIApp = CheckMiddleware(LimitMiddleware(app, settings), hosts, frozenset(origins))
    if origins:
        exposed = ("Inference-Header-Content-Length", "Retry-After", "Traceparent")
        whole = CORSMiddleware(
            whole, allow_origins=origins, allow_methods=METHODS, allow_headers=HEADERS, expose_headers=exposed
        )
    return whole


class CheckMiddleware:
    """ASGI middleware: checks path, host and origin. hosts: names in lower case. origins: as browsers write them."""

    def __init__(self, app: ASGIApp, hosts: set[str], origins: frozenset[str]) -> None:
        self._app = app
        self._hosts = hosts
        self._origins = origins
        self._known: set[str] = set()  # values of the header Host that have passed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        failure = self._failure(scope)
        if failure is not None:
            await JsonReply({"error": failure.message}, failure.status, failure.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _failure(self, scope: Scope) -> RequestFailed | None:
        fault = path_fault(scope["raw_path"])
        if fault is not None:
            return RequestFailed(400, fault)
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
                return RequestFailed(
                    421, "this host is not served here: the gateway's setting `hosts` names the hosts that are"
                )
            if len(self._known) < 1000:
                self._known.add(host)
        if (origin or site) and not origin_allowed(origin, host, site, ()):
            scope[_FOREIGN] = True
            if scope["method"] not in READING and not origin_allowed(origin, host, site, self._origins):
                return RequestFailed(
                    403,
                    "a page of this origin may not send this: the gateway's setting `cors_origins` names the origins that may",
                )
        return None


def right_of(path: str, method: str) -> Right:
    """The right that a route needs, by its template. Everything that is not known to be harmless needs an operator's."""
    if path in _OPEN_PATHS or path.startswith("/v2/health/"):
        return Right.NONE
    steps = path.split("/")
    if steps[1] == "admin":
        return Right.OPERATE
    if path in _QUERY_PATHS or (method in READING and steps[1] in ("apps", "v2")):
        return Right.QUERY
    if method == "POST":
        if path.startswith("/v2/models/") and steps[-1] in ("infer", "generate", "generate_stream"):
            return Right.QUERY
        if len(steps) == 3 and steps[-1] in ("predict", "update"):
            return Right.QUERY
    return Right.OPERATE


def check(scope: Scope, right: Right, access: AccessControl) -> None:
    """Check the right of whoever sends this request. Raises RequestFailed."""
    if access.free(right):
        return
    credential = next((value.decode("latin-1") for name, value in scope["headers"] if name == b"authorization"), None)
    access.check(right, credential)
    if right is Right.OPERATE and scope.get(_FOREIGN) and not access.operators:
        raise RequestFailed(403, "a page of another origin needs an operator's token for this", code="forbidden")
