"""`infaas status`, and `infaas doctor`: checks of this machine (machine_checks) and of a running system; each failure names its remedy."""

import asyncio
import json
import os
import socket
import ssl
import textwrap
import time
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bus.codec import BadMessage, decode, encode
from bus.durability import address_of, greeting, weaknesses
from bus.login import Login, SystemAddress, login_from
from bus.messages.fleet import DispatcherHeartbeat, WorkerHeartbeat
from bus.messages.public import Listing, ListRequest
from bus.port import Bus, BusError, Delivery, NoResponders
from bus.subjects import Subjects
from infaas.cli.machine_checks import (
    BACKENDS,
    CheckFailed,
    Finding,
    State,
    check_backends,
    check_machine,
    run_async_check,
)
from infaas.cli.options import DataDir, Json, Wide
from infaas.cli.output import FAILED, Failure, drifted, line_width, missed_words, show
from infaas.cli.parts import processes_of
from infaas.connecting import connect, data_place, locate
from infaas.errors import InfaasError, NotConnected

_MARKS = {"ok": "ok     ", "failed": "FAILED ", "skipped": "skipped"}
_INDENT = " " * 28  # of what goes on in the next line
_NARROWEST = 60  # characters a line
FUSED = "fused"  # the process of this name has all that is on a query's way (services/shell/host/stack.py)
LACKING_S = 0.5  # s that a system may take for its lists, as JSON, if it lacks something


def status(*, data_dir: DataDir = None, wide: Wide = False, json: Json = False) -> int:
    """Show the whole system at a glance: workers, apps, variants by state, unfinished and failed registrations.

    What is missing comes first. With --json and something missing, lists that do not come within half a second are left out.
    """
    missing = missing_of(data_dir)
    if missing and not json:  # at once: a NATS that is stopped takes no connection
        print(f"not ready, missing: {'; '.join(missing)}", flush=True)
    from infaas.cli.lists import overview, render_overview  # noqa: PLC0415  (that takes longer than to find what is missing)

    async def work() -> dict[str, Any]:
        # What says itself that it lacks something may not answer.
        async with asyncio.timeout(LACKING_S if missing and json else None), connect(data_dir=data_dir) as client:
            return await overview(client, data_dir)

    told: dict[str, Any] = {"ready": not missing, "missing": missing, "lacks": _lacks(data_dir)}
    try:
        found = asyncio.run(work())
        told |= found | {"lacks": told["lacks"] | found["lacks"]}
    except (InfaasError, TimeoutError):
        if not (missing and json):
            raise

    def page(found: dict[str, Any]) -> None:
        for what, instead in found["lacks"].items():
            print(f"no {what}: {instead}")
        render_overview(found, wide=wide)

    show(told, json, page)
    return 0


def _lacks(data_dir: Path | None) -> dict[str, str]:
    """What the system's composition does not have, and what is instead."""
    place = locate(data_dir).data_dir
    with suppress(Failure):  # another version's
        if place is not None and FUSED in processes_of(place):
            return {
                "fail-over": f"the process {FUSED} alone answers queries; it is started again, and what it had is refused or sent again"
            }
    return {}


def doctor(*, data_dir: DataDir = None, json: Json = False) -> int:
    """Check this machine, and a running system if there is one. Each failed check names its remedy. Exits 1 if a check failed."""
    with suppress(NotConnected):
        if (missing := missing_of(data_dir)) and not json:  # at once: the checks take seconds
            print(f"not ready, missing: {'; '.join(missing)}", flush=True)
    # Forked before anything else runs: loading torch takes longer than all the rest.
    with ProcessPoolExecutor(len(BACKENDS), get_context("fork")) as apart, ThreadPoolExecutor(1) as beside:
        backends = [apart.submit(check_backends, names) for names in BACKENDS]
        machine = beside.submit(check_machine, data_place(data_dir))
        beside.submit(import_module, "psycopg")  # while the bus is listened to
        system = _check_system(data_dir)
        findings = [*machine.result(), *(finding for one in backends for finding in one.result()), *system]
    failed = any(finding.state == "failed" for finding in findings)
    show({"ok": not failed, "checks": [finding.to_map() for finding in findings]}, json, _render)
    return FAILED if failed else 0


