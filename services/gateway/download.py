"""A file from a URL, for the registration of a model: only from hosts that the operator allowed, and from the address that was checked.

A server that fetches the URLs of strangers can be made to send requests to its own network (SSRF). So: http and https only, no
credentials, no redirects, no proxies, every address of the host checked before the first connection, and limits of size and time.
"""

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from http.client import HTTPConnection, HTTPException, HTTPResponse
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from pathlib import Path
from threading import Timer
from typing import NamedTuple

from services.core.hosts import PORTS, Address, AllowedHost, BadHttpUrl, http_url

_NAT64 = IPv6Network("64:ff9b::/96")
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # the only IPv6 addresses that are assigned to anybody
_RESERVED = tuple(  # reserved blocks that not every version of Python knows
    ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20")
)

CHUNK = 2**18  # bytes read at a time
SILENCE_S = 10.0  # longest time without a byte from the server

Resolver = Callable[[str, int], list[str]]  # host and port to addresses


class NotAllowed(Exception):
    """Nothing is fetched from this URL, host or address. forbidden: it is well-formed, but the operator does not allow it."""

    def __init__(self, message: str, *, forbidden: bool = True) -> None:
        super().__init__(message)
        self.forbidden = forbidden


class FileUrl(NamedTuple):
    """The URL of a file on an allowed host. host: in lower case. target: path and query, as they go into the request."""

    scheme: str
    host: str
    port: int
    target: str
    allowed: AllowedHost


def file_url(url: str, hosts: tuple[AllowedHost, ...]) -> FileUrl:
    """The parts of `url`, if its host is allowed. A host without a port has its scheme's own. Raises NotAllowed."""
    try:
        parts = http_url(url)
    except BadHttpUrl as error:
        raise NotAllowed(str(error), forbidden=False) from error
    scheme, host, port, target = parts
    for allowed in hosts:
        if allowed.name == host and port == (allowed.port or PORTS[scheme]):
            return FileUrl(scheme, host, port, target, allowed)
    raise NotAllowed(
        f"nothing is fetched from {parts.place}: the operator's setting gateway.register_hosts does not name it"
    )


def checked_addresses(found: list[str], source: FileUrl) -> list[str]:
    """These addresses of a host, if all of them are allowed. Raises NotAllowed."""
    if not found:
        raise NotAllowed(f"{source.host} has no address", forbidden=False)
    expected = source.allowed.address
    for text in found:
        address = ip_address(text.partition("%")[0])
        if expected is not None:
            if _plain(address) != _plain(expected):
                raise NotAllowed(f"{source.host} is at another address than the one that the operator allowed")
        elif not is_public(address):
            raise NotAllowed(
                f"{source.host} is at an address of a private network: the operator may allow it as"
                f" {source.host}=ADDRESS in gateway.register_hosts"
            )
    return found


def is_public(address: Address) -> bool:
    """Whether an address is public: not this machine's, of a private network, of a multicast group, or reserved."""
    plain = _plain(address)
    if isinstance(plain, IPv6Address):
        if plain.sixtofour is not None:
            return is_public(plain.sixtofour)
        if plain in _NAT64:
            return is_public(IPv4Address(int(plain) & 0xFFFFFFFF))
        if plain not in _GLOBAL_UNICAST:
            return False
    if any(plain in network for network in _RESERVED):
        return False
    return plain.is_global and not (
        plain.is_multicast or plain.is_reserved or plain.is_unspecified or plain.is_loopback or plain.is_link_local
    )


def _plain(address: Address) -> Address:
    """The IPv4 address of an IPv4-mapped IPv6 address; other addresses as they are."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


class DownloadFailed(Exception):
    """The server sent no usable file; the text says why. status: of the gateway's HTTP reply."""

    def __init__(self, message: str, status: int = 502) -> None:
        super().__init__(message)
        self.status = status


class DownloadRules(NamedTuple):
    """The operator's rules. max_bytes: of one file. timeout_s: of one file, from resolving its host to its last byte."""

    hosts: tuple[AllowedHost, ...]
    max_bytes: int = 2**30
    timeout_s: float = 300.0
    tls: ssl.SSLContext | None = None


