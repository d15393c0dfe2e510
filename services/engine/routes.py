"""Which requests there are: method, path and query that are let through, compared as they were sent. Pure.

Nothing is decoded before it is compared, so that no way of writing a path means one thing here and another to the engine: whatever is
not written as the engine's documentation writes it is refused.
"""

import json
import re
from typing import NamedTuple
from urllib.parse import parse_qsl, urlencode

from services.engine.strict import NotStrict, loads

MOST_FILTERS = 16
_VERSION = re.compile(r"/v1\.[0-9]{1,3}(?=/)")
_NODE = re.compile(r"/nodes/([A-Za-z0-9][A-Za-z0-9_.-]{0,254})(/update)?")
_INDEX = re.compile(r"[0-9]{1,19}")
_LISTS = {"/nodes": ("filters",), "/tasks": ("filters",), "/services": ("filters", "status")}
_FREE = ("/_ping", "/version")  # before a client knows what to speak; they tell nothing about the swarm


class Denied(Exception):
    """This is not let through; the text says why, to whoever asked and to the log. status: HTTP's."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


class Route(NamedTuple):
    """A request that is let through. path: without the version. prefix: the version as it was asked for, "" or "/v1.NN".

    query: as the engine gets it. node: whose labels are to change, "" in all that only reads; revision: the version of it that they change.
    free: needs no token.
    """

    method: str
    prefix: str
    path: str
    query: str = ""
    node: str = ""
    revision: int = -1
    free: bool = False

    @property
    def target(self) -> str:
        """As in the request's line."""
        return f"{self.prefix}{self.path}{'?' if self.query else ''}{self.query}"


def find(method: str, target: str) -> Route:
    """The route of a request. target: as in its line. Raises Denied."""
    path, mark, query = target.partition("?")
    version = _VERSION.match(path)
    prefix = version.group() if version else ""
    path = path[len(prefix) :]
    pairs = _pairs(query) if mark else {}
    if path in _FREE:
        if method != "GET" and not (method == "HEAD" and path == "/_ping"):
            raise _no_method(method, path)
        return Route(method, prefix, path, _only(pairs, ()), free=True)
    if path == "/info" or path in _LISTS:
        if method != "GET":
            raise _no_method(method, path)
        return Route(method, prefix, path, _only(pairs, _LISTS.get(path, ())))
    node = _NODE.fullmatch(path)
    if node is None:
        raise Denied("the engine proxy lets nothing through to this path")
    name, update = node.groups()
    if method != ("POST" if update else "GET"):
        raise _no_method(method, path)
    if not update:
        return Route(method, prefix, path, _only(pairs, ()))
    index = pairs.pop("version", "")
    if not _INDEX.fullmatch(index):
        raise Denied("an update names the version that it changes: ?version=NUMBER")
    _only(pairs, ())
    return Route(method, prefix, path, f"version={int(index)}", node=name, revision=int(index))


def _no_method(method: str, path: str) -> Denied:
    return Denied(f"the engine proxy does not let {method[:20]} through to {path[:100]}")


def _pairs(query: str) -> dict[str, str]:
    try:
        found = parse_qsl(query, keep_blank_values=True, strict_parsing=True, errors="strict", max_num_fields=4)
    except ValueError as error:
        raise Denied("the query of this request cannot be read") from error
    if len({key.casefold() for key, _ in found}) != len(found):
        raise Denied("the query of this request has a parameter twice")
    return dict(found)


def _only(pairs: dict[str, str], known: tuple[str, ...]) -> str:
    """The query as the engine gets it, written anew."""
    for key in pairs:
        if key not in known:
            raise Denied(f"the engine proxy does not let the parameter {key[:50]!r} through here")
    if pairs.get("status", "true").lower() not in ("true", "false", "1", "0"):
        raise Denied("status is true or false")
    if "filters" in pairs:
        pairs["filters"] = _filters(pairs["filters"])
    return urlencode(pairs)


def _filters(text: str) -> str:
    """{"label": ["a=b"]}, or as older clients write it {"label": {"a=b": true}}."""
    try:
        found = loads(text.encode())
    except NotStrict as error:
        raise Denied(f"filters: {error}") from error
    if not isinstance(found, dict) or len(found) > MOST_FILTERS or not all(map(_values, found.values())):
        raise Denied("filters are an object of lists of texts")
    return json.dumps(found)


def _values(values: object) -> bool:
    if isinstance(values, dict):
        return all(isinstance(value, bool) for value in values.values())
    return isinstance(values, list) and all(isinstance(value, str) for value in values)