def _check_system(data_dir: Path | None) -> list[Finding]:
    named = data_dir or any(os.environ.get(f"INFAAS_{name}") for name in ("DATA_DIR", "NATS_URL", "SQL_DSN"))
    try:
        findings = asyncio.run(check_system(locate(data_dir)))
    except NotConnected as error:
        return [Finding("system", "failed", str(error), "infaas up")]
    if findings[0].state == "failed" and not named:
        return [Finding("system", "skipped", "no system runs here; `infaas up` starts one")]
    return findings


def _render(document: dict[str, list[dict[str, str]]]) -> None:
    width = max(_NARROWEST, line_width())
    for finding in document["checks"]:
        head = f"{_MARKS[finding['state']]}  {finding['check']:18} "
        print(textwrap.fill(finding["detail"], width, initial_indent=head, subsequent_indent=_INDENT))
        if finding["state"] == "failed":
            print(textwrap.fill(finding["remedy"], width, initial_indent=f"{_INDENT}-> ", subsequent_indent=_INDENT))


# Checks of a running system: NATS, JetStream, the database, services, clocks.

LEAST_PAYLOAD = 2**20
LEAST_POSTGRES = 160000
MAX_SKEW_S = 0.050
LISTEN_S = 1.6  # three heartbeats; while nothing comes
HEARD_S = 0.6  # one of each sender
AGAIN_S = 5.0  # ten more; while a clock seems to be off, which a heartbeat that came late looks like too
LOOK_S = 0.02
MAX_WAITING = 100  # outcome batches that wait for the recorder
_LOGS = "look at its log (infaas logs) or start it: infaas run"


async def check_system(system: SystemAddress) -> list[Finding]:
    """All checks of one system. Without NATS, the checks that need it are left out."""
    nats = await run_async_check("nats", lambda: _nats(system.nats))
    parts = await _look_at_parts(system)
    if nats.state != "ok":
        return [
            nats,
            await run_async_check("sql", lambda: asyncio.to_thread(_sql, system.sql)),
            *await _look_at_parts(system, parts),
        ]
    from bus.natsbus import NatsBus  # noqa: PLC0415

    try:
        login = login_from(os.environ) if system.data_dir is None else system.login
        bus = await NatsBus.connect(system.nats, name="infaas doctor", **login.options())
    except (BusError, OSError) as error:
        remedy = (
            "check user and password in the URL (INFAAS_NATS_URL or --data-dir), or INFAAS_NKEY_SEED and INFAAS_TLS_CA"
        )
        return [nats, Finding("nats login", "failed", str(error), remedy), *parts]
    try:
        subjects = Subjects(system.prefix)
        # alone: what else this process does would count as a difference of clocks
        heartbeats = await _listen(bus, subjects)
        checks: dict[str, Callable[[], Awaitable[str]]] = {
            "jetstream": lambda: _jetstream(bus),
            "outcomes": lambda: _outcomes(bus, subjects),
            "sql": lambda: asyncio.to_thread(_sql, system.sql),
            "drift": lambda: asyncio.to_thread(_drift, system.sql),
            "dispatchers": lambda: _dispatchers(heartbeats),
            "workers": lambda: _workers(heartbeats),
            "clock": lambda: _clock(heartbeats),
            "registrar": lambda: _registrar(bus, subjects),
            "apps": lambda: _apps(bus, subjects),
        }
        # each may wait for one that hangs
        found = await asyncio.gather(*(run_async_check(*check) for check in checks.items()))
        kept = await _durable(system)
        ending = await asyncio.to_thread(check_certificates, system, login.tls_ca)
        return [nats, *kept, *ending, *found, *await _look_at_parts(system, parts)]
    finally:
        await bus.close()


async def _look_at_parts(system: SystemAddress, before: list[Finding] | None = None) -> list[Finding]:
    """The first look that finds something counts: the other checks take seconds, in which a process may hang, or one that hung be replaced."""
    page = system.metrics
    if not page or any(one.state == "failed" for one in before or ()):
        return before or []
    return [await run_async_check("parts", lambda: _parts(page))]


