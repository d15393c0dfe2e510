"""From where files may be fetched: which URLs, which hosts, which addresses. Pure: names are resolved elsewhere."""

from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

PORTS = {"http": 80, "https": 443}
MOST_URL = 2048  # characters
_NAT64 = IPv6Network("64:ff9b::/96")
_INTERNET = IPv6Network("2000::/3")  # all that is given out to anybody
_SPECIAL = tuple(  # not every Python knows that these are nobody's
    ip_network(text) for text in ("192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2001:db8::/32", "3fff::/20")
)
_LETTERS = frozenset("abcdefghijklmnopqrstuvwxyz0123456789-._")

Address = IPv4Address | IPv6Address


class NotAllowed(Exception):
    """A URL, host or address from which nothing is fetched. forbidden: it is well-formed, and the operator did not allow it."""

    def __init__(self, message: str, *, forbidden: bool = True) -> None:
        super().__init__(message)
        self.forbidden = forbidden


class Host(NamedTuple):
    """One entry of the setting. port: None is the scheme's own. address: where it is, in a network of one's own."""

    name: str
    port: int | None
    address: Address | None


class Place(NamedTuple):
    """Where one file is. host: in lower case. target: path and query, as they go into the request."""

    scheme: str
    host: str
    port: int
    target: str
    allowed: Host


def hosts_of(entries: tuple[str, ...]) -> tuple[Host, ...]:
    """The setting gateway.register_hosts: `name`, `name:port`, `name=address`, `name:port=address`, or an address. Raises ValueError."""
    return tuple(_entry(entry) for entry in entries)


def _entry(entry: str) -> Host:
    named, _, at = entry.strip().lower().partition("=")
    literal = _literal(named)
    if literal is not None:
        name, port = str(literal), None
    else:
        name, colon, digits = named.rpartition(":") if ":" in named else (named, "", "")
        name, port = (name.strip("[]"), _port(digits, entry)) if colon else (named, None)
        literal = _literal(name)
    if literal is None and not _is_name(name):
        raise ValueError(f"{entry!r} is no host: write name, name:port, name=address or an address")
    address = literal
    if at:
        address = _literal(at)
        if address is None:
            raise ValueError(f"{entry!r}: {at!r} is no address")
    return Host(str(literal) if literal is not None else name, port, address)


def _port(digits: str, entry: str) -> int:
    if not (digits.isascii() and digits.isdigit() and 0 < int(digits) < 65536):
        raise ValueError(f"{entry!r}: {digits!r} is no port")
    return int(digits)


def place_of(url: str, hosts: tuple[Host, ...]) -> Place:
    """Where `url` leads, if anything may be fetched from there at all. Raises NotAllowed."""
    if len(url) > MOST_URL or not url.isascii() or not url.isprintable() or " " in url or "\\" in url:
        raise NotAllowed(f"the URL must be printable ASCII without spaces, at most {MOST_URL} long", forbidden=False)
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise NotAllowed(f"the URL cannot be read: {error}", forbidden=False) from error
    if parts.scheme not in PORTS:
        raise NotAllowed(f"only http and https URLs are fetched, not {parts.scheme or 'this'!r}", forbidden=False)
    if "@" in parts.netloc:
        raise NotAllowed("the URL carries a user or password: URLs with credentials are not fetched", forbidden=False)
    host = (parts.hostname or "").removesuffix(".")
    if not host:
        raise NotAllowed("the URL names no host", forbidden=False)
    literal = _literal(host)
    if literal is not None:
        host = str(literal)
    elif not _is_name(host):
        raise NotAllowed(f"{host!r} is no host name, nor an address in its usual form", forbidden=False)
    port = PORTS[parts.scheme] if port is None else port
    for allowed in hosts:
        if allowed.name == host and port == (allowed.port or PORTS[parts.scheme]):
            return Place(parts.scheme, host, port, _target(parts), allowed)
    where = host if port == PORTS[parts.scheme] else f"{host}:{port}"
    raise NotAllowed(f"nothing is fetched from {where}: the operator's setting gateway.register_hosts does not name it")


def checked(found: list[str], place: Place) -> list[str]:
    """The addresses that a host's name stands for, if all of them may be asked. Raises NotAllowed."""
    if not found:
        raise NotAllowed(f"{place.host} has no address", forbidden=False)
    expected = place.allowed.address
    for text in found:
        address = ip_address(text.partition("%")[0])
        if expected is not None:
            if _plain(address) != _plain(expected):
                raise NotAllowed(f"{place.host} is at another address than the one that the operator allowed")
        elif not public(address):
            raise NotAllowed(
                f"{place.host} is at an address of a private network: the operator may allow it as"
                f" {place.host}=ADDRESS in gateway.register_hosts"
            )
    return found


def public(address: Address) -> bool:
    """Whether an address is anybody's on the Internet: not this machine, its networks, a group, or reserved."""
    plain = _plain(address)
    if isinstance(plain, IPv6Address):
        if plain.sixtofour is not None:
            return public(plain.sixtofour)
        if plain in _NAT64:
            return public(IPv4Address(int(plain) & 0xFFFFFFFF))
        if plain not in _INTERNET:
            return False
    if any(plain in network for network in _SPECIAL):
        return False
    return plain.is_global and not (
        plain.is_multicast or plain.is_reserved or plain.is_unspecified or plain.is_loopback or plain.is_link_local
    )


def _plain(address: Address) -> Address:
    """An IPv4 address that is written as an IPv6 one is that IPv4 address."""
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return address if mapped is None else mapped


def _literal(text: str) -> Address | None:
    try:
        return ip_address(text)
    except ValueError:
        return None


def _is_name(text: str) -> bool:
    """A host's name, and no number in disguise: 2130706433, 0x7f.1 and 0177.0.0.1 are addresses to many resolvers."""
    last = text.rpartition(".")[2]
    return (
        0 < len(text) <= 253
        and _LETTERS.issuperset(text)
        and all(0 < len(part) <= 63 for part in text.split("."))
        and not last[0].isdigit()
    )


def _target(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
