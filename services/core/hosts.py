"""Hosts that an operator names, and URLs of such hosts. Pure.

A server that sends requests to the URLs of strangers can be made to reach its own network (SSRF). So it sends none to a host that no setting
names. Addresses in disguise (2130706433, 0x7f.1), credentials and other schemes than http and https are refused.
"""

from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}
MAX_URL = 2048  # characters
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")

Address = IPv4Address | IPv6Address


class BadHttpUrl(ValueError):
    """It is no URL of http or https, or carries credentials. The text says what is wrong."""


class AllowedHost(NamedTuple):
    """One entry of a setting. port: None: none is named. address: the host's only valid one, for hosts of a private network."""

    name: str
    port: int | None
    address: Address | None


class HttpUrl(NamedTuple):
    """The parts of a URL. host: in lower case. target: path and query, as they go into the request."""

    scheme: str
    host: str
    port: int
    target: str

    @property
    def place(self) -> str:
        """The host, with the port if it is not the scheme's own."""
        host = in_url(self.host)
        return host if self.port == PORTS[self.scheme] else f"{host}:{self.port}"


def in_url(host: str) -> str:
    """A host or address as URLs have it."""
    return f"[{host}]" if ":" in host else host


def reachable(host: str) -> str:
    """The address at which this machine reaches what listens there."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104


def allowed_hosts(entries: tuple[str, ...]) -> tuple[AllowedHost, ...]:
    """Entries `name`, `name:port`, `name=address`, `name:port=address`, or an address. Raises ValueError."""
    return tuple(_entry(entry) for entry in entries)


def _entry(entry: str) -> AllowedHost:
    named, _, at = entry.strip().lower().partition("=")
    address = literal(named)
    if address is not None:
        name, port = str(address), None
    else:
        name, colon, digits = named.rpartition(":") if ":" in named else (named, "", "")
        name, port = (name.strip("[]"), _port(digits, entry)) if colon else (named, None)
        address = literal(name)
    if address is None and not _is_name(name):
        raise ValueError(f"{entry!r} is no host: write name, name:port, name=address or an address")
    name = str(address) if address is not None else name
    if at:
        address = literal(at)
        if address is None:
            raise ValueError(f"{entry!r}: {at!r} is no address")
    return AllowedHost(name, port, address)


def _port(digits: str, entry: str) -> int:
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits) < 65536):
        raise ValueError(f"{entry!r}: {digits!r} is no port")
    return int(digits)


def http_url(url: str) -> HttpUrl:
    """The parts of `url`. Raises BadHttpUrl."""
    if len(url) > MAX_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise BadHttpUrl(f"the URL must be printable ASCII without spaces, at most {MAX_URL} long")
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise BadHttpUrl(f"the URL cannot be read: {error}") from error
    if parts.scheme not in PORTS:
        raise BadHttpUrl(f"only http and https URLs are taken, not {parts.scheme or url[:80]!r}")
    if "@" in parts.netloc:
        raise BadHttpUrl("the URL carries a user or password: URLs with credentials are not taken")
    host = (parts.hostname or "").removesuffix(".")
    if not host:
        raise BadHttpUrl("the URL names no host")
    address = literal(host)
    if address is not None:
        host = str(address)
    elif not _is_name(host):
        raise BadHttpUrl(f"{host!r} is no host name, nor an address in its usual form")
    return HttpUrl(parts.scheme, host, PORTS[parts.scheme] if port is None else port, _target(parts))


def literal(text: str) -> Address | None:
    """The address that is written here. None if it is none."""
    try:
        return ip_address(text)
    except ValueError:
        return None


def _is_name(text: str) -> bool:
    """Whether it is a host's name, and not an address in disguise: many resolvers take 2130706433, 0x7f.1 and 0177.0.0.1 for one."""
    last = text.rpartition(".")[2]
    return (
        0 < len(text) <= 253
        and _LETTERS.issuperset(text)
        and all(0 < len(part) <= 63 for part in text.split("."))
        and not last[0].isdigit()
    )


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
