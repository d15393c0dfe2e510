"""`infaas doctor` on frameworks and clocks: what works, what does not and why, and what nobody has ever run."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator

import pytest

from bus.codec import encode
from bus.memory import MemoryBus
from bus.messages.fleet import DispatcherHeartbeat
from bus.subjects import Subjects
from infaas.cli import doctor
from infaas.cli.machine_checks import BACKENDS, NEVER_EXECUTED, CheckFailed, check_backends
from services.executor.backends import NAMES, backend
from services.shell.host.accelerators import accelerators


@pytest.fixture(scope="module")
def findings():
    return {finding.check.removeprefix("backend "): finding for names in BACKENDS for finding in check_backends(names)}


def test_every_backend_has_a_line_that_says_whether_it_was_ever_executed(findings) -> None:
    assert sorted(findings) == sorted(NAMES)
    assert findings["ort"].state == "ok"
    assert "cpu" in findings["ort"].detail
    for name, finding in findings.items():
        assert (NEVER_EXECUTED in finding.detail) == (not backend(name).executed)
        assert finding.detail.strip() != NEVER_EXECUTED
    kinds = {one.kind for one in accelerators()}
    for name, finding in findings.items():
        if backend(name).hardware not in {"cpu", *kinds}:
            assert finding.state == "skipped"
            assert any(word in finding.detail for word in ("driver", "tool", "executor.remote_hosts"))


@contextlib.asynccontextmanager
async def _beats(late: list[float]) -> AsyncIterator[MemoryBus]:
    """A bus on which a dispatcher says late[0], late[1], ... seconds ago, and the last of them again and again."""
    bus, subject = MemoryBus(), Subjects("infaas").dispatcher_heartbeat("d0")

    async def send() -> None:
        for ago in [*late, *[late[-1]] * 1000]:
            beat = DispatcherHeartbeat(dispatcher="d0", incarnation=1, at=time.time() - ago)
            bus.publish(subject, encode(beat))
            await asyncio.sleep(0.02)

    sending = asyncio.create_task(send())
    yield bus
    sending.cancel()
    await bus.close()


async def test_a_clock_is_not_off_because_the_first_heartbeats_come_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "AGAIN_S", 300.0)
    async with _beats([0.4] * 100 + [0.0]) as bus:  # longer than it listens to clocks that agree
        assert "dispatcher d0" in await doctor._clock(await doctor._listen(bus, Subjects("infaas")))


async def test_a_clock_that_is_off_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "AGAIN_S", 0.1)
    async with _beats([0.4]) as bus:
        heartbeats = await doctor._listen(bus, Subjects("infaas"))
    with pytest.raises(CheckFailed, match=r"\d+\.\d ms apart \(dispatcher d0\)"):
        await doctor._clock(heartbeats)
