"""`infaas up`: a whole system on this machine, in the foreground, until Ctrl-C or SIGTERM."""

import asyncio
import json as jsonlib
import logging
import os
import signal
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from dashboard import NEEDS, can_show
from infaas.cli.options import DataDir, Json, whole
from infaas.cli.output import fail, progress, usage

if TYPE_CHECKING:
    from bus.login import SystemAddress
    from services.core.settings import Settings
    from services.shell.host.stack import Stack, StackSpec

log = logging.getLogger(__name__)

# they tell commands where a system is; a new system ignores them
_CLIENT_VARIABLES = ("INFAAS_NATS_URL", "INFAAS_SQL_DSN")
_URLS = {
    "nats": "NATS", "sql": "SQL", "dashboard": "dashboard", "gateway": "gateway", "gateway_grpc": "gRPC", "metrics": "metrics"
}  # fmt: skip
_SLOW_S = 15.0  # after which a start prints what it waits for


def up(
    *,
    data_dir: Annotated[Path, Parameter(env_var="INFAAS_DATA_DIR")] = Path(".infaas"),
    port_base: Annotated[int | None, Parameter(converter=whole, validator=Number(gte=1, lte=65000))] = None,
    workers: Annotated[int, Parameter(converter=whole, validator=Number(gte=1, lte=64))] = 1,
    max_workers: Annotated[int | None, Parameter(converter=whole, validator=Number(gte=1, lte=64))] = None,
    dispatchers: Annotated[int | None, Parameter(converter=whole, validator=Number(gte=1, lte=64))] = None,
    simulate: str | None = None,
    config: Path | None = None,
    dashboard: bool = True,
    gateway: bool = True,
    fused: Annotated[bool, Parameter(negative="")] = False,
    json: Json = False,
) -> int:
    """Run a whole system on this machine: NATS, PostgreSQL, every service, a worker, the gateway and the dashboard.

    Prints the URLs, then a line that starts with `ready` once a query can be answered. Ctrl-C or SIGTERM stops everything,
    a closed terminal (SIGHUP) does not.

    Example: `infaas up --max-workers 3`

    Parameters
    ----------
    data_dir
        Directory for the system's state, which survives a restart.
    port_base
        Port of NATS. PostgreSQL, the dashboard, the gateway and its gRPC get the next four ports; a busy port is an error. Metrics get
        the port ten above, or a free one. Default: the ports of the last start, at first 4222, 5433, 8501, 8000, 8001 and 9100, or free
        ports instead of busy ones.
    workers
        Number of workers.
    max_workers
        Largest number of workers: more than --workers are started under load, and idle ones are stopped. The setting machines.kinds
        describes other kinds of machine.
    dispatchers
        Number of dispatchers. Default: the setting dispatcher.count.
    simulate
        Devices that each worker simulates, as gpu=1,inferentia=2. They sleep as long as a recorded profile says, and their answers are
        marked as simulated.
    config
        Settings file (TOML); `infaas settings` lists the settings. If it sets bus.url or store.dsn, these servers are used.
    dashboard
        Run the dashboard, if the extra `dashboard` is installed: what runs, what it costs and why, in a browser.
    gateway
        Run the gateway for HTTP and gRPC clients.
    fused
        Run gateway, dispatcher, executor and monitor in one process: less memory and CPU for one worker. A model that crashes takes the
        queries under way and open HTTP connections with it; those of the bus are refused or answered once the process is back.
    json
        Print the URLs as one JSON document, then `ready`.

    """
    from services.shell.runtime import telemetry  # noqa: PLC0415

    telemetry.set_up("WARNING")
    if dashboard and not can_show():
        progress(f"no dashboard: {NEEDS}")
    plan = _plan(data_dir, port_base, workers, max_workers, dispatchers, simulate, config, dashboard, gateway, fused)
    _renew_keys(plan)
    return asyncio.run(_up(plan, json))


def _renew_keys(plan: "StackSpec") -> None:
    """Give keys that an older version has made the rights of this one. Raises ServerError in a newer one's data directory."""
    from infaas.credentials import USERS, CredentialStore  # noqa: PLC0415
    from services.shell.host.endpoints import check_version  # noqa: PLC0415

    auth = plan.settings.bus.auth
    if auth and (Path(auth) / USERS).exists():
        check_version(plan.data_dir)
        if CredentialStore(Path(auth)).renew():
            progress(f"the keys in {auth} have the rights of this version now")


def open_page(page: Literal["dashboard", "gateway"] = "dashboard", *, data_dir: DataDir = None) -> int:
    """Print the address of a running system's dashboard, or of its gateway, and open it in a browser where there is one.

    Example: `infaas open gateway`

    Parameters
    ----------
    page
        Which one: dashboard or gateway.

    """
    import webbrowser  # noqa: PLC0415

    from infaas.connecting import data_place, read_endpoints  # noqa: PLC0415

    place = data_place(data_dir)
    url = getattr(read_endpoints(place), page)
    if not url:
        lacks = f"; {NEEDS}" if page == "dashboard" and not can_show() else ""
        fail(f"the system in {place} runs without a {page}: start it without --no-{page}{lacks}")
    print(url, flush=True)
    if not webbrowser.open(url):
        progress("there is no browser on this machine: open the address by hand")
    return 0


