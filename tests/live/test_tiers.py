"""A simulated GPU as a cache of models, on a real nats-server: what is Warm comes back by its transfer alone, with the object store empty."""

import asyncio
import shutil
import time
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from bus.codec import encode
from bus.messages.catalog import VariantRecord
from bus.messages.fleet import DemoteInstance
from services.core.emulation import emulated
from services.core.settings import MonitorSettings
from services.executor.__main__ import wire as wire_executor
from services.monitor.__main__ import wire as wire_monitor
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.worker import Worker, measured, worker

MODEL = tiny_models.mlp()
X, CLASSES = tiny_models.digits(4)
INIT_S, TRANSFER_S = 6.0, 1.5  # long beside what else happens on a busy machine
LRU = MonitorSettings(heartbeat_s=0.1, cache="lru", max_models=1, host_mb=4000)


def on_gpu(name: str) -> VariantRecord:
    """A variant of a simulated GPU whose load is mostly initialisation."""
    made = emulated(measured(MODEL, X, [tiny_models.CLASSES]), "gpu", name)
    times = {"init_ms": 1000 * INIT_S, "transfer_ms": 1000 * TRANSFER_S, "load_ms": 1000 * (INIT_S + TRANSFER_S)}
    return replace(made, profile=replace(made.profile, memory_mb=1300.0, host_mb=1300.0, **times))


async def begin(here: Worker, *records: VariantRecord) -> None:
    for record in records:
        await here.catalogue(record, MODEL)
    await until(lambda: here.beats and all(device.alive for device in here.beats[-1].devices))


async def empty_stores(here: Worker, directory: Path) -> None:
    """No model file is left, neither in the object store nor on the worker's disk."""
    store = await here.bus.object_store(here.subjects.artifacts_bucket)
    await store.delete(on_gpu("a").artifact)
    await asyncio.to_thread(shutil.rmtree, directory / "workers" / "w1" / "artifacts")


async def test_a_device_with_room_for_one_of_two_brings_back_what_is_warm(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    async with worker(nats_url, prefix, tmp_path, LRU, simulate={"gpu": 1}) as here:
        await begin(here, on_gpu("a"), on_gpu("b"))

        async def seconds(variant: str) -> float:
            began = time.monotonic()
            answer = await here.ask(X, latency_ms=120_000.0, variant=variant)
            assert answer.get("variant") == variant, answer
            return time.monotonic() - began

        assert await seconds("a") > INIT_S + TRANSFER_S
        await until(lambda: here.states() == {"a.w1-1": "Active"})
        await seconds("b")
        await until(lambda: here.states() == {"a.w1-1": "Warm", "b.w1-1": "Active"})
        gpu = here.beats[-1].devices[-1]
        assert (gpu.device, gpu.memory_used_mb, gpu.host_used_mb) == ("gpu-0", 1300.0, 1300.0)

        await empty_stores(here, tmp_path)
        since = len(here.beats)
        asked = asyncio.create_task(seconds("a"))
        await until(
            lambda: "Loading" in [one.state for beat in here.beats[since:] for one in beat.instances] or asked.done()
        )
        while_it_loads = await here.ask(X, latency_ms=120_000.0, variant="a")
        assert while_it_loads.get("variant") == "a", while_it_loads
        await asked
        [*_, again] = [one for one in here.loads if one.instance == "a.w1-1"]
        assert again.tier == "device"
        assert again.load_ms / 1000 >= 0.9 * TRANSFER_S

        await until(lambda: here.states() == {"a.w1-1": "Active", "b.w1-1": "Warm"})

        async def listed() -> bool:
            items = (await here.order(here.subjects.list("variants"), {}))["items"]
            states = {one["variant"]: (one["state"], one["transfer_ms"]) for one in items}
            return states == {"a": ("Active", 1000 * TRANSFER_S), "b": ("Warm", 1000 * TRANSFER_S)}

        await until(listed)  # a dispatcher hears of it by itself

        async def told() -> bool:
            actions = [row["action"] for row in await here.rows("scaling") if row["variant"] == "a"]
            states = [row["to_state"] for row in await here.rows("state") if row["variant"] == "a" and row["app"]]
            whole_way = ["Loading", "Active", "Unloading", "Warm", "Loading", "Active"]
            return (actions, states) == (["load", "demote", "promote"], whole_way)

        await until(told)  # it was not made again


async def test_others_compute_while_models_come_back_one_after_the_other(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    roomy = replace(LRU, max_models=0)
    async with worker(nats_url, prefix, tmp_path, roomy, simulate={"gpu": 1}) as here:
        await begin(here, *map(on_gpu, "abc"))
        asked = [here.ask(X, latency_ms=120_000.0, variant=one) for one in "abc"]
        assert all("outputs" in answer for answer in await asyncio.gather(*asked))
        for one in "ab":
            subject = here.subjects.executor("w1", "gpu-0", "demote")
            here.bus.publish(subject, encode(DemoteInstance(instance=f"{one}.w1-1")))
        await until(lambda: sorted(here.states().values()) == ["Active", "Warm", "Warm"])
        await empty_stores(here, tmp_path)
        loads = len(here.loads)
        waiting = [asyncio.create_task(here.ask(X, latency_ms=120_000.0, variant=one)) for one in "ab"]
        await until(lambda: "Loading" in here.states().values() or all(task.done() for task in waiting))
        computed = 0
        while not all(task.done() for task in waiting):
            assert "outputs" in await here.ask(X, variant="c")
            computed += not any(task.done() for task in waiting)
        assert computed, "another model computed during a transfer"
        assert all("outputs" in task.result() for task in waiting)
        assert [one.tier for one in here.loads[loads:]] == ["device", "device"]


@pytest.mark.parametrize("preload", ["active", "warm"])
async def test_the_first_query_after_a_restart_shows_no_initialisation(
    nats_url: str, prefix: str, tmp_path: Path, preload: Literal["active", "warm"]
) -> None:
    settings = MonitorSettings(heartbeat_s=0.1, host_mb=4000, preload=preload)
    async with worker(nats_url, prefix, tmp_path, settings, simulate={"gpu": 1}) as here:
        await begin(here, *map(on_gpu, "ab"))
        await here.stop("executor")
        await here.stop("monitor")
        await here.start("monitor", wire_monitor)
        await here.start("executor", wire_executor)
        state = preload.capitalize()
        await until(lambda: list(here.states().values()) == [state, state])
        before = len(here.loads)
        answer = await here.ask(X, latency_ms=120_000.0, variant="b")
        assert answer.get("variant") == "b", answer
        assert all(one.load_ms < 1000 * INIT_S for one in here.loads[before:]), "it was made again"
