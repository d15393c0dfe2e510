"""One worker as one process to start and stop: `infaas run worker`, what a container of a worker runs (docs/swarm.md).

It keeps two processes running, as `infaas up` does: the executor, and the monitor with the model-autoscaler and the runner of offline
jobs. It shows their metrics as one page, and says on the bus when the executor has ended. On SIGTERM the worker drains, then stops. Beside a system
of `infaas up`, its logs are with that one's, and that one's page of metrics has its own.

An order to start or stop a worker of this machine carries the epoch of its controller. An order with a smaller epoch than an earlier order's,
or than the leader record's, is refused: a controller that has lost its lease can no longer act.
"""

import asyncio
import logging
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Container, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from bus.codec import BadMessage, decode, encode
from bus.messages.fleet import ExecutorExited, WorkerHeartbeat
from bus.messages.scaling import Drain, LeaderRecord, MachineReply, StartMachine, StopMachine
from bus.port import Bus, BusError, Delivery, KeyValueEntry, Subscription
from bus.rights import from_stream
from bus.subjects import Subjects, valid_name
from services.core.outcomes import LAST_WORDS
from services.core.settings import Settings, WorkerSettings
from services.core.settings.fields import Texts
from services.shell.host import process
from services.shell.host.endpoints import PortClaims, recorded
from services.shell.host.machine import devices_of, worker_name
from services.shell.host.process import ServerError
from services.shell.host.running import Running, shared
from services.shell.host.supervise import Child, Supervisor, until_stopped
from services.shell.metrics.system import WORKERS, SystemMetrics, show_pages
from services.shell.runtime import telemetry
from services.shell.runtime.runtime import unix_now
from services.shell.settings import login_of

log = logging.getLogger(__name__)

LOGS = "logs"  # below the data directory, as `infaas.logfiles` reads them
ROLES, KEPT_S = ("worker", "executor", "monitor"), 7 * 24 * 3600.0
MONITORS = ["monitor", "model-autoscaler", "offline"]
EXECUTOR, MONITOR = 1, 2  # stages: the monitor stops first and says that it leaves, so that nobody sends anything more
STEPS: process.Steps = ((signal.SIGTERM, 8.0), (signal.SIGKILL, 5.0))
AGAIN = 1.0  # s between attempts to reach NATS
# s that the next worker of a machine waits for the last one to end, and between attempts
LOCK, LOCK_S, RETRY_S = "worker.lock", 90.0, 0.2
SEED = ("INFAAS_BUS__NKEY_SEED", "INFAAS_BUS__NKEY_SEED_FILE", "INFAAS_NKEY_SEED")  # the variables of one setting


def forget_gone(data_dir: Path, running: Container[str]) -> None:
    """Delete logs that workers which are gone have not written for KEPT_S. running: names of processes, as their logs have them."""
    for file in (data_dir / LOGS).glob("*-*.log*"):
        name = file.name.partition(".log")[0]
        role, _, worker = name.partition("-")
        if role not in ROLES or name in running or time.time() - file.stat().st_mtime < KEPT_S:
            continue
        place = data_dir / WORKERS / worker
        with suppress(ServerError):  # it runs, beside the system
            lock = process.Lock(place / LOCK) if place.exists() else None
            file.unlink()
            if lock is not None:
                shutil.rmtree(place, ignore_errors=True)
                lock.release()


def serve(settings: Settings, environ: Mapping[str, str], config: Path | None = None) -> int:
    """Run one worker until SIGTERM or Ctrl-C; returns the exit code. environ: of its processes."""
    telemetry.set_up(settings.log_level, "worker")
    return asyncio.run(_main(settings, environ, config))


