"""The checks of every request before a dialect sees it: its path, its host, the page that sent it, and its right.

Host and origin are checked because of browsers. A page from anywhere can make its visitor's browser send requests to this machine.
If its owner points the page's own name to this machine (DNS rebinding), the browser takes them for the page's own. So a request must
name a known host (421), and requests that change or compute something must not come from a page of another origin (403).
"""

from collections.abc import Collection
from ipaddress import ip_address
from socket import gethostname
from urllib.parse import unquote_to_bytes

from services.core.settings import GatewaySettings, listed
from services.gateway.errors import RequestFailed
from services.gateway.http.access import AccessControl, Right, check_app, is_loopback
from services.shell.http.messages import HttpReply, HttpRequest

READING = frozenset({"GET", "HEAD", "OPTIONS"})
METHODS = ("GET", "POST", "PUT", "DELETE")
HEADERS = ("Authorization", "Content-Type", "Content-Encoding", "Inference-Header-Content-Length", "Traceparent")
_OPEN_PATHS = ("/", "/docs")  # they show what anybody may know
_QUERY_PATHS = ("/classify", "/clipper/metrics", "/list", "/metrics", "/openapi.json", "/v2/repository/index")
# they list what the token is for
_FOR_ONE_APP = ("/openapi.json", "/v2", "/v2/models", "/v2/models/stats", "/v2/repository/index")
_EXPOSED = "access-control-expose-headers: Inference-Header-Content-Length, Retry-After, Traceparent\r\n"
_PREFLIGHT = (
    "content-type: text/plain; charset=utf-8\r\nvary: Origin\r\naccess-control-max-age: 600\r\n"
    f"access-control-allow-methods: {', '.join(METHODS)}\r\naccess-control-allow-headers: {', '.join(HEADERS)}\r\n"
).encode()
_ASKED = {"", "accept", "accept-language", "content-language", *(name.lower() for name in HEADERS)}


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


class HeadChecks:
    """Checks path, host and origin."""

    def __init__(self, settings: GatewaySettings) -> None:
        self._origins = frozenset(listed(settings.cors_origins))
        self._hosts = {name.lower() for name in (settings.address, *listed(settings.hosts))}
        if not is_loopback(settings.address):
            self._hosts.add(gethostname().lower())
        self._known: set[str] = set()  # values of the header Host that have passed

    def check(self, request: HttpRequest) -> None:
        """Check what every request must have. Raises RequestFailed."""
        fault = path_fault(request.raw_path)
        if fault is not None:
            raise RequestFailed(400, fault)
        host = request.header(b"host") or ""
        if host not in self._known and (host or request.version != "1.0"):
            if not host_allowed(host, self._hosts):
                raise RequestFailed(
                    421, "this host is not served here: the gateway's setting `hosts` names the hosts that are"
                )
            if len(self._known) < 1000:
                self._known.add(host)
        if b"origin" in request.headers or b"sec-fetch-site" in request.headers:
            self._check_origin(request, host)

    def _check_origin(self, request: HttpRequest, host: str) -> None:
        origin, site = request.header(b"origin") or "", request.header(b"sec-fetch-site") or ""
        if origin and self._origins & {origin, "*"}:
            shown = "*" if "*" in self._origins else f"{origin}\r\nvary: Origin"
            request.more = f"access-control-allow-origin: {shown}\r\n{_EXPOSED}".encode("latin-1")
        if not origin_allowed(origin, host, site, ()):
            request.foreign = True
            if request.method not in READING and not origin_allowed(origin, host, site, self._origins):
                raise RequestFailed(
                    403,
                    "a page of this origin may not send this: the gateway's setting `cors_origins` names the origins that may",
                )

    def preflight(self, request: HttpRequest) -> HttpReply | None:
        """The reply to a browser that asks what a page may send; None: it does not ask, or no page may."""
        wanted = request.header(b"access-control-request-method")
        if not self._origins or request.method != "OPTIONS" or wanted is None or b"origin" not in request.headers:
            return None
        asked = (request.header(b"access-control-request-headers") or "").lower().split(",")
        fine = request.more and wanted in METHODS and {name.strip() for name in asked} <= _ASKED
        return HttpReply([b"OK" if fine else b"this page may not send this"], _PREFLIGHT, 200 if fine else 400)


def app_of(request: HttpRequest) -> str | None:
    """The app that a query's path asks for, which may not exist."""
    named = request.params
    name: str = named.get("app") or named.get("model") or request.query_params.get("model_name", "")
    return name.partition(".")[0] or None


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


def check(request: HttpRequest, right: Right, access: AccessControl) -> None:
    """Check the right of whoever sends this request. Raises RequestFailed."""
    if access.free(right):
        return
    request.only = access.check(right, request.header(b"authorization"))
    if request.only and request.path not in _FOR_ONE_APP:
        check_app(request.only, app_of(request))
    if right is Right.OPERATE and request.foreign and not access.operators:
        raise RequestFailed(403, "a page of another origin needs an operator's token for this", code="forbidden")
