"""A real instance slowed down by a neighbour on its core moves to another core while it serves, and is as fast as before."""

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from bus.codec import encode
from bus.messages.fleet import MoveInstance
from services.core.settings import MonitorSettings
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.nats import run
from tests.support.servers.worker import measured, worker

pytestmark = pytest.mark.slow

HOGS = 4  # on one core with our thread: it gets a fifth of the time
WATCHFUL = MonitorSettings(
    heartbeat_s=0.2, interfered_ratio=1.8, least_items=4, mitigate_after_s=0.4, mitigate_again_s=2.0
)


def two_cores() -> list[int]:
    if not hasattr(os, "sched_getaffinity"):
        pytest.skip("this operating system cannot keep a thread to some cores")
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        pytest.skip("this machine gives us one core: there is no other to move to")
    return cores


@contextmanager
def hogs(core: int) -> Iterator[None]:
    """Processes that do nothing but compute, on this core."""
    code = (
        f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nend = time.time() + 60\nwhile time.time() < end: pass"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(HOGS)]
    try:
        yield
    finally:
        for each in running:
            each.kill()
            each.wait()


def fetched(directory: Path) -> dict[str, int]:
    """The artifacts on this worker's disk, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*.onnx")}


def test_an_interfered_instance_moves_to_another_core_and_recovers(nats_url: str, prefix: str, tmp_path: Path) -> None:
    first, *others = two_cores()
    # Long batches: the kernel's scheduler spares what computes for a millisecond at a time.
    x = np.random.default_rng(0).normal(size=(16, 1, 28, 28)).astype("f4")
    record = measured(tiny_models.convnet(), x, [tiny_models.CLASSES])
    replies: list[dict] = []

    async def main() -> None:
        async with worker(nats_url, prefix, tmp_path, WATCHFUL) as here:
            await here.catalogue(record, tiny_models.convnet())
            await until(lambda: here.beats and here.beats[-1].devices[0].alive)
            assert "outputs" in await here.ask(x)
            [instance] = here.states()
            asked: list[bytes] = []
            await here.bus.subscribe(here.subjects.controller("ask"), lambda d: asked.append(d.data))
            order = here.subjects.executor("w1", "cpu", "move")
            files = fetched(tmp_path)
            here.bus.publish(order, encode(MoveInstance(instance=instance, cores=[first])))
            await until(lambda: here.moves)
            assert (here.moves[0].error, here.moves[0].cores) == ("", [first])
            assert f"1 thread kept to core {first} by the system" in here.moves[0].proof

            async def load() -> None:
                while True:
                    replies.append(await here.ask(x))
                    await asyncio.sleep(0.05)

            stream = asyncio.create_task(load())
            await until(lambda: len(replies) >= 10)
            with hogs(first):
                began = len(replies)
                await until(lambda: set(here.states().values()) == {"Interfered"}, 40)
                await until(lambda: len(here.moves) > 1 or len(asked) >= 15, 60)
                if len(here.moves) < 2:
                    stream.cancel()
                    pytest.skip("this machine's other cores were busy all the while: there was none to move to")
                moved = len(replies)
                await until(lambda: len(replies) >= moved + 12, 40)
                await until(lambda: here.states() == {instance: "Active"}, 20)
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
            assert here.moves[1].error == ""
            assert set(here.moves[1].cores) <= set(others)
            assert all("outputs" in reply for reply in replies), "no query was lost"
            slow = statistics.median(reply["compute_ms"] for reply in replies[began + 1 : moved])
            fast = statistics.median(reply["compute_ms"] for reply in replies[moved + 2 :])
            assert fast < slow, (fast, slow)
            assert fetched(tmp_path) == files, "the artifact is not fetched again"
            states = [(row["from_state"], row["to_state"]) for row in await here.rows("state")]
            assert ("Active", "Interfered") in states
            assert ("Interfered", "Active") in states
            scaling = [row for row in await here.rows("scaling") if row["action"] == "migrate"]
            assert [row["scaler"] for row in scaling] == ["monitor"] * len(here.moves)
            assert "kept to core" in scaling[-1]["reason"]
            assert "busy) would be better" in scaling[-1]["reason"]

    run(main())


def test_a_move_that_cannot_be_carried_out_is_told_and_harms_nothing(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    two_cores()
    x, _ = tiny_models.digits(1)
    record = measured(tiny_models.mlp(), x, [tiny_models.CLASSES])

    async def main() -> None:
        async with worker(nats_url, prefix, tmp_path, WATCHFUL) as here:
            await here.catalogue(record, tiny_models.mlp())
            await until(lambda: here.beats and here.beats[-1].devices[0].alive)
            assert "outputs" in await here.ask(x)
            [instance] = here.states()
            order = here.subjects.executor("w1", "cpu", "move")
            here.bus.publish(order, encode(MoveInstance(instance=instance, cores=[4000])))
            await until(lambda: here.moves)
            assert "cannot run on core 4000" in here.moves[0].error
            assert "outputs" in await here.ask(x)
            assert here.states() == {instance: "Active"}

    run(main())