class _Heartbeats:
    """The heartbeats of some time, with the smallest clock difference of each sender."""

    def __init__(self) -> None:
        self.workers: dict[str, WorkerHeartbeat] = {}
        self.dispatchers: set[str] = set()
        self.skew: dict[str, float] = {}

    def worker(self, delivery: Delivery) -> None:
        try:
            heartbeat = decode(WorkerHeartbeat, delivery.data)
        except BadMessage:
            return
        self.workers[heartbeat.worker] = heartbeat
        self._note(heartbeat.worker, heartbeat.at)

    def dispatcher(self, delivery: Delivery) -> None:
        try:
            heartbeat = decode(DispatcherHeartbeat, delivery.data)
        except BadMessage:
            return
        if not heartbeat.dispatcher.startswith("offline-"):  # a runner of offline jobs takes no queries
            self.dispatchers.add(heartbeat.dispatcher)
        self._note(f"dispatcher {heartbeat.dispatcher}", heartbeat.at)

    def _note(self, sender: str, at: float) -> None:
        # A slow delivery adds to the difference. So the smallest one is the most exact.
        skew = at - time.time()
        self.skew[sender] = min(abs(skew), self.skew.get(sender, abs(skew)))

    def farthest(self) -> tuple[str, float]:
        """The sender whose clock differs most from ours, and by how many seconds."""
        return max(self.skew.items(), key=lambda item: item[1], default=("", 0.0))


async def _listen(bus: Bus, subjects: Subjects) -> _Heartbeats:
    heartbeats = _Heartbeats()
    await bus.subscribe(subjects.worker_heartbeat(), heartbeats.worker)
    await bus.subscribe(subjects.dispatcher_heartbeat(), heartbeats.dispatcher)
    await asyncio.sleep(HEARD_S)
    end = time.monotonic() + LISTEN_S - HEARD_S
    while not (heartbeats.workers and heartbeats.dispatchers) and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    end = time.monotonic() + AGAIN_S
    while heartbeats.farthest()[1] > MAX_SKEW_S and time.monotonic() < end:  # noqa: ASYNC110
        await asyncio.sleep(LOOK_S)
    return heartbeats


async def _nats(url: str) -> str:
    """The server's greeting, which needs no password."""
    address = address_of(url.partition(",")[0])
    try:
        said = await asyncio.to_thread(greeting, address)
    except (OSError, ValueError) as error:
        raise CheckFailed(
            f"{address[0]}:{address[1]}: {error}", "start a system (infaas up), or correct the URL"
        ) from error
    seen = f"nats-server {said['version']} at {address[0]}:{address[1]}, bodies up to {said['max_payload']} bytes"
    if said["max_payload"] < LEAST_PAYLOAD:
        raise CheckFailed(seen, "set max_payload: 8MB in the server's configuration")
    return seen


async def _durable(system: SystemAddress) -> list[Finding]:
    """Whether servers that are not our own keep what they acknowledge."""
    if system.data_dir is not None and "bus.url" not in system.given:
        return []
    weak = await asyncio.to_thread(weaknesses, system.nats, system.monitoring)
    told = []
    for one in weak:
        what, _, remedy = one.text.partition(": ")
        told.append(Finding("nats keeps", "failed" if one.certain else "skipped", what, remedy))
    return told or [Finding("nats keeps", "ok", "each server writes to disk before it acknowledges")]


ENDS_SOON_S = 30 * 86400.0


def check_certificates(system: SystemAddress, ca: str) -> list[Finding]:
    """How long the certificates of NATS, the gateway and the dashboard are valid still; empty: none has one. ca: who vouches for them."""
    context = Login(tls_ca=ca).options()["tls"] if ca else ssl.create_default_context()
    context.check_hostname = False  # the names are others' business
    found = []
    for name, url in (("NATS", system.nats), ("gateway", system.gateway or ""), ("dashboard", system.dashboard or "")):
        with suppress(OSError, ValueError):
            host, port = address_of(url.partition(",")[0]) if name == "NATS" else _https(url)
            try:
                until = ssl.cert_time_to_seconds(_certificate((host, port), context, greets=name == "NATS"))
            except ssl.SSLCertVerificationError as error:
                found.append((name, -1.0 if "expired" in str(error) else None))
            else:
                found.append((name, until - time.time()))
    findings = []
    for name, left in found:
        check, remedy = f"TLS {name}", "infaas auth certify --tls-host HOST, then restart what has it"
        if left is None:
            findings.append(
                Finding(check, "skipped", "its authority is not known here: name its file in INFAAS_TLS_CA")
            )
        elif left < 0:
            findings.append(Finding(check, "failed", "it has expired", remedy))
        else:
            state: State = "failed" if left < ENDS_SOON_S else "ok"
            findings.append(Finding(check, state, f"valid for {left / 86400:.0f} days", remedy))
    return findings


