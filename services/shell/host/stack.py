"""A whole system on one machine: which processes `infaas up` runs, in which order, and how they find each other."""

import asyncio
import logging
import os
import signal
import site
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlsplit, urlunsplit

from msgspec.structs import replace

from bus.codec import encode
from bus.messages.fleet import ExecutorExited
from bus.natsjet import LostStream
from bus.port import Bus, BusError
from bus.subjects import Subjects
from services.core.settings import GatewaySettings, Settings, WorkerSettings
from services.shell.clock import now
from services.shell.host import endpoints, process
from services.shell.host import endpoints as ports
from services.shell.host.endpoints import SystemEndpoints
from services.shell.host.local_workers import LocalWorkers
from services.shell.host.machine import PLAIN, devices_of, environ_of, initial, worker_of
from services.shell.host.nats import EmbeddedNats
from services.shell.host.postgres import STEPS as POSTGRES_STEPS
from services.shell.host.postgres import EmbeddedPostgres
from services.shell.host.process import ServerError
from services.shell.host.readiness import Readiness
from services.shell.host.supervise import Child, Supervisor, ended
from services.shell.metrics.system import SystemMetrics
from services.shell.runtime.known_streams import KnownStreams, StreamFile
from services.shell.settings import login_of

log = logging.getLogger(__name__)

GATEWAY = ("gateway", "gateway_grpc")  # its ports, HTTP and gRPC
NATS, POSTGRES, SERVICES = range(3)  # stages: started upwards, stopped downwards
# The services' own drain takes up to 5 s.
SERVICE_STEPS: process.Steps = ((signal.SIGTERM, 6.0), (signal.SIGKILL, 5.0))
KNOWN = "streams.json"  # which streams and buckets this system has
HOPELESS = 5  # restarts of one service before the first `ready` that end the attempt


@dataclass(frozen=True, kw_only=True)
class StackSpec:
    """What to run. nats_url, sql_dsn: servers of somebody else to use instead of our own. environ: the services'."""

    data_dir: Path
    settings: Settings
    workers: int = 1
    dispatchers: int = 1
    dashboard: bool = True
    gateway: bool = True
    port_base: int | None = None
    config: Path | None = None
    nats_url: str | None = None
    sql_dsn: str | None = None
    reader_dsn: str | None = None
    environ: Mapping[str, str]

    @property
    def initial(self) -> dict[str, str]:
        """The workers it starts with, name to kind; the same at every start."""
        return initial(self.workers, self.settings.machines)


