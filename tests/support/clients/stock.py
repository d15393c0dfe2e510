"""What a foreign program needs to talk to the system: only stock nats-py and msgpack, and the contract's names."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import msgpack
import nats
import numpy as np
import pytest
from nats.aio.client import Client

from tests.support.servers.system import APP, Whole


def tensor(array: np.ndarray) -> dict[str, Any]:
    names = {"float32": "FP32", "float64": "FP64", "int64": "INT64", "uint8": "UINT8"}
    return {"datatype": names[str(array.dtype)], "shape": list(array.shape), "data": array.tobytes()}


def array(tensor: dict[str, Any]) -> np.ndarray:
    dtype = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8"}[tensor["datatype"]]
    return np.frombuffer(tensor["data"], dtype).reshape(tensor["shape"])


async def ask(nc: Client, subject: str, body: Any, *, raw: bool = False, timeout: float = 60) -> dict[str, Any]:
    message = await nc.request(subject, body if raw else msgpack.packb(body), timeout=timeout)
    reply = msgpack.unpackb(message.data)
    assert isinstance(reply, dict)
    return reply


async def answered(nc: Client, body: dict[str, Any], subject: str = f"infaas.query.{APP}") -> dict[str, Any]:
    """Ask until it is answered: a variant that is not loaded yet may be refused with a time to try again."""
    give_up = time.monotonic() + 240
    while True:
        reply = await ask(nc, subject, body)
        if "error" not in reply:
            return reply
        error = reply["error"]
        assert error["code"] in ("deadline", "overloaded"), error
        assert time.monotonic() < give_up, error
        await asyncio.sleep(max(error.get("retry_after_ms", 0) / 1000, 0.05))


@asynccontextmanager
async def connected(system: Whole) -> AsyncIterator[Client]:
    nc = await nats.connect(system.nats)
    try:
        yield nc
        assert (await answered(nc, {"inputs": tensor(system.x[:1])}))["outputs"]
    finally:
        await nc.close()


@pytest.fixture
def nc(system: Whole) -> AbstractAsyncContextManager[Client]:
    """A connection as of any NATS client. The system still answers rightly after the test."""
    return connected(system)


X = np.zeros((1, 784), np.float32)
GOOD = tensor(X)