async def _main(settings: Settings, environ: Mapping[str, str], config: Path | None) -> int:
    host = WorkerHost(settings, environ, config)
    try:
        await until_stopped(host.start(), host.stop)
    except ServerError as error:
        raise SystemExit(f"infaas: {error}") from error
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
            "INFAAS_DATA_DIR": settings.data_dir,
        }
        self._environ = {**environ, **found}
        self._data_dir = Path(settings.data_dir)
        self._place = self._data_dir / WORKERS / self.name
        self._beside = recorded(self._data_dir, "nats") == settings.bus.url  # a system of this machine
        self._pages: dict[str, int] = {}
        self._subjects = Subjects(settings.prefix)
        self._supervisor = Supervisor()
        self._claims = PortClaims()
        self._lock: process.Lock | None = None
        self._metrics: SystemMetrics | None = None
        self._forks: process.ForkServer | None = None
        self._bus: Bus | None = None
        self._connecting: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Start the processes, as soon as no other worker of this name has the data directory; raises ServerError."""
        await self._take_turn()
        if self._beside:
            telemetry.to_file(self._log_of("worker"), "worker")
        asked = self._settings.metrics
        if asked.enabled and asked.port:
            if not self._claims.take(asked.port):
                raise ServerError(f"port {asked.port} (metrics.port) is busy")
            claims = self._claims
            self._metrics = SystemMetrics(asked, asked.port, self._supervisor, claims.take, claims.take_any)
            await self._metrics.open()
        self._connecting = asyncio.get_running_loop().create_task(self._connect())
        if sys.platform == "linux":
            self._forks = process.ForkServer(["executor", *MONITORS], self._config, self._environ, None)
            await asyncio.to_thread(self._forks.wait_ready)
        ours = self._settings.worker
        self._start("executor", ["executor"], EXECUTOR, ours.executor_nkey)
        self._start("monitor", MONITORS, MONITOR, ours.monitor_nkey)
        if self._metrics is not None:
            self._metrics.started = True
        if self._beside:
            show_pages(self._place, self._pages)
        log.info("the worker %s runs", self.name)

    async def stop(self) -> None:
        """Drain, then stop everything; returns when nothing is left."""
        show_pages(self._place, {})
        if self._metrics is not None:
            self._metrics.started = False
        if self._bus is not None and self._supervisor.pids:
            await drain(self._bus, self._subjects, self.name, self._settings.worker.drain_s)
        if self._forks is not None:
            self._forks.close()
        await self._supervisor.stop()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.wait([self._connecting])
        if self._bus is not None:
            await self._bus.close()
        if self._metrics is not None:
            await self._metrics.close()
        self._claims.release()
        if self._lock is not None:
            self._lock.release()
        log.info("the worker %s stopped", self.name)

    # -- inside

    async def _take_turn(self) -> None:
        """Wait until no other worker of this name runs: Swarm may start a machine's next one before the last one has ended."""
        self._place.mkdir(parents=True, exist_ok=True)
        end = asyncio.get_running_loop().time() + LOCK_S
        logged = False
        while True:
            try:
                self._lock = process.Lock(self._place / LOCK)
            except ServerError:
                if asyncio.get_running_loop().time() > end:
                    raise
            else:
                return
            if not logged:
                log.info("waiting for another worker %s to end", self.name)
                logged = True
            await asyncio.sleep(RETRY_S)

    def _log_of(self, name: str) -> Path:
        return self._data_dir / LOGS / f"{name}-{self.name}.log"

    def _start(self, name: str, services: list[str], stage: int, seed: str) -> None:
        command = process.service_command(services, self._config)
        file = None
        if self._beside:
            file = self._log_of(name)
            name = file.stem
        if self._metrics is not None:
            port = self._metrics.port_for(name)
        else:
            port = self._claims.take_any() if self._beside and self._settings.metrics.enabled else 0
        self._pages[name] = port
        environ = {**self._environ, "INFAAS_METRICS__PORT": str(port)}
        if seed:
            environ = {key: value for key, value in environ.items() if key not in SEED} | {SEED[0]: seed}
        environ = process.with_our_source(environ)

        running = shared()

        def launch() -> subprocess.Popen[bytes] | process.Taken:
            return process.start_service(
                command, log=file, environ=environ, cwd=Path.cwd(), running=running, forks=self._forks
            )

        ended = partial(self._executor_ended, running) if stage == EXECUTOR else None
        self._supervisor.start(Child(name, launch, stage, STEPS, ended, running))

    def _executor_ended(self, running: Running | None, reason: str, succeeded: bool) -> None:
        if self._bus is not None:
            engines = self._settings.executor.remote_hosts
            worker = replace(self._settings.worker, name=self.name)
            publish_exit(self._bus, self._subjects, worker, engines, reason, running, succeeded=succeeded)

    async def _connect(self) -> None:
        """Connect to NATS, however long it takes. Nothing waits for it."""
        from bus.natsbus import NatsBus  # noqa: PLC0415  (the processes are to start first)

        logged = False
        while self._bus is None:
            try:
                self._bus = await NatsBus.connect(
                    self._settings.bus.url, name="worker", **login_of(self._settings.bus).options()
                )
            except (BusError, OSError) as error:
                if not logged:
                    log.warning("no connection to NATS yet: %s", error)
                    logged = True
                await asyncio.sleep(AGAIN)