def _https(url: str) -> tuple[str, int]:
    """Raises ValueError where it is another scheme."""
    parts = urlsplit(url)
    if parts.scheme != "https":
        raise ValueError(url)
    return parts.hostname or "", parts.port or 443


def _certificate(address: tuple[str, int], context: ssl.SSLContext, *, greets: bool) -> str:
    """When the server's certificate ends. greets: it speaks first, and in plain text. Raises OSError, ValueError."""
    with socket.create_connection(address, timeout=5.0) as connection:
        if greets and b'"tls_required":true' not in connection.recv(65536):
            raise ValueError("no TLS")
        with context.wrap_socket(connection, server_hostname=address[0]) as secure:
            return str((secure.getpeercert() or {})["notAfter"])


async def _request(bus: Bus, subject: str) -> dict[str, Any]:
    reply = await bus.request(subject, b"", 5.0)
    document: dict[str, Any] = json.loads(reply.data)
    return document


async def _jetstream(bus: Bus) -> str:
    remedy = "enable JetStream in the server's configuration, with a store_dir on a disk with room"
    try:
        info = await _request(bus, "$JS.API.INFO")
    except NoResponders as error:
        raise CheckFailed("JetStream is off", remedy) from error
    except BusError as error:
        raise CheckFailed(f"JetStream does not answer: {error}", remedy) from error
    if "error" in info:
        raise CheckFailed(info["error"].get("description", info["error"]), remedy)
    used, most = int(info.get("storage", 0)), int(info.get("limits", {}).get("max_storage", -1))
    seen = f"{info.get('streams', 0)} streams, {used / 2**20:.1f} MiB on disk"
    if most > 0 and used > 0.9 * most:
        raise CheckFailed(f"{seen} of {most / 2**20:.0f}", "raise the account's storage limit, or remove streams")
    return seen


async def _outcomes(bus: Bus, subjects: Subjects) -> str:
    """Whether outcomes reach the database. They stay in their stream until the recorder has committed them."""
    remedy = f"the recorder is too slow or does not run: {_LOGS} recorder"
    try:
        info = await _request(bus, f"$JS.API.STREAM.INFO.{subjects.outcome_stream}")
    except BusError as error:
        raise CheckFailed(error, remedy) from error
    if "error" in info:
        raise CheckFailed(f"{subjects.outcome_stream}: {info['error'].get('description')}", remedy)
    waiting = int(info["state"]["messages"])
    if waiting > MAX_WAITING:
        raise CheckFailed(f"{waiting} batches wait for the database", remedy)
    return f"{waiting} batches wait for the database"


def _sql(dsn: str) -> str:
    import psycopg  # noqa: PLC0415

    try:
        with psycopg.connect(dsn, connect_timeout=5, application_name="infaas doctor") as connection:
            version = connection.info.server_version
            apps = connection.execute("SELECT count(*) FROM infaas.apps").fetchone()
            found = connection.execute("SELECT extversion FROM pg_extension WHERE extname = 'timescaledb'").fetchone()
    except psycopg.errors.UndefinedTable as error:
        raise CheckFailed("the schema is not there", "run: python -m services.shell.store prepare") from error
    except psycopg.Error as error:
        raise CheckFailed(error, "start a system (infaas up), or correct INFAAS_SQL_DSN") from error
    timescale = f"TimescaleDB {found[0]}" if found else "no TimescaleDB (not needed)"
    seen = f"PostgreSQL {version // 10000}.{version % 10000}, {timescale}, {apps[0] if apps else 0} apps"
    if version < LEAST_POSTGRES:
        raise CheckFailed(seen, "use PostgreSQL 16 or newer")
    return seen


def _drift(dsn: str) -> str:
    """Whether the apps' queries look like the validation sets."""
    import psycopg  # noqa: PLC0415

    from infaas.cli.history import DRIFT  # noqa: PLC0415

    try:
        with psycopg.connect(dsn, connect_timeout=5, application_name="infaas doctor") as connection:
            found = connection.execute(DRIFT).fetchall()
    except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
        raise CheckFailed(
            "the database has an older version's schema, which knows no drift",
            "restart the system with this version (infaas up), or: python -m services.shell.store prepare",
        ) from error
    except psycopg.Error as error:
        raise CheckFailed(error, "see the check of SQL") from error
    if found:
        told = "; ".join(drifted(*row) for row in found)
        raise CheckFailed(
            told, "label some of these queries (infaas.feedback), or register a version that was trained for them"
        )
    return "no app's queries are known to differ from the validation set"


