"""The dashboard's process. It listens at once, and loads Streamlit when the first visitor connects.

Until then it is a plain Python process with a tenth of the memory. The visitor's connection waits in the socket's queue meanwhile.
"""

import json
import logging
import select
import socket
import time
import tomllib
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector, start_http_server

from bus.login import SystemAddress
from dashboard import NEEDS, can_show
from infaas.connecting import data_place, locate
from infaas.logfiles import LOGS

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

APP = Path(__file__).parent / "app.py"
LOOPBACK = ("localhost", "127.0.0.1", "::1")
RESTS_S = 300.0  # s without a visitor, after which a process that was started for one ends
VISITORS = 128  # whose connections wait


REGISTRY = CollectorRegistry()
ProcessCollector(namespace="infaas", registry=REGISTRY)
VIEWERS = Gauge("infaas_dashboard_viewers", "Pages of the dashboard that are open in browsers.", registry=REGISTRY)
STATEMENTS = Histogram(
    "infaas_dashboard_statement_seconds", "How long the dashboard's statements took.", ["statement"], registry=REGISTRY
)
FAILURES = Counter(
    "infaas_dashboard_failures_total", "Statements of the dashboard without a result.", ["statement"], registry=REGISTRY
)


class CannotServe(Exception):
    """The dashboard cannot start. The text is one sentence that says what to do."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How to serve: the section [dashboard] of the settings (docs/dashboard.md).

    public_url: the URL that visitors use, if it is not http://address:port, as behind a proxy. login: a TOML file with Streamlit's
    section [auth], for OpenID Connect; "": no login. allow: e-mail addresses and @domains that may see the dashboard; empty: everybody
    who can log in. metrics: where its own metrics are shown. rests_s: s without a visitor after which it ends; None: it does not.
    """

    address: str
    port: int
    public_url: str
    login: str
    allow: tuple[str, ...]
    tls_certificate: str = ""
    tls_key: str = ""
    metrics: tuple[str, int] | None = None
    rests_s: float | None = None

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return self.public_url.rstrip("/") or f"http{'s' if self.tls_certificate else ''}://{host}:{self.port}"


_address: list[SystemAddress] = []


def set_system_address(address: SystemAddress | None) -> None:
    """Set the system that this process shows. None: look for it at every query, as the commands do."""
    _address[:] = [] if address is None else [address]


def system_address() -> SystemAddress:
    """The system that this process shows. Raises NotConnected if a data directory is named and nothing runs there."""
    return _address[0] if _address else locate()


def log_directory() -> Path:
    """Where the processes of the system write their logs, if they run on this machine."""
    known = _address[0].data_dir if _address else None
    return data_place(known) / LOGS


def serve(options: ServeOptions, address: SystemAddress | None, entrance: Callable[[], socket.socket]) -> int:
    """Serve until SIGTERM or Ctrl-C. address: of the system; None: look for it as the commands do. entrance: opens the socket. Raises CannotServe."""
    if not can_show():
        raise CannotServe(NEEDS)
    secrets = _secrets(options)
    try:
        listener = entrance()
    except OSError as error:
        raise CannotServe(f"cannot listen on {error}") from None
    listener.listen(VISITORS)
    if options.metrics is not None:
        with suppress(OSError):  # a dashboard without metrics is better than none
            start_http_server(options.metrics[1], options.metrics[0], REGISTRY)
    print(f"the dashboard is at {options.url}", flush=True)
    if select.select([listener], [], [], options.rests_s)[0]:
        set_system_address(address)
        _run(listener, options, secrets)
    return 0


def _settings(options: ServeOptions) -> dict[str, Any]:
    """Streamlit's own settings, in addition to .streamlit/config.toml."""
    public = urlsplit(options.url)
    settings = {
        "server.address": options.address,
        "server.port": options.port,
        "server.baseUrlPath": public.path.strip("/"),
        "server.corsAllowedOrigins": [f"{public.scheme}://{public.netloc}"],
    }
    if options.address in LOOPBACK:
        # Another site's page must not reach this server by a host name that it lets point to this machine.
        settings["server.allowedHosts"] = sorted({*LOOPBACK, public.hostname or "localhost"})
    return settings


