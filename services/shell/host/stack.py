"""A whole system on one machine: which processes `infaas up` runs, in which order, and how they find each other."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from bus.login import Login, SystemAddress
from bus.natsjet import LostStream
from bus.port import Bus, BusError
from bus.subjects import Subjects
from services.core.settings import Settings, WorkerSettings
from services.shell.host import process
from services.shell.host.endpoints import (
    PortClaims,
    at,
    check_version,
    choose_ports,
    mark_stopped,
    moved_ports,
    page_url,
    preferred_ports,
    recorded,
    recorded_ports,
    write_endpoints,
    write_parts,
)
from services.shell.host.machine import PLAIN, environ_of, initial, worker_of
from services.shell.host.nats import EmbeddedNats, Keys
from services.shell.host.postgres import STEPS as POSTGRES_STEPS
from services.shell.host.postgres import EmbeddedPostgres, role_dsn
from services.shell.host.process import ServerError
from services.shell.host.readiness import Readiness
from services.shell.host.running import AFTER, BESIDE, LastingMemory
from services.shell.host.supervise import Child, Supervisor, ended
from services.shell.host.worker import LocalWorkers, forget_gone, publish_exit
from services.shell.http.server import LISTENING, listen
from services.shell.metrics.system import PAGE, SystemMetrics
from services.shell.runtime import telemetry
from services.shell.runtime.known_streams import LOOKED, KnownStreams, StreamFile, look_at_servers
from services.shell.settings import deciding, given, login_of

log = logging.getLogger(__name__)

GATEWAY = ("gateway", "gateway_grpc")  # its ports, HTTP and gRPC
NATS, POSTGRES, SERVICES = range(3)  # stages: started in this order, stopped in the reverse order
# The services' own drain takes up to 5 s.
SERVICE_STEPS: process.Steps = ((signal.SIGTERM, 6.0), (signal.SIGKILL, 5.0))
# The services that are copies of one process: they share the memory of what they import.
SHARED = (
    "dispatcher", "executor", "jobs", "model-autoscaler", "monitor", "offline", "recorder", "registrar", "vm-autoscaler"
)  # fmt: skip
MONITORS = ["monitor", "model-autoscaler", "offline"]  # of one worker, in one process
FUSED = ["dispatcher", "executor", *MONITORS]  # in one process with the gateway, if `infaas up --fused` asks for it
SERVERS = ("nats", "postgres")  # the children that are no services
LOG = "up"  # the name of the supervisor's own log
KNOWN = "streams.json"  # which streams and buckets this system has
PING_S = 60.0  # s that a question to NATS waits; how long it has waited is told meanwhile
# A PostgreSQL that is stopped is left alone for longer than NATS, without which nothing is served: history waits in its streams meanwhile.
# Both lose nothing that they have acknowledged, whatever ends them.
POSTGRES_HUNG = 10.0
HOPELESS = 5  # restarts of one service after which `ready` gives up


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """What to run. nats_url, sql_dsn: servers to use instead of our own. fused: all that is on a query's way in one process. environ: variables of
    the services.
    """

    data_dir: Path
    settings: Settings
    workers: int = 1
    dispatchers: int = 1
    dashboard: bool = True
    gateway: bool = True
    fused: bool = False
    port_base: int | None = None
    config: Path | None = None
    nats_url: str | None = None
    sql_dsn: str | None = None
    reader_dsn: str | None = None
    environ: Mapping[str, str]

    @property
    def initial(self) -> dict[str, str]:
        """The workers that it starts with, name to kind. They are the same at every start."""
        return initial(self.workers, self.settings.machines)


class Stack:
    """One running system. `start`, then `ready`, then `stop`, all on the main thread's event loop."""

    def __init__(self, spec: StackSpec) -> None:
        self._spec = spec
        self._logs = spec.data_dir / "logs"
        self._subjects = Subjects(spec.settings.prefix)
        self._supervisor = Supervisor()
        self._claims = PortClaims()
        self._lock: process.Lock | None = None
        self._bus: Bus | None = None
        self._readiness: Readiness | None = None
        self._environ: dict[str, str] = {}
        self._workers: dict[str, list[Child]] = {}
        self._hosting: LocalWorkers | None = None
        self._metrics: SystemMetrics | None = None
        self._supervisor.changed = self._tell_parts
        self._supervisor.swept = self._swept
        self._chosen: dict[str, int] = {}
        self._log: logging.Handler | None = None
        self._keys: Keys | None = None
        # by child: where connections wait while none of its processes accepts them
        self._listening: dict[str, socket.socket] = {}
        self._forks: process.ForkServer | None = None
        self._await_visitor: Callable[[], None] | None = None
        self._memory = LastingMemory()
        self.notices: list[str] = []  # what `start` did otherwise than usual, for people

    async def start(self) -> SystemAddress:
        """Start servers and services and return where they are; raises ServerError. Call `stop` in any case."""
        spec = self._spec
        try:
            spec.data_dir.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            why = error.strerror if not isinstance(error, FileExistsError) else "it is a file"
            raise ServerError(
                f"the data directory {spec.data_dir} cannot be made: {why}; choose another --data-dir"
            ) from None
        try:
            self._lock = process.Lock(spec.data_dir / "up.lock")
        except ServerError:
            running = recorded(spec.data_dir, "pid")
            how = f"`kill {running}` stops it" if running else "stop it first"
            raise ServerError(
                f"a system runs in {spec.data_dir} already: {how}, or choose another --data-dir"
            ) from None
        check_version(spec.data_dir)
        if spec.settings.bus.auth:
            self._keys = Keys(spec.settings.bus.auth, spec.settings.prefix)
        self._log = telemetry.to_file(self._logs / f"{LOG}.log", LOG)
        self._memory.open(self._spec.data_dir)
        kept = recorded_ports(spec.data_dir)
        ours = [name for name, given in (("nats", spec.nats_url), ("postgres", spec.sql_dsn)) if given is None]
        ours += ["dashboard"] * spec.dashboard
        gateway = spec.settings.gateway
        ours += ["gateway"] * (spec.gateway and gateway.port > 0) + ["gateway_grpc"] * (
            spec.gateway and gateway.grpc_port > 0
        )
        ours += ["metrics"] * spec.settings.metrics.enabled
        preferred = preferred_ports(spec.settings)
        take, take_any = self._claims.take, self._claims.take_any
        chosen = choose_ports(ours, spec.port_base, kept, take, take_any, preferred)
        self.notices = moved_ports(chosen, spec.port_base, kept, preferred)
        if spec.config is None and (before := recorded(spec.data_dir, "config")):
            self.notices.append(
                f"the last start had --config {before}, this one has none: its settings are the defaults"
            )
        self._metrics = SystemMetrics(
            spec.settings.metrics, chosen.get("metrics", 0), self._supervisor, take, take_any, spec.data_dir
        )
        if sys.platform == "linux":
            services = [*SHARED, *["gateway"] * spec.gateway]
            self._forks = process.ForkServer(services, spec.config, spec.environ, self._logs / "forks.log")
        metrics = await self._metrics.open()
        self._chosen = chosen
        nats_url, writer, reader, environ = await self._start_servers(chosen)
        self._service(
            "registrar", ["registrar", "recorder", "vm-autoscaler", "jobs"], environ | {"INFAAS_STORE__DSN": writer}
        )
        dashboard = self._start_dashboard(chosen["dashboard"], environ, reader) if spec.dashboard else None
        found = SystemAddress(
            nats=nats_url,
            sql=reader,
            writer=writer,
            prefix=spec.settings.prefix,
            dashboard=dashboard,
            gateway=page_url(gateway, chosen["gateway"]) if "gateway" in chosen else None,
            gateway_grpc=at(gateway.address, chosen["gateway_grpc"]) if "gateway_grpc" in chosen else None,
            metrics=metrics,
            settings=deciding(spec.settings),
            given=given(spec.config, spec.environ),
            config=None if spec.config is None else str(spec.config.absolute()),
            login=Login() if self._keys is None else self._keys.login(["operator"]),
        )
        write_endpoints(spec.data_dir, found, kept | chosen)
        return found

    async def ready(self, timeout: float = 120.0) -> None:
        """Return once a query can be answered; raises ServerError when a service keeps failing, or after `timeout` s."""
        assert self._bus is not None, "start first"
        addresses = [
            (self._spec.settings.gateway.address, self._chosen[name]) for name in GATEWAY[:1] if name in self._chosen
        ]
        self._readiness = Readiness(self._bus, self._subjects, self._spec.initial, addresses)
        waiting = asyncio.create_task(self._readiness.wait())
        give_up = asyncio.get_running_loop().time() + timeout
        try:
            while not waiting.done():
                await asyncio.wait([waiting], timeout=0.2)
                for name, restarts in self._supervisor.restarts.items():
                    if restarts >= HOPELESS:
                        file = self._logs / f"{name}.log"
                        raise ServerError(f"{name} does not stay up: {process.last_line(file)} (more in {file})")
                if asyncio.get_running_loop().time() > give_up:
                    raise ServerError(f"not ready after {timeout:.0f} s, missing: {self.missing}; see {self._logs}")
            await waiting
            if self._metrics is not None:
                self._metrics.started = True
        finally:
            waiting.cancel()

    @property
    def missing(self) -> str:
        """What `ready` waits for, in words."""
        return self._readiness.missing if self._readiness is not None else "the servers"

    async def stop(self) -> None:
        """Stop everything that was started, services first; nothing is left behind."""
        if self._lock is None:
            return  # the directory is another system's
        mark_stopped(self._spec.data_dir)
        if self._metrics is not None:
            self._metrics.started = False
        if self._hosting is not None:
            await self._hosting.close()
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()
        if self._forks is not None:
            self._forks.close()
        await self._supervisor.stop()
        if self._metrics is not None:
            await self._metrics.close()
        for listening in self._listening.values():
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()
        self._memory.close()
        self._claims.release()
        self._lock.release()
        if self._log is not None:
            logging.getLogger().removeHandler(self._log)
            self._log.close()

    # -- servers

    async def _start_servers(self, chosen: Mapping[str, int]) -> tuple[str, str, str, dict[str, str]]:
        """Start NATS and the database side by side, and the services that need only NATS as soon as it is there."""
        try:
            async with asyncio.TaskGroup() as group:
                storing = group.create_task(self._start_store(chosen.get("postgres", 0)))
                nats_url = await self._start_nats(chosen.get("nats", 0))
                known = {"INFAAS_BUS__KNOWN": str((self._spec.data_dir / KNOWN).absolute())}
                if self._forks is not None:
                    await asyncio.to_thread(self._forks.wait_ready)
                environ = self._environ = self._service_environ({"INFAAS_BUS__URL": nats_url, **known})
                self._start_serving(environ)
                group.create_task(self._connect(nats_url))
        except BaseExceptionGroup as group:
            failures, others = group.split(ServerError)
            if failures is None or others is not None:
                raise
            raise failures.exceptions[0] from None
        return nats_url, *storing.result(), environ

    async def _start_nats(self, port: int) -> str:
        spec = self._spec
        if spec.nats_url is not None:
            self.notices += await look_at_servers(spec.settings.bus)
            return spec.nats_url
        server = EmbeddedNats(spec.data_dir, port, max_payload=spec.settings.bus.max_payload, keys=self._keys)
        self._supervisor.start(Child("nats", server.launch, NATS, asked=self._ask_nats))
        await asyncio.to_thread(server.wait_ready)
        return server.url

    async def _ask_nats(self) -> None:
        """A ping on our own connection."""
        if self._bus is None:
            raise BusError("not connected yet")
        await self._bus.flush(PING_S)

    async def _start_store(self, port: int) -> tuple[str, str]:
        """The writer's and the reader's DSN of a database that is ready for them."""
        spec = self._spec
        if spec.sql_dsn is not None and spec.reader_dsn is not None:
            return spec.sql_dsn, spec.reader_dsn  # an administrator has prepared it
        if spec.sql_dsn is not None:
            administrator = spec.sql_dsn
        else:
            server = EmbeddedPostgres(spec.data_dir, port)
            await asyncio.to_thread(server.prepare)
            postgres = Child(
                "postgres", server.launch, POSTGRES, POSTGRES_STEPS, asked=server.ask, hung=POSTGRES_HUNG, serves=False
            )
            self._supervisor.start(postgres)
            await asyncio.to_thread(server.wait_ready)
            administrator = server.superuser_dsn
        writer = process.kept_secret(spec.data_dir / "writer.secret")
        reader = process.kept_secret(spec.data_dir / "reader.secret")
        await self._prepare_store(administrator, writer, reader)
        return role_dsn(administrator, "infaas_writer", writer), role_dsn(administrator, "infaas_reader", reader)

    async def _prepare_store(self, administrator: str, writer: str, reader: str) -> None:
        """Make roles and schema, in a short-lived process: the supervisor itself stays small."""
        file = self._logs / "prepare.log"
        file.unlink(missing_ok=True)
        environ = self._service_environ(
            {
                "INFAAS_STORE__SUPERUSER_DSN": administrator,
                "INFAAS_STORE__WRITER_PASSWORD": writer,
                "INFAAS_STORE__READER_PASSWORD": reader,
                "INFAAS_CONFIG": "" if self._spec.config is None else str(self._spec.config.absolute()),
            }
        )
        command = [sys.executable, "-P", "-m", "services.shell.store", "prepare"]
        preparing = process.start_service(command, log=file, environ=environ, forks=self._forks)
        await ended(preparing)
        if preparing.wait() != 0:
            raise ServerError(f"cannot prepare the database: {process.last_line(file)}")

    # -- services

    def _tell_parts(self) -> None:
        """Write down which process is which part, for `infaas restart`."""
        pids = {name: pid for name, pid in self._supervisor.pids.items() if name not in SERVERS}
        write_parts(self._spec.data_dir, pids)

    def _swept(self) -> None:
        process.rotate(self._logs)
        forget_gone(self._spec.data_dir, self._supervisor.pids)
        if self._keys is not None and self._keys.changed() and (nats := self._supervisor.pids.get("nats")):
            os.kill(nats, signal.SIGHUP)  # it reads its users again

    def _start_serving(self, environ: dict[str, str]) -> None:
        spec, gateway = self._spec, {}
        if spec.gateway:
            wanted = {name: str(self._chosen.get(name, 0)) for name in GATEWAY}
            gateway = {"INFAAS_GATEWAY__PORT": wanted["gateway"], "INFAAS_GATEWAY__GRPC_PORT": wanted["gateway_grpc"]}
            if self._metrics is not None:
                gateway[PAGE] = self._metrics.page
            if spec.dashboard:  # its start page links the dashboard
                gateway["INFAAS_DASHBOARD__PUBLIC_URL"] = self._dashboard_url
            gateway["INFAAS_GATEWAY__REUSE_PORT"] = "true"  # a gateway and its successor listen for gRPC at once
            if port := self._chosen.get("gateway"):
                listens = spec.settings.gateway
                self._listen("fused" if spec.fused else "gateway", listens.address, port, reuse=listens.reuse_port)
        drain_s = spec.settings.gateway.drain_s if spec.gateway else 0.0
        if spec.fused:
            [(worker, kind)] = spec.initial.items()
            settings = self._worker_settings(worker, kind)
            services = [*FUSED, *["gateway"] * spec.gateway]
            self._service("fused", services, environ | environ_of(settings) | gateway, settings, drain_s)
            return
        for worker, kind in spec.initial.items():
            self._start_worker(worker, kind)
        for number in range(spec.dispatchers):
            self._service(f"dispatcher-{number}", ["dispatcher"], environ)
        if spec.gateway:
            self._service("gateway", ["gateway"], environ | gateway, notice=drain_s)

    def _listen(self, name: str, address: str, port: int, *, reuse: bool = False) -> socket.socket:
        """Open a child's socket, which it inherits; raises ServerError."""
        try:
            self._listening[name] = listen(address, port, reuse=reuse, of=name)
        except OSError as error:
            raise ServerError(f"the {name} cannot listen on {error}") from error
        return self._listening[name]

    def _worker_settings(self, worker: str, kind: str) -> WorkerSettings:
        spec = self._spec
        settings = replace(worker_of(kind, spec.settings.machines.kinds, spec.settings.worker), name=worker)
        # The first worker gets the machine's accelerators, so that none of their memory is promised twice.
        return settings if worker == next(iter(spec.initial), worker) else replace(settings, gpus=0)

    def _start_worker(self, worker: str, kind: str) -> None:
        """Start the processes of one worker; raises ServerError."""
        settings = self._worker_settings(worker, kind)
        environ = self._environ | environ_of(settings)
        children = self._workers[worker] = []
        children.append(self._service(f"executor-{worker}", ["executor"], environ, settings))
        children.append(self._service(f"monitor-{worker}", MONITORS, environ))

    async def _stop_worker(self, worker: str) -> None:
        """Stop the processes of one worker. Does nothing if there is no such worker."""
        children = self._workers.pop(worker, [])
        await self._supervisor.stop_only(children)
        if self._metrics is not None:
            self._metrics.remove(child.name for child in children)

    def _start_dashboard(self, port: int, environ: Mapping[str, str], reader: str) -> str:
        """Listen for visitors, and return its URL. Its process runs while there are any; the first one's connection waits until then."""
        more = {"INFAAS_STORE__READER_DSN": reader, "INFAAS_STORE__DSN": "", "INFAAS_DASHBOARD__PORT": str(port)}
        loop, entrance = (
            asyncio.get_running_loop(),
            self._listen("dashboard", self._spec.settings.dashboard.address, port),
        )
        entrance.listen()

        def visited() -> None:
            loop.remove_reader(entrance)
            self._service("dashboard", ["dashboard"], {**environ, **more})

        def rests() -> None:
            if self._metrics is not None:
                self._metrics.remove(["dashboard"])
            loop.add_reader(entrance, visited)

        self._await_visitor = rests
        rests()
        return self._dashboard_url

    @property
    def _dashboard_url(self) -> str:
        settings = self._spec.settings.dashboard
        return settings.public_url or page_url(settings, self._chosen["dashboard"])

    def _service(
        self,
        name: str,
        services: list[str],
        environ: dict[str, str],
        worker: WorkerSettings | None = None,
        notice: float = 0.0,
    ) -> Child:
        """Keep one process with these services running. worker: whose executor it is, if any. notice: s more that it takes to stop."""
        child = self._child(name, services, environ, worker, notice)
        self._supervisor.start(child)
        return child

    def _child(
        self, name: str, services: list[str], environ: dict[str, str], worker: WorkerSettings | None, notice: float
    ) -> Child:
        file = self._logs / f"{name}.log"
        command = process.service_command(services, self._spec.config)
        port = self._metrics.port_for(name) if self._metrics is not None else 0
        environ = {**environ, "INFAAS_METRICS__PORT": str(port)}
        if self._keys is not None:
            environ |= self._keys.environ(services)
        listening = self._listening.get(name)
        if listening is not None:
            environ[LISTENING] = str(listening.fileno())
        running = self._memory.of(name) if services != ["dashboard"] else None

        def launch() -> subprocess.Popen[bytes] | process.Taken:
            return process.start_service(
                command, log=file, environ=environ, cwd=Path.cwd(), running=running,
                keep_open=() if listening is None else (listening.fileno(),),
                forks=self._forks if running is not None else None,
            )  # fmt: skip

        def exited(reason: str, succeeded: bool) -> None:
            if worker is not None and self._bus is not None:
                engines = self._spec.settings.executor.remote_hosts
                publish_exit(self._bus, self._subjects, worker, engines, reason, running, succeeded=succeeded)

        (polite, patience), *last = SERVICE_STEPS
        steps = ((polite, patience + notice), *last)
        serves = worker is not None or bool({"dispatcher", "monitor", "gateway"}.intersection(services))
        again = None if running is None else partial(self._child, name, services, environ, worker, notice)
        return Child(
            name, launch, SERVICES, steps, exited if worker else None, running, serves=serves, again=again,
            succession=AFTER if "monitor" in services else BESIDE,
            rests=self._await_visitor if services == ["dashboard"] else None,
        )  # fmt: skip

    def _service_environ(self, more: Mapping[str, str]) -> dict[str, str]:
        own = {"INFAAS_DATA_DIR": str(self._spec.data_dir), LOOKED: "yes"}
        return process.with_our_source({**self._spec.environ, **own, **more})

    async def _connect(self, url: str) -> None:
        from bus.natsbus import NatsBus  # noqa: PLC0415  (not before NATS itself has been started)

        try:
            login = (
                login_of(self._spec.settings.bus)
                if self._keys is None
                else self._keys.login(["supervisor", "registrar"])
            )
            self._bus = await NatsBus.connect(url, name="supervisor", **login.options())
            known = KnownStreams([StreamFile(self._spec.data_dir / KNOWN)], adopt=self._spec.settings.bus.adopt)
            await known.check(self._bus.streams)
            known.attach_to(self._bus.streams)
            kinds = {PLAIN, *self._spec.settings.machines.kinds}
            self._hosting = LocalWorkers(self._bus, self._subjects, kinds, self._start_worker, self._stop_worker)
            await self._hosting.open(self._spec.initial)
        except LostStream as error:
            raise ServerError(str(error)) from error
        except (BusError, OSError) as error:
            raise ServerError(f"cannot reach NATS: {error}") from error