def publish_exit(
    bus: Bus,
    subjects: Subjects,
    worker: WorkerSettings,
    engines: Texts,
    reason: str,
    running: Running | None,
    *,
    succeeded: bool = False,
) -> None:
    """Say on the bus, for monitors and dispatchers, that a worker's executor has ended, for all devices that it drove: a moment later, since its own last
    words come on another connection.
    """
    uids = None
    if running is not None:
        uids = running.read()
        running.forget()
    for device in devices_of(worker, engines=engines):
        fact = ExecutorExited(
            worker=worker.name, device=device.name, at=unix_now(), reason=reason, running=uids, succeeded=succeeded
        )
        asyncio.get_running_loop().call_later(LAST_WORDS, _tell, bus, subjects.exited(worker.name, device.name), fact)


def _tell(bus: Bus, subject: str, fact: ExecutorExited) -> None:
    try:
        bus.publish(subject, encode(fact))
    except BusError as error:
        log.warning("cannot tell that an executor ended: %s", error)


# ---- draining: before its processes are stopped a worker takes nothing new, and what is queued on it is answered

ORDERER = "worker"
QUIET_S = 1.0  # s for which nothing must have been queued: by then everything sent to the worker has arrived
SILENT_S = 3.0  # s without a heartbeat after which the worker has no monitor that could drain it
REPEAT_S = 0.5  # s until the order is sent again while no heartbeat says that the worker drains


async def drain(bus: Bus, subjects: Subjects, worker: str, patience: float) -> bool:
    """Have the worker drain, and return whether it became empty within `patience` s (0: do nothing). Never raises.

    The order has the epoch 0, which no controller has. The heartbeats of the worker's monitor say whether it drains and how much is
    left.
    """
    if patience <= 0:
        return False
    loop = asyncio.get_running_loop()
    quiet = asyncio.Event()
    empty_since: list[float] = []  # when it was first seen to drain with nothing queued
    last = turned = loop.time()

    def on_heartbeat(delivery: Delivery) -> None:
        nonlocal last
        last = loop.time()
        try:
            message = decode(WorkerHeartbeat, delivery.data)
        except BadMessage:
            return
        if message.leaving:
            quiet.set()
        elif not message.draining or any(instance.queued for instance in message.instances):
            empty_since.clear()
        elif not empty_since:
            empty_since.append(loop.time())
        elif loop.time() - empty_since[0] >= QUIET_S:
            quiet.set()

    end = last + patience
    order = encode(Drain(epoch=0, reason="its processes are being stopped", orderer=ORDERER))
    try:
        subscription = await bus.subscribe(subjects.worker_heartbeat(worker), on_heartbeat)
        while not quiet.is_set() and (left := end - loop.time()) > 0 and loop.time() - last < SILENT_S:
            if not empty_since:
                bus.publish(subjects.worker(worker, "drain"), order)
            try:
                await asyncio.wait_for(quiet.wait(), min(REPEAT_S, left))
            except TimeoutError:
                before, turned = turned, loop.time()
                if turned - before > 2.0 * REPEAT_S:
                    last = turned  # the silence was this process's own
        await subscription.drain()
    except BusError as error:
        log.warning("the worker %s is stopped without draining: %s", worker, error)
        return False
    if not quiet.is_set():
        log.warning("the worker %s is stopped although it has not become empty within %g s", worker, patience)
    return quiet.is_set()


# ---- workers of this machine, which the VM-autoscaler starts and stops over the bus while `infaas up` runs


HOSTS = "machines"  # queue group: one of several hosts starts a worker
LEADER = "controller"
MACHINE = "machine."


