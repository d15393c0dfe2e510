"""The dashboard's process: listens at once, and loads Streamlit when the first visitor comes.

Until then it is a plain Python process of a tenth of the memory. The visitor's connection waits in the socket's queue meanwhile.
"""

import logging
import select
import socket
import tomllib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from infaas.connecting import SystemAddress

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Receive, Scope, Send

APP = Path(__file__).parent / "app.py"
LOOPBACK = ("localhost", "127.0.0.1", "::1")


class CannotServe(Exception):
    """The dashboard cannot start; the text is one sentence for people and says what to do."""


@dataclass(frozen=True, kw_only=True)
class ServeOptions:
    """How to serve. Section [dashboard] of the settings (docs/dashboard.md).

    public_url: where visitors see it, if not at http://address:port: behind a proxy. login: a TOML file with Streamlit's section
    [auth], for OpenID Connect; "": none. allow: e-mail addresses, or @domain, that may see it; empty: whoever can log in.
    """

    address: str = "127.0.0.1"
    port: int = 8501
    public_url: str = ""
    login: str = ""
    allow: tuple[str, ...] = ()

    @property
    def url(self) -> str:
        host = f"[{self.address}]" if ":" in self.address else self.address
        return self.public_url.rstrip("/") or f"http://{host}:{self.port}"


def serve(options: ServeOptions, endpoints: SystemAddress | None) -> int:
    """Serve until SIGTERM or Ctrl-C. endpoints: of the system; None: looked for as the commands do. Raises CannotServe."""
    secrets = _secrets(options)
    listener = listen(options.address, options.port)
    print(f"the dashboard is at {options.url}", flush=True)
    select.select([listener], [], [])
    from dashboard.store import tell  # noqa: PLC0415  (pandas and Streamlit: only now that somebody looks)

    tell(endpoints)
    return _run(listener, options, secrets)


def listen(address: str, port: int) -> socket.socket:
    """A socket that takes connections; raises CannotServe."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((address, port))
        listener.listen(128)
    except OSError as error:
        listener.close()
        raise CannotServe(
            f"cannot listen on {address}:{port}: {error.strerror}; set dashboard.address or dashboard.port"
        ) from None
    return listener


def _settings(options: ServeOptions) -> dict[str, Any]:
    """Streamlit's own settings, beside those of .streamlit/config.toml."""
    public = urlsplit(options.url)
    settings = {
        "server.address": options.address,
        "server.port": options.port,
        "server.baseUrlPath": public.path.strip("/"),
        "server.corsAllowedOrigins": [f"{public.scheme}://{public.netloc}"],
    }
    if options.address in LOOPBACK:
        # A page of somebody else's must not reach us under a name of its own that it points to this machine.
        settings["server.allowedHosts"] = sorted({*LOOPBACK, public.hostname or "localhost"})
    return settings


def _run(listener: socket.socket, options: ServeOptions, secrets: dict[str, Any]) -> int:
    import uvicorn  # noqa: PLC0415  (and Streamlit: only now that somebody looks)
    from starlette.middleware import Middleware  # noqa: PLC0415
    from streamlit import config as streamlit_config  # noqa: PLC0415
    from streamlit.starlette import App  # noqa: PLC0415

    from dashboard.login import require  # noqa: PLC0415

    _log_as_others_do()
    if options.login:
        require()
    origin = Middleware(SameOrigin, public=urlsplit(options.url).netloc)
    app = App(APP, secrets=secrets, middleware=[origin])
    for name, value in _settings(options).items():  # after the App, which says where config.toml is
        streamlit_config.set_option(name, value)
    config = uvicorn.Config(
        app,
        ws="websockets-sansio",
        ws_per_message_deflate=False,
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=2,
    )
    uvicorn.Server(config).run(sockets=[listener])
    return 0


def _log_as_others_do() -> None:
    """Streamlit's lines go where this process's go, in their form: it gives each of its loggers a handler of its own."""
    for name in [name for name in logging.root.manager.loggerDict if name.partition(".")[0] == "streamlit"]:
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _secrets(options: ServeOptions) -> dict[str, Any]:
    """What Streamlit needs for logging in; raises CannotServe."""
    if not options.login:
        if options.allow:
            raise CannotServe("dashboard.allow says who may log in, but there is no dashboard.login")
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


# -- Only pages of the dashboard itself may open its WebSocket, through which all data go.


class SameOrigin:
    """Refuses WebSockets that another site's page opens.

    Streamlit would do so, too, but asks a service on the Internet for this machine's address first.
    """

    def __init__(self, app: "ASGIApp", public: str) -> None:
        """Make it; public: host and port that visitors see."""
        self._app = app
        self._public = public.lower()

    async def __call__(self, scope: "Scope", receive: "Receive", send: "Send") -> None:
        if scope["type"] == "websocket" and not self._ours(dict(scope["headers"])):
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _ours(self, headers: dict[bytes, bytes]) -> bool:
        origin, host = (headers.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host"))
        return not origin or urlsplit(origin).netloc in {host, self._public}