async def _dispatchers(heartbeats: _Heartbeats) -> str:
    if not heartbeats.dispatchers:
        raise CheckFailed("no dispatcher sends heartbeats", f"{_LOGS} dispatcher")
    return f"{len(heartbeats.dispatchers)} alive"


async def _workers(heartbeats: _Heartbeats) -> str:
    if not heartbeats.workers:
        raise CheckFailed("no worker sends heartbeats", f"{_LOGS} monitor, infaas run executor")
    dead = [
        f"{worker}/{device.device}"
        for worker, heartbeat in sorted(heartbeats.workers.items())
        for device in heartbeat.devices
        if not device.alive
    ]
    if dead:
        raise CheckFailed(f"dead devices: {', '.join(dead)}", f"their executor is gone: {_LOGS} executor")
    kinds = [f"{name} ({', '.join(d.kind for d in beat.devices)})" for name, beat in sorted(heartbeats.workers.items())]
    return ", ".join(kinds)


async def _clock(heartbeats: _Heartbeats) -> str:
    """Deadlines are Unix times: clocks must agree."""
    if not heartbeats.skew:
        raise CheckFailed("no service sends heartbeats", "start services (see above)")
    sender, skew = heartbeats.farthest()
    seen = f"at most {skew * 1000:.1f} ms apart ({sender})"
    if skew > MAX_SKEW_S:
        raise CheckFailed(
            seen, f"set the clocks by NTP (chrony); more than {MAX_SKEW_S * 1000:.0f} ms breaks deadlines"
        )
    return seen


async def _registrar(bus: Bus, subjects: Subjects) -> str:
    try:
        await bus.request(subjects.registration("none"), b"", 2.0)
    except NoResponders as error:
        raise CheckFailed("no registrar listens", f"{_LOGS} registrar") from error
    except BusError:
        pass
    return "listens"


async def _apps(bus: Bus, subjects: Subjects) -> str:
    """Whether somebody can serve each app, as a dispatcher sees it."""
    try:
        reply = await bus.request(subjects.list("apps"), encode(ListRequest()), 2.0)
        apps = decode(Listing, reply.data).items
    except (BusError, BadMessage) as error:
        raise CheckFailed(f"no dispatcher lists the apps: {error}", f"{_LOGS} dispatcher") from error
    alarms = [f"nobody can serve {app['app']}: {app['unserved']}" for app in apps if app.get("unserved")]
    if alarms:
        raise CheckFailed(
            "; ".join(alarms), "do what the reason says; `infaas variants` and `infaas workers` show more"
        )
    missed = [words for app in apps if (words := missed_words(app))]
    if missed:
        raise CheckFailed(
            "; ".join(missed),
            "look at what comes in, register a model that suits it, or set what becomes of such queries (`infaas admin set-app APP --quality-act refuse`)",
        )
    return f"each of {len(apps)} may be served"


async def _parts(metrics: str) -> str:
    """The readiness that the system reports itself (docs/metrics.md)."""
    missing = await asyncio.to_thread(missing_now, metrics)
    if missing:
        raise CheckFailed(f"not ready, missing: {'; '.join(missing)}", "look at their logs: infaas logs")
    return f"all are ready; metrics at {metrics}"


def missing_now(metrics: str) -> list[str]:
    """What the system lacks by its own page, which is beside that of its metrics. Raises CheckFailed where nobody answers."""
    import http.client  # noqa: PLC0415

    url = metrics.removesuffix("/metrics") + "/readyz"
    where = urlsplit(url)
    try:
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=5.0)
        connection.request("GET", where.path)
        missing: list[str] = json.loads(connection.getresponse().read())["missing"]
        connection.close()
    except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
        raise CheckFailed(
            f"{url} does not answer: {error}", "check that `infaas up` still runs: its process serves this page"
        ) from error
    return missing


def missing_of(data_dir: Path | None) -> list[str]:
    """The same for `infaas status`; empty where the system has no such page. Raises NotConnected."""
    metrics = locate(data_dir).metrics
    try:
        return missing_now(metrics) if metrics else []
    except CheckFailed as failed:
        return [str(failed)]