class LocalWorkers(Struct, eq=False):
    """The workers of this machine. launch(worker, kind) starts one (may raise ServerError); end(worker) stops one and waits for its end."""

    bus: Bus
    subjects: Subjects
    kinds: Collection[str]
    launch: Callable[[str, str], None]
    end: Callable[[str], Awaitable[None]]
    _epoch: int = 0
    _present: set[str] = set()  # started, or booting
    _ended: set[str] = set()
    _booting: dict[str, asyncio.TimerHandle] = {}
    _ending: dict[str, asyncio.Task[None]] = {}
    _open: list[Subscription] = []

    async def open(self, initial: Iterable[str]) -> None:
        """Take orders from now on. initial: workers that run already. Records of workers of an earlier run are deleted."""
        self._present.update(initial)
        control = await self.bus.key_value(self.subjects.control_bucket)
        for key in await control.keys():
            if key.startswith(MACHINE):
                await control.delete(key)
        self._open = [
            await control.watch(self._changed),
            await self.bus.subscribe(self.subjects.machines("start"), self._start, HOSTS),
            await self.bus.subscribe(self.subjects.machines("stop"), self._stop),
        ]

    async def close(self) -> None:
        """Start nothing more, and wait until the workers that are being stopped have ended."""
        for timer in self._booting.values():
            timer.cancel()
        self._booting.clear()
        for subscription in self._open:
            with suppress(BusError):
                await subscription.drain()
        self._open.clear()
        if self._ending:
            await asyncio.wait(self._ending.values())

    # -- orders

    def _changed(self, entry: KeyValueEntry | None) -> None:
        if entry is not None and entry.key == LEADER and entry.value is not None:
            with suppress(BadMessage):
                self._epoch = max(self._epoch, decode(LeaderRecord, entry.value).epoch)

    def _start(self, delivery: Delivery) -> None:
        if from_stream(delivery.reply, delivery.headers):
            return
        try:
            order = decode(StartMachine, delivery.data)
        except BadMessage as error:
            self._reply(delivery, "", str(error))
            return
        self._reply(delivery, order.worker, self._obstacle(order) or self._begin(order))

    def _obstacle(self, order: StartMachine) -> str:
        if outdated := self._outdated(order.epoch):
            return outdated
        if not valid_name(order.worker):
            return f"worker {order.worker!r} must be 1 to 64 letters, digits, - or _, a letter or digit first"
        if order.kind not in self.kinds:
            return f"there is no kind of machine {order.kind!r} here: {', '.join(sorted(self.kinds))}"
        if not 0 <= order.boot_s < float("inf"):
            return f"boot_s must be at least 0 s, not {order.boot_s}"
        if order.worker in self._ended:
            return f"{order.worker} has been stopped: names are not used again"
        return ""

    def _begin(self, order: StartMachine) -> str:
        if order.worker in self._present:
            return ""
        self._present.add(order.worker)
        if order.boot_s > 0:
            loop = asyncio.get_running_loop()
            self._booting[order.worker] = loop.call_later(order.boot_s, self._booted, order.worker, order.kind)
            return ""
        return self._launched(order.worker, order.kind)

    def _booted(self, worker: str, kind: str) -> None:
        del self._booting[worker]
        self._launched(worker, kind)

    def _launched(self, worker: str, kind: str) -> str:
        try:
            self.launch(worker, kind)
        except ServerError as error:
            log.error("cannot start worker %s: %s", worker, error)
            self._clean_up(worker)
            return str(error)
        return ""

    def _stop(self, delivery: Delivery) -> None:
        if from_stream(delivery.reply, delivery.headers):
            return
        try:
            order = decode(StopMachine, delivery.data)
        except BadMessage as error:
            self._reply(delivery, "", str(error))
            return
        if outdated := self._outdated(order.epoch):
            self._reply(delivery, order.worker, outdated)
            return
        task = self._clean_up(order.worker)
        task.add_done_callback(lambda done: self._reply(delivery, order.worker, _failure(done)))

    def _clean_up(self, worker: str) -> asyncio.Task[None]:
        """Stop a worker, or the start of one. A second call gets the same task."""
        task = self._ending.get(worker)
        if task is None:
            task = self._ending[worker] = asyncio.get_running_loop().create_task(self._ended_now(worker))
            task.add_done_callback(lambda _: self._ending.pop(worker, None))
        return task

    async def _ended_now(self, worker: str) -> None:
        timer = self._booting.pop(worker, None)
        if timer is not None:
            timer.cancel()
        await self.end(worker)
        self._present.discard(worker)
        self._ended.add(worker)

    # -- inside

    def _outdated(self, epoch: int) -> str:
        if epoch < self._epoch:
            return f"the order is of epoch {epoch}, another controller leads since epoch {self._epoch}"
        self._epoch = epoch
        return ""

    def _reply(self, delivery: Delivery, worker: str, error: str) -> None:
        if not delivery.reply:
            return
        with suppress(BusError):
            self.bus.publish(delivery.reply, encode(MachineReply(worker=worker, error=error)))


def _failure(task: asyncio.Task[None]) -> str:
    error = None if task.cancelled() else task.exception()
    return "" if error is None else str(error) or repr(error)