def _plan(
    data_dir: Path,
    port_base: int | None,
    workers: int,
    max_workers: int | None,
    dispatchers: int | None,
    simulate: str | None,
    config: Path | None,
    dashboard: bool,
    gateway: bool,
    fused: bool = False,
) -> "StackSpec":
    from services.shell.host.machine import NO_GRPC, has_grpc  # noqa: PLC0415
    from services.shell.host.stack import StackSpec  # noqa: PLC0415
    from services.shell.prices import check_budget, place_of  # noqa: PLC0415
    from services.shell.settings import SettingsError, load  # noqa: PLC0415

    environ = {name: value for name, value in os.environ.items() if name not in _CLIENT_VARIABLES}
    if fused:
        if more := [f"--{name}" for name, n in _counts(workers, max_workers, dispatchers) if n > 1]:
            usage(f"--fused is for one worker with one dispatcher: leave out {', '.join(more)}")
        environ |= {"INFAAS_MACHINES__PROVIDER": "off", "INFAAS_DISPATCHER__COUNT": "1"}
    if simulate is not None:
        environ["INFAAS_WORKER__SIMULATE"] = simulate  # the services read it there too
    if max_workers is not None:
        if max_workers < workers:
            usage(f"--max-workers {max_workers} is less than --workers {workers}: raise it, or start fewer")
        environ["INFAAS_MACHINES__KINDS__CPU__MINIMUM"] = str(workers)
        environ["INFAAS_MACHINES__KINDS__CPU__MAXIMUM"] = str(max_workers)
    try:
        settings = load(config, environ)
        if gateway and settings.gateway.grpc_port and not has_grpc():
            progress(f"no gRPC: {NO_GRPC}")
            environ["INFAAS_GATEWAY__GRPC_PORT"] = "0"
            settings = load(config, environ)
        check_budget(settings, workers, place_of(config, environ))
        _check_own_policies(settings)
    except SettingsError as error:
        usage(str(error))
    if settings.bus.auth and _names_nats(config, environ):
        usage("bus.auth is for the NATS that `infaas up` starts: leave it out, or leave bus.url out")
    plain = settings.machines.kinds.get("cpu")
    if plain is not None and 0 < plain.maximum < workers:
        usage(
            f"--workers {workers} is more than machines.kinds.cpu.maximum, {plain.maximum}: lower it, or raise the setting"
        )
    return StackSpec(
        data_dir=data_dir.absolute(),
        settings=settings,
        workers=workers,
        dispatchers=dispatchers or settings.dispatcher.count,
        dashboard=dashboard and can_show(),
        gateway=gateway,
        fused=fused,
        port_base=port_base,
        config=config,
        nats_url=settings.bus.url if _names_nats(config, environ) else None,
        sql_dsn=settings.store.dsn or None,
        reader_dsn=settings.store.reader_dsn or None,
        environ=environ,
    )


def _counts(workers: int, max_workers: int | None, dispatchers: int | None) -> list[tuple[str, int]]:
    return [("workers", workers), ("max-workers", max_workers or 1), ("dispatchers", dispatchers or 1)]


def _check_own_policies(settings: "Settings") -> None:
    """Refuse classes of the user's that cannot be loaded, before anything starts. Raises SettingsError."""
    if any(":" in name for name in (settings.dispatcher.policy, settings.autoscaler.policy)):
        from services.shell.policies import load_policy, load_scaling  # noqa: PLC0415  (it needs numpy)

        load_policy(settings)
        load_scaling(settings)


def _names_nats(config: Path | None, environ: Mapping[str, str]) -> bool:
    """Whether the settings name a NATS server, even with the default URL."""
    tree: dict[str, Any] = tomllib.loads(config.read_text()) if config is not None else {}
    return "url" in tree.get("bus", {}) or any(environ.get(f"INFAAS_BUS__URL{end}") for end in ("", "_FILE"))


async def _up(plan: "StackSpec", as_json: bool) -> int:
    from services.shell.host.process import ServerError  # noqa: PLC0415
    from services.shell.host.stack import Stack  # noqa: PLC0415
    from services.shell.host.supervise import until_stopped  # noqa: PLC0415

    asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _without_terminal)
    stack = Stack(plan)
    try:
        await until_stopped(_start(stack, as_json), stack.stop)
    except ServerError as error:
        fail(str(error))
    return 0


def _without_terminal() -> None:
    """Its terminal was closed: go on, and write there no more."""
    log.warning("the terminal was closed, the system goes on: `kill %d` stops it", os.getpid())
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in range(3):
        if os.isatty(fd):
            os.dup2(nowhere, fd)
    os.close(nowhere)


async def _start(stack: "Stack", as_json: bool) -> None:
    endpoints = await stack.start()
    for notice in stack.notices:
        progress(notice)
    _print_urls(endpoints, as_json)
    slow = asyncio.get_running_loop().call_later(_SLOW_S, lambda: progress(f"still waiting for {stack.missing}"))
    try:
        await stack.ready()
    finally:
        slow.cancel()
    print("ready: Ctrl-C stops everything", flush=True)


def _print_urls(endpoints: "SystemAddress", as_json: bool) -> None:
    if as_json:
        print(jsonlib.dumps({name: getattr(endpoints, name) for name in _URLS}), flush=True)
        return
    for name, title in _URLS.items():
        if (url := getattr(endpoints, name)) is not None:
            print(f"{title:10} {url}", flush=True)
