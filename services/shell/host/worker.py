"""One worker as one process to start and stop: `infaas run worker`, what a container of a worker runs (docs/swarm.md).

Keeps the executor, and the monitor with the model-autoscaler and the runner of offline jobs, running side by side as `infaas up` does, shows their
metrics as one page, and says on the bus when the executor has ended. SIGTERM: the worker drains, then stops.
"""

import asyncio
import logging
import signal
import site
import subprocess
import sys
from collections.abc import Mapping
from os import pathsep
from pathlib import Path

from bus.codec import BadMessage, decode, encode
from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.messages.scaling import Drain
from bus.port import Bus, BusError, Delivery
from bus.subjects import Subjects
from services.core.settings import Settings
from services.shell.clock import now
from services.shell.host import endpoints, process
from services.shell.host.machine import devices_of, worker_name
from services.shell.host.process import ServerError
from services.shell.host.supervise import Child, Supervisor
from services.shell.metrics.system import SystemMetrics
from services.shell.runtime import telemetry
from services.shell.settings import login_of

log = logging.getLogger(__name__)

EXECUTOR, MONITOR = 1, 2  # stages: the monitor says goodbye first, so that nobody sends anything more
STEPS: process.Steps = ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0))
AGAIN = 1.0  # s between attempts to reach NATS
LOCK, LOCK_S, TURN_S = (
    "worker.lock",
    90.0,
    0.2,
)  # s that the next worker of a machine waits for the last one to end, and between looks
SEED = ("INFAAS_BUS__NKEY_SEED", "INFAAS_BUS__NKEY_SEED_FILE", "INFAAS_NKEY_SEED")  # names for one setting


def serve(settings: Settings, environ: Mapping[str, str], config: Path | None = None) -> int:
    """Run one worker until SIGTERM or Ctrl-C; returns the exit code. environ: of its processes."""
    telemetry.set_up(settings.log_level, "worker")
    return asyncio.run(_main(settings, environ, config))


async def _main(settings: Settings, environ: Mapping[str, str], config: Path | None) -> int:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    host = WorkerHost(settings, environ, config)
    starting, stopped = asyncio.create_task(host.start()), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait([starting, stopped], return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            starting.result()
            await stopped
    except ServerError as error:
        raise SystemExit(f"infaas: {error}") from error
    finally:
        starting.cancel()
        await asyncio.wait([starting])
        await host.stop()
    return 0


class WorkerHost:
    """The processes of one worker. Use it from the main thread's event loop; `stop` in any case."""

    def __init__(self, settings: Settings, environ: Mapping[str, str], config: Path | None = None) -> None:
        self.name = worker_name(settings.worker)
        self._settings = settings
        self._config = config
        found = {
            "INFAAS_WORKER__NAME": self.name,
            "INFAAS_BUS__URL": settings.bus.url,
            "INFAAS_PREFIX": settings.prefix,
        }
        self._environ = {**environ, **found}
        self._subjects = Subjects(settings.prefix)
        self._supervisor = Supervisor()
        self._claims = endpoints.PortClaims()
        self._lock: process.Lock | None = None
        self._hub: SystemMetrics | None = None
        self._bus: Bus | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the processes, as soon as no other worker of this name has the data directory; raises ServerError."""
        await self._take_turn()
        asked = self._settings.metrics
        if asked.enabled and asked.port:
            self._hub = SystemMetrics(asked, None, None, self._supervisor, self._claims.take, self._claims.take_any)
            if self._hub.port != asked.port:
                raise ServerError(f"port {asked.port} (metrics.port) is busy")
            await self._hub.open()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())
        ours = self._settings.worker
        self._start("executor", ["executor"], EXECUTOR, ours.executor_nkey)
        self._start("monitor", ["monitor", "model-autoscaler", "offline"], MONITOR, ours.monitor_nkey)
        if self._hub is not None:
            self._hub.started = True
        log.info("the worker %s runs", self.name)

    async def stop(self) -> None:
        """Drain, then stop everything; returns when nothing is left."""
        if self._hub is not None:
            self._hub.started = False
        if self._bus is not None and self._supervisor.pids:
            await drain(self._bus, self._subjects, self.name, self._settings.worker.drain_s)
        await self._supervisor.stop()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._bus is not None:
            await self._bus.close()
        if self._hub is not None:
            await self._hub.close()
        self._claims.release()
        if self._lock is not None:
            self._lock.release()
        log.info("the worker %s stopped", self.name)

    # -- inside

    async def _take_turn(self) -> None:
        """Swarm may start a machine's next worker before the last one has ended; both would answer to one name."""
        place = Path(self._settings.data_dir) / "workers" / self.name
        place.mkdir(parents=True, exist_ok=True)
        end = asyncio.get_running_loop().time() + LOCK_S
        told = False
        while True:
            try:
                self._lock = process.Lock(place / LOCK)
            except ServerError:
                if asyncio.get_running_loop().time() > end:
                    raise
            else:
                return
            if not told:
                log.info("waiting for another worker %s to end", self.name)
                told = True
            await asyncio.sleep(TURN_S)

    def _start(self, name: str, services: list[str], stage: int, seed: str) -> None:
        command: list[str | Path] = [sys.executable, "-P", "-m", "infaas.cli.run", *services]
        if self._config is not None:
            command += ["--config", self._config.absolute()]
        port = self._hub.port_for(name) if self._hub is not None else 0
        environ = {**self._environ, "INFAAS_METRICS__PORT": str(port)}
        if seed:
            environ = {key: value for key, value in environ.items() if key not in SEED} | {SEED[0]: seed}
        root = str(Path(__file__).resolve().parents[3])
        if root not in site.getsitepackages():  # run from a source tree
            environ["PYTHONPATH"] = pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))

        def launch() -> subprocess.Popen[bytes]:
            return process.start(command, log=None, on_our_death=signal.SIGKILL, environ=environ, cwd=Path.cwd())

        exited = self._publish_exit if stage == EXECUTOR else None
        self._supervisor.start(Child(name, launch, stage, STEPS, exited))

    def _publish_exit(self, reason: str) -> None:
        """Tell monitors and dispatchers at once that the executor is gone, with all devices that it drove."""
        if self._bus is None:
            return
        for device in devices_of(self._settings.worker):
            fact = ExecutorExited(worker=self.name, device=device.name, at=now(), reason=reason)
            try:
                self._bus.publish(self._subjects.exited(self.name, device.name), encode(fact))
            except BusError as error:
                log.warning("cannot tell that the executor ended: %s", error)

    async def _connect(self) -> None:
        """A connection of our own, for as long as it takes; nothing waits for it."""
        from bus.natsbus import NatsBus  # noqa: PLC0415  (the processes are to start first)

        told = False
        while self._bus is None:
            try:
                self._bus = await NatsBus.connect(
                    self._settings.bus.url, name="worker", **login_of(self._settings.bus).options()
                )
            except (BusError, OSError) as error:
                if not told:
                    log.warning("no connection to NATS yet: %s", error)
                    told = True
                await asyncio.sleep(AGAIN)