class Stack:
    """One running system. `start`, then `ready`, then `stop`, all on the main thread's event loop."""

    def __init__(self, plan: StackSpec) -> None:
        self._plan = plan
        self._logs = plan.data_dir / "logs"
        self._subjects = Subjects(plan.settings.prefix)
        self._supervisor = Supervisor()
        self._claims = ports.PortClaims()
        self._lock: process.Lock | None = None
        self._bus: Bus | None = None
        self._readiness: Readiness | None = None
        self._starting: subprocess.Popen[bytes] | None = None
        self._environ: dict[str, str] = {}
        self._workers: dict[str, list[Child]] = {}
        self._hosting: LocalWorkers | None = None
        self._hub: SystemMetrics | None = None
        self._chosen: dict[str, int] = {}

    async def start(self) -> SystemEndpoints:
        """Start servers and services and return where they are; raises ServerError. Call `stop` in any case."""
        plan = self._plan
        plan.data_dir.mkdir(parents=True, exist_ok=True)
        try:
            self._lock = process.Lock(plan.data_dir / "up.lock")
        except ServerError:
            raise ServerError(
                f"a system runs in {plan.data_dir} already: stop it first, or choose another --data-dir"
            ) from None
        recorded = endpoints.recorded_ports(plan.data_dir)
        ours = [name for name, given in (("nats", plan.nats_url), ("postgres", plan.sql_dsn)) if given is None]
        ours += ["dashboard"] * plan.dashboard
        door = plan.settings.gateway
        ours += ["gateway"] * (plan.gateway and door.port > 0) + ["gateway_grpc"] * (
            plan.gateway and door.grpc_port > 0
        )
        preferred = {
            **ports.DEFAULT_PORTS,
            "dashboard": plan.settings.dashboard.port,
            "gateway": door.port,
            "gateway_grpc": door.grpc_port,
        }
        chosen = ports.choose_ports(ours, plan.port_base, recorded, self._claims.take, self._claims.take_any, preferred)
        claims = self._claims
        self._hub = SystemMetrics(
            plan.settings.metrics,
            plan.port_base,
            recorded.get("metrics"),
            self._supervisor,
            claims.take,
            claims.take_any,
        )
        metrics = await self._hub.open()
        self._chosen = chosen
        nats_url, writer, reader, environ = await self._start_servers(chosen)
        self._service(
            "registrar", ["registrar", "recorder", "vm-autoscaler", "jobs"], environ | {"INFAAS_STORE__DSN": writer}
        )
        dashboard = self._start_dashboard(chosen["dashboard"], environ, reader) if plan.dashboard else None
        found = SystemEndpoints(
            nats=nats_url,
            sql=reader,
            writer=writer,
            prefix=plan.settings.prefix,
            dashboard=dashboard,
            gateway=gateway_url(door, chosen["gateway"]) if "gateway" in chosen else None,
            gateway_grpc=at(door.address, chosen["gateway_grpc"]) if "gateway_grpc" in chosen else None,
            metrics=metrics,
        )
        endpoints.write_endpoints(plan.data_dir, found, chosen | ({"metrics": self._hub.port} if metrics else {}))
        return found

    async def ready(self, timeout: float = 120.0) -> None:
        """Return once a query can be answered; raises ServerError when a service keeps failing, or after `timeout` s."""
        assert self._bus is not None, "start first"
        doors = [
            (self._plan.settings.gateway.address, self._chosen[name]) for name in GATEWAY[:1] if name in self._chosen
        ]
        self._readiness = Readiness(self._bus, self._subjects, self._plan.initial, doors)
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
            if self._hub is not None:
                self._hub.started = True
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
        endpoints.mark_stopped(self._plan.data_dir)
        if self._hub is not None:
            self._hub.started = False
        if self._hosting is not None:
            await self._hosting.close()
        bus, self._bus = self._bus, None
        if bus is not None:
            await bus.close()
        if self._starting is not None:
            process.end(self._starting)
        await self._supervisor.stop()
        if self._hub is not None:
            await self._hub.close()
        self._claims.release()
        self._lock.release()

    # -- servers

    async def _start_servers(self, chosen: Mapping[str, int]) -> tuple[str, str, str, dict[str, str]]:
        """Start NATS and the database side by side, and the services that need only NATS as soon as it is there."""
        try:
            async with asyncio.TaskGroup() as group:
                storing = group.create_task(self._start_store(chosen.get("postgres", 0)))
                nats_url = await self._start_nats(chosen.get("nats", 0))
                known = {"INFAAS_BUS__KNOWN": str((self._plan.data_dir / KNOWN).absolute())}
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
        plan = self._plan
        if plan.nats_url is not None:
            return plan.nats_url
        server = EmbeddedNats(plan.data_dir, port, max_payload=plan.settings.bus.max_payload)
        self._supervisor.start(Child("nats", server.launch, NATS))
        await asyncio.to_thread(server.wait_ready)
        return server.url

    async def _start_store(self, port: int) -> tuple[str, str]:
        """The writer's and the reader's DSN of a database that is ready for them."""
        plan = self._plan
        if plan.sql_dsn is not None and plan.reader_dsn is not None:
            return plan.sql_dsn, plan.reader_dsn  # an administrator has prepared it
        if plan.sql_dsn is not None:
            administrator = plan.sql_dsn
        else:
            server = EmbeddedPostgres(plan.data_dir, port)
            await asyncio.to_thread(server.prepare)
            self._supervisor.start(Child("postgres", server.launch, POSTGRES, POSTGRES_STEPS))
            await asyncio.to_thread(server.wait_ready)
            administrator = server.superuser_dsn
        writer = process.kept_secret(plan.data_dir / "writer.secret")
        reader = process.kept_secret(plan.data_dir / "reader.secret")
        await self._prepare_store(administrator, writer, reader)
        return role_dsn(administrator, "infaas_writer", writer), role_dsn(administrator, "infaas_reader", reader)

    async def _prepare_store(self, administrator: str, writer: str, reader: str) -> None:
        """Roles and schema, by a short-lived process: the supervisor itself stays small."""
        file = self._logs / "prepare.log"
        file.unlink(missing_ok=True)
        environ = self._service_environ(
            {
                "INFAAS_STORE__SUPERUSER_DSN": administrator,
                "INFAAS_STORE__WRITER_PASSWORD": writer,
                "INFAAS_STORE__READER_PASSWORD": reader,
                "INFAAS_CONFIG": "" if self._plan.config is None else str(self._plan.config.absolute()),
            }
        )
        command = [sys.executable, "-P", "-m", "services.shell.store", "prepare"]
        self._starting = process.start(command, log=file, on_our_death=signal.SIGKILL, environ=environ)
        await ended(self._starting)
        if self._starting.wait() != 0:
            raise ServerError(f"cannot prepare the database: {process.last_line(file)}")

    # -- services

    def _start_serving(self, environ: dict[str, str]) -> None:
        for worker, kind in self._plan.initial.items():
            self._start_worker(worker, kind)
        for number in range(self._plan.dispatchers):
            self._service(f"dispatcher-{number}", ["dispatcher"], environ)
        if self._plan.gateway:
            wanted = {name: str(self._chosen.get(name, 0)) for name in GATEWAY}
            more = {"INFAAS_GATEWAY__PORT": wanted["gateway"], "INFAAS_GATEWAY__GRPC_PORT": wanted["gateway_grpc"]}
            self._service("gateway", ["gateway"], environ | more, notice=self._plan.settings.gateway.drain_s)

    def _start_worker(self, worker: str, kind: str) -> None:
        """Start the processes of one worker; raises ServerError."""
        plan = self._plan
        settings = replace(worker_of(kind, plan.settings.machines.kinds, plan.settings.worker), name=worker)
        # The machine's accelerators are the first worker's: no memory of theirs is promised twice.
        if worker != next(iter(plan.initial), worker):
            settings = replace(settings, gpus=0)
        environ = self._environ | environ_of(settings)
        children = self._workers[worker] = []
        children.append(self._service(f"executor-{worker}", ["executor"], environ, settings))
        children.append(self._service(f"monitor-{worker}", ["monitor", "model-autoscaler", "offline"], environ))

    async def _stop_worker(self, worker: str) -> None:
        """Stop the processes of one worker alone; nothing when there is no such worker."""
        children = self._workers.pop(worker, [])
        await self._supervisor.stop_only(children)
        if self._hub is not None:
            self._hub.gone(child.name for child in children)

    def _start_dashboard(self, port: int, environ: Mapping[str, str], reader: str) -> str:
        """Start the dashboard, which nothing waits for; returns where it will be."""
        more = {"INFAAS_STORE__READER_DSN": reader, "INFAAS_STORE__DSN": "", "INFAAS_DASHBOARD__PORT": str(port)}
        self._service("dashboard", ["dashboard"], {**environ, **more})
        settings = self._plan.settings.dashboard
        return settings.public_url or f"http://{at(settings.address, port)}"

    def _service(
        self,
        name: str,
        services: list[str],
        environ: dict[str, str],
        worker: WorkerSettings | None = None,
        notice: float = 0.0,
    ) -> Child:
        """Keep one process with these services running; worker: whose executor it is. notice: s more that it takes to stop."""
        file = self._logs / f"{name}.log"
        command: list[str | Path] = [sys.executable, "-P", "-m", "infaas.cli.run", *services]
        if self._plan.config is not None:
            command += ["--config", self._plan.config.absolute()]

        port = self._hub.port_for(name) if self._hub is not None and services != ["dashboard"] else 0
        environ = {**environ, "INFAAS_METRICS__PORT": str(port)}

        def launch() -> subprocess.Popen[bytes]:
            return process.start(command, log=file, on_our_death=signal.SIGKILL, environ=environ, cwd=Path.cwd())

        def exited(reason: str) -> None:
            if worker is not None:
                self._publish_exit(worker, reason)

        (polite, patience), *last = SERVICE_STEPS
        child = Child(name, launch, SERVICES, ((polite, patience + notice), *last), exited if worker else None)
        self._supervisor.start(child)
        return child

    def _publish_exit(self, worker: WorkerSettings, reason: str) -> None:
        """Tell monitors and dispatchers at once that a worker's executor is gone, with all devices that it drove."""
        if self._bus is None:
            return
        for device in devices_of(worker):
            fact = ExecutorExited(worker=worker.name, device=device.name, at=now(), reason=reason)
            try:
                self._bus.publish(self._subjects.exited(worker.name, device.name), encode(fact))
            except BusError as error:
                log.warning("cannot tell that an executor ended: %s", error)

    def _service_environ(self, more: Mapping[str, str]) -> dict[str, str]:
        environ = {**self._plan.environ, "INFAAS_DATA_DIR": str(self._plan.data_dir), **more}
        root = str(Path(__file__).resolve().parents[3])
        if root not in site.getsitepackages():  # run from a source tree: the children must find it, too
            environ["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environ.get("PYTHONPATH")]))
        return environ

    async def _connect(self, url: str) -> None:
        from bus.natsbus import NatsBus  # noqa: PLC0415  (not before NATS itself has been started)

        try:
            self._bus = await NatsBus.connect(url, name="supervisor", **login_of(self._plan.settings.bus).options())
            known = KnownStreams([StreamFile(self._plan.data_dir / KNOWN)], adopt=self._plan.settings.bus.adopt)
            await known.check(self._bus.streams)
            known.guard(self._bus.streams)
            kinds = {PLAIN, *self._plan.settings.machines.kinds}
            self._hosting = LocalWorkers(self._bus, self._subjects, kinds, self._start_worker, self._stop_worker)
            await self._hosting.open(self._plan.initial)
        except LostStream as error:
            raise ServerError(str(error)) from error
        except (BusError, OSError) as error:
            raise ServerError(f"cannot reach NATS: {error}") from error


def at(address: str, port: int) -> str:
    """host:port, as URLs have it."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def gateway_url(settings: GatewaySettings, port: int) -> str:
    """Where the HTTP gateway is asked on this machine."""
    return f"http{'s' if settings.tls_certificate else ''}://{at(settings.address, port)}"


def role_dsn(dsn: str, role: str, password: str) -> str:
    """The postgresql:// URL `dsn` for another role; raises ServerError for a DSN in another form."""
    parts = urlsplit(dsn)
    if parts.scheme not in {"postgresql", "postgres"}:
        raise ServerError("store.dsn must be a URL: postgresql://user:password@host:port/database")
    where = parts.netloc.rpartition("@")[2]
    return urlunsplit(parts._replace(netloc=f"{quote(role, safe='')}:{quote(password, safe='')}@{where}"))
