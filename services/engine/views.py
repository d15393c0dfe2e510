"""What is told of the engine's answers: named fields, so that whatever a later engine adds stays with it. Pure.

Left out are above all environments, arguments, mounts, configs, secrets, and labels of services and containers that are not the
stack's: people put passwords in all of them.
"""

from collections.abc import Callable, Mapping
from typing import Any

View = Callable[[Any], Any]

_WHEN = ("ID", "Version", "CreatedAt", "UpdatedAt")
_LABELS = ("infaas.", "com.docker.stack.")  # of services


class Unexpected(ValueError):
    """The engine answered something else than its documentation says."""


def version(found: Any) -> Any:
    """GET /version."""
    return _pick(found, "Platform", "Version", "ApiVersion", "MinAPIVersion", "Os", "Arch")


def info(found: Any) -> Any:
    """GET /info."""
    told = _pick(found, "ID", "Name", "ServerVersion", "OSType", "Architecture", "NCPU", "MemTotal", "Labels")
    return told | _part(found, "Swarm", _swarm)


def node(found: Any) -> Any:
    """GET /nodes/{id}. The spec is told whole: it goes back with an update, and there is nothing in it but name, role and labels."""
    told = _pick(found, *_WHEN, "Spec", "Status", "ManagerStatus")
    return told | _part(found, "Description", _description)


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
    """How to tell of what the engine answers at this path, version left out."""
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
    told = _pick(found, "Hostname", "Platform", "Resources")
    return told | _part(found, "Engine", lambda engine: _pick(engine, "EngineVersion", "Labels"))


def _task(found: Any) -> Any:
    told = _pick(found, *_WHEN, "ServiceID", "Slot", "NodeID", "DesiredState", "AssignedGenericResources")
    return told | _part(found, "Spec", _task_spec) | _part(found, "Status", _task_status)


def _task_spec(found: Any) -> Any:
    told = _pick(found, "Placement", "Resources", "ForceUpdate")
    return told | _part(found, "ContainerSpec", lambda container: _pick(container, "Image", "StopGracePeriod"))


def _task_status(found: Any) -> Any:
    return _pick(found, "Timestamp", "State", "Message", "Err")


def _service(found: Any) -> Any:
    told = _pick(found, *_WHEN, "ServiceStatus", "UpdateStatus")
    return told | _part(found, "Spec", _service_spec)


def _service_spec(found: Any) -> Any:
    told = _pick(found, "Name", "Mode")
    told |= _part(
        found, "Labels", lambda labels: {key: labels[key] for key in _whole(labels) if key.startswith(_LABELS)}
    )
    return told | _part(found, "TaskTemplate", _task_spec)


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
    """This field of an object, seen so; nothing where it is not there."""
    value = _whole(found).get(name)
    return {} if value is None else {name: one(value)}
