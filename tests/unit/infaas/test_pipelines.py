"""Pipelines as code, against peers that answer by the contract: branches are taken and overlap, errors reach the driver."""

import asyncio
import time
from typing import Any

import msgpack
import numpy as np
import pytest

from infaas.errors import Refused
from infaas.pipelines import Rpc, run
from tests.support.clients.peers import Peers, cascade, peers, with_peers
from tests.support.clients.responders import answer

__all__ = ["peers"]  # a fixture


async def test_a_driver_runs_and_its_branches_are_taken_as_its_code_says(peers: Peers) -> None:
    for value, asked in ((1.0, 0), (-1.0, 1)):
        got = await run(peers.client, cascade, {"image": np.full((1, 3), value, np.float32)})
        assert got.output.tolist() == [3 * value]
        assert len(peers.apps["exact"].heard) == asked


async def test_parallel_branches_overlap_in_time(peers: Peers) -> None:
    """Each of two apps answers only once both have been asked."""
    bus = peers.apps["check"].bus
    waiting: list[Any] = []

    def meet(delivery: Any) -> None:
        waiting.append(delivery)
        if len(waiting) == 2:
            for one in waiting:
                bus.publish(one.reply, msgpack.packb(answer(msgpack.unpackb(one.data))))
            waiting.clear()

    for app in ("left", "right"):
        await bus.subscribe(f"infaas.query.{app}", meet)
    await bus.flush()

    async def gathered(rpc: Rpc, x: Any) -> float:
        one, other = await asyncio.gather(rpc("left", x), rpc("right", x))
        return float(one.output[0] + other.output[0])

    async def futures(rpc: Rpc, x: Any) -> float:
        one, other = rpc("left", x), rpc("right", x)
        return float((await one).output[0] + (await other).output[0])

    for driver in (gathered, futures):
        async with asyncio.timeout(30.0):
            assert await run(peers.client, driver, [[1.0, 2.0]]) == 6.0


async def test_the_queries_of_a_run_say_where_they_belong(peers: Peers) -> None:
    async def twice(rpc: Rpc, x: Any) -> None:
        await rpc("quick", x)
        await rpc("quick", x)
        await rpc("check", x, stage="last", accuracy=0.5, id="mine")

    began = time.time()
    await run(peers.client, twice, [[1.0]], latency_ms=5000.0)
    first, second = peers.apps["quick"].heard
    name = first["id"].partition("/")[0]
    assert (first["id"], second["id"]) == (f"{name}/quick/1", f"{name}/quick/2")
    [last] = peers.apps["check"].heard
    assert (last["id"], last["accuracy"]) == ("mine", 0.5)
    assert began + 5.0 <= first["deadline"] == last["deadline"] <= time.time() + 5.0
    await run(peers.client, twice, [[1.0]])
    assert "deadline" not in peers.apps["quick"].heard[-1]


async def test_a_refusal_is_raised_where_the_driver_awaits_it(peers: Peers) -> None:
    async def careless(rpc: Rpc, x: Any) -> Any:
        return await rpc("broken", x)

    async def careful(rpc: Rpc, x: Any) -> Any:
        try:
            return await rpc("broken", x)
        except Refused:
            return await rpc("quick", x)

    async def forgetful(rpc: Rpc, x: Any) -> Any:
        rpc("broken", x)
        return await rpc("quick", x)

    for driver in (careless, forgetful):
        with pytest.raises(Refused, match="it broke"):
            await run(peers.client, driver, [[1.0]])
    assert (await run(peers.client, careful, [[1.0]])).output.tolist() == [1.0]


async def test_a_driver_that_fails_gives_up_what_is_under_way() -> None:
    async def fails(rpc: Rpc, x: Any) -> None:
        rpc("check", x)
        await rpc("quick", x)
        raise ValueError("mine")

    async with with_peers(check=lambda *_: None) as peers:
        async with asyncio.timeout(30.0):
            with pytest.raises(ValueError, match="mine"):
                await run(peers.client, fails, [[1.0]])
        assert len(asyncio.all_tasks()) == 1
