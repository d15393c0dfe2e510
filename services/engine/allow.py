"""What the engine proxy lets through: some requests, only strict JSON, changes of labels `infaas.*`, and named fields of the answers. Pure.

Nothing is decoded before it is compared. So no spelling of a path can mean one thing here and another to the engine: what is not
written as in the engine's documentation is refused. Of answers only named fields are shown, so that fields of later engines are never shown.
Left out are above all environments, arguments, mounts, configs, secrets, and those labels of services and containers that are not the
stack's: people put passwords in all of them.
"""

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlencode


class NotStrict(ValueError):
    """The text is not JSON, or could be read in two ways. The message is for people."""


def strict_json(text: bytes) -> Any:
    """The value of a JSON text. Raises NotStrict, also if an object has a key twice: other readers may take the other value."""
    try:
        return json.loads(text.decode(), object_pairs_hook=_once, parse_constant=_no_number)
    except NotStrict:
        raise
    except RecursionError as error:
        raise NotStrict("the JSON is nested too deeply") from error
    except ValueError as error:
        raise NotStrict(f"this is no JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise NotStrict("an object has a key twice")
    return found


def _no_number(word: str) -> Any:
    raise NotStrict(f"this is no JSON: {word}")


# ---- requests

MOST_FILTERS = 16
_VERSION = re.compile(r"/v1\.[0-9]{1,3}(?=/)")
_NODE = re.compile(r"/nodes/([A-Za-z0-9][A-Za-z0-9_.-]{0,254})(/update)?")
_INDEX = re.compile(r"[0-9]{1,19}")
_LISTS = {"/nodes": ("filters",), "/tasks": ("filters",), "/services": ("filters", "status")}
# what clients ask before they know the API's version; the answers say nothing about the swarm
_FREE = ("/_ping", "/version")


class Denied(Exception):
    """This is not let through. The text says why, to the client and to the log. status: of HTTP."""

    def __init__(self, reason: str, status: int = 403) -> None:
        super().__init__(reason)
        self.status = status


class AllowedRequest(NamedTuple):
    """A request that is let through. path: without the version. prefix: the version as it was asked for, "" or "/v1.NN".

    query: as the engine gets it. node: whose labels are to change, "" for requests that only read. revision: the version of the node that
    they change. free: needs no token.
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
        """As in the request line."""
        return f"{self.prefix}{self.path}{'?' if self.query else ''}{self.query}"


def allowed_request(method: str, target: str) -> AllowedRequest:
    """The request as it is let through. target: as in the request line. Raises Denied."""
    path, mark, query = target.partition("?")
    version = _VERSION.match(path)
    prefix = version.group() if version else ""
    path = path[len(prefix) :]
    pairs = _pairs(query) if mark else {}
    if path in _FREE:
        if method != "GET" and not (method == "HEAD" and path == "/_ping"):
            raise _no_method(method, path)
        return AllowedRequest(method, prefix, path, _only(pairs, ()), free=True)
    if path == "/info" or path in _LISTS:
        if method != "GET":
            raise _no_method(method, path)
        return AllowedRequest(method, prefix, path, _only(pairs, _LISTS.get(path, ())))
    node = _NODE.fullmatch(path)
    if node is None:
        raise Denied("the engine proxy lets nothing through to this path")
    name, update = node.groups()
    if method != ("POST" if update else "GET"):
        raise _no_method(method, path)
    if not update:
        return AllowedRequest(method, prefix, path, _only(pairs, ()))
    index = pairs.pop("version", "")
    if not _INDEX.fullmatch(index):
        raise Denied("an update names the version that it changes: ?version=NUMBER")
    _only(pairs, ())
    return AllowedRequest(method, prefix, path, f"version={int(index)}", node=name, revision=int(index))


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
    """The query as the engine gets it, encoded again. Raises Denied for a parameter that is not in `known`."""
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
        found = strict_json(text.encode())
    except NotStrict as error:
        raise Denied(f"filters: {error}") from error
    if not isinstance(found, dict) or len(found) > MOST_FILTERS or not all(map(_values, found.values())):
        raise Denied("filters are an object of lists of texts")
    return json.dumps(found)


def _values(values: object) -> bool:
    if isinstance(values, dict):
        return all(isinstance(value, bool) for value in values.values())
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


# ---- changes: of a node's labels, those whose names begin with `infaas.`, but for the operator's

OURS = re.compile(r"infaas\.[A-Za-z0-9._-]{1,120}")
# the purpose of a machine, and where data is
OPERATORS = frozenset({"infaas.pool", "infaas.nats", "infaas.db", "infaas.gateway"})
MOST_VALUE = 256


class LabelChange(NamedTuple):
    """A change of a node. set: labels that are new or differ. removed: names. spec: for the engine, the present one with the new labels."""

    set: dict[str, str]
    removed: list[str]
    spec: dict[str, Any]


def label_change(present: Mapping[str, Any], asked: Any) -> LabelChange:
    """What the wanted spec of a node changes. present: its spec as the engine has it. Raises Denied.

    What goes to the engine is made from the present spec. Only labels are taken from the wanted one.
    """
    if not isinstance(asked, dict):
        raise Denied("the spec of a node is an object")
    wanted, had = _rest(asked), _rest(present)
    if wanted != had:
        names = sorted(key for key in wanted.keys() | had.keys() if wanted.get(key) != had.get(key))
        raise Denied(f"only labels of a node may change through the engine proxy, not {', '.join(names)[:200]}")
    before, after = _labels(present.get("Labels")), _labels(asked.get("Labels"))
    put = {name: value for name, value in after.items() if before.get(name) != value}
    removed = sorted(before.keys() - after.keys())
    for name in [*put, *removed]:
        if not OURS.fullmatch(name):
            raise Denied(f"only labels infaas.* may change through the engine proxy, not {name[:100]!r}")
        if name in OPERATORS:
            raise Denied(f"the engine proxy leaves the label {name!r} to the operator")
    for name, value in put.items():
        if len(value) > MOST_VALUE or not value.isprintable():
            raise Denied(f"the label {name!r} may have {MOST_VALUE} printable characters")
    return LabelChange(put, removed, {**present, "Labels": after})


def _rest(spec: Mapping[str, Any]) -> dict[str, Any]:
    """All fields but the labels. An empty field counts as missing."""
    return {key: value for key, value in spec.items() if key != "Labels" and value not in ("", None)}


def _labels(found: Any) -> dict[str, str]:
    if found is None:
        return {}
    if not isinstance(found, dict) or not all(isinstance(value, str) for value in found.values()):
        raise Denied("the labels of a node are an object of texts")
    return found


# ---- answers: what of them is shown

View = Callable[[Any], Any]

_WHEN = ("ID", "Version", "CreatedAt", "UpdatedAt")
_LABELS = ("infaas.", "com.docker.stack.")  # of services


class Unexpected(ValueError):
    """The engine's answer is not what its documentation says."""


def version(found: Any) -> Any:
    """GET /version."""
    return _pick(found, "Platform", "Version", "ApiVersion", "MinAPIVersion", "Os", "Arch")


def info(found: Any) -> Any:
    """GET /info."""
    shown = _pick(found, "ID", "Name", "ServerVersion", "OSType", "Architecture", "NCPU", "MemTotal", "Labels")
    return shown | _part(found, "Swarm", _swarm)


def node(found: Any) -> Any:
    """GET /nodes/{id}. The spec is shown whole: it comes back with an update, and has only name, role and labels."""
    shown = _pick(found, *_WHEN, "Spec", "Status", "ManagerStatus")
    return shown | _part(found, "Description", _description)


def nodes(found: Any) -> Any:
    """GET /nodes."""
    return _each(found, node)


def tasks(found: Any) -> Any:
    """GET /tasks."""
    return _each(found, _task)


def services(found: Any) -> Any:
    """GET /services."""
    return _each(found, _service)


VIEWS: Mapping[str, View] = {
    "/version": version,
    "/info": info,
    "/nodes": nodes,
    "/tasks": tasks,
    "/services": services,
}  # every other path: `node`


def view(path: str) -> View:
    """The view of an answer at this path, without the version."""
    return VIEWS.get(path, node)


def _swarm(found: Any) -> Any:
    return _pick(
        found,
        "NodeID",
        "NodeAddr",
        "LocalNodeState",
        "ControlAvailable",
        "Error",
        "RemoteManagers",
        "Nodes",
        "Managers",
    )


def _description(found: Any) -> Any:
    shown = _pick(found, "Hostname", "Platform", "Resources")
    return shown | _part(found, "Engine", lambda engine: _pick(engine, "EngineVersion", "Labels"))


def _task(found: Any) -> Any:
    shown = _pick(found, *_WHEN, "ServiceID", "Slot", "NodeID", "DesiredState", "AssignedGenericResources")
    return shown | _part(found, "Spec", _task_spec) | _part(found, "Status", _task_status)


def _task_spec(found: Any) -> Any:
    shown = _pick(found, "Placement", "Resources", "ForceUpdate")
    return shown | _part(found, "ContainerSpec", lambda container: _pick(container, "Image", "StopGracePeriod"))


def _task_status(found: Any) -> Any:
    return _pick(found, "Timestamp", "State", "Message", "Err")


def _service(found: Any) -> Any:
    shown = _pick(found, *_WHEN, "ServiceStatus", "UpdateStatus")
    return shown | _part(found, "Spec", _service_spec)


def _service_spec(found: Any) -> Any:
    shown = _pick(found, "Name", "Mode")
    shown |= _part(
        found, "Labels", lambda labels: {key: labels[key] for key in _whole(labels) if key.startswith(_LABELS)}
    )
    return shown | _part(found, "TaskTemplate", _task_spec)


def _each(found: Any, one: View) -> list[Any]:
    if not isinstance(found, list):
        raise Unexpected("a list was expected")
    return [one(item) for item in found]


def _whole(found: Any) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise Unexpected("an object was expected")
    return found


def _pick(found: Any, *names: str) -> dict[str, Any]:
    whole = _whole(found)
    return {name: whole[name] for name in names if name in whole}


def _part(found: Any, name: str, one: View) -> dict[str, Any]:
    """This field of an object, as `one` shows it; nothing if it is missing."""
    value = _whole(found).get(name)
    return {} if value is None else {name: one(value)}
