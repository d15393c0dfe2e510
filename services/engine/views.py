"""Which parts of the engine's answers are shown: only named fields, so that fields of later engines are never shown. Pure.

Left out are above all environments, arguments, mounts, configs, secrets, and those labels of services and containers that are not the
stack's: people put passwords in all of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

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
