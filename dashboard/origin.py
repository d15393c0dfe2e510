"""Only pages of the dashboard itself may open its WebSocket, through which all data go."""

from urllib.parse import urlsplit

from starlette.types import ASGIApp, Receive, Scope, Send


class SameOrigin:
    """Refuses WebSockets that another site's page opens.

    Streamlit would do so, too, but asks a service on the Internet for this machine's address first.
    """

    def __init__(self, app: ASGIApp, public: str) -> None:
        """Make it; public: host and port that visitors see."""
        self._app = app
        self._public = public.lower()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket" and not self._ours(dict(scope["headers"])):
            await send({"type": "websocket.close", "code": 1008})
            return
        await self._app(scope, receive, send)

    def _ours(self, headers: dict[bytes, bytes]) -> bool:
        origin, host = (headers.get(name, b"").decode("latin-1").lower() for name in (b"origin", b"host"))
        return not origin or urlsplit(origin).netloc in {host, self._public}
