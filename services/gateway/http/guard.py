"""What is checked of every request before anything else: its path, whose name it was sent to, which page sent it, who asks.

Browsers are the reason for the middle two: a page from anywhere can make its visitor's browser send requests to this machine, and a
name that its owner points to this machine after the page was loaded (DNS rebinding) makes them look harmless. So names must be known
(421), and what changes or computes something must not come from another page's origin (403).
"""

from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import unquote_to_bytes

READING = frozenset({"GET", "HEAD", "OPTIONS"})


def path_fault(raw: bytes) -> str | None:
    """What is wrong with a path as it was sent: names of apps and models need none of this. None: nothing."""
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
    """Whether a request may be sent to this name. An address always: nobody can point it elsewhere. hosts: names, `*.name`, or `*`."""
    host = bare_host(value)
    if host is None:
        return False
    if host == "localhost" or host.endswith(".localhost") or host in hosts or "*" in hosts or _address(host):
        return True
    return any(name.startswith("*.") and host.endswith(name[1:]) for name in hosts)


def origin_allowed(origin: str, host: str, site: str, origins: Collection[str]) -> bool:
    """Whether a page of this origin may do more than look. host: the request's own. site: its header Sec-Fetch-Site.

    No browser leaves out the origin where it matters; other programs send none.
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
