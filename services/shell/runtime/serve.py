"""The main of every service process: connect, wire, run until a signal or a failure, drain."""

import asyncio
import ctypes
import gc
import logging
import os
import signal
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any

from bus.natsjet import LostStream
from bus.port import Bus, BusError
from bus.subjects import Subjects, of_one_hearer
from services.core.settings import Settings
from services.shell.host.process import ServerError
from services.shell.host.running import AFTER, GO, LEAVES, READY, SUCCEEDED, Running, inherited
from services.shell.host.watch import TURN
from services.shell.metrics.exporter import Exporter
from services.shell.runtime import telemetry
from services.shell.runtime.known_streams import LOOKED, KnownStreams, look_at_servers
from services.shell.runtime.runtime import ActorFailed, Runtime
from services.shell.runtime.telemetry import span_exporter
from services.shell.settings import login_of

if TYPE_CHECKING:
    from bus.natsbus import NatsBus

log = logging.getLogger(__name__)

Wire = Callable[[Settings, Bus], Awaitable[list[Runtime]]]
NESTED = {"model-autoscaler": "autoscaler.models", "vm-autoscaler": "autoscaler.vms", "offline": "jobs.runner"}
FAILED = 70  # exit code: an actor kept failing; the supervisor starts the process again
# Far above the number of objects in use at a time: few live long enough for a second collection. Of what is in circles, so many wait for one.
COLLECT = (20_000, 20, 50)
PATIENCE = 60.0  # s to wait for the bus at the start
STREAMS_S = 120.0  # s to wait at the start for streams that other services make
LIFT_S = 30.0  # s between checks whether streams can have more replicas
SUCCESSOR_S = 90.0  # s that a process which is to end waits for its successor; its supervisor lets it go before
_ARENA_MAX = -8  # mallopt's parameter number, malloc.h
LOOK_S = 0.01  # s between looks at what the supervisor says
CATCH_UP_S = 45.0  # s more in which a successor must have what it needs; it does its work then, whatever it lacks
MARGIN_S = 0.5  # s by which a heartbeat may be late


Draining = Callable[[Bus], Awaitable[object]]


def package_of(service: str) -> str:
    """The package of the service of this name, which is most often its folder's."""
    return f"services.{NESTED.get(service, service)}"


def together(services: Iterable[str]) -> Wire:
    """The wiring of these services in one process. Every composition is such a list: a service's own, `stack.FUSED`, that of `infaas.serve`."""
    wires: list[Wire] = [import_module(f"{package_of(name)}.__main__").wire for name in services]

    async def wire(settings: Settings, bus: Bus) -> list[Runtime]:
        return [runtime for each in wires for runtime in await each(settings, bus)]

    return wire


def serve(name: str, settings: Settings, wire: Wire, drain: Draining | None = None, *, local: bool = False) -> int:
    """Run the actors that `wire` builds until SIGTERM or SIGINT; returns the exit code. drain: what comes before they are stopped.

    local: a query's way from one of these actors to another does not cross the server.
    """
    import uvloop  # noqa: PLC0415  (only service processes need it)

    telemetry.set_up(settings.log_level, name)
    if "executor" not in name:  # whose models compute in many threads
        share_heap()
    try:
        code: int = uvloop.run(_main(name, settings, wire, drain, local))
    except LostStream as error:
        raise SystemExit(str(error)) from error
    return code


def share_heap() -> None:
    """Let all threads allocate from one heap, where that is glibc's. Else each thread of `asyncio.to_thread` has one that grows to the most that any of
    their calls needed, one after the other for hours: 15 MB of the registrar's 50. MALLOC_ARENA_MAX in the environment overrides this.
    """
    if "MALLOC_ARENA_MAX" not in os.environ:
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).mallopt(_ARENA_MAX, 1)