def _run(listener: socket.socket, options: ServeOptions, secrets: dict[str, Any]) -> None:
    import uvicorn  # noqa: PLC0415  (uvicorn and Streamlit are loaded for the first visitor)
    from starlette.middleware import Middleware  # noqa: PLC0415
    from streamlit import config as streamlit_config  # noqa: PLC0415
    from streamlit.starlette import App  # noqa: PLC0415

    from dashboard.login import set_login_required  # noqa: PLC0415

    _unify_logging()
    if options.login:
        set_login_required()
    origin = Middleware(SameOrigin, public=urlsplit(options.url).netloc)
    app = App(APP, secrets=secrets, middleware=[origin], routes=_pages(urlsplit(options.url).path.rstrip("/")))
    for name, value in _settings(options).items():  # after App, which finds config.toml
        streamlit_config.set_option(name, value)
    config = uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=options.tls_certificate or None,
        ssl_keyfile=options.tls_key or None,
    )

    class Server(uvicorn.Server):
        visited = time.monotonic()

        async def on_tick(self, counter: int) -> bool:
            """Whether it ends."""
            if self.server_state.connections:
                self.visited = time.monotonic()
            rests = options.rests_s is not None and time.monotonic() - self.visited > options.rests_s
            return await super().on_tick(counter) or rests

    Server(config).run(sockets=[listener])


def _pages(base: str) -> list[Any]:
    """Each page's address, which tells the browser where the server is: else it first looks below the page, where nothing answers."""
    from starlette.responses import HTMLResponse  # noqa: PLC0415
    from starlette.routing import Route  # noqa: PLC0415
    from streamlit.file_util import get_static_dir  # noqa: PLC0415

    told = f"<script>window.__streamlit = {{BACKEND_BASE_URL: location.origin + {json.dumps(f'{base}/')}}}</script>"
    text = (Path(get_static_dir()) / "index.html").read_text("utf-8").replace("<head>", f"<head>{told}", 1)

    async def page(_: object) -> HTMLResponse:
        return HTMLResponse(text, headers={"Cache-Control": "no-cache"})

    return [Route(f"{base}/{view.stem}", page) for view in APP.parent.glob("views/*.py")]


def _unify_logging() -> None:
    """Write Streamlit's log lines like all others of this process. Streamlit gives each of its loggers a handler of its own."""
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "streamlit"]:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _secrets(options: ServeOptions) -> dict[str, Any]:
    """The secrets that Streamlit needs for the login. Raises CannotServe."""
    if not options.login:
        if options.allow:
            raise CannotServe("dashboard.allow says who may log in: set dashboard.login as well, or leave it out")
        return {}
    try:
        auth = tomllib.loads(Path(options.login).read_text())["auth"]
    except OSError as error:
        raise CannotServe(f"cannot read dashboard.login, {options.login}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise CannotServe(f"dashboard.login, {options.login}, is not valid TOML: {error}") from None
    except KeyError:
        raise CannotServe(f"dashboard.login, {options.login}, has no section [auth]: see docs/dashboard.md") from None
    missing = {"cookie_secret", "client_id", "client_secret", "server_metadata_url"} - set(auth)
    if missing:
        raise CannotServe(f"dashboard.login, {options.login}: [auth] has no {', '.join(sorted(missing))}")
    if find_spec("authlib") is None:
        raise CannotServe("dashboard.login needs the package authlib: pip install 'infaas[login]'")
    return {"auth": {"redirect_uri": f"{options.url}/oauth2callback", **auth}, "allow": list(options.allow)}


class SameOrigin:
    """Refuses WebSockets that another site's page opens. All data of the dashboard go through a WebSocket.

    Streamlit would refuse them too, but it would first ask a service on the Internet for this machine's address.
    """

    def __init__(self, app: "ASGIApp", public: str) -> None:
        """public: host and port that visitors see."""
        self._app = app
        self._public = public.lower()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "websocket" and not self._is_same_origin(dict(scope["headers"])):
            await send({"type": "websocket.close", "code": 1008})
            return
        with VIEWERS.track_inprogress() if scope["type"] == "websocket" else nullcontext():
            await self._app(scope, receive, send)

    def _is_same_origin(self, headers: dict[bytes, bytes]) -> bool:
        origin, host = (headers.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host"))
        return not origin or urlsplit(origin).netloc in {host, self._public}
