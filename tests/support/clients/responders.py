"""A small peer that answers by the contract, written with the stock msgpack package: for tests of the client alone."""

import asyncio
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np

from bus.port import Bus, Delivery

Reply = dict[str, Any] | None


async def until(condition: Callable[[], Any], seconds: float = 180.0) -> None:
    """Wait until it holds. The time only ends a failing test: it is far longer than anything takes on a busy machine."""
    async with asyncio.timeout(seconds):
        while True:
            held = condition()
            if await held if asyncio.iscoroutine(held) else held:
                return
            await asyncio.sleep(0.005)


def answer(query: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """A right Answer to a query: the sum of each item, as FP32."""
    inputs = query.get("inputs")
    sums = np.zeros(1, np.float32) if inputs is None else item_sums(inputs)
    tensor = {"datatype": "FP32", "shape": [len(sums)], "data": sums.astype("<f4").tobytes()}
    return {
        "id": query.get("id"),
        "outputs": {"sum": tensor},
        "model": "adder",
        "version": "1",
        "variant": "adder-v1",
        "hardware": "cpu",
        "worker": "w0",
        "accuracy": 0.9,
        "latency_ms": 1.5,
        "queue_ms": 0.5,
        "compute_ms": 1.0,
        "batch": len(sums),
        "cached": False,
        "simulated": False,
        "cost": 0.001,
        "missed": [],
        "a_field_of_a_later_version": 1,
    } | fields


def refusal(code: str, message: str = "no", **more: Any) -> dict[str, Any]:
    return {"id": None, "error": {"code": code, "message": message, **more}}


def item_sums(tensor: Any) -> np.ndarray:
    if isinstance(tensor, list):
        return np.array(tensor, np.float64).reshape(len(tensor), -1).sum(1)
    if "datatype" not in tensor:
        return sum(item_sums(one) for one in tensor.values())
    names = {"FP32": "<f4", "FP64": "<f8", "INT64": "<i8", "UINT8": "u1", "BOOL": "?"}
    array = np.frombuffer(tensor["data"], names[tensor["datatype"]]).reshape(tensor["shape"])
    return array.reshape(len(array), -1).sum(1)


class Responder:
    """Listens on one subject and answers with what `behave(body, number)` returns; None: stays silent. Keeps what came."""

    def __init__(self, bus: Bus, behave: Callable[[dict[str, Any], int], Reply | list[Reply]]) -> None:
        self.bus = bus
        self.heard: list[dict[str, Any]] = []
        self.replies_to: Counter[str] = Counter()
        self._behave = behave

    async def listen(self, subject: str) -> "Responder":
        self.subscription = await self.bus.subscribe(subject, self._handle, "dispatchers")
        await self.bus.flush()
        return self

    def _handle(self, delivery: Delivery) -> None:
        body = msgpack.unpackb(delivery.data)
        self.heard.append(body)
        self.replies_to[delivery.reply] += 1
        replies = self._behave(body, len(self.heard))
        for reply in replies if isinstance(replies, list) else [replies]:
            if reply is not None:
                self.bus.publish(delivery.reply, msgpack.packb(reply))
