"""The main of every service process: connect, wire, run until a signal or a failure, drain."""

import asyncio
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from bus.natsjet import LostStream
from bus.port import Bus, BusError
from services.core.settings import Settings
from services.shell.metrics.exporter import Exporter
from services.shell.runtime import telemetry
from services.shell.runtime.known_streams import KnownStreams
from services.shell.runtime.runtime import ActorFailed, Runtime
from services.shell.runtime.telemetry import span_exporter
from services.shell.settings import login_of

if TYPE_CHECKING:
    from bus.natsbus import NatsBus

log = logging.getLogger(__name__)

Wire = Callable[[Settings, Bus], Awaitable[list[Runtime]]]
FAILED = 70  # exit code: an actor kept failing; the supervisor starts the process again
COLLECT = (
    100_000,
    20,
    50,
)  # far above the number of objects in use at a time: few live long enough for a second collection
PATIENCE = 60.0  # s to wait for the bus at the start
STREAMS_S = 120.0  # s to wait at the start for streams that other services make
LIFT_S = 30.0  # s between checks whether streams can have more replicas


Draining = Callable[[Bus], Awaitable[object]]


def serve(name: str, settings: Settings, wire: Wire, drain: Draining | None = None) -> int:
    """Run the actors that `wire` builds until SIGTERM or SIGINT; returns the exit code. drain: what comes before they are stopped."""
    import uvloop  # noqa: PLC0415  (only service processes need it)

    telemetry.set_up(settings.log_level, name)
    try:
        code: int = uvloop.run(_main(name, settings, wire, drain))
    except LostStream as error:
        raise SystemExit(str(error)) from error
    return code


async def _main(name: str, settings: Settings, wire: Wire, drain: Draining | None) -> int:
    exporter = Exporter(name, settings.metrics)
    await exporter.open()
    known = KnownStreams.of(settings)
    bus = await _connect(name, settings, known)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runtimes = await wire(settings, bus)
    exporter.attach(bus, runtimes)
    spans = span_exporter(settings.telemetry.otlp_endpoint, name)
    for runtime in runtimes:
        runtime.spans = spans
    for runtime in runtimes:
        await runtime.start()
    exporter.running(True)
    known.serving = True
    lifting = loop.create_task(_lift(bus))
    log.info("%s runs", name, extra={"pid": os.getpid()})
    # Everything made so far lives as long as the process: the collector need not look at it again.
    gc.collect()
    gc.freeze()
    gc.set_threshold(*COLLECT)
    stopped = loop.create_task(stop.wait())
    ends: list[asyncio.Future[Any]] = [stopped, *(runtime.failed for runtime in runtimes)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    code = 0
    for runtime in runtimes:
        if runtime.failed.done() and isinstance(runtime.failed.exception(), ActorFailed):
            log.critical("%s", runtime.failed.exception())
            code = FAILED
    exporter.running(False)
    lifting.cancel()
    if drain is not None and code == 0:
        await drain(bus)
    for runtime in reversed(runtimes):
        await runtime.stop(runtime.grace)
    await bus.drain()
    await exporter.close()
    if spans is not None:
        await asyncio.to_thread(spans.close)
    log.info("%s stopped", name)
    return code


async def _lift(bus: "NatsBus") -> None:
    """Give streams more replicas when servers have joined the cluster."""
    while True:
        await asyncio.sleep(LIFT_S)
        await bus.streams.lift()


async def _connect(name: str, settings: Settings, known: KnownStreams) -> "NatsBus":
    from bus.natsbus import NatsBus  # noqa: PLC0415  (tests serve on the memory bus without it)

    end = asyncio.get_running_loop().time() + PATIENCE
    try:
        login = login_of(settings.bus).options()
    except BusError as error:
        raise SystemExit(f"bus: {error}") from error
    while True:
        try:
            bus = await NatsBus.connect(settings.bus.url, name=name, **login)
        except (BusError, OSError) as error:
            if asyncio.get_running_loop().time() > end:
                raise SystemExit(f"cannot reach NATS at the configured url: {error}") from error
            await asyncio.sleep(0.1)
        else:
            break
    bus.streams.replicas = settings.bus.replicas
    bus.streams.patience_s = STREAMS_S
    known.attach_to(bus.streams)
    await known.check(bus.streams)
    return bus