def resolve(host: str, port: int) -> list[str]:
    """The addresses that the system's resolver finds. Raises OSError."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def download(url: str, into: Path, rules: DownloadRules, resolver: Resolver = resolve) -> int:
    """Write the file at `url` to `into`; returns its size. Blocks. Raises NotAllowed, DownloadFailed."""
    source = file_url(url, rules.hosts)
    ends = time.monotonic() + rules.timeout_s
    try:
        addresses = checked_addresses(resolver(source.host, source.port), source)
    except OSError as error:
        raise DownloadFailed(f"{source.host} cannot be found: {error.strerror or error}") from error
    connection = _connected(source, addresses, rules, ends)
    try:
        return _download(connection, source, into, rules, ends)
    except (OSError, HTTPException) as error:
        into.unlink(missing_ok=True)
        if time.monotonic() >= ends:
            raise DownloadFailed(f"{source.host} did not send the file within {rules.timeout_s:g} s", 504) from error
        what = (
            "said nothing for too long"
            if isinstance(error, TimeoutError)
            else f"sent no usable answer: {_short(error)}"
        )
        raise DownloadFailed(f"{source.host} {what}") from error
    except BaseException:
        into.unlink(missing_ok=True)
        raise
    finally:
        connection.end()


class _Connection(HTTPConnection):
    """A connection over an open socket, shut down when the time is over."""

    sock: socket.socket

    def __init__(self, source: FileUrl, sock: socket.socket, seconds: float) -> None:
        super().__init__(source.host, source.port)
        self.sock = self._socket = sock
        # A server that sends a byte now and then restarts the time-out of a socket, but not this timer.
        self._timer = Timer(max(0.0, seconds), self._cut)
        self._timer.daemon = True
        self._timer.start()

    def connect(self) -> None:
        raise HTTPException("the connection ended")

    def secure(self, context: ssl.SSLContext) -> None:
        """Speak TLS from now on. Raises OSError."""
        self.sock = self._socket = context.wrap_socket(
            self.sock, server_hostname=self.host, do_handshake_on_connect=False
        )
        self.sock.do_handshake()

    def end(self) -> None:
        """Close the connection and its socket. (getresponse calls `close`, too, and keeps the socket for the response.)"""
        self._timer.cancel()
        self.close()
        self._socket.close()

    def _cut(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)


def _connected(source: FileUrl, addresses: list[str], rules: DownloadRules, ends: float) -> _Connection:
    failure: Exception | None = None
    for address in addresses:
        left = ends - time.monotonic()
        if left <= 0:
            break
        try:
            plain = socket.create_connection((address, source.port), timeout=min(SILENCE_S, left))
        except OSError as error:
            failure = error
            continue
        connection = _Connection(source, plain, ends - time.monotonic())
        try:
            if source.scheme == "https":
                connection.secure(rules.tls or ssl.create_default_context())
        except OSError as error:
            connection.end()
            failure = error
            continue
        return connection
    raise DownloadFailed(f"{source.host} cannot be reached: {_short(failure) if failure else 'it took too long'}")


def _download(connection: _Connection, source: FileUrl, into: Path, rules: DownloadRules, ends: float) -> int:
    headers = {"Accept": "*/*", "Accept-Encoding": "identity", "User-Agent": "infaas", "Connection": "close"}
    connection.request("GET", source.target, headers=headers)
    response = connection.getresponse()
    with response:
        _check(response, source, rules)
        size = 0
        with into.open("wb") as file:
            while piece := response.read1(CHUNK):
                size += len(piece)
                if size > rules.max_bytes:
                    raise DownloadFailed(_too_large(source, rules), 413)
                file.write(piece)
        if response.length:
            raise HTTPException(f"{response.length} bytes are missing")
        if time.monotonic() >= ends:
            raise HTTPException("it was cut off")  # by the timer, which may look like the end of the file
        return size


def _check(response: HTTPResponse, source: FileUrl, rules: DownloadRules) -> None:
    if 300 <= response.status < 400:
        raise DownloadFailed(f"{source.host} redirects to another URL: give the URL of the file itself")
    if response.status != 200:
        raise DownloadFailed(f"{source.host} answered {response.status}: is the URL right?")
    if response.getheader("Content-Encoding", "identity").strip().lower() not in ("", "identity"):
        raise DownloadFailed(f"{source.host} sends the file in a coding that was not asked for")
    if response.length is not None and response.length > rules.max_bytes:
        raise DownloadFailed(_too_large(source, rules), 413)


def _too_large(source: FileUrl, rules: DownloadRules) -> str:
    return f"the file at {source.host} is larger than gateway.register_max_bytes, {rules.max_bytes} bytes"


def _short(error: BaseException) -> str:
    return " ".join(str(error).split())[:200] or type(error).__name__