# ---- draining: before its processes are stopped a worker takes nothing new, and what is queued on it is answered

ORDERER = "worker"
QUIET_S = 1.0  # s for which nothing must have been queued: what was under way to the worker has arrived by then
SILENT_S = 3.0  # s after which a worker of which nothing is heard has no monitor that could drain it
TELL_S = 0.5  # s until the order is given again while no heartbeat shows that it was heard


async def drain(bus: Bus, subjects: Subjects, worker: str, patience: float) -> bool:
    """Returns once it is empty, at the latest after `patience` s (0: at once); whether it was. Never raises.

    The order has the epoch 0: it is nobody's but the machine's own. Its monitor's heartbeats say when it is heard and how much
    is left.
    """
    if patience <= 0:
        return False
    loop = asyncio.get_running_loop()
    quiet = asyncio.Event()
    heard: list[float] = []  # when it began to drain with nothing queued, as far as is known
    last = loop.time()

    def beat(delivery: Delivery) -> None:
        nonlocal last
        last = loop.time()
        try:
            message = decode(WorkerHeartbeat, delivery.data)
        except BadMessage:
            return
        if message.leaving:
            quiet.set()
        elif not message.draining or any(instance.queued for instance in message.instances):
            heard.clear()
        elif not heard:
            heard.append(loop.time())
        elif loop.time() - heard[0] >= QUIET_S:
            quiet.set()

    end = last + patience
    order = encode(Drain(epoch=0, reason="its processes are being stopped", orderer=ORDERER))
    try:
        hearing = await bus.subscribe(subjects.worker_heartbeat(worker), beat)
        while not quiet.is_set() and (left := end - loop.time()) > 0 and loop.time() - last < SILENT_S:
            if not heard:
                bus.publish(subjects.worker(worker, "drain"), order)
            try:
                await asyncio.wait_for(quiet.wait(), min(TELL_S, left))
            except TimeoutError:
                continue
        await hearing.drain()
    except BusError as error:
        log.warning("the worker %s is stopped without draining: %s", worker, error)
        return False
    if not quiet.is_set():
        log.warning("the worker %s is stopped although it has not become empty within %g s", worker, patience)
    return quiet.is_set()
