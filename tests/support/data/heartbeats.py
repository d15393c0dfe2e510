"""Heartbeats of workers, with what a test says of them and the rest as on an idle machine."""

from collections.abc import Sequence
from typing import Any

from bus.messages.fleet import DeviceStatus, InstanceStatus, WorkerHeartbeat


def device(name: str = "cpu", **fields: Any) -> DeviceStatus:
    """Of the kind that its name begins with."""
    given = {
        "kind": name.partition("-")[0], "cores": 2, "memory_mb": 4000.0, "memory_used_mb": 0.0, "cores_used": 0.0,
        "utilisation": 0.1, "price_per_hour": 0.1,
    }  # fmt: skip
    return DeviceStatus(device=name, **(given | fields))


def instance(name: str = "i", variant: str = "v", **fields: Any) -> InstanceStatus:
    given = {"device": "cpu", "state": "Active", "since": 0.0}
    return InstanceStatus(instance=name, variant=variant, **(given | fields))


def beat(*instances: InstanceStatus, devices: Sequence[DeviceStatus] | None = None, **fields: Any) -> WorkerHeartbeat:
    """devices: a CPU unless a test has others, of whose kind the worker is."""
    there = [device()] if devices is None else list(devices)
    given = {"worker": "w0", "hardware": there[0].kind if there else "cpu", "incarnation": 1, "at": 0.0}
    return WorkerHeartbeat(devices=there, instances=list(instances), **(given | fields))
