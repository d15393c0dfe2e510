"""A file from a URL, for whoever registers a model: only from hosts that the operator allowed, from the very address that was checked.

A server that fetches what strangers name can be made to ask its own network (SSRF). So: http and https only, no credentials, no
redirects, no proxies, every address of the name looked at before one of them is connected to, and limits of size and time.
"""

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from services.gateway.rafiqi.places import Host, NotAllowed, Place, checked, place_of

CHUNK = 2**18
SILENCE_S = 10.0  # nothing at all from the other side

Resolver = Callable[[str, int], list[str]]  # host and port to addresses


class FetchFailed(Exception):
    """The other side gave nothing that can be used; the text says why. status: HTTP's, for whoever asked."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class Fetching(NamedTuple):
    """The operator's rules. max_bytes: of one file; timeout_s: for one file, from resolving its host to its last byte."""

    hosts: tuple[Host, ...]
    max_bytes: int = 2**30
    timeout_s: float = 300.0
    tls: ssl.SSLContext | None = None


def resolve(host: str, port: int) -> list[str]:
    """The addresses that the system's resolver knows. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def fetch(url: str, into: Path, rules: Fetching, resolver: Resolver = resolve) -> int:
    """Write what is at `url` to a file; returns its size. Blocks. Raises NotAllowed, FetchFailed."""
    place = place_of(url, rules.hosts)
    ends = time.monotonic() + rules.timeout_s
    try:
        addresses = checked(resolver(place.host, place.port), place)
    except OSError as error:
        raise FetchFailed(f"{place.host} cannot be found: {error.strerror or error}") from error
    connection = _connected(place, addresses, rules, ends)
    try:
        return _download(connection, place, into, rules, ends)
    except (OSError, HTTPException) as error:
        into.unlink(missing_ok=True)
        if time.monotonic() >= ends:
            raise FetchFailed(f"{place.host} did not send the file within {rules.timeout_s:g} s", 504) from error
        what = (
            "said nothing for too long"
            if isinstance(error, TimeoutError)
            else f"sent no usable answer: {_short(error)}"
        )
        raise FetchFailed(f"{place.host} {what}") from error
    except BaseException:
        into.unlink(missing_ok=True)
        raise
    finally:
        connection.end()


class _Connection(HTTPConnection):
    """A connection over a socket that is there already, cut off when the time is up."""

    sock: socket.socket

    def __init__(self, place: Place, sock: socket.socket, seconds: float) -> None:
        super().__init__(place.host, place.port)
        self.sock = self._held = sock
        # A server that sends a byte now and then resets every time-out of a socket, but not this one.
        self._guard = Timer(max(0.0, seconds), self._cut)
        self._guard.daemon = True
        self._guard.start()

    def connect(self) -> None:
        raise HTTPException("the connection ended")

    def secure(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on. Raises OSError."""
        self.sock = self._held = context.wrap_socket(
            self.sock, server_hostname=self.host, do_handshake_on_connect=False
        )
        self.sock.do_handshake()

    def end(self) -> None:
        """Close it. (`close` is called by getresponse, too, and leaves the socket to the response.)"""
        self._guard.cancel()
        self.close()
        self._held.close()

    def _cut(self) -> None:
        with suppress(OSError):
            self._held.shutdown(socket.SHUT_RDWR)


def _connected(place: Place, addresses: list[str], rules: Fetching, ends: float) -> _Connection:
    failure: Exception | None = None
    for address in addresses:
        left = ends - time.monotonic()
        if left <= 0:
            break
        try:
            plain = socket.create_connection((address, place.port), timeout=min(SILENCE_S, left))
        except OSError as error:
            failure = error
            continue
        connection = _Connection(place, plain, ends - time.monotonic())
        try:
            if place.scheme == "https":
                connection.secure(rules.tls or ssl.create_default_context())
        except OSError as error:
            connection.end()
            failure = error
            continue
        return connection
    raise FetchFailed(f"{place.host} cannot be reached: {_short(failure) if failure else 'it took too long'}")


def _download(connection: _Connection, place: Place, into: Path, rules: Fetching, ends: float) -> int:
    headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "infaas", "Connection": "close"}
    connection.request("GET", place.target, headers=headers)
    response = connection.getresponse()
    with response:
        _check(response, place, rules)
        size = 0
        with into.open("wb") as file:
            while piece := response.read1(CHUNK):
                size += len(piece)
                if size > rules.max_bytes:
                    raise FetchFailed(_too_large(place, rules), 413)
                file.write(piece)
        if response.length:
            raise HTTPException(f"{response.length} bytes are missing")
        if time.monotonic() >= ends:
            raise HTTPException("it was cut off")  # by us, which may look like the end
        return size


def _check(response: HTTPResponse, place: Place, rules: Fetching) -> None:
    if 300 <= response.status < 400:
        raise FetchFailed(f"{place.host} redirects to another place: give the URL of the file itself")
    if response.status != 200:
        raise FetchFailed(f"{place.host} answered {response.status}: is the URL right?")
    if response.getheader("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise FetchFailed(f"{place.host} sends the file in a coding that was not asked for")
    if response.length is not None and response.length > rules.max_bytes:
        raise FetchFailed(_too_large(place, rules), 413)


def _too_large(place: Place, rules: Fetching) -> str:
    return f"the file at {place.host} is larger than gateway.register_max_bytes, {rules.max_bytes} bytes"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__


__all__ = ("FetchFailed", "Fetching", "NotAllowed", "fetch", "resolve")
