"""/startz: up from the first readiness on, whatever goes away later."""

import json

from bus.memory import MemoryBus
from bus.subjects import Subjects
from services.core.actor import Envelope, Inlet, Watch
from services.core.settings import MetricsSettings
from services.shell.metrics import exporter as exporting
from services.shell.metrics.exporter import Exporter
from services.shell.runtime.runtime import Runtime


class Idle:
    inlets: tuple[Inlet, ...] = ()
    watches: tuple[Watch, ...] = ()

    def handle(self, envelope: Envelope) -> tuple[()]:
        del envelope
        return ()


async def test_it_is_up_once_it_has_been_ready_and_stays_so() -> None:
    lacking = ["a database"]

    async def reachable() -> str:
        return lacking[0]

    bus = MemoryBus()
    exporter = Exporter("recorder", MetricsSettings(port=0))
    assert (await exporter.startup()).status == 503  # no connection yet
    runtime = Runtime("idle", Idle, bus, Subjects(), reachable=reachable)
    exporter.attach(bus, [runtime])
    assert (await exporter.startup()).status == 503  # not running yet
    await runtime.start()
    exporter.running(True)
    page = await exporter.startup()
    assert page.status == 503
    assert json.loads(page.body)["missing"] == ["a database"]
    lacking[0] = ""
    assert (await exporter.startup()).status == 200
    lacking[0] = "a database"
    assert (await exporter.readiness()).status == 503
    assert (await exporter.startup()).status == 200  # an orchestrator is not to start it again for that
    exporter.running(False)
    assert (await exporter.startup()).status == 200  # it drains
    await runtime.stop()


async def test_what_others_fail_to_bring_does_not_keep_it_down_for_ever() -> None:
    async def reachable() -> str:
        return "workers"

    bus = MemoryBus()
    exporter = Exporter("dispatcher", MetricsSettings(port=0))
    runtime = Runtime("idle", Idle, bus, Subjects(), reachable=reachable)
    exporter.attach(bus, [runtime])
    await runtime.start()
    exporter.running(True)
    assert (await exporter.startup()).status == 503
    exporter._since -= exporting.UNREADY
    assert (await exporter.startup()).status == 200
    await runtime.stop()
