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

from bus.codec import encode
from bus.messages.fleet import ExecutorExited
from bus.port import Bus, BusError
from bus.subjects import Subjects
from services.core.settings import Settings
from services.shell import ports, process, telemetry
from services.shell.clock import now
from services.shell.draining import drain
from services.shell.machine import devices_of, worker_name
from services.shell.metrics.hub import Hub
from services.shell.process import ServerError
from services.shell.settings import login_of
from services.shell.supervise import Child, Supervisor

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
        self._claims = ports.Claims()
        self._lock: process.Lock | None = None
        self._hub: Hub | None = None
        self._bus: Bus | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the processes, as soon as no other worker of this name has the data directory; raises ServerError."""
        await self._take_turn()
        asked = self._settings.metrics
        if asked.enabled and asked.port:
            self._hub = Hub(asked, None, None, self._supervisor, self._claims.take, self._claims.take_any)
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
        root = str(Path(__file__).resolve().parents[2])
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