async def _main(name: str, settings: Settings, wire: Wire, drain: Draining | None, local: bool) -> int:
    running = inherited()
    exporter = Exporter(name, settings.metrics)
    succeeds = running is not None and running.role != 0
    await exporter.open(succeeds=succeeds)
    known = KnownStreams.of(settings)
    bus = await _connect(name, settings, known, local)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    runtimes = await wire(settings, bus)
    exporter.attach(bus, runtimes)
    spans = span_exporter(settings.telemetry.otlp_endpoint, name)
    for runtime in runtimes:
        runtime.spans = spans
        runtime.kept = running.kept if running is not None else None
    if running is not None and running.role == AFTER:
        running.says(READY)
        while running.role and not stop.is_set():  # noqa: ASYNC110  another process says it
            await asyncio.sleep(LOOK_S)
    if succeeds:
        heard = settings.monitor.heartbeat_s + MARGIN_S  # by then every worker has said what it has
        await asyncio.gather(*(runtime.start((heard, heard + CATCH_UP_S)) for runtime in runtimes))
    else:
        for runtime in runtimes:
            await runtime.start()
    exporter.running(True)
    turning = loop.create_task(_turn(running)) if running is not None else None
    inheriting = loop.create_task(_inherit(running, runtimes[0])) if running is not None else None
    if running is not None:
        running.says(READY)
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
    succeeded = running is not None and code == 0 and await _successor(running, stop) == SUCCEEDED
    if succeeded:  # the successor's page is the one to read
        await exporter.close()
    exporter.running(False)
    lifting.cancel()
    if turning is not None and inheriting is not None and running is not None:
        turning.cancel()
        inheriting.cancel()
        running.leave()
    if drain is not None and code == 0:
        await drain(bus)
    for runtime in reversed(runtimes):
        await runtime.stop(runtime.grace, succeeded=succeeded)
    await bus.drain()
    await exporter.close()
    if spans is not None:
        await asyncio.to_thread(spans.close)
    log.info("%s stopped", name)
    return code


async def _inherit(running: Running, runtime: Runtime) -> None:
    """Have sent what the process before this one could not send, once that has ended."""
    if running.before is None:
        return
    while running.role:  # noqa: ASYNC110  another process says it
        await asyncio.sleep(LOOK_S)
    runtime.inherit(running.before.kept)


async def _successor(running: Running, stop: asyncio.Event) -> int:
    """Say that we are to end, and go on until the supervisor lets us go. A second signal, or a supervisor that says nothing, ends us, too."""
    running.says(LEAVES)
    stop.clear()
    end = asyncio.get_running_loop().time() + SUCCESSOR_S
    while not running.let_go and not stop.is_set() and asyncio.get_running_loop().time() < end:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    return running.let_go or GO


async def _turn(running: Running) -> None:
    """Show the supervisor that the loop turns."""
    while True:
        running.turn()
        await asyncio.sleep(TURN)


async def _lift(bus: "NatsBus") -> None:
    """Give streams more replicas when servers have joined the cluster."""
    while True:
        await asyncio.sleep(LIFT_S)
        await bus.streams.lift()


async def _connect(name: str, settings: Settings, known: KnownStreams, local: bool = False) -> "NatsBus":
    from bus.natsbus import LocalFirstBus, NatsBus  # noqa: PLC0415  (`infaas.serve` runs without it)

    kind = LocalFirstBus if local else NatsBus
    end = asyncio.get_running_loop().time() + PATIENCE
    try:
        login = login_of(settings.bus).options()
    except BusError as error:
        raise SystemExit(f"bus: {error}") from error
    while True:
        try:
            bus = await kind.connect(settings.bus.url, name=name, **login)
        except (BusError, OSError) as error:
            if asyncio.get_running_loop().time() > end:
                raise SystemExit(f"cannot reach NATS at the configured url: {error}") from error
            await asyncio.sleep(0.1)
        else:
            break
    if isinstance(bus, LocalFirstBus):
        bus.alone = of_one_hearer(Subjects(settings.prefix))
    bus.streams.replicas = settings.bus.replicas
    bus.streams.patience_s = STREAMS_S
    known.attach_to(bus.streams)
    await known.check(bus.streams)
    if not os.environ.get(LOOKED):
        try:
            for text in await look_at_servers(settings.bus):
                log.warning("%s", text)
        except ServerError as error:
            raise SystemExit(str(error)) from error
    return bus
