"""A provider of OpenID Connect on this machine that knows one person and asks for no password."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

import pytest

jwk = pytest.importorskip("joserfc.jwk")  # of the extra `login`
jwt = pytest.importorskip("joserfc.jwt")

CLIENT = "dashboard"


class Provider(ThreadingHTTPServer):
    """email: whoever sits before the browser; may be changed."""

    def __init__(self, email: str) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.email = email
        self.key = jwk.RSAKey.generate_key(2048, {"kid": "one"})
        self.nonces: dict[str, str] = {}
        self.url = f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: Provider

    def log_message(self, *_: Any) -> None:
        """Say nothing."""

    def do_GET(self) -> None:
        own, asked = self.server, urlsplit(self.path)
        if asked.path == "/.well-known/openid-configuration":
            self._json(
                {
                    "issuer": own.url,
                    "authorization_endpoint": f"{own.url}/authorize",
                    "token_endpoint": f"{own.url}/token",
                    "jwks_uri": f"{own.url}/jwks",
                    "id_token_signing_alg_values_supported": ["RS256"],
                }
            )
        elif asked.path == "/jwks":
            self._json({"keys": [own.key.as_dict(private=False)]})
        elif asked.path == "/authorize":
            query = {name: values[0] for name, values in parse_qs(asked.query).items()}
            code = f"code-{len(own.nonces)}"
            own.nonces[code] = query.get("nonce", "")
            self.send_response(302)
            self.send_header("Location", f"{query['redirect_uri']}?code={code}&state={quote(query['state'])}")
            self.end_headers()
        else:
            self.send_error(404)

    def do_POST(self) -> None:
        form = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
        own, now = self.server, int(time.time())
        claims = {
            "iss": own.url,
            "aud": CLIENT,
            "sub": "1",
            "iat": now,
            "exp": now + 600,
            "email_verified": True,
            "email": own.email,
            "nonce": own.nonces.pop(form["code"][0]),
        }
        token = jwt.encode({"alg": "RS256", "kid": "one"}, claims, own.key)
        self._json({"access_token": "a", "token_type": "Bearer", "expires_in": 600, "id_token": token})

    def _json(self, document: dict[str, Any]) -> None:
        body = json.dumps(document).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def provider(email: str) -> Iterator[Provider]:
    """One that runs, at its `url`."""
    server = Provider(email)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
