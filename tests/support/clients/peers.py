"""Apps for drivers: peers that answer by the contract on the in-process bus, a driver that asks two of them, and its samples."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import numpy as np
import pytest

from bus.memory import Broker
from infaas.client import Client
from infaas.pipelines import Rpc
from tests.support.clients.responders import Responder, answer, refusal

Behave = Callable[[dict[str, Any], int], Any]
APPS = ("quick", "exact", "check", "broken")


class Peers:
    """One for each app: it sums each item; `broken` refuses, `infaas.list.apps` says that each takes x and gives sum."""

    apps: dict[str, Responder]
    client: Client


@asynccontextmanager
async def with_peers(**behaviours: Behave) -> AsyncIterator[Peers]:
    usual: dict[str, Behave] = dict.fromkeys(APPS, lambda body, _: answer(body))
    usual["broken"] = lambda *_: refusal("model_error", "it broke")
    spec = {"datatype": "FP32", "shape": [-1]}
    rows = [
        {"app": app, "inputs": [{"name": "x", **spec}], "outputs": [{"name": "sum", "datatype": "FP32", "shape": []}]}
        for app in APPS
    ]
    broker, peers = Broker(), Peers()
    peers.apps = {
        app: await Responder(broker.connect(), behave).listen(f"infaas.query.{app}")
        for app, behave in {**usual, **behaviours}.items()
    }
    await Responder(broker.connect(), lambda *_: {"items": rows}).listen("infaas.list.apps")
    async with await Client(broker.connect()).open() as peers.client:
        yield peers


@pytest.fixture
def peers() -> AbstractAsyncContextManager[Peers]:
    return with_peers()


async def cascade(rpc: Rpc, x: Any) -> Any:
    first = await rpc("quick", {"x": x["image"]})
    if first.outputs["sum"][0] > 0:
        return first
    return await rpc("exact", {"x": x["image"]})


def samples(count: int, unsure: float, seed: int = 0) -> dict[str, np.ndarray]:
    """Of the images, this share has a negative sum."""
    signs = np.where(np.random.default_rng(seed).random(count) < unsure, -1.0, 1.0)
    return {"image": (signs[:, None] * np.ones((count, 3))).astype("<f4")}
