"""A real instance slowed down by a neighbour on its core moves to another core while it serves, and is as fast as before.

That needs a core that nobody else uses: where the test fails while other processes use the machine, it is skipped.
"""

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from bus.codec import encode
from bus.messages.fleet import MoveInstance
from services.core.settings import MonitorSettings
from tests.support.clients.responders import until
from tests.support.models import tiny_models
from tests.support.servers.worker import Worker, measured, worker

HOGS = 4  # on one core with our thread: it gets a fifth of the time
OTHERS = 0.25  # cores that other processes may use before this machine counts as busy
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
def hogs(core: int) -> Iterator[list[psutil.Process]]:
    """Processes that do nothing but compute, on this core."""
    code = (
        f"import os, time\nos.sched_setaffinity(0, {{{core}}})\nend = time.time() + 900\nwhile time.time() < end: pass"
    )
    running = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(HOGS)]
    try:
        yield [psutil.Process(each.pid) for each in running]
    finally:
        for each in running:
            each.kill()
            each.wait()


class Patience:
    """Waits for what takes a moment on a machine of one's own, and skips the test where others take the machine meanwhile."""

    def __init__(self, cores: list[int]) -> None:
        self._cores = cores
        self.ours = [psutil.Process()]
        self._begin()

    def _begin(self) -> None:
        self._at, self._before = time.monotonic(), self._seconds()

    def _seconds(self) -> float:
        """CPU seconds of everybody but us, on our cores, so far."""
        times = psutil.cpu_times(percpu=True)
        used = sum(sum(times[core]) - times[core].idle - getattr(times[core], "iowait", 0.0) for core in self._cores)
        return used - sum(sum(process.cpu_times()[:2]) for process in self.ours)

    async def until(self, condition: Callable[[], Any], what: str) -> None:
        self._begin()
        try:
            await until(condition)
        except TimeoutError:
            others = (self._seconds() - self._before) / (time.monotonic() - self._at)
            if others > OTHERS:
                pytest.skip(f"other processes used {others:.1f} of this machine's cores, and {what}")
            raise AssertionError(f"{what}, while other processes used {others:.2f} cores") from None


def fetched(directory: Path) -> dict[str, int]:
    """The artifacts on this worker's disk, and when they were written."""
    return {str(path): path.stat().st_mtime_ns for path in directory.rglob("*.onnx")}


async def test_an_interfered_instance_moves_to_another_core_and_recovers(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    cores = two_cores()
    # Long batches: the kernel's scheduler spares what computes for a millisecond at a time.
    x = np.random.default_rng(0).normal(size=(16, 1, 28, 28)).astype("f4")
    record = measured(tiny_models.convnet(), x, [tiny_models.CLASSES])
    replies: list[dict] = []

    async with worker(nats_url, prefix, tmp_path, WATCHFUL) as here:
        patience = Patience(cores)
        await here.catalogue(record, tiny_models.convnet())
        await until(lambda: here.beats and here.beats[-1].devices[0].alive)
        assert "outputs" in await here.ask(x)
        await until(here.states)
        [instance] = here.states()
        order = here.subjects.executor("w1", "cpu", "move")
        files = fetched(tmp_path)
        here.bus.publish(order, encode(MoveInstance(instance=instance, cores=cores[:1])))
        await until(lambda: here.moves)
        assert (here.moves[0].error, here.moves[0].cores) == ("", cores[:1])
        assert f"1 thread kept to core {cores[0]} by the system" in here.moves[0].proof

        async def load() -> None:
            while True:
                replies.append(await here.ask(x))
                await asyncio.sleep(0.05)

        stream = asyncio.create_task(load())
        try:
            await until(lambda: len(replies) >= 10)
            moved, beaten = len(here.moves), len(here.beats)
            [core] = here.moves[-1].cores  # another one already where the first was busy without us
            with hogs(core) as neighbours:
                patience.ours += neighbours
                await patience.until(lambda: away(here, core, moved), "there was no idle core to move to")
                answered, since = len(replies), len(here.beats)
                await until(lambda: len(replies) >= answered + 12)
                await patience.until(lambda: "Active" in states(here, since), "it was slow on its new core")
                del patience.ours[1:]
            assert "Interfered" in states(here, beaten)
        finally:
            stream.cancel()
            await asyncio.gather(stream, return_exceptions=True)
        assert all("outputs" in reply for reply in replies), "no query was lost"
        assert fetched(tmp_path) == files, "the artifact is not fetched again"

        async def changes() -> set[tuple[str, str]]:
            return {(row["from_state"], row["to_state"]) for row in await here.rows("state")}

        async def migrations() -> list[dict[str, Any]]:
            return [row for row in await here.rows("scaling") if row["action"] == "migrate"]

        await holds(changes, lambda found: {("Active", "Interfered"), ("Interfered", "Active")} <= found)
        await holds(migrations, lambda found: len(found) >= 2)
        found = await migrations()
        assert {row["scaler"] for row in found} == {"monitor"}
        assert all("kept to core" in row["reason"] for row in found)
        assert all("busy) would be better" in row["reason"] for row in found[1:])


def away(here: Worker, core: int, moved: int) -> bool:
    """Whether one of the moves after the first `moved` has led away from this core."""
    return any(not move.error and core not in move.cores for move in here.moves[moved:])


def states(here: Worker, since: int) -> set[str]:
    """The states of all instances in the heartbeats from the `since`-th on."""
    return {one.state for beat in here.beats[since:] for one in beat.instances}


async def holds(look: Callable[[], Awaitable[Any]], condition: Callable[[Any], bool]) -> None:
    async def check() -> bool:
        return condition(await look())

    await until(check)


async def test_a_move_that_cannot_be_carried_out_is_told_and_harms_nothing(
    nats_url: str, prefix: str, tmp_path: Path
) -> None:
    two_cores()
    x, _ = tiny_models.digits(1)
    record = measured(tiny_models.mlp(), x, [tiny_models.CLASSES])

    async with worker(nats_url, prefix, tmp_path, WATCHFUL) as here:
        await here.catalogue(record, tiny_models.mlp())
        await until(lambda: here.beats and here.beats[-1].devices[0].alive)
        assert "outputs" in await here.ask(x)
        await until(here.states)
        [instance] = here.states()
        order = here.subjects.executor("w1", "cpu", "move")
        here.bus.publish(order, encode(MoveInstance(instance=instance, cores=[4000])))
        await until(lambda: here.moves)
        assert "cannot run on core 4000" in here.moves[0].error
        assert "outputs" in await here.ask(x)
        await until(lambda: here.states() == {instance: "Active"})
